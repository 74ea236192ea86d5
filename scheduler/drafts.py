"""Speculation: tokens that a sequence will probably sample, computed in the same chunk as its last known token.

A drafted token is right if and only if the sampler draws it there, from the same logits and random number as without
the draft. So drafts are a schedule: they decide how many rows a step has, and never what a row gives.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from .sequence import Sequence
from .suffix import SuffixDrafter

logger = logging.getLogger(__name__)

METHODS = ("suffix", "ngram")
PROBE_EVERY = 16  # tokens of a sequence: it drafts one then, whether or not its drafts paid
MAX_CHANCE = 0.98  # of a token: more can't be told from a few dozen


@dataclass(frozen=True, kw_only=True)
class SpeculativeConfig:
    """Settings of speculation, by vLLM's names. None changes a bit of a result."""

    method: str | Callable[[list[int]], list[int]]
    """suffix: drafts from the sequence, its prompt, the prompt's other samples and earlier rollouts of the prompt.
    ngram: from the sequence and its prompt. A callable: from token ids (prompt and completion) to drafted ones."""
    num_speculative_tokens: int = 8
    """Most tokens to draft for a sequence in a step."""
    prompt_lookup_min: int = 2
    """Tokens that must agree before a place is a source of drafts."""
    suffix_decoding_max_cached_requests: int = 32
    """Rollouts that are kept per prompt for later drafts."""

    def __post_init__(self) -> None:
        if not callable(self.method) and self.method not in METHODS:
            raise ValueError(
                f"speculative method {self.method!r}; choose {', '.join(METHODS)}, or give a callable of token ids"
            )
        for name in ("num_speculative_tokens", "prompt_lookup_min", "suffix_decoding_max_cached_requests"):
            value: Any = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be a positive integer, got {value!r}")


class Drafter(Protocol):
    """A source of drafts."""

    def propose(self, seq: Sequence, limit: int) -> tuple[list[int], list[float]]:
        """Return up to `limit` tokens that may come next, and how likely each is if those before it come."""

    def finish(self, seq: Sequence) -> None:
        """Take leave of a sequence that has ended."""


class CallableDrafter:
    """A `Drafter` of a user's function. What it can't answer is no draft, and said once."""

    def __init__(self, function: Callable[[list[int]], list[int]], vocab_size: int):
        self.function = function
        self.vocab_size = vocab_size
        self._warned = False

    def propose(self, seq: Sequence, limit: int) -> tuple[list[int], list[float]]:
        """Return the function's tokens up to the first that is no token id."""
        try:
            tokens = [*self.function(list(seq.token_ids))][:limit]
        except Exception as error:
            self._warn(f"the drafter failed, and drafts nothing then: {type(error).__name__}: {error}")
            return [], []
        for number, token in enumerate(tokens):
            if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < self.vocab_size:
                self._warn(f"the drafter gave {token!r}, which is no token id; its draft ends before it")
                tokens = tokens[:number]
                break
        return tokens, [1.0] * len(tokens)

    def finish(self, seq: Sequence) -> None:
        """Do nothing: the function keeps its own memory."""

    def _warn(self, text: str) -> None:
        if not self._warned:
            logger.warning(text)
        self._warned = True


@dataclass
class Record:
    """How a sequence's drafts have done: `offered` by the drafter's own estimates, and `accepted`; old ones fade.

    draft, shares: the last draft and its estimates, made when `start` tokens were known.
    """

    offered: float = 0.0
    accepted: float = 0.0
    draft: list[int] = field(default_factory=list)
    shares: list[float] = field(default_factory=list)
    start: int = 0


class Speculator:
    """Decides how many tokens to draft: as many as lower the time per token, by what rows cost and drafts have hit.

    step_seconds: the time of a step by its number of rows.
    """

    def __init__(self, config: SpeculativeConfig, vocab_size: int, step_seconds: Callable[[int], float]):
        self._rows = 0
        self._tokens_per_second = 0.0
        self.limit = config.num_speculative_tokens
        self.step_seconds = step_seconds
        self._records: dict[int, Record] = {}
        self._all = Record()
        self.drafter: Drafter
        if callable(config.method):
            self.drafter = CallableDrafter(config.method, vocab_size)
        else:
            window = config.suffix_decoding_max_cached_requests
            self.drafter = SuffixDrafter(config.prompt_lookup_min, config.method == "suffix", window)

    def begin_step(self, num_sequences: int, num_rows: int) -> None:
        """Start a step that would give `num_sequences` tokens from `num_rows` rows without drafts."""
        self._rows = num_rows
        self._tokens_per_second = num_sequences / self.step_seconds(num_rows)

    def draft(self, seq: Sequence) -> list[int]:
        """Return a draft for a sequence that computes its last token in this step."""
        record = self._records.setdefault(seq.seq_id, Record())
        self._settle(record, seq)
        left = seq.max_tokens - seq.num_completion_tokens - 1
        second = self.step_seconds(self._rows + 1) - self.step_seconds(self._rows)
        cost = self._tokens_per_second * second  # of a row, in tokens: a drafted one must be as probable as that
        if seq.num_tokens % PROBE_EVERY == 0:
            cost = 0.0
            left = min(left, 1)
        chance = self._chance(record)
        limit = min(self.limit, left)
        if cost > 0.0:
            limit = min(limit, int(math.log(min(cost, 1.0)) / math.log(chance)))
        record.start = len(seq.token_ids)
        record.draft = []
        record.shares = []
        if limit > 0:
            tokens, shares = self.drafter.propose(seq, limit)
            keep = _count_likely(shares, chance, cost)
            record.draft = tokens[:keep]
            record.shares = shares[:keep]
        self._rows += len(record.draft)
        return record.draft

    def pays_to_wait(self, seq: Sequence) -> bool:
        """True if a draft promises more than the token that a step without waiting would give."""
        record = self._records.get(seq.seq_id, self._all)
        return self._chance(record) >= 0.5 or seq.num_tokens % PROBE_EVERY == 0

    def _chance(self, record: Record) -> float:
        """The probability of a drafted token whose estimate is 1: as for all sequences, until its own are known."""
        usual = (1.0 + self._all.accepted) / (2.0 + self._all.offered)
        return min(MAX_CHANCE, (2.0 * usual + record.accepted) / (2.0 + record.offered))

    def _settle(self, record: Record, seq: Sequence) -> None:
        """Compare a sequence's last draft with what was sampled."""
        sampled = seq.token_ids[record.start :]
        if not record.draft or not sampled:
            return
        for each, kept in ((record, 0.8), (self._all, 0.99)):
            each.offered *= kept
            each.accepted *= kept
        for token, drafted, share in zip(sampled, record.draft, record.shares, strict=False):
            for each in (record, self._all):
                each.offered += share
                each.accepted += token == drafted
            if token != drafted:
                break

    def finish(self, seq: Sequence) -> None:
        """Take leave of a sequence that has ended."""
        record = self._records.pop(seq.seq_id, None)
        if record is not None:
            self._settle(record, seq)
        self.drafter.finish(seq)


def _count_likely(shares: list[float], chance: float, cost: float) -> int:
    """Return how many tokens of a draft are as probable as a row costs, each given those before it."""
    total = 1.0
    for count, share in enumerate(shares):
        total *= share * chance
        if total < cost:
            return count
    return len(shares)
