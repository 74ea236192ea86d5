"""The scheduler: admission, chunks, preemption, and what has become of each step's sequences."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Hashable, Set
from dataclasses import dataclass, field
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
    """The sequences of one step, which computes `num_scheduled_tokens` of each from its `num_cached_tokens` on.

    tokens_left, sequences_left: how many more it may have. split: a sequence got less than it wants. drafting: the
    sequences whose last known token it computes, and that may draft.
    """

    sequences: list[Sequence] = field(default_factory=list)
    drafting: list[Sequence] = field(default_factory=list)
    tokens_left: int = 0
    sequences_left: int = 0
    split: bool = False

    @property
    def full(self) -> bool:
        """True if nothing can be added."""
        return self.tokens_left == 0 or self.sequences_left == 0

    @property
    def num_tokens(self) -> int:
        """Tokens that the step computes."""
        return sum(seq.num_scheduled_tokens for seq in self.sequences)

    def add(self, seq: Sequence, tokens: int) -> None:
        """Add a sequence, of which the step computes this many tokens."""
        assert 0 < tokens <= self.tokens_left, f"{seq} can't have {tokens} tokens"
        seq.num_scheduled_tokens = tokens
        self.sequences.append(seq)
        self.tokens_left = max(0, self.tokens_left - tokens * seq.token_cost)
        self.sequences_left -= 1


@dataclass
class CallQueue:
    """The sequences that were asked for together: those that wait, in order of arrival, and how many run."""

    waiting: list[Sequence] = field(default_factory=list)
    num_running: int = 0


class Scheduler:
    """The choice of the tokens that each step computes, so that no call waits for the whole of another one.

    The first running sequence of each call ranks before all others; otherwise the order is that of arrival. A step goes
    through the sequences by rank. Those that run may take blocks from those that rank below them (preemption: all KV
    dropped, recomputed later). Then waiting sequences are admitted, as long as sequences, tokens and blocks last: the
    first one of a call of which nothing runs may even preempt sequences that are not their call's first; the rest come
    in order of arrival. While several calls are there, what needs more tokens than a step has gets half of those that
    are left, and later what nobody else wants, up to half of a step: others wait for its end. With one call all of this
    is first in, first out. A sequence whose prompt is scored counts twice (`token_cost`).

    Several steps may be under way at once: they are computed in the order in which they are scheduled, so KV counts as
    existing from then on. Only a sampled token is late. Its sequence waits (`batches_in_flight`, for pipelines, whose
    steps share the sequences out), or with `async_scheduling` is in the next step, too, without knowing its last token.

    speculator: drafts tokens, in what nobody else wants of a step, for sequences that reach their last one; these wait
    for what comes of it.
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
        self.batches_in_flight = batches_in_flight
        self.async_scheduling = async_scheduling
        self.speculator = speculator
        self.blocks = block_manager
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        # those that have unfinished sequences, in order of arrival; a dict would look for its first ever longer
        self.calls: OrderedDict[Hashable, CallQueue] = OrderedDict()
        self.running: list[Sequence] = []  # in order of arrival
        self._ranks: tuple[list[Sequence], list[Sequence]] | None = None  # of those that run, until these change
        self.num_waiting = 0
        self.stats = SchedulerStats()

    @property
    def has_work(self) -> bool:
        """True if a sequence runs or waits."""
        return bool(self.calls)

    def add(self, seq: Sequence) -> None:
        """Queue a sequence; its siblings start when its prompt's KV exists."""
        seq.check_fits(self.blocks.num_blocks * self.blocks.block_size)
        self._queue(seq)

    def schedule(self) -> Batch:
        """Return the next step's batch. It is empty only if there is no work, or all of it awaits a token."""
        busy = min(len(self.running) + self.num_waiting, self.max_num_seqs)
        share = -(-busy // self.batches_in_flight)  # or the first batch would take all sequences
        batch = Batch(tokens_left=self.max_num_batched_tokens, sequences_left=share)
        preemptions = self.stats.preemptions
        firsts, others = self._ranked()
        self._continue(batch, firsts)
        still, victims = self._ranked()
        if len(still) == len(firsts) < len(self.calls):  # no first was preempted, and a call has none
            self._admit_firsts(batch, victims.copy())
        self._continue(batch, others)
        if self.num_waiting and self.stats.preemptions == preemptions and len(self.running) < self.max_num_seqs:
            self._admit_rest(batch)
        if batch.split:
            self._share_rest(batch)
        if self.speculator is not None and batch.drafting:
            self._draft(self.speculator, batch)
        batch.sequences.sort(key=_arrival)  # samples of a prompt side by side: they share reads
        if not batch.sequences and self.has_work:
            heads = [*self.running, *next(iter(self.calls.values())).waiting[:1]]
            assert any(seq.num_pending for seq in heads), "nothing scheduled though there is work"
        return batch

    def _ranked(self) -> tuple[list[Sequence], list[Sequence]]:
        """The running sequences that are their call's first, and the others; both in order of arrival."""
        if self._ranks is None:
            firsts: dict[Hashable, Sequence] = {}
            others = [seq for seq in self.running if firsts.setdefault(seq.call, seq) is not seq]
            self._ranks = list(firsts.values()), others
        return self._ranks

    def _continue(self, batch: Batch, sequences: list[Sequence]) -> None:
        """Add running sequences to the batch, in this order; what lacks blocks takes them from the last by rank."""
        for seq in sequences:
            if batch.full:
                return
            if seq.status is not SequenceStatus.RUNNING:  # preempted for another one, just now
                continue
            if seq.num_pending and self._waits(seq):
                continue
            seq.draft = []
            tokens = self._tokens_for(batch, seq, seq.num_cached_tokens)
            while not self.blocks.allocate(seq, seq.num_cached_tokens + tokens):
                self.preempt_last()
                if seq.status is not SequenceStatus.RUNNING:
                    break
            else:
                batch.add(seq, tokens)
                if seq.num_cached_tokens + tokens == seq.num_tokens and not seq.num_pending and not seq.needs_tokens:
                    batch.drafting.append(seq)

    def _admit_firsts(self, batch: Batch, victims: list[Sequence]) -> None:
        """Admit a sequence of each call of which none runs; the victims, last one first, make room."""
        for call in self.calls.values():
            if call.waiting and not call.num_running and not self._admit(batch, call, victims):
                return

    def _admit_rest(self, batch: Batch) -> None:
        for call in self.calls.values():
            while call.waiting:
                if not self._admit(batch, call, []):
                    return

    def _admit(self, batch: Batch, call: CallQueue, victims: list[Sequence]) -> bool:
        """Admit a call's first waiting sequence. False if it has to wait."""
        seq = call.waiting[0]
        no_place = len(self.running) >= self.max_num_seqs
        if seq.num_pending or batch.full or (no_place and not victims):
            return False
        hit = self.blocks.match_prefix(seq)
        tokens = self._tokens_for(batch, seq, hit)
        missing = self.blocks.blocks_for(hit + tokens) - len(seq.block_table) - self.blocks.num_free
        if missing > 0 and missing > self.blocks.count_private(victims):
            self.blocks.free(seq)
            return False
        if no_place:
            self._preempt(victims.pop())
        while not self.blocks.allocate(seq, hit + tokens):
            self._preempt(victims.pop())
        call.waiting.pop(0)
        self.num_waiting -= 1
        self._run(seq)
        self.stats.prefix_hit_tokens += hit
        seq.num_prefix_hit = hit if seq.num_prefix_hit is None else seq.num_prefix_hit
        batch.add(seq, tokens)
        return True

    def _tokens_for(self, batch: Batch, seq: Sequence, start: int) -> int:
        """Tokens of a sequence, from `start` on, that a batch takes: a long prompt leaves some to other calls."""
        wanted = seq.num_tokens - start
        room = batch.tokens_left
        begin = start if seq.num_prefix_hit is None else seq.num_prefix_hit
        if (seq.num_tokens - begin) * seq.token_cost > self.max_num_batched_tokens and len(self.calls) > 1:
            room = (room - len(self.running)) // 2  # each of those that run may want one
        tokens = min(wanted, max(1, room // seq.token_cost))
        batch.split |= tokens < wanted
        return tokens

    def _share_rest(self, batch: Batch) -> None:
        """Give sequences that got a part of a step what nobody else wants of it, up to half of a step."""
        for seq in batch.sequences:
            before = seq.num_scheduled_tokens * seq.token_cost
            most = min(before + batch.tokens_left, self.max_num_batched_tokens // 2)
            tokens = min(seq.num_tokens - seq.num_cached_tokens, most // seq.token_cost)
            if tokens > seq.num_scheduled_tokens and self.blocks.allocate(seq, seq.num_cached_tokens + tokens):
                seq.num_scheduled_tokens = tokens
                batch.tokens_left -= tokens * seq.token_cost - before

    def _waits(self, seq: Sequence) -> bool:
        """True if the token under way is the sequence's last one, or has to be known first."""
        last = seq.num_tokens - seq.num_prompt_tokens >= seq.max_tokens
        drafts = bool(seq.draft) or (self.speculator is not None and self.speculator.pays_to_wait(seq))
        return last or drafts or seq.needs_tokens or not self.async_scheduling

    def _draft(self, speculator: Speculator, batch: Batch) -> None:
        """Set drafts, in what is left of the step; who has most tokens to come is first.

        They take only such blocks as are free when each running sequence, and each that starts, has one more.
        """
        speculator.begin_step(self.running, len(batch.sequences), batch.num_tokens, self.num_waiting > 0)
        kept = len(self.running) + sum(len(seq.siblings) for seq in batch.drafting)
        for seq in sorted(batch.drafting, key=lambda seq: -seq.tokens_to_come):
            blocks = len(seq.block_table) + max(0, self.blocks.num_free - kept)
            room = min(batch.tokens_left // seq.token_cost, blocks * self.blocks.block_size - seq.num_tokens)
            draft = speculator.draft(seq, max(0, room))  # without room, too: it waits for drafts no longer then
            if draft and self.blocks.allocate(seq, seq.num_tokens + len(draft)):
                seq.draft = draft
                seq.num_scheduled_tokens += len(draft)
                batch.tokens_left -= len(draft) * seq.token_cost

    def preempt_last(self) -> None:
        """Take all KV from the running sequence that ranks last, which starts over later."""
        firsts, others = self._ranked()
        self._preempt((others or firsts)[-1])

    def _preempt(self, seq: Sequence) -> None:
        self.stats.preemptions += 1
        self._requeue(seq)

    def _requeue(self, seq: Sequence) -> None:
        self._stop(seq)
        self._queue(seq)

    def _queue(self, seq: Sequence) -> None:
        seq.status = SequenceStatus.WAITING
        insort(self.calls.setdefault(seq.call, CallQueue()).waiting, seq, key=_arrival)
        self.num_waiting += 1

    def _run(self, seq: Sequence) -> None:
        seq.status = SequenceStatus.RUNNING
        insort(self.running, seq, key=_arrival)
        self._ranks = None
        self.calls[seq.call].num_running += 1

    def _stop(self, seq: Sequence) -> None:
        call = self.calls[seq.call]
        running = seq.status is SequenceStatus.RUNNING
        queue = self.running if running else call.waiting
        place = bisect_left(queue, seq.seq_id, key=_arrival)  # no search: a queue may be long
        assert queue[place] is seq, f"{seq} is not where its arrival puts it"
        del queue[place]
        if running:
            call.num_running -= 1
            self._ranks = None
        else:
            self.num_waiting -= 1
        self.blocks.free(seq)
        seq.num_scheduled_tokens = 0
        seq.draft = []
        seq.stale_kv = False

    def postprocess(self, batch: Batch) -> None:
        """Record that a step was submitted: its KV exists for all steps after it, and its block copies are done.

        Moves the counters, publishes full blocks and starts the siblings of prompts that are complete.
        """
        self.blocks.end_copies()
        self.stats.steps += 1
        for seq in batch.sequences:
            prompt_left = seq.num_prompt_tokens - seq.num_cached_tokens
            if prompt_left > 0:
                self.stats.prompt_tokens_computed += min(seq.num_scheduled_tokens, prompt_left)
            seq.num_cached_tokens += seq.num_scheduled_tokens - len(seq.draft)
            seq.num_scheduled_tokens = 0
            self.stats.draft_tokens += len(seq.draft)
            self.blocks.cache_blocks(seq)
        for seq in batch.sequences:
            if seq.num_cached_tokens == seq.num_tokens:
                self._fork(seq)

    def accept(self, seq: Sequence) -> None:
        """Record that a drafted token was sampled: its KV exists."""
        self.stats.accepted_tokens += 1
        if seq.status is SequenceStatus.RUNNING:  # not preempted meanwhile
            seq.num_cached_tokens += 1

    def _fork(self, seq: Sequence) -> None:
        """Start the siblings of a sequence whose prompt's KV exists, before it grows.

        Where sequences or blocks are short, a sibling waits like any other and finds the prompt in the prefix cache.
        """
        siblings = seq.siblings
        seq.siblings = []
        for sibling in siblings:
            if len(self.running) < self.max_num_seqs and self.blocks.num_free:
                self.blocks.fork(seq, sibling)
                self._run(sibling)
            else:
                self._queue(sibling)

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
                self.preempt_last()
        return tokens > 1

    def finish(self, seq: Sequence) -> None:
        """Remove a sequence, finished or aborted; its full blocks stay findable."""
        self.blocks.cache_blocks(seq)
        self._stop(seq)
        seq.status = SequenceStatus.FINISHED
        call = self.calls[seq.call]
        if not call.waiting and not call.num_running:
            del self.calls[seq.call]
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
                self._requeue(seq)
        self.blocks.reset_prefix_cache(salt)
