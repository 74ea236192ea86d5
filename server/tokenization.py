"""Text in and out for the HTTP side, with a tokenizer of its own beside the engine's."""

from __future__ import annotations

import asyncio
import copy
import functools
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from ..engine import LLM
from ..engine.input_processor import render_chat

T = TypeVar("T")
WORKERS = 4  # threads that encode texts, so that a long one holds nobody up


class Tokenization:
    """Short texts at once; `in_thread` for long ones, which would hold the event loop up."""

    def __init__(self, llm: LLM):
        self.tokenizer = copy.deepcopy(llm.tokenizer)
        self.processor = llm.input_processor(self.tokenizer)
        self.need = self.processor.need_tokenizer
        self._executor = ThreadPoolExecutor(WORKERS, "tokenizer")  # they leave the interpreter to others meanwhile
        self.token = functools.lru_cache(maxsize=2**16)(self._token)

    def in_thread(self, function: Callable[..., T], *args, **kwargs) -> Awaitable[T]:
        """Call a function in a tokenizer's thread and return its result. Cancelled, it is dropped unless it runs."""
        return asyncio.wrap_future(self._executor.submit(function, *args, **kwargs))

    @functools.cached_property
    def longest_token(self) -> int:
        """The characters of the vocabulary's longest token."""
        return max((len(token) for token in self.need("text").get_vocab()), default=1)

    def check_length(self, prompt: str | Sequence[int]) -> None:
        """ValueError for a text, or ids, too long for the model however it is split: it isn't worth tokenising."""
        limit = self.processor.max_model_len
        if len(prompt) <= limit:
            return
        least = -(-len(prompt) // self.longest_token) if isinstance(prompt, str) else len(prompt)
        if least > limit:
            raise ValueError(f"at least {least} tokens: that leaves no room in max_model_len {limit}")

    def _token(self, token_id: int) -> str:
        return f"token_id:{token_id}" if self.tokenizer is None else self.tokenizer.decode([token_id])

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text. ValueError for one of any length that the model has no room for."""
        self.check_length(text)
        return self.processor.encode(text, add_special_tokens=add_special_tokens)

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of token ids. Raises ValueError for ids out of range, or more than the model has room for."""
        self.check_length(token_ids)
        self.processor.check_ids(token_ids)
        return self.need("text").decode(token_ids)

    def chat(self, messages: list[dict], known: tuple[int, Sequence[int]] = (0, ()), /, **template) -> list[int]:
        """The token ids that the chat template makes of a conversation, whose messages are `plain`.

        known: how many of the first messages were generated here, and their ids. The conversation begins with these,
        unless the template writes those messages otherwise in the longer conversation, or ends them by no EOS.
        """
        tokenizer = self.need("chat messages")
        whole = render_chat(tokenizer, messages, **template)
        count, ids = known
        if count:
            start = render_chat(tokenizer, messages[:count], **template | {"add_generation_prompt": False})
            end = len(start.rstrip())
            for token in self.processor.eos_token_ids:
                if whole.startswith(start) and start[:end].endswith(self.token(token)):
                    ended = ids[-1] in self.processor.eos_token_ids
                    rest = whole[end if ended else end - len(self.token(token)) :]
                    return [*ids, *self.encode(rest, add_special_tokens=False)]
        return self.encode(whole, add_special_tokens=False)
