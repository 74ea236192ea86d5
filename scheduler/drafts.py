"""Speculation: tokens that a sequence will probably sample, computed in the same chunk as its last known token.

A drafted token is right if and only if the sampler draws it there, from the same logits and random number as without
the draft. So drafts are a schedule: they decide how many rows a step has, and never what a row gives.
"""

from __future__ import annotations

import logging
import operator
import time
from collections import defaultdict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, fields
from itertools import islice
from typing import Any, Protocol

from .sequence import Sequence
from .suffix import SuffixDrafter

logger = logging.getLogger(__name__)

METHODS = ("suffix", "ngram")
MAX_RUN = 64  # tokens: an index holds whole runs
PROBE_EVERY = 16  # tokens of a sequence, at least: it drafts one then, whether or not its drafts paid
PROBE_SHARE = 0.01  # of a sequence's time: probes that cost more come less often
MAX_CHANCE = 0.98  # of a token: more can't be told from a few dozen
MIN_PROFIT = 1.3  # tokens expected of a draft for each that its time is worth: a batch ends with its least lucky sample
LEAD = 16.0  # tokens ahead, per token that drafts promise on average, for which a call's last sequence will make up
ROW_COST = 0.02  # of a row, in tokens, at least: where a measured step takes no longer with it, that is noise, too


@dataclass(frozen=True, kw_only=True)
class SpeculativeConfig:
    """Settings of speculation, by vLLM's names. None changes a bit of what a version of the weights gives a request."""

    method: str | Callable[[list[int]], list[int]] = ""
    """suffix: drafts from the sequence, its prompt, the prompt's other samples and earlier rollouts of the prompt.
    ngram: from the sequence and its prompt. A callable: from token ids (prompt and completion) to drafted ones."""
    num_speculative_tokens: int = 8
    """Most tokens to draft for a sequence in a step."""
    prompt_lookup_min: int = 2
    """Tokens that must agree before a place is a source of drafts."""
    prompt_lookup_max: int | None = None
    """Most tokens that are asked to agree, where more do, at most 64; by default four times `prompt_lookup_min`."""
    suffix_decoding_max_cached_requests: int = 32
    """Rollouts that are kept for later drafts: of each prompt, where vLLM's number is that of all."""

    def __post_init__(self) -> None:
        if not callable(self.method) and self.method not in METHODS:
            raise ValueError(
                f"speculative method {self.method!r}; choose {', '.join(METHODS)}, or give a callable of token ids"
            )
        unused = [] if self.method == "suffix" else ["suffix_decoding_max_cached_requests"]
        if callable(self.method):
            unused += "prompt_lookup_min", "prompt_lookup_max"
        for each in fields(self)[1:]:
            value: Any = getattr(self, each.name)
            if value is None and each.default is None:
                continue
            if each.name in unused and value != each.default:
                raise ValueError(f"{each.name} means nothing to the speculative method {self.method!r}; leave it out")
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{each.name} must be a positive integer, got {value!r}")
        if not self.prompt_lookup_min <= self.lengths[0] <= MAX_RUN:
            raise ValueError(f"prompt_lookup_max must be from prompt_lookup_min to {MAX_RUN}, got {self.lengths[0]}")

    @property
    def lengths(self) -> list[int]:
        """Lengths of the runs to look for, longest first. Among few different tokens a short one says little."""
        longest = self.prompt_lookup_max or max(min(4 * self.prompt_lookup_min, MAX_RUN), self.prompt_lookup_min)
        return sorted({longest, *(min(n * self.prompt_lookup_min, longest) for n in (1, 2))}, reverse=True)


class Drafter(Protocol):
    """A source of drafts. seconds: what a proposal takes, where that is worth counting."""

    seconds: float

    def source(self, seq: Sequence) -> str:
        """Return a name for what a proposal would come from: how often drafts are right is told for each."""

    def propose(self, seq: Sequence, limit: int) -> tuple[list[int], list[float]]:
        """Return up to `limit` tokens that may come next, and how likely each is if those before it come."""

    def finish(self, seq: Sequence) -> None:
        """Take leave of a sequence that has ended."""


