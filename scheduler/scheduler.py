"""The scheduler: admission, chunks, preemption, and what has become of each step's sequences."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Set
from dataclasses import dataclass, field
from itertools import chain
from operator import attrgetter

from .block_manager import BlockManager
from .drafts import Speculator
from .sequence import Sequence, SequenceStatus

_arrival = attrgetter("seq_id")


@dataclass
class SchedulerStats:
    """Counts of tokens, preemptions and steps since the start; of drafted tokens, too, and of those that were right."""

    prompt_tokens_computed: int = 0
    prefix_hit_tokens: int = 0
    preemptions: int = 0
    steps: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0


@dataclass
class Batch:
    """The sequences of one step, which computes `num_scheduled_tokens` of each from its `num_cached_tokens` on."""

    sequences: list[Sequence] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        """Tokens that the step computes."""
        return sum(seq.num_scheduled_tokens for seq in self.sequences)


class Scheduler:
    """Decides which tokens each step computes. Both queues are in order of arrival.

    Running sequences go first and may take blocks from newer ones (preemption: all KV dropped, recomputed later);
    then waiting sequences are admitted, oldest first, as long as sequences, tokens and blocks last.

    Several steps may be under way at once: they are computed in the order in which they are scheduled, so KV counts as
    existing from then on. Only a sampled token is late. Its sequence waits (`batches_in_flight`, for pipelines, whose
    steps share the sequences out), or with `async_scheduling` is in the next step, too, without knowing its last token.

    speculator: drafts tokens for sequences that reach their last one; these wait for what comes of it.
    """

    def __init__(
        self,
        block_manager: BlockManager,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        batches_in_flight: int = 1,
        async_scheduling: bool = False,
        speculator: Speculator | None = None,
    ):
        if max_num_seqs < 1 or max_num_batched_tokens < 1 or batches_in_flight < 1:
            raise ValueError("max_num_seqs, max_num_batched_tokens and batches_in_flight must be positive")
        self.batches_in_flight = batches_in_flight
        self.async_scheduling = async_scheduling
        self.speculator = speculator
        self.blocks = block_manager
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.block_copies: list[tuple[int, int]] = []  # (source, destination), due before the next step's writes
        self.stats = SchedulerStats()

    @property
    def has_work(self) -> bool:
        """True if a sequence runs or waits."""
        return bool(self.waiting or self.running)

    def add(self, seq: Sequence) -> None:
        """Queue a sequence; its siblings start when its prompt's KV exists."""
        seq.check_fits(self.blocks.num_blocks * self.blocks.block_size)
        insort(self.waiting, seq, key=_arrival)

    def schedule(self) -> Batch:
        """Return the next step's batch. It is empty only if there is no work, or all of it awaits a token."""
        batch = Batch()
        budget = self.max_num_batched_tokens
        busy = min(len(self.running) + len(self.waiting), self.max_num_seqs)
        share = -(-busy // self.batches_in_flight)  # or the first batch would take all sequences
        preempted = False
        if self.speculator is not None and self.running:
            rows = sum(seq.num_tokens - seq.num_cached_tokens for seq in self.running)
            self.speculator.begin_step(len(self.running), rows)
        for seq in list(self.running):
            if budget == 0 or len(batch.sequences) == share:
                break
            if seq.status is not SequenceStatus.RUNNING or self._waits(seq):  # preempted for an older one, just now
                continue
            tokens = min(seq.num_tokens - seq.num_cached_tokens, budget)
            self._draft(seq, budget)
            while not self.blocks.allocate(seq, seq.num_cached_tokens + tokens):
                preempted = True
                self.preempt_newest()
                if seq.status is not SequenceStatus.RUNNING:
                    break
            else:
                budget -= self._take(batch, seq, tokens + len(seq.draft))
        while self.waiting and not preempted and budget and len(self.running) < self.max_num_seqs:
            seq = self.waiting[0]
            if seq.num_pending or len(batch.sequences) == share:
                break
            hit = self.blocks.match_prefix(seq)
            tokens = min(seq.num_tokens - hit, budget)
            if not self.blocks.allocate(seq, hit + tokens):
                self.blocks.free(seq)
                break
            self.waiting.pop(0)
            seq.status = SequenceStatus.RUNNING
            insort(self.running, seq, key=_arrival)
            self.stats.prefix_hit_tokens += hit
            seq.num_prefix_hit = hit if seq.num_prefix_hit is None else seq.num_prefix_hit
            budget -= self._take(batch, seq, tokens)
        if not batch.sequences:
            late = any(seq.num_pending for seq in chain(self.running, self.waiting))  # mostly the first one
            assert late or not self.has_work, "nothing scheduled though there is work"
        return batch

    def _waits(self, seq: Sequence) -> bool:
        """True if a token under way is the sequence's last one, or has to be known first."""
        if seq.num_pending == 0:
            return False
        last = seq.num_tokens - seq.num_prompt_tokens >= seq.max_tokens
        drafts = bool(seq.draft) or (self.speculator is not None and self.speculator.pays_to_wait(seq))
        return last or drafts or seq.needs_tokens or not self.async_scheduling

    def _draft(self, seq: Sequence, budget: int) -> None:
        """Set the draft of a running sequence whose last token is computed now: in the budget, and in free blocks."""
        seq.draft = []
        room = budget - (seq.num_tokens - seq.num_cached_tokens)
        if self.speculator is None or room < 1 or seq.num_pending or seq.needs_tokens:
            return
        draft = self.speculator.draft(seq)[:room]
        if draft and self.blocks.allocate(seq, seq.num_tokens + len(draft)):
            seq.draft = draft

    def _take(self, batch: Batch, seq: Sequence, tokens: int) -> int:
        assert tokens > 0, f"{seq} has nothing to compute"
        seq.num_scheduled_tokens = tokens
        batch.sequences.append(seq)
        return tokens

    def preempt_newest(self) -> None:
        """Take all KV from the newest running sequence, which starts over later."""
        self.stats.preemptions += 1
        self._preempt(self.running[-1])

    def _preempt(self, seq: Sequence) -> None:
        self._stop(seq)
        seq.status = SequenceStatus.WAITING
        insort(self.waiting, seq, key=_arrival)

    def _stop(self, seq: Sequence) -> None:
        queue = self.running if seq.status is SequenceStatus.RUNNING else self.waiting
        place = bisect_left(queue, seq.seq_id, key=_arrival)  # no search: a queue may be long
        assert queue[place] is seq, f"{seq} is not where its arrival puts it"
        del queue[place]
        self.blocks.free(seq)
        seq.num_scheduled_tokens = 0
        seq.draft = []
        seq.stale_kv = False

    def postprocess(self, batch: Batch) -> list[Sequence]:
        """Record that a step was submitted: its KV exists for all steps after it, and its block copies are done.

        Moves the counters, publishes full blocks and starts the siblings of prompts that are complete. Returns the
        sequences that sample a token in this step, each followed by its siblings.
        """
        self.block_copies.clear()
        self.stats.steps += 1
        for seq in batch.sequences:
            prompt_left = max(0, seq.num_prompt_tokens - seq.num_cached_tokens)
            self.stats.prompt_tokens_computed += min(seq.num_scheduled_tokens, prompt_left)
            seq.num_cached_tokens += seq.num_scheduled_tokens - len(seq.draft)
            seq.num_scheduled_tokens = 0
            self.stats.draft_tokens += len(seq.draft)
            self.blocks.cache_blocks(seq)
        sampling: list[Sequence] = []
        for seq in batch.sequences:
            if seq.num_cached_tokens == seq.num_tokens:
                sampling += [seq, *self._fork(seq)]
        return sampling

    def accept(self, seq: Sequence) -> None:
        """Record that a drafted token was sampled: its KV exists."""
        self.stats.accepted_tokens += 1
        if seq.status is SequenceStatus.RUNNING:  # not preempted meanwhile
            seq.num_cached_tokens += 1

    def _fork(self, seq: Sequence) -> list[Sequence]:
        """Start the siblings of a sequence whose prompt's KV exists, before it grows. Return them.

        Where sequences or blocks are short, a sibling waits like any other and finds the prompt in the prefix cache.
        """
        siblings = seq.siblings
        seq.siblings = []
        for sibling in siblings:
            if len(self.running) < self.max_num_seqs and self.blocks.num_free:
                copy = self.blocks.fork(seq, sibling)
                if copy is not None:
                    self.block_copies.append(copy)
                sibling.status = SequenceStatus.RUNNING
                insort(self.running, sibling, key=_arrival)
            else:
                insort(self.waiting, sibling, key=_arrival)
        return siblings

    def shrink(self, batch: Batch) -> bool:
        """Take back a batch that ran out of memory, and lower the limits of those to come.

        False if the batch is a single token of a single sequence: nothing smaller can be scheduled.
        """
        sequences = batch.sequences
        tokens = batch.num_tokens
        for seq in sequences:
            seq.num_scheduled_tokens = 0
            seq.draft = []
        if tokens > len(sequences):
            self.max_num_batched_tokens = max(len(sequences), tokens // 2)
        elif len(sequences) > 1:
            self.max_num_seqs = len(sequences) // 2
            while len(self.running) > self.max_num_seqs:
                self.preempt_newest()
        return tokens > 1

    def finish(self, seq: Sequence) -> None:
        """Remove a sequence, finished or aborted; its full blocks stay findable."""
        self.blocks.cache_blocks(seq)
        self._stop(seq)
        seq.status = SequenceStatus.FINISHED
        if self.speculator is not None:
            self.speculator.finish(seq)

    def preempt_all(self, salt: bytes, keep: Set[int] = frozenset()) -> None:
        """Forget all KV, since the weights are new; running sequences start over from their tokens.

        Those whose ids are in `keep` go on from the KV that they have, which is then stale.
        """
        for seq in reversed(list(self.running)):
            if seq.seq_id in keep:
                seq.stale_kv = True
            else:
                self._preempt(seq)
        if not self.running:
            self.block_copies.clear()
        self.blocks.reset_prefix_cache(salt)
