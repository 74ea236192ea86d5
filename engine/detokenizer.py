"""Text from token ids, as they come."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol


class Tokenizer(Protocol):
    """The methods of transformers' tokenizers that the engine and the server need."""

    def __hash__(self) -> int:
        """Tokenizers are keys of caches."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a text."""

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Return the text of token ids."""

    def get_vocab(self) -> dict[str, int]:
        """Return the ids of all entries."""

    @property
    def added_tokens_decoder(self) -> dict[int, Any]:
        """The tokens that were added to the vocabulary, special ones among them, by id."""

    def apply_chat_template(self, conversation: list[dict[str, str]], **options: Any) -> str:
        """Return a conversation as text; see transformers."""


class TextStream:
    """Text of a growing list of token ids; never half a character, never taken back.

    Some decoders treat a text's first token specially, so new tokens are decoded behind a few known ones and the known
    ones' text is cut off.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True):
        self.tokenizer = tokenizer
        self.skip_special_tokens = skip_special_tokens
        self.text = ""
        self._known = 0  # tokens [_known, _read) are decoded again, as the context of the next ones
        self._read = 0

    def read(self, token_ids: Sequence[int]) -> None:
        """Read the tokens that are new. token_ids: all of them, those read before included."""
        if self._read == len(token_ids):
            return
        context = self._decode(token_ids[self._known : self._read])
        text = self._decode(token_ids[self._known :])
        if len(text) > len(context) and not text.endswith("\ufffd"):  # U+FFFD: the bytes of a character, incomplete
            self.text += text[len(context) :]
            self._known = self._read
            self._read = len(token_ids)

    def _decode(self, token_ids: Sequence[int]) -> str:
        return self.tokenizer.decode(token_ids, skip_special_tokens=self.skip_special_tokens) if token_ids else ""

    def shown(self, stop: Sequence[str]) -> str:
        """The text without an end that may become a stop string."""
        held = 0
        for each in stop:
            sizes = range(min(len(each) - 1, len(self.text)), held, -1)
            held = next((size for size in sizes if self.text.endswith(each[:size])), held)
        return self.text[: len(self.text) - held]
