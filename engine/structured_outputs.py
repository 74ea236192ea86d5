"""Structured outputs: the tokens that a grammar allows next, the same for the engine and the trainer.

The allowed tokens are a pure function of the grammar, the tokenizer and the completion so far. So a schedule changes
nothing about them, and a trainer finds them again from the tokens. llguidance computes them.
"""

from __future__ import annotations

import functools
import json
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from .detokenizer import Tokenizer

_compiling = threading.Lock()


class GrammarError(ValueError):
    """A grammar or its tokenizer can't be used, or tokens break the grammar."""


@dataclass(frozen=True, kw_only=True)
class StructuredOutputsParams:
    """The form of a completion, from its first token to EOS; exactly one of these. The names are vLLM's.

    Raises GrammarError, a ValueError; what is wrong in a grammar is found where a prompt comes with it.
    """

    json: str | Mapping[str, Any] | None = None
    """A JSON schema, as text or as a dict."""
    json_object: bool | None = None
    """Any JSON object."""
    regex: str | None = None
    """A regular expression for the whole completion, in Rust's syntax."""
    choice: Sequence[str] | None = None
    """One of these strings."""
    grammar: str | None = None
    """A context-free grammar, in llguidance's Lark dialect or in llama.cpp's GBNF."""

    def __post_init__(self) -> None:
        given = {field.name: getattr(self, field.name) for field in fields(self)}
        asked = {name for name, value in given.items() if value is not None and (name, value) != ("json_object", False)}
        if len(asked) != 1:
            raise GrammarError(
                f"structured_outputs needs exactly one of {', '.join(given)}; got {sorted(asked) or 'none'}"
            )
        try:
            self.source  # noqa: B018  found here, an error is the caller's
        except TypeError as error:
            raise GrammarError(f"structured_outputs: {error}") from error

    @functools.cached_property
    def source(self) -> tuple[Any, str]:
        """The kind and the text of the grammar, as llguidance takes them."""
        if self.json_object:
            return "json", '{"type": "object"}'
        if (choice := self.choice) is not None:
            if not choice or not isinstance(choice, list | tuple) or not all(isinstance(c, str) and c for c in choice):
                raise GrammarError(f"choice must be a list of non-empty strings, got {choice!r}")
            return "choice", json.dumps([*choice])
        if self.json is not None:
            return "json", self.json if isinstance(self.json, str) else json.dumps(self.json)
        kind = "grammar" if self.regex is None else "regex"
        text = self.grammar if self.regex is None else self.regex
        if not isinstance(text, str):
            raise GrammarError(f"{kind} must be a string, got {text!r}")
        return kind, text


class Constraint:
    """The tokens that a grammar allows after those of a completion so far.

    mask: one bit per token, u32 [ceil(V / 32)]; bit j % 32 of word j // 32 is 1 where token j may come next. eos: the
    ids that end a completion. Raises GrammarError where the grammar can't be worked with, for which it is compiled: a
    large one takes a second, once.
    """

    def __init__(self, params: StructuredOutputsParams, tokenizer: Tokenizer, vocab_size: int, eos: Sequence[int]):
        with _compiling:  # of threads that ask for the same grammar, one compiles it
            matcher, self.mask = _beginning(params.source, tokenizer, vocab_size, (*eos,))
            self._matcher = matcher.deep_copy()

    def advance(self, token: int) -> None:
        """Add a token to the completion. GrammarError where it breaks the grammar, or none may follow it."""
        self._matcher.consume_token(token)
        self.mask = _allowed(self._matcher)

    def masks(self, token_ids: Sequence[int]) -> Iterator[np.ndarray]:
        """Yield the mask that each token of a whole completion was sampled under. GrammarError: there is none."""
        for number, token in enumerate(token_ids):
            if number:
                self.advance(token_ids[number - 1])
            if not self.mask[token >> 5] >> (token & 31) & 1:
                raise GrammarError(
                    f"token {token}, number {number} of a completion, is not what structured_outputs allows there; "
                    "score completions with the parameters, and the version of llguidance, that they were sampled with"
                )
            yield self.mask


@functools.lru_cache(maxsize=16)
def _beginning(
    source: tuple[Any, str], tokenizer: Tokenizer, vocab_size: int, eos: tuple[int, ...]
) -> tuple[Any, np.ndarray]:
    """Return a grammar's matcher, to be copied, and its first mask."""
    from llguidance import LLMatcher, grammar_from

    try:
        compiled = grammar_from(*source)
    except (TypeError, ValueError) as error:
        raise GrammarError(f"structured_outputs: {error}") from error
    matcher = LLMatcher(grammar_tokenizer(tokenizer, vocab_size, eos), compiled, log_level=0)
    return matcher, _allowed(matcher)


def _allowed(matcher: Any) -> np.ndarray:
    words = np.frombuffer(matcher.compute_bitmask(), np.uint32)
    if matcher.is_error():
        raise GrammarError(f"structured_outputs: {matcher.get_error().partition('<state>')[0].strip()}")
    if not words.any():
        raise GrammarError("structured_outputs: the grammar and the vocabulary leave no token here")
    return words


@functools.lru_cache(maxsize=8)
def grammar_tokenizer(tokenizer: Tokenizer, vocab_size: int, eos: tuple[int, ...]) -> Any:
    """Return llguidance's form of a tokenizer. Takes about a second, once. GrammarError where it has none."""
    from llguidance.hf import from_tokenizer

    fast: Any = tokenizer  # or the library refuses it
    try:
        return from_tokenizer(fast, vocab_size, [*eos])
    except Exception as error:  # the library raises many kinds
        raise GrammarError(f"structured_outputs can't be had with this model's tokenizer: {error}") from error
