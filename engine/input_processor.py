"""The way from a caller's arguments to a `Request` that the engine can run; all errors are found here."""

from __future__ import annotations

import hashlib
import pathlib
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from transformers import AutoTokenizer

from ..model.checkpoint import CheckpointError
from .detokenizer import Tokenizer
from .request import Request, Sample
from .sampling_params import SamplingParams

Prompt = str | Sequence[int] | dict[str, Any]
SEED_BITS = 53  # of seeds that are drawn: replies tell them, and some readers of JSON hold integers as doubles
_PROMPT_KEYS = ({"prompt"}, {"prompt_token_ids"})


@dataclass
class InputProcessor:
    """The check and tokenisation of prompts.

    It holds no state of the engine: threads may share one, whose tokenizer is a Rust library's.

    where: what to call the model in errors.
    """

    tokenizer: Tokenizer | None
    where: str
    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]

    def process(self, prompt: Prompt, params: SamplingParams, request_id: str, use_prefix_cache: bool) -> Request:
        """Return a request of `params.n` samples; ValueError or TypeError if it can't be served."""
        if not isinstance(params, SamplingParams):
            raise TypeError(f"sampling_params must be SamplingParams, got {type(params).__name__}")
        text, ids, cache_salt = self._token_ids(prompt)
        if not ids:
            raise ValueError("empty prompt: at least one token is needed")
        self.check_ids(ids)
        room = self.max_model_len - len(ids)
        if room < 1:
            raise ValueError(f"prompt of {len(ids)} tokens leaves no room in max_model_len {self.max_model_len}")
        eos = () if params.ignore_eos else self.eos_token_ids
        bad = [t for t in params.stop_token_ids if t >= self.vocab_size]
        if bad:
            raise ValueError(f"stop_token_ids {bad} are out of range; the vocabulary has {self.vocab_size} entries")
        if params.stop:
            self.need_tokenizer("stop strings")
        if params.min_tokens and len({*eos, *params.stop_token_ids}) == self.vocab_size:
            raise ValueError("every token is EOS or a stop token: min_tokens leaves nothing to sample")
        if params.structured_outputs is not None:
            self.need_tokenizer("structured outputs")
        seed = secrets.randbits(SEED_BITS) if params.seed is None else params.seed % 2**64
        request = Request(request_id, text, ids, params, seed, eos, self.vocab_size)
        max_tokens = min(params.max_tokens or room, room)
        if params.min_tokens > max_tokens:
            raise ValueError(f"min_tokens {params.min_tokens} exceeds the {max_tokens} tokens that there is room for")
        cached = use_prefix_cache and params.prompt_logprobs is None
        request.samples = [Sample(request, index, max_tokens, cached) for index in range(params.n)]
        for sample in request.samples:
            sample.cache_salt = cache_salt
            sample.begin_constraint(self.tokenizer)
        return request

    def check_ids(self, ids: Sequence[int]) -> None:
        """Raise ValueError or TypeError for what is no token id of the model's."""
        for token in ids:
            if isinstance(token, bool) or not isinstance(token, int):
                raise TypeError(f"prompt token ids must be integers, got {token!r}")
            if not 0 <= token < self.vocab_size:
                raise ValueError(f"token id {token} is out of range; the vocabulary has {self.vocab_size} entries")

    def _token_ids(self, prompt: Prompt) -> tuple[str | None, list[int], bytes]:
        cache_salt = b""
        if isinstance(prompt, dict):
            fields = dict(prompt)
            if (salt := fields.pop("cache_salt", None)) is not None:
                if not isinstance(salt, str) or not salt:
                    raise ValueError(f"cache_salt must be a non-empty string, got {salt!r}")
                cache_salt = hashlib.blake2b(salt.encode("utf-8", "surrogatepass"), person=b"cache_salt").digest()
            if set(fields) not in _PROMPT_KEYS:
                raise ValueError(
                    "a prompt dict has the key 'prompt' or 'prompt_token_ids', and perhaps 'cache_salt'; "
                    f"got {sorted(prompt)}"
                )
            (prompt,) = fields.values()
        if isinstance(prompt, str):
            return prompt, self.encode(prompt), cache_salt
        if hasattr(prompt, "tolist"):
            prompt = prompt.tolist()
        if not isinstance(prompt, list | tuple):
            raise TypeError(f"a prompt is a string, token ids, or a dict of one of them; got {type(prompt).__name__}")
        return None, list(prompt), cache_salt

    def encode(self, text: str, **options: Any) -> list[int]:
        """Return a text's token ids. ValueError where there is no tokenizer, or it has no tokens for the text."""
        tokenizer = self.need_tokenizer("string prompts")
        try:
            return tokenizer.encode(text, **options)
        except Exception as error:  # the libraries below raise many kinds
            raise ValueError(f"the tokenizer can't encode the text: {error}") from error

    def need_tokenizer(self, what: str) -> Tokenizer:
        """Return the tokenizer. Raises ValueError, naming what needs it, where there is none."""
        if self.tokenizer is None:
            raise ValueError(f"{what} need a tokenizer, and {self.where} has none; give token ids")
        return self.tokenizer


def need_chat_template(tokenizer: Tokenizer | None, where: object) -> Tokenizer:
    """Return the tokenizer. Raises ValueError where there is none, or none with a chat template."""
    if tokenizer is None:
        raise ValueError(f"chat messages need a tokenizer, and {where} has none; give token ids")
    if not getattr(tokenizer, "chat_template", None):
        raise ValueError(f"{where} has no chat template; use `generate`, with a prompt that is the whole text")
    return tokenizer


def render_chat(tokenizer: Tokenizer, messages: list[dict], **template: Any) -> str:
    """Return the text that the chat template makes of messages. ValueError where it refuses them."""
    try:
        return tokenizer.apply_chat_template(messages, tokenize=False, **template)
    except Exception as error:  # the template is a program of the model's (or the client's)
        raise ValueError(f"the chat template refuses these messages: {error}") from error


def load_tokenizer(path: pathlib.Path) -> Tokenizer | None:
    """Return the model's tokenizer, or None where it has none: token ids still work."""
    files = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")
    if not any((path / f).is_file() for f in files):
        return None
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(path)
        return tokenizer
    except Exception as error:  # the libraries below raise many kinds
        raise CheckpointError(
            f"the tokenizer in {path} does not load ({type(error).__name__}: {error}); "
            "mend it, or use token ids with skip_tokenizer_init=True"
        ) from error
