"""Structured outputs: the tokens that a grammar allows next, the same for the engine and the trainer.

The allowed tokens are a pure function of the grammar, the tokenizer and the completion so far. So a schedule changes
nothing about them, and a trainer finds them again from the tokens. llguidance computes them.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np


class GrammarError(ValueError):
    """A grammar or its tokenizer can't be used, or tokens break the grammar."""


@dataclass(frozen=True, kw_only=True)
class StructuredOutputsParams:
    """What a completion must look like, from its first token to EOS; exactly one of these. The names are vLLM's.

    Raises GrammarError, a ValueError, with the place where a grammar is wrong or asks for what isn't supported.
    """

    json: str | Mapping[str, Any] | None = None
    """A JSON schema, as text or as a dict. Kept as text."""
    json_object: bool | None = None
    """Any JSON object."""
    regex: str | None = None
    """A regular expression for the whole completion, in Rust's syntax."""
    choice: Sequence[str] | None = None
    """One of these strings."""
    grammar: str | None = None
    """A context-free grammar, in llguidance's Lark dialect or in llama.cpp's GBNF."""

    def __post_init__(self) -> None:
        given = [field.name for field in fields(self) if getattr(self, field.name)]
        if len(given) != 1:
            names = ", ".join(field.name for field in fields(self))
            raise GrammarError(f"structured_outputs needs exactly one of {names}; got {', '.join(given) or 'none'}")
        if isinstance(self.json, Mapping):
            object.__setattr__(self, "json", json.dumps(self.json))
        if self.choice is not None:
            if isinstance(self.choice, str) or not all(isinstance(c, str) and c for c in self.choice):
                raise GrammarError(f"choice must be a list of non-empty strings, got {self.choice!r}")
            object.__setattr__(self, "choice", tuple(self.choice))
        self.compiled  # noqa: B018  found here, it is the caller's error

    @functools.cached_property
    def compiled(self) -> str:
        """The grammar in llguidance's own form."""
        from llguidance import LLMatcher, grammar_from

        kind, text = self._source()
        try:
            compiled = grammar_from(kind, text)  # type: ignore[arg-type]
        except (TypeError, ValueError) as error:
            raise GrammarError(f"structured_outputs: {error}") from error
        failed, problems = LLMatcher.validate_grammar_with_warnings(compiled)
        if failed:
            raise GrammarError(f"structured_outputs: {problems[0]}")
        return compiled

    def _source(self) -> tuple[str, str]:
        if self.choice is not None:
            return "choice", json.dumps(self.choice)
        if self.json_object:
            return "json", '{"type": "object"}'
        kind = next(name for name in ("json", "regex", "grammar") if getattr(self, name) is not None)
        text = getattr(self, kind)
        if not isinstance(text, str):
            raise GrammarError(f"{kind} must be a string, got {type(text).__name__}")
        return kind, text


class Constraint:
    """The tokens that a grammar allows after those of a completion so far.

    mask: one bit per token, u32 [ceil(V / 32)]; bit j % 32 of word j // 32 is 1 where token j may come next. token_ids:
    of a completion that has begun. Raises GrammarError where they break the grammar, or it can't be worked with.
    """

    def __init__(
        self,
        params: StructuredOutputsParams,
        tokenizer: Any,
        vocab_size: int,
        eos_token_ids: Iterable[int],
        token_ids: Iterable[int] = (),
    ):
        from llguidance import LLMatcher

        self._matcher = LLMatcher(grammar_tokenizer(tokenizer, vocab_size, tuple(eos_token_ids)), params.compiled,
                                  log_level=0)  # fmt: skip
        self._matcher.consume_tokens([*token_ids])
        self.mask = self._allowed()

    def advance(self, token: int) -> None:
        """Add a token to the completion. GrammarError where no token may follow."""
        self._matcher.consume_token(token)
        self.mask = self._allowed()

    def _allowed(self) -> np.ndarray:
        words = np.frombuffer(self._matcher.compute_bitmask(), np.uint32)
        if self._matcher.is_error():
            raise GrammarError(f"structured_outputs: {self._matcher.get_error().partition('<state>')[0].strip()}")
        if not words.any():
            raise GrammarError("structured_outputs: the grammar and the vocabulary leave no token here")
        return words


def completion_masks(
    params: StructuredOutputsParams,
    tokenizer: Any,
    vocab_size: int,
    eos_token_ids: Iterable[int],
    token_ids: Sequence[int],
) -> Iterator[np.ndarray]:
    """Yield the mask that each token of a completion was sampled under. GrammarError: it wasn't sampled under any."""
    constraint = Constraint(params, tokenizer, vocab_size, eos_token_ids)
    for number, token in enumerate(token_ids):
        if not constraint.mask[token >> 5] >> (token & 31) & 1:
            raise GrammarError(
                f"token {token}, number {number} of a completion, is not what structured_outputs allows there; score "
                "completions with the parameters that they were sampled with, and with the same version of llguidance"
            )
        yield constraint.mask
        if number < len(token_ids) - 1:
            constraint.advance(token)


@functools.lru_cache(maxsize=8)
def grammar_tokenizer(tokenizer: Any, vocab_size: int, eos_token_ids: tuple[int, ...]) -> Any:
    """Return llguidance's form of a tokenizer. Takes about a second, once. GrammarError where it has none."""
    from llguidance.hf import from_tokenizer

    try:
        return from_tokenizer(tokenizer, vocab_size, [*eos_token_ids])
    except Exception as error:  # the library raises many kinds
        raise GrammarError(f"structured_outputs can't be had with this model's tokenizer: {error}") from error