class CallableDrafter:
    """A `Drafter` of a user's function. What it can't answer is no draft, and said once."""

    def __init__(self, function: Callable[[list[int]], list[int]], vocab_size: int):
        self.function = function
        self.vocab_size = vocab_size
        self.seconds = 0.0
        self._asked = 0
        self._warned = False

    def source(self, seq: Sequence) -> str:
        """Return the only one."""
        return "function"

    def propose(self, seq: Sequence, limit: int) -> tuple[list[int], list[float]]:
        """Return the function's tokens up to the first that is no token id."""
        start = time.perf_counter()
        tokens: list[int] = []
        try:
            for given in islice(self.function(list(seq.token_ids)), limit):
                token = -1 if isinstance(given, bool) else operator.index(given)  # of numpy's integers and torch's, too
                if not 0 <= token < self.vocab_size:
                    raise ValueError(f"{given!r} is no token id")
                tokens.append(token)
        except Exception as error:
            if not self._warned:
                logger.warning("the drafter failed, which ends a draft there: %s: %s", type(error).__name__, error)
            self._warned = True
        weight = (0.0, 1.0, 0.2)[min(self._asked, 2)]  # the first call may load something
        self._asked += 1
        self.seconds += weight * (time.perf_counter() - start - self.seconds)
        return tokens, [1.0] * len(tokens)

    def finish(self, seq: Sequence) -> None:
        """Do nothing: the function keeps its own memory."""


@dataclass
class Tally:
    """How drafts have done: tokens `offered` by the drafter's own estimates, and `accepted`; old ones fade.

    promised: tokens that were expected of a draft, as a fading mean; no draft promises none.
    """

    promised: float = 2.0
    offered: float = 0.0
    accepted: float = 0.0


@dataclass
class Record:
    """A sequence's drafts. tally: of those from its present source.

    draft, shares: the last draft and its estimates, made when `start` tokens were known. probe_at: tokens when the next
    probe is due.
    """

    probe_at: int
    source: str = ""
    tally: Tally = field(default_factory=Tally)
    draft: list[int] = field(default_factory=list)
    shares: list[float] = field(default_factory=list)
    start: int = 0


