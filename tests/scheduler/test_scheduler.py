"""The scheduler and the block manager alone; KV is modelled as the tokens that it is computed from."""

import random
import subprocess
import sys
from collections import deque
from typing import ClassVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from samebits.scheduler import BlockManager, Scheduler, Sequence, SequenceStatus

from helpers.invariants import check_scheduler, waiting

SIZE = 4  # tokens a block


class Driver:
    """The engine's half of a step, without a model. With `late`, a step's tokens come when the next one has started.

    A slot of the KV cache holds (weight version, all tokens up to there), which is what real KV depends on; so a
    sequence that reads another prefix, a stale version, or KV that does not exist yet is caught at the step that does.
    """

    def __init__(self, num_blocks=8, max_num_seqs=8, max_num_batched_tokens=64, late=False):
        blocks = BlockManager(num_blocks, SIZE)
        self.scheduler = Scheduler(blocks, max_num_seqs, max_num_batched_tokens, async_scheduling=late)
        self.late = late
        self.flights = deque()  # of each step under way, its draws: sequence, token
        self.scheduler.blocks.reset_prefix_cache(b"0")
        self.version = 0
        self.kv = {}
        self.requests = []  # each a list: the leader, then its siblings
        self.copies = 0
        self.computed = []  # tokens of each step

    @property
    def blocks(self):
        return self.scheduler.blocks

    @property
    def unfinished(self):
        return [s for r in self.requests for s in r if s.status is not SequenceStatus.FINISHED]

    def add(self, prompt, max_tokens=4, n=1, use_prefix_cache=True, call=None):
        first = sum(map(len, self.requests))
        group = [Sequence(first + i, prompt, max_tokens, i, use_prefix_cache) for i in range(n)]
        for seq in group:
            seq.call = first if call is None else call
        group[0].siblings = group[1:]
        self.scheduler.add(group[0])
        self.requests.append(group)
        return group[0]

    def schedule(self):
        """schedule(), with the promises about its choice."""
        s = self.scheduler
        running, waiters = list(s.running), {name: list(call.waiting) for name, call in s.calls.items()}
        batch = s.schedule()
        assert batch.num_tokens <= s.max_num_batched_tokens
        assert all(seq.num_scheduled_tokens >= 1 for seq in batch.sequences)
        assert len(set(map(id, batch.sequences))) == len(batch.sequences) <= s.max_num_seqs
        assert set(batch.sequences) <= set(s.running)
        for seq in batch.sequences:
            assert seq.num_tokens - seq.num_prompt_tokens < seq.max_tokens, f"{seq} goes on after its last token"
        served = {seq.call for seq in running}
        admitted = {name: [seq for seq in queue if seq in s.running] for name, queue in waiters.items()}
        for name, queue in waiters.items():
            assert admitted[name] == queue[: len(admitted[name])], "admission is not first in, first out"
        whole = [len(admitted[name]) == len(queue) for name, queue in waiters.items()]
        more = [len(admitted[name]) > (name not in served) for name in waiters]
        assert all(all(whole[:i]) for i, further in enumerate(more) if further), "a call's rest overtook an older call"
        begun = [bool(admitted[name]) for name, queue in waiters.items() if queue and name not in served]
        assert begun == sorted(begun, reverse=True), "a call began before an older one"
        preempted = [seq for seq in running if seq in waiting(s)]
        firsts = {seq.call: seq.seq_id for seq in sorted({*running, *s.running}, key=lambda seq: -seq.seq_id)}
        rank = {seq: (firsts[seq.call] != seq.seq_id, seq.seq_id) for seq in {*running, *s.running}}
        for loser in preempted:
            assert all(rank[winner] < rank[loser] for winner in s.running), "preempted for one of lower rank"
        if running:
            last = running[0].num_pending and running[0].num_tokens - running[0].num_prompt_tokens
            assert running[0] in batch.sequences or last == running[0].max_tokens, "the oldest one was held up"
        check_scheduler(s)
        return batch

    def compute(self, batch):
        """Writes the batch's KV and verifies all KV that it reads."""
        for source, destination in self.scheduler.blocks.copies:
            for offset in range(SIZE):
                self.kv[destination, offset] = self.kv.get((source, offset))
        self.copies += len(self.scheduler.blocks.copies)
        self.computed.append(batch.num_tokens)
        for seq in batch.sequences:
            *known, newest = seq.scheduled_token_ids
            assert all(token >= 0 for token in known)
            assert newest >= 0 or self.flights[-1][-1 - newest][0] is seq, "a token of another sequence"
            for position in range(seq.num_cached_tokens, seq.num_cached_tokens + seq.num_scheduled_tokens):
                self.kv[self.slot(seq, position)] = self.truth(seq, position)
        for seq in batch.sequences:
            for position in range(seq.num_cached_tokens + seq.num_scheduled_tokens):
                assert self.kv[self.slot(seq, position)] == self.truth(seq, position), f"{seq} reads foreign KV"

    def slot(self, seq, position):
        return seq.block_table[position // SIZE], position % SIZE

    def truth(self, seq, position):
        coming = [token for flight in self.flights for s, token in flight if s is seq]
        return self.version, tuple((seq.token_ids + coming)[: position + 1])

    def step(self, token=lambda seq: 7, ends=lambda seq: False):
        batch = self.schedule()
        if batch.sequences:
            self.compute(batch)
            drawing = [each for seq in batch.sequences if seq.samples_now for each in (seq, *seq.siblings)]
            self.scheduler.postprocess(batch)
            check_scheduler(self.scheduler)
            self.flights.append([(seq, token(seq)) for seq in drawing])
            for i, seq in enumerate(drawing):
                seq.num_pending, seq.pending_row = seq.num_pending + 1, i
        if self.flights and (len(self.flights) > self.late or not batch.sequences):
            self.deliver(ends)
        return batch

    def deliver(self, ends=lambda seq: False):
        """The tokens of the oldest step under way."""
        for seq, token in self.flights.popleft():
            seq.num_pending -= 1
            if seq.status is SequenceStatus.FINISHED:
                continue
            seq.token_ids.append(token)
            if seq.num_completion_tokens >= seq.max_tokens or ends(seq):
                self.scheduler.finish(seq)
        check_scheduler(self.scheduler)

    def abort(self, group):
        unstarted, group[0].siblings = group[0].siblings, []
        for seq in group:
            if seq in unstarted:
                seq.status = SequenceStatus.FINISHED
            elif seq.status is not SequenceStatus.FINISHED:
                self.scheduler.finish(seq)
        check_scheduler(self.scheduler)

    def drain(self):
        """Runs to the end. Each step computes a token of the oldest running sequence for good, hence the bound."""
        bound = 2 * sum(seq.num_prompt_tokens + seq.max_tokens for seq in self.unfinished)
        for _ in range(bound):
            if not self.scheduler.has_work:
                break
            self.step()
        assert not self.unfinished, f"livelock: {self.unfinished} after {bound} steps"
        assert not self.schedule().sequences
        assert self.blocks.num_free == self.blocks.num_blocks

    def run(self, prompt, **kwargs):
        """One request from start to end; returns the tokens of its prompt that were found in the cache."""
        before = self.scheduler.stats.prefix_hit_tokens
        self.add(prompt, **kwargs)
        self.drain()
        return self.scheduler.stats.prefix_hit_tokens - before


def tokens(seed, count):
    rng = random.Random(seed)
    return [rng.randrange(1000) for _ in range(count)]


# --- random workloads -------------------------------------------------------------------------------------------------


class Workload(RuleBasedStateMachine):
    totals: ClassVar[dict[str, int]] = {}  # what all examples together exercised

    @initialize(
        blocks=st.integers(1, 9),
        seqs=st.sampled_from([1, 2, 3, 8]),
        budget=st.sampled_from([1, 2, 3, 5, 9, 64]),
        late=st.booleans(),
    )
    def start(self, blocks, seqs, budget, late):
        self.driver = Driver(blocks, seqs, budget, late)
        self.shared = [0, 1] * 20

    @property
    def capacity(self):
        return self.driver.blocks.num_blocks * SIZE

    @rule(
        shared=st.integers(0, 20),
        tail=st.lists(st.integers(0, 1), max_size=9),
        most=st.integers(1, 30),
        n=st.sampled_from([1, 1, 2, 4]),
        cached=st.sampled_from([True, True, True, False]),
        call=st.sampled_from([None, None, "one", "another"]),
    )
    def add(self, shared, tail, most, n, cached, call):
        prompt = (self.shared[:shared] + tail or [0])[: self.capacity]
        most = min(most, self.capacity - len(prompt) + 1)
        self.driver.add(prompt, most, n, cached, call)

    @rule(seed=st.integers(0, 2**16), ending=st.sampled_from([0.0, 0.0, 0.2, 1.0]), count=st.integers(1, 6))
    def step(self, seed, ending, count):
        rng = random.Random(seed)
        for _ in range(count):
            self.driver.step(lambda seq: rng.randrange(2), lambda seq: rng.random() < ending)

    @precondition(lambda self: self.driver.unfinished)
    @rule(which=st.integers(0, 2**16))
    def abort(self, which):
        alive = [group for group in self.driver.requests if any(seq in self.driver.unfinished for seq in group)]
        self.driver.abort(alive[which % len(alive)])

    @rule()
    def new_weights(self):
        while self.driver.flights:
            self.driver.deliver()
        self.driver.version += 1
        self.driver.scheduler.preempt_all(str(self.driver.version).encode())
        check_scheduler(self.driver.scheduler)

    @rule()
    def forget_prefixes(self):
        self.driver.blocks.reset_prefix_cache(self.driver.blocks.salt)
        check_scheduler(self.driver.scheduler)

    def teardown(self):
        if not hasattr(self, "driver"):
            return
        self.driver.drain()
        stats = self.driver.scheduler.stats
        for name, count in (
            ("hits", stats.prefix_hit_tokens),
            ("preemptions", stats.preemptions),
            ("copies", self.driver.copies),
        ):
            self.totals[name] = self.totals.get(name, 0) + count


def test_no_workload_breaks_an_invariant_reads_foreign_kv_or_stalls():
    Workload.totals.clear()
    run_state_machine_as_test(
        Workload,
        settings=settings(
            derandomize=True,
            database=None,
            deadline=None,
            max_examples=250,
            stateful_step_count=30,
            suppress_health_check=list(HealthCheck),
        ),
    )
    assert min(Workload.totals.values()) > 20, f"the workloads exercised too little: {Workload.totals}"


@pytest.mark.parametrize("seed", range(40))
def test_many_requests_in_a_tiny_pool_all_finish(seed):
    rng = random.Random(seed)
    driver = Driver(
        num_blocks=rng.randint(3, 6),
        max_num_seqs=rng.choice((2, 5, 20)),
        max_num_batched_tokens=rng.choice((1, 6, 50)),
        late=seed % 2 == 1,
    )
    for _ in range(12):
        prompt = tokens(rng.randrange(3), rng.randint(1, 8))
        driver.add(prompt, rng.randint(1, 12 - len(prompt) + 1), n=rng.choice((1, 3)))
    driver.drain()


@pytest.mark.parametrize("late", [False, True])
def test_what_was_generated_is_found_again(late):
    """Blocks whose last token was under way when their KV was written, too."""
    driver = Driver(num_blocks=8, late=late)
    first = driver.add(tokens(0, 5), max_tokens=12)
    driver.drain()
    assert driver.run(first.token_ids) == 16


# --- imports ----------------------------------------------------------------------------------------------------------


def test_the_scheduler_needs_no_torch():
    code = "import sys, samebits.scheduler; assert 'torch' not in sys.modules"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


# --- what fits --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("prompt", "max_tokens"), [(33, 1), (1, 33), (20, 14)])
def test_a_request_that_can_outgrow_the_pool_is_refused_at_submission(prompt, max_tokens):
    driver = Driver(num_blocks=8)  # 32 tokens
    with pytest.raises(ValueError, match=r"KV cache of 32 tokens; lower max_tokens or raise kv_cache_memory_bytes"):
        driver.add(tokens(0, prompt), max_tokens)
    assert not driver.scheduler.has_work


@pytest.mark.parametrize("prompt", [1, 19, 31, 32])
def test_a_request_that_grows_to_exactly_the_pools_capacity_finishes(prompt):
    driver = Driver(num_blocks=8)
    seq = driver.add(tokens(0, prompt), max_tokens=32 - prompt + 1)
    driver.drain()
    assert seq.num_tokens == 33, "the last token's KV is never needed"
    assert driver.scheduler.stats.preemptions == 0


def test_two_requests_that_each_need_the_whole_pool_both_finish():
    driver = Driver(num_blocks=4)
    for seed in (1, 2):
        driver.add(tokens(seed, 3), max_tokens=14)
    driver.drain()
    assert driver.scheduler.stats.preemptions > 0


# --- order ------------------------------------------------------------------------------------------------------------


def test_admission_is_first_in_first_out_even_if_a_later_request_would_fit():
    driver = Driver(num_blocks=4, max_num_batched_tokens=64)
    driver.add(tokens(0, 8), max_tokens=1)
    big = driver.add(tokens(1, 12), max_tokens=1)
    small = driver.add(tokens(2, 2), max_tokens=1)
    batch = driver.step()
    assert [seq.seq_id for seq in batch.sequences] == [0]
    assert waiting(driver.scheduler) == [big, small]


def test_the_newest_sequence_is_preempted_and_goes_back_to_the_head_of_the_queue():
    driver = Driver(num_blocks=4, max_num_seqs=3)
    old, middle, new = (driver.add(tokens(i, 4), max_tokens=9) for i in range(3))
    last = driver.add(tokens(9, 4), max_tokens=2)
    driver.step()
    assert driver.scheduler.running == [old, middle, new]
    driver.step()  # old takes the one free block; middle takes new's
    assert driver.scheduler.running == [old, middle]
    assert waiting(driver.scheduler) == [new, last]
    assert new.num_completion_tokens == 1, "a preempted sequence keeps its tokens"
    driver.drain()


def test_a_step_never_computes_more_tokens_than_its_budget():
    driver = Driver(num_blocks=16, max_num_batched_tokens=5)
    for i in range(4):
        driver.add(tokens(i, 9), max_tokens=5)
    driver.drain()
    assert driver.computed[:7] == [5] * 7
    assert max(driver.computed) == 5


def test_a_step_never_runs_more_sequences_than_its_limit():
    driver = Driver(num_blocks=64, max_num_seqs=3)
    for i in range(5):
        driver.add(tokens(i, 3), max_tokens=3, n=2)
    sizes = []
    while driver.scheduler.has_work:
        sizes.append(len(driver.step().sequences))
    assert max(sizes) == 3


def test_a_chunk_samples_only_when_it_reaches_the_last_token():
    driver = Driver(max_num_batched_tokens=4)
    seq = driver.add(tokens(0, 10), max_tokens=2)
    seen = []
    for _ in range(4):
        driver.step()
        seen.append((seq.num_cached_tokens, seq.num_completion_tokens))
    assert seen[:3] == [(4, 0), (8, 0), (10, 1)]


# --- prefix cache -----------------------------------------------------------------------------------------------------


def test_two_equal_prompts_in_one_prefill_batch_never_free_blocks_in_use():
    driver = Driver(num_blocks=8)
    prompt = tokens(0, 10)
    first, second = (driver.add(prompt, max_tokens=3) for _ in range(2))
    driver.step()
    assert first.block_table[:2] == second.block_table[:2], "the duplicate was not swapped for the known block"
    assert first.block_table[2] != second.block_table[2], "a block that is written is shared"
    assert [driver.blocks.ref_count[b] for b in first.block_table] == [2, 2, 1]
    assert driver.blocks.num_free == 4, "the duplicates' own blocks were not freed"
    driver.scheduler.finish(first)
    check_scheduler(driver.scheduler)
    assert not set(second.block_table) & set(driver.blocks.free_blocks)
    driver.drain()


def test_a_block_is_published_only_after_its_kv_exists():
    driver = Driver(num_blocks=16, max_num_batched_tokens=6)
    prompt = tokens(0, 12)
    driver.add(prompt, max_tokens=2)
    batch = driver.schedule()  # 6 of 12 tokens
    assert not driver.blocks.block_of, "published before it was computed"
    driver.compute(batch)
    driver.scheduler.postprocess(batch)
    assert len(driver.blocks.block_of) == 1, "one block is full, the second is not"
    probe = Sequence(99, prompt, 1)
    assert driver.blocks.match_prefix(probe) == 4
    driver.blocks.free(probe)


def test_equal_prompts_admitted_in_the_same_step_do_not_hit_each_other():
    driver = Driver(num_blocks=16)
    prompt = tokens(0, 9)
    driver.add(prompt)
    driver.add(prompt)
    batch = driver.schedule()
    assert [seq.num_scheduled_tokens for seq in batch.sequences] == [9, 9]
    assert driver.scheduler.stats.prefix_hit_tokens == 0


@pytest.mark.parametrize("length", [1, 4, 5, 8, 9, 12, 13])
def test_a_full_prefix_hit_leaves_at_least_one_token_to_compute(length):
    driver = Driver(num_blocks=8)
    prompt = tokens(0, length)
    assert driver.run(prompt, max_tokens=1) == 0
    assert driver.run(prompt, max_tokens=1) == (length - 1) // SIZE * SIZE


def test_a_hit_needs_all_tokens_before_the_block_to_be_equal():
    driver = Driver(num_blocks=16)
    prompt = tokens(0, 13)
    driver.run(prompt)
    assert driver.run([prompt[0] + 1, *prompt[1:]]) == 0, "the same second block behind another first block was hit"
    assert driver.run([*prompt[:5], prompt[5] + 1, *prompt[6:]]) == 4


def test_completions_are_found_as_prefixes_too():
    driver = Driver(num_blocks=16)
    prompt = tokens(0, 6)
    driver.run(prompt, max_tokens=7)  # samples 7s; KV of the last one is never computed
    assert driver.run([*prompt, 7, 7, 7, 7, 7, 7, 7], max_tokens=1) == 12


def test_nothing_is_found_under_a_new_salt():
    driver = Driver(num_blocks=16)
    prompt = tokens(0, 13)
    driver.run(prompt)
    hashes = set(driver.blocks.block_of)
    driver.blocks.reset_prefix_cache(b"1")
    assert not driver.blocks.block_of
    assert driver.run(prompt) == 0
    assert not hashes & set(driver.blocks.block_of), "the weight version is not in the hash"
    assert driver.run(prompt) == 12


def test_a_running_sequences_blocks_of_the_old_salt_are_never_found():
    driver = Driver(num_blocks=16)
    prompt = tokens(0, 9)
    old = driver.add(prompt, max_tokens=20)
    driver.step()
    driver.blocks.reset_prefix_cache(b"1")  # without preemption: the sequence keeps its KV
    for _ in range(8):
        driver.step()
    probe = Sequence(99, old.token_ids, 1)
    assert driver.blocks.match_prefix(probe) == 0


def test_new_weights_drop_all_kv_and_keep_all_tokens():
    driver = Driver(num_blocks=16)
    seqs = [driver.add(tokens(i, 9), max_tokens=9, n=2) for i in range(2)]
    driver.step()
    assert driver.scheduler.blocks.copies, "no copy is pending: this test proves nothing about them"
    sampled = [list(seq.token_ids) for seq in seqs]
    driver.version = 1
    driver.scheduler.preempt_all(b"1")
    check_scheduler(driver.scheduler)
    assert not driver.scheduler.blocks.copies
    assert driver.blocks.num_free == 16
    assert [seq.seq_id for seq in waiting(driver.scheduler)] == [0, 1, 2, 3]
    assert [seq.token_ids for seq in seqs] == sampled
    driver.drain()


def test_a_sequence_that_opted_out_neither_finds_nor_publishes():
    driver = Driver(num_blocks=16)
    prompt = tokens(0, 13)
    driver.run(prompt, use_prefix_cache=False)
    assert not driver.blocks.block_of
    driver.run(prompt)
    assert driver.run(prompt, use_prefix_cache=False) == 0
    assert driver.run(prompt) == 12


def test_eviction_is_oldest_first_and_tails_before_the_heads_they_build_on():
    driver = Driver(num_blocks=6)
    old, new = tokens(1, 9), tokens(2, 9)
    driver.run(old, max_tokens=1)
    driver.run(new, max_tokens=1)  # two published blocks each, two blank
    assert len(driver.blocks.block_of) == 4
    driver.run(tokens(3, 4 * SIZE - 1), max_tokens=1, use_prefix_cache=False)  # needs four: two blank, old's two
    probe = Sequence(99, new, 1)
    assert driver.blocks.match_prefix(probe) == 8, "the newer prefix was evicted first"
    driver.blocks.free(probe)
    assert driver.blocks.match_prefix(Sequence(98, old, 1)) == 0

    driver = Driver(num_blocks=3)
    driver.run(old, max_tokens=1)
    driver.run(tokens(3, 2 * SIZE - 1), max_tokens=1, use_prefix_cache=False)  # a blank one and one of the two
    assert driver.blocks.match_prefix(Sequence(97, old, 1)) == 4, "the head went before the tail"


def test_memory_that_was_written_is_written_again_before_other_memory():
    driver = Driver(num_blocks=64)
    for _ in range(3):  # e.g. steps of training, with new weights each
        driver.add(tokens(1, 9), max_tokens=9, n=4)
        driver.drain()
        driver.blocks.reset_prefix_cache(driver.blocks.salt)
    assert len({block for block, _ in driver.kv}) <= 2 + 4 * 3


def test_a_hit_makes_a_prefix_young_again():
    driver = Driver(num_blocks=6)
    old, new = tokens(1, 9), tokens(2, 9)
    for prompt in (old, new, old):
        driver.run(prompt, max_tokens=1)
    driver.run(tokens(3, 4 * SIZE - 1), max_tokens=1, use_prefix_cache=False)
    assert driver.blocks.match_prefix(Sequence(99, old, 1)) == 8


def test_a_prefix_whose_blocks_are_in_use_is_never_evicted():
    driver = Driver(num_blocks=4)
    old = driver.add(tokens(1, 8), max_tokens=6)
    driver.step()
    table = list(old.block_table)
    driver.add(tokens(2, 8), max_tokens=6)  # does not fit beside it for long
    while old.status is SequenceStatus.RUNNING:
        assert old.block_table[:2] == table
        driver.step()
    driver.drain()


# --- siblings ---------------------------------------------------------------------------------------------------------


def test_fork_shares_full_blocks_and_copies_the_partial_one():
    driver = Driver(num_blocks=8)
    leader = driver.add(tokens(0, 10), max_tokens=4, n=3)
    siblings = list(leader.siblings)
    driver.step()
    assert driver.scheduler.running == [leader, *siblings]
    assert all(seq.block_table[:2] == leader.block_table[:2] for seq in siblings)
    partial = [seq.block_table[2] for seq in (leader, *siblings)]
    assert len(set(partial)) == 3
    assert driver.scheduler.blocks.copies == [(partial[0], partial[1]), (partial[0], partial[2])]
    assert [driver.blocks.ref_count[b] for b in leader.block_table] == [3, 3, 3], (
        "the block to copy is kept, once for each copy"
    )
    assert driver.scheduler.stats.prompt_tokens_computed == 10
    driver.drain()


def test_a_step_that_fails_after_its_writes_copies_the_same_again():
    """The copy's source would have gone to another sequence: its owner ended by its first token."""
    driver = Driver(num_blocks=6)
    leader = driver.add(tokens(0, 6), max_tokens=4, n=2)
    driver.step(ends=lambda seq: seq is leader)
    assert leader.status is SequenceStatus.FINISHED
    assert driver.blocks.copies, "nothing is to be copied: this test proves nothing"
    driver.add(tokens(1, 5), max_tokens=4)
    driver.compute(driver.schedule())
    driver.drain()
    assert driver.blocks.num_free == 6


def test_fork_of_whole_blocks_copies_nothing():
    driver = Driver(num_blocks=8)
    leader = driver.add(tokens(0, 8), max_tokens=4, n=3)
    siblings = list(leader.siblings)
    driver.step()
    assert not driver.scheduler.blocks.copies
    assert all(seq.block_table == leader.block_table for seq in siblings)
    driver.drain()


def test_siblings_publish_what_each_of_them_sampled():
    driver = Driver(num_blocks=32)
    prompt = tokens(0, 8)
    driver.add(prompt, max_tokens=10, n=2)
    while driver.scheduler.has_work:
        driver.step(token=lambda seq: seq.sample_index)
    for tail, hit in (([0] * 9, 16), ([1] * 9, 16), ([0] * 4 + [1] * 5, 12), ([1] * 4 + [0] * 5, 12)):
        assert driver.run(prompt + tail, max_tokens=1) == hit


@pytest.mark.parametrize(("num_blocks", "max_num_seqs"), [(3, 8), (8, 1)])
def test_siblings_that_find_no_room_wait_and_hit_the_prompt_later(num_blocks, max_num_seqs):
    driver = Driver(num_blocks, max_num_seqs)
    leader = driver.add(tokens(0, 9), max_tokens=3, n=3)
    siblings = list(leader.siblings)
    driver.step()
    assert waiting(driver.scheduler) == siblings
    driver.drain()
    assert driver.scheduler.stats.prefix_hit_tokens >= 16
    assert all(seq.num_completion_tokens == 3 for seq in (leader, *siblings))


def test_a_group_aborted_before_its_siblings_start_leaves_nothing_behind():
    driver = Driver(max_num_batched_tokens=4)
    driver.add(tokens(0, 10), n=3)
    other = driver.add(tokens(1, 6))
    driver.step()
    driver.abort(driver.requests[0])
    assert waiting(driver.scheduler) + driver.scheduler.running == [other]
    driver.drain()


def test_a_pending_copy_survives_the_end_of_its_source_and_of_its_destination():
    for gone in (0, 1):
        driver = Driver(num_blocks=8)
        leader = driver.add(tokens(0, 10), max_tokens=6, n=3)
        group = [leader, *leader.siblings]
        driver.step()
        driver.scheduler.finish(group[gone])
        driver.add(tokens(1, 12), max_tokens=2)  # takes freed blocks in the step that carries out the copies
        driver.drain()


# --- calls ------------------------------------------------------------------------------------------------------------


def steps_until(driver, seq, tokens=1):
    """The steps until a sequence has this many tokens."""
    for count in range(1, 1000):
        driver.step()
        if seq.num_completion_tokens >= tokens:
            return count
    raise AssertionError(f"{seq} waits for ever")


def busy_driver(call, late=False, steps=5):
    """A driver with a call that has more work than there is room for: prompts that are long, or many, or samples."""
    driver = Driver(num_blocks=1024, max_num_seqs=8, max_num_batched_tokens=16, late=late)
    if call == "a long prompt":
        driver.add(tokens(0, 500), max_tokens=1)
    elif call == "many prompts":
        for i in range(40):
            driver.add(tokens(i, 60), max_tokens=4, call="heavy")
    else:
        driver.add(tokens(0, 10), max_tokens=40, n=32)
    for _ in range(steps):
        driver.step()
    return driver


HEAVY_CALLS = ["a long prompt", "many prompts", "many samples"]


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("call", HEAVY_CALLS)
def test_a_small_call_behind_a_large_one_has_its_token_in_the_first_step_after_it_came(call, late):
    driver = busy_driver(call, late)
    assert steps_until(driver, driver.add(tokens(99, 3), max_tokens=1)) == 1 + late
    driver.drain()


@pytest.mark.parametrize("call", HEAVY_CALLS)
def test_what_belongs_to_the_large_call_itself_waits_for_its_turn(call):
    """The control: without calls of its own, the small sequence waits for all of the work before it."""
    driver = busy_driver(call)
    last = driver.add(tokens(99, 3), max_tokens=1, call=next(iter(driver.scheduler.calls)))
    assert steps_until(driver, last) > 20


def test_large_calls_share_the_steps_tokens_and_small_ones_pass_them_all():
    driver = Driver(num_blocks=1024, max_num_seqs=16, max_num_batched_tokens=64)
    for i in range(3):
        driver.add(tokens(i, 300), max_tokens=2)
    for _ in range(6):
        driver.step()
    done = [group[0].num_cached_tokens for group in driver.requests]
    assert sum(done) == 6 * 64, "a step was not filled"
    assert min(done) > 6 * 64 / 12, "a long prompt stood still"
    assert steps_until(driver, driver.add(tokens(9, 3), max_tokens=5), tokens=5) == 5
    driver.drain()


def test_a_long_prompt_holds_no_other_calls_tokens_up():
    driver = Driver(num_blocks=1024, max_num_seqs=16, max_num_batched_tokens=16)
    driver.add(tokens(0, 500), max_tokens=1)
    seqs = [driver.add(tokens(i, 2), max_tokens=20) for i in range(1, 6)]
    for _ in range(22):
        driver.step()
    assert all(seq.num_completion_tokens == 20 for seq in seqs)


def test_a_long_prompt_gets_what_nobody_else_wants_up_to_half_of_a_step():
    """The other call's tokens come sooner in short steps, and alone it has whole ones."""
    driver = Driver(num_blocks=1024, max_num_seqs=16, max_num_batched_tokens=16)
    long = driver.add(tokens(0, 200), max_tokens=1)
    driver.step()
    short = driver.add(tokens(1, 2), max_tokens=4)
    for _ in range(5):
        driver.step()
    assert short.status is SequenceStatus.FINISHED
    assert driver.computed == [16, 10, 9, 9, 9, 16] and long.num_cached_tokens == 16 + 4 * 8 + 16
    driver.add(tokens(2, 2), max_tokens=50, n=8)
    driver.step()
    driver.step()
    assert driver.computed[-1] == 16, "more run than leave half of a step"


def test_a_sequence_whose_tokens_cost_twice_as_much_gets_half_as_many():
    driver = Driver(num_blocks=1024, max_num_batched_tokens=16)
    scored = driver.add(tokens(0, 40), max_tokens=30, use_prefix_cache=False)
    scored.token_cost = 2
    driver.step()
    plain = driver.add(tokens(1, 2), max_tokens=3)
    for _ in range(3):
        driver.step()
    assert plain.status is SequenceStatus.FINISHED
    assert driver.computed == [8, 4 + 2, 4 + 1, 4 + 1] and scored.num_cached_tokens == 20
    driver.drain()


def test_a_call_takes_a_place_only_from_those_that_are_not_the_first_of_theirs():
    driver = Driver(num_blocks=1024, max_num_seqs=4)
    driver.add(tokens(0, 3), max_tokens=90, n=3)
    driver.add(tokens(1, 3), max_tokens=90)
    driver.step()
    third, fourth, fifth = (driver.add(tokens(i, 3), max_tokens=90) for i in (2, 3, 4))
    driver.step()
    driver.step()
    assert [seq.seq_id for seq in driver.scheduler.running] == [0, 3, third.seq_id, fourth.seq_id]
    assert [seq.seq_id for seq in waiting(driver.scheduler)] == [1, 2, fifth.seq_id]
    assert driver.scheduler.stats.preemptions == 2
    driver.drain()


def test_a_call_takes_blocks_only_where_they_are_enough_for_it():
    driver = Driver(num_blocks=8)
    driver.add(tokens(0, 20), max_tokens=6, n=2)  # five blocks, then one more for each
    driver.step()
    held = waiting(driver.scheduler)
    too_large = driver.add(tokens(1, 17), max_tokens=1)
    small = driver.add(tokens(2, 3), max_tokens=1)
    driver.step()
    assert driver.scheduler.stats.preemptions == 0 and waiting(driver.scheduler) == [*held, too_large, small]
    driver.drain()


def test_calls_whose_first_sequences_fill_all_places_come_in_order_of_arrival():
    driver = Driver(num_blocks=1024, max_num_seqs=2)
    groups = [driver.add(tokens(i, 3), max_tokens=4, n=2) for i in range(4)]
    order = []
    while driver.scheduler.has_work:
        driver.step()
        order += [seq.seq_id for seq in groups if seq.status is SequenceStatus.FINISHED and seq.seq_id not in order]
    assert order == sorted(order) and len(order) == 4


def test_the_second_sequence_of_a_call_is_not_overtaken_for_ever():
    driver = Driver(num_blocks=1024, max_num_seqs=2)
    pair = [driver.add(tokens(i, 3), max_tokens=6, call="pair") for i in range(2)]
    for i in range(40):  # there is always a newer call
        driver.add(tokens(i, 3), max_tokens=3)
        driver.step()
    assert all(seq.status is SequenceStatus.FINISHED for seq in pair)
    driver.drain()