class Speculator:
    """The choice of how many tokens to draft: as many as lower the time per token.

    That depends on what rows cost and how many drafts were right. A call ends with its last sequence, so where
    sequences end at their limits those that lag are worth all of a step, and those well ahead nothing. Where they end
    before, or others wait for their places, all are worth the same.

    step_seconds: the time of a step by its number of rows. overlaps: steps do, so that who drafts misses two of them:
    it waits for its last token, and for what comes of the draft.
    """

    def __init__(
        self, config: SpeculativeConfig, vocab_size: int, step_seconds: Callable[[int], float], overlaps: bool = False
    ):
        self._driver_seconds = 0.0  # of a step, beside the model's and the drafts', as a fading mean
        self._drafting = 0.0  # seconds of this step that went into drafts
        self._at_limit = 0.5  # share of sequences, but short ones, that end at their limits; a fading mean
        self.limit = config.num_speculative_tokens
        self.step_seconds = step_seconds
        self._missed = 2 if overlaps else 0
        self._records: dict[int, Record] = {}
        self._promised = 2.0  # of a draft of those that lag, as a fading mean
        self._usual: defaultdict[str, Tally] = defaultdict(Tally)  # of all sequences, by source
        self.drafter: Drafter
        if callable(config.method):
            self.drafter = CallableDrafter(config.method, vocab_size)
        else:
            window = config.suffix_decoding_max_cached_requests
            self.drafter = SuffixDrafter(config.lengths, config.method == "suffix", window)

    def begin_step(self, running: list[Sequence], num_sequences: int, num_rows: int, queue: bool) -> None:
        """Start a step of `num_sequences` of those that run: `num_rows` rows without drafts. queue: others wait."""
        self._rows = num_rows
        self._num_sequences = num_sequences
        self._seconds = self.step_seconds(num_rows) + self._driver_seconds  # without drafts
        to_come: defaultdict[Hashable, list[int]] = defaultdict(list)
        for seq in running:
            to_come[seq.call].append(seq.tokens_to_come)
        told = 0.0 if queue else min(MAX_CHANCE, self._at_limit)
        self._share_of_all = (1.0 - told) / num_sequences  # of a step, that a token of any sequence saves
        told *= len(running) / num_sequences / len(to_come)  # steps until each has had one, shared by the calls
        self._share_of_last: dict[Hashable, tuple[float, float]] = {}  # call -> tokens to come of who lags, its share
        for call, each in to_come.items():
            least = max(each) - LEAD * self._promised
            self._share_of_last[call] = least, told / sum(n >= least for n in each)

    def draft(self, seq: Sequence, room: int) -> list[int]:
        """Return a draft of at most `room` tokens for a sequence that computes its last token in this step."""
        begin = time.perf_counter()
        record = self._record(seq)
        chance = self._chance(record)
        most = min(self.limit, room, seq.tokens_to_come - 1)
        least, share = self._share_of_last[seq.call]
        lags = seq.tokens_to_come >= least
        costs = self._costs(most, self._share_of_all + share * lags)
        probe = 0
        if seq.num_tokens >= record.probe_at:
            probe = min(most, 1)
            cost = self._missed + sum(self._costs(probe, 1.0 / self._num_sequences))
            record.probe_at = seq.num_tokens + max(PROBE_EVERY, int(cost / PROBE_SHARE))
        limit = max(probe, _most_gain([chance] * most, costs)[0])  # no estimate is above 1, so none makes it longer
        tokens, shares = self.drafter.propose(seq, limit) if limit > 0 else ([], [])
        keep, promised = _most_gain([each * chance for each in shares], costs)
        keep = max(keep, min(probe, len(tokens)))
        record.start = len(seq.token_ids)
        record.draft = tokens[:keep]
        record.shares = shares[:keep]
        for each, rate in ((record.tally, 0.2), (self._usual[record.source], 0.01)):
            each.promised += rate * (promised - each.promised)
        if lags:
            self._promised += 0.01 * (promised - self._promised)
        self._rows += len(record.draft)
        self._drafting += time.perf_counter() - begin
        return record.draft

    def note_driver(self, seconds: float) -> None:
        """Note what a step took beside the model, drafts included: they don't save their own time."""
        self._driver_seconds += 0.05 * (seconds - self._drafting - self._driver_seconds)
        self._drafting = 0.0

    def pays_to_wait(self, seq: Sequence) -> bool:
        """True if a draft promises the token, at least, that a step without waiting would give, or for a probe."""
        record = self._record(seq)
        return record.tally.promised >= 1.0 or seq.num_tokens >= record.probe_at

    def _record(self, seq: Sequence) -> Record:
        """Return the sequence's record, with what came of its last draft, begun anew where its source is another."""
        if seq.seq_id not in self._records:
            self._records[seq.seq_id] = Record(seq.num_tokens + PROBE_EVERY)
        record = self._records[seq.seq_id]
        self._settle(record, seq)
        source = self.drafter.source(seq)
        if source != record.source:
            record.source = source
            record.tally = Tally(self._usual[source].promised)
        return record

    def _costs(self, most: int, share: float) -> list[float]:
        """Return what drafts of 1, 2, ... tokens cost, in tokens, each of which saves this share of a step."""
        alone = self.step_seconds(self._rows) - self.drafter.seconds
        return [
            max(ROW_COST * rows, MIN_PROFIT / (share * self._seconds) * (self.step_seconds(self._rows + rows) - alone))
            for rows in range(1, most + 1)
        ]

    def _chance(self, record: Record) -> float:
        """The probability of a drafted token whose estimate is 1: as for all sequences, until its own are known."""
        of_all = self._usual[record.source]
        usual = (1.0 + of_all.accepted) / (2.0 + of_all.offered)
        return min(MAX_CHANCE, (2.0 * usual + record.tally.accepted) / (2.0 + record.tally.offered))

    def _settle(self, record: Record, seq: Sequence) -> None:
        """Compare a sequence's last draft with what was sampled."""
        sampled = seq.token_ids[record.start :]
        if not record.draft or not sampled:
            return
        tallies = record.tally, self._usual[record.source]
        for each, kept in zip(tallies, (0.8, 0.99), strict=True):
            each.offered *= kept
            each.accepted *= kept
        for token, drafted, share in zip(sampled, record.draft, record.shares, strict=False):
            for each in tallies:
                each.offered += share
                each.accepted += token == drafted
            if token != drafted:
                break
        record.draft = []

    def finish(self, seq: Sequence) -> None:
        """Take leave of a sequence that has ended."""
        record = self._records.pop(seq.seq_id, None)
        if record is not None:
            self._settle(record, seq)
        if seq.num_completion_tokens > PROBE_EVERY:
            self._at_limit += 0.05 * ((seq.tokens_to_come <= 0) - self._at_limit)
        self.drafter.finish(seq)


def _most_gain(chances: list[float], costs: list[float]) -> tuple[int, float]:
    """Return the length of a draft that gains most after its costs, 0 if none gains, and the tokens expected of it.

    chances: of each token, if those before it come. costs: of drafts of 1, 2, ... tokens, at least as many.
    """
    best = 0
    gain = 0.0
    expected = 0.0
    total = 0.0
    likely = 1.0
    for count, (chance, cost) in enumerate(zip(chances, costs, strict=False), 1):
        likely *= chance
        total += likely
        if total - cost > gain:
            best = count
            gain = total - cost
            expected = total
    return best, expected
