"""Drafts: where they come from, how many there are, and that what is remembered stays bounded. No model."""

import itertools
import random
import time
import tracemalloc
from array import array

import numpy as np
import pytest
import torch

from samebits.scheduler import BlockManager, Scheduler, Sequence, SpeculativeConfig, Speculator, suffix
from samebits.scheduler.drafts import PROBE_EVERY, Tally
from samebits.scheduler.suffix import Pool, SuffixDrafter


def sequence(number, prompt, tokens=(), key=0, max_tokens=10_000):
    seq = Sequence(number, prompt, max_tokens)
    seq.random_key = key
    seq.token_ids += tokens
    return seq


def longest_match(texts, tokens):
    """The slow way: for the longest end of `tokens` that occurs in the texts with a token after it, those tokens."""
    best, after = 0, []
    for text in texts:
        for end in range(1, len(text)):
            length = 0
            while length < min(end, len(tokens)) and text[end - 1 - length] == tokens[-1 - length]:
                length += 1
            if length >= best:
                after = [text[end]] if length > best else [*after, text[end]]
                best = length
    return best, after


def after_longest_run(texts, tokens, lengths):
    """The slow way: what follows the longest run that ends `tokens`, of one of these lengths, wherever it is known."""
    runs = (tuple(tokens[-length:]) for length in lengths if len(tokens) >= length)
    return next(filter(None, ([t for text in texts for t in after(text, run)] for run in runs)), [])


def found_by(drafter, number):
    """The tokens at the places that the drafter finds anew for a sequence."""
    return [text[i] for text, i in drafter._find(drafter._cursors[number])]


@pytest.mark.parametrize("min_match", [1, 2, 3])
@pytest.mark.parametrize("shared", [False, True])
def test_drafts_come_from_places_of_the_longest_match(monkeypatch, min_match, shared):
    monkeypatch.setattr(suffix, "MAX_PLACES", 10**6)
    drafted = 0
    for case in range(20):
        rng = random.Random(case)
        lengths = [4 * min_match, 2 * min_match, min_match]
        drafter = SuffixDrafter(lengths, shared, window=8)
        prompt = [rng.randrange(3) for _ in range(rng.randint(1, 12))]
        tail = prompt[-min_match:]
        earlier = []
        for number in range(4):
            seq = sequence(number, prompt, key=number)
            for _ in range(rng.randint(5, 40)):
                own = tail + seq.completion_token_ids
                texts = [prompt, own, *(earlier if shared else [])]
                best, following = longest_match(texts, own)
                tokens, shares = drafter.propose(seq, 1)
                assert sorted(found_by(drafter, number)) == sorted(after_longest_run(texts, own, lengths))
                assert bool(tokens) == (best >= min_match)
                if tokens:
                    places = drafter._cursors[number].places
                    known = [text[i] for text, i in places if i < len(text)]
                    assert not {*following} - {*known}, "a place of the longest match was left out"
                    most = max(known.count(t) for t in known)
                    assert known.count(tokens[0]) == most
                    assert shares == [most / len(known)]
                    drafted += 1
                seq.token_ids.append(rng.randrange(3))
            drafter.propose(seq, 1)
            drafter.finish(seq)
            earlier.append(tail + seq.completion_token_ids)
    assert drafted > 500


@pytest.mark.parametrize("shared", [False, True])
def test_drafts_come_from_siblings_as_they_grow(shared):
    drafter = SuffixDrafter([8, 4, 2], shared, window=8)
    ahead, behind = [sequence(number, [5, 6], key=number) for number in range(2)]
    found = []
    for tokens, prefix in [([1, 2, 3, 4], [1, 2]), ([7, 8], [3, 4]), ([9], [7])]:
        for seq, new in ((ahead, tokens), (behind, prefix)):
            seq.token_ids += new
            drafted, _ = drafter.propose(seq, 3)
        found.append(drafted)
    assert found == ([[3, 4], [7, 8], [8, 9]] if shared else [[], [], []])


def test_a_rollout_of_the_same_random_numbers_goes_before_all_others():
    drafter = SuffixDrafter([8, 4, 2], True, window=8)
    for number, (key, tokens) in enumerate([(7, [5, 1, 2, 9]), (8, [5, 1, 2, 3]), (9, [5, 1, 2, 3])]):
        seq = sequence(number, [5, 5], tokens, key)
        drafter.propose(seq, 1)
        drafter.finish(seq)
    assert drafter.propose(sequence(10, [5, 5], [5, 1, 2], key=7), 3)[0] == [9]
    assert drafter.propose(sequence(11, [5, 5], [5, 1, 2], key=6), 3)[0] == [3]


def test_drafts_follow_most_places_and_then_those_that_agreed():
    drafter = SuffixDrafter([8, 4, 2], True, window=8)
    for number, tokens in enumerate([[1, 2, 3], [1, 2, 4, 6], [1, 2, 4, 7], [1, 2, 4, 7]]):
        seq = sequence(number, [8, 9], tokens, key=number)
        drafter.propose(seq, 1)
        drafter.finish(seq)
    assert drafter.propose(sequence(9, [8, 9], [1, 2], key=9), 5) == ([4, 7], [3 / 4, 2 / 3])


def test_prompts_of_other_salts_share_nothing():
    drafter = SuffixDrafter([4, 2, 1], True, window=8)
    seq = sequence(0, [5], [6, 7], key=1)
    drafter.propose(seq, 1)
    drafter.finish(seq)
    other = sequence(1, [5], [6], key=2)
    other.cache_salt = b"another"
    assert drafter.propose(other, 1)[0] == []
    assert drafter.propose(sequence(2, [5], [6], key=2), 1)[0] == [7]


def finished(drafter, number, prompt, tokens, salt=b""):
    """Let a sequence come and go."""
    seq = sequence(number, prompt, tokens, key=number)
    seq.cache_salt = salt
    drafter.propose(seq, 1)
    drafter.finish(seq)


def test_the_longest_runs_are_drafted_from_other_prompts_of_the_same_salt(monkeypatch):
    monkeypatch.setattr(suffix, "PART", 1)
    run = [*range(10, 18)]
    drafter = SuffixDrafter([8, 4, 2], True, window=8)
    finished(drafter, 0, [5, 5], [*run, 20, 21])
    assert drafter.propose(sequence(1, [6, 6], run, key=1), 2) == ([20, 21], [1.0, 1.0])
    assert drafter.propose(sequence(2, [6, 6], [9, *run[1:]], key=2), 2)[0] == [], "a run of 7 tokens"
    salted = sequence(3, [6, 6], run, key=3)
    salted.cache_salt = b"another"
    assert drafter.propose(salted, 2)[0] == []
    finished(drafter, 4, [6, 6], [*run[-3:], 30])
    assert drafter.propose(sequence(5, [6, 6], run, key=5), 1)[0] == [20], "a shorter run of the prompt's own"
    finished(drafter, 6, [6, 6], [*run, 40])
    assert drafter.propose(sequence(7, [6, 6], run, key=7), 1)[0] == [40]


def test_a_pool_finds_what_its_newest_parts_hold_and_no_more(monkeypatch):
    monkeypatch.setattr(suffix, "PART", 40)
    monkeypatch.setattr(suffix, "MAX_PART", 160)
    monkeypatch.setattr(suffix, "MAX_POOL", 900)
    rng = random.Random(0)
    pool = Pool(3)
    texts = []
    for _ in range(400):
        texts.append(array("i", [rng.randrange(9) for _ in range(rng.randint(1, 30))]))
        pool.add(texts[-1])
        kept = [text for _, part in pool._parts for text in part]
        assert kept == texts[len(texts) - len(pool._new) - len(kept) : len(texts) - len(pool._new)]
        assert sum(map(len, kept)) <= 900
        assert sum(map(len, pool._new)) < 40
        assert len(pool._parts) <= 12
    found = 0
    for run in itertools.product(range(9), repeat=3):
        following = [after(text, run) for _, part in pool._parts for text in part]
        places = [text[i] for text, i in pool.find([*run])]
        assert bool(places) == any(following)
        assert {*places} <= {*itertools.chain(*following)}
        found += len(places)
    assert found > 100


def after(text, run):
    """The slow way: the tokens that follow a run in a text."""
    return [text[i] for i in range(len(run), len(text)) if tuple(text[i - len(run) : i]) == run]


def test_what_is_remembered_is_bounded(monkeypatch):
    monkeypatch.setattr(suffix, "MAX_HISTORY", 500)
    monkeypatch.setattr(suffix, "ROLLOUT_TOKENS", 5)
    drafter = SuffixDrafter([8, 4, 2], True, window=3)
    resident = sequence(10**6, [1, 1], [2])
    drafter.propose(resident, 1)  # its prompt's group never ends
    for number in range(300):
        seq = sequence(number, [1, number % 9], range(number, number + 20), key=number)
        drafter.propose(seq, 1)
        drafter.finish(seq)
        assert drafter._history_tokens == sum(5 + len(t) for kept in drafter._history.values() for _, t in kept) <= 500
        assert all(len(kept) <= 3 for kept in drafter._history.values())
        assert len(drafter._groups) <= 1
        assert len(drafter._pools) == 1
        assert all(group.ended <= 7 for group in drafter._groups.values())
    drafter.finish(resident)
    assert not drafter._groups
    assert not drafter._cursors
    for number in range(40):
        finished(drafter, number, [1], [2], salt=bytes([number]))
    assert [*drafter._pools] == [bytes([number]) for number in range(40 - suffix.MAX_POOLS, 40)]


@pytest.mark.parametrize("length", [1, 2, 100])
def test_what_is_kept_takes_the_memory_that_it_is_counted_for(monkeypatch, length):
    for name, value in (("MAX_HISTORY", 2**18), ("PART", 1), ("MAX_POOL", 0)):
        monkeypatch.setattr(suffix, name, value)
    drafter = SuffixDrafter([8, 4, 2], True, window=32)
    tracemalloc.start()
    for number in range(1500):
        finished(drafter, number, [5, number], [7] * length)
    kept, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(drafter._history) < 1000, "the bound is reached"
    assert kept <= 4 * 2**18 * 1.1


def test_growing_texts_are_indexed_up_to_a_bound(monkeypatch):
    monkeypatch.setattr(suffix, "MAX_LIVE", 300)
    for shared in (True, False):
        drafter = SuffixDrafter([8, 4, 2], shared, window=3)
        running = [sequence(number, [1, number // 3], key=number) for number in range(30)]
        rng = random.Random(0)
        for _ in range(20):
            for seq in running:
                drafter.propose(seq, 2)
                seq.token_ids.append(rng.randrange(3))
                indexes = {id(i): i for c in drafter._cursors.values() for i in (c.index, c.group.index)}
                assert drafter._live_tokens == sum(index.size for index in indexes.values()) <= 300
        assert drafter._live_tokens > 290
        known = drafter._cursors[29]
        assert known.text == running[29].token_ids[: known.known], "its own text is known to its end"
        for seq in running:
            drafter.finish(seq)
        assert drafter._live_tokens == 0


def test_rollouts_without_a_draft_are_kept_and_those_that_ended_early_replace_none(monkeypatch):
    drafter = SuffixDrafter([4, 2, 1], True, window=8)
    with monkeypatch.context() as patch:
        patch.setattr(suffix, "LiveIndex", None)  # nor StillIndex: indexing takes milliseconds
        drafter.finish(sequence(0, [5], [6, 7, 8], key=1))
        drafter.finish(sequence(1, [5], [6, 7], key=1))
    assert drafter.propose(sequence(2, [5], [6, 7], key=1), 3)[0] == [8]
    for number, tokens in enumerate(([6, 9], [6, 7, 8]), 3):
        drafter.finish(sequence(number, [5], tokens, key=1))
    assert drafter.propose(sequence(5, [5], [6], key=1), 3)[0] == [7, 8], "what came last, though it was known before"
    assert len(drafter._history.popitem()[1]) == 2


def test_earlier_rollouts_are_not_indexed_while_one_of_the_same_key_agrees(monkeypatch):
    drafter = SuffixDrafter([4, 2, 1], True, window=8)
    drafter.finish(sequence(0, [5], [6, 7, 8], key=1))
    made = []
    plain = suffix.StillIndex
    monkeypatch.setattr(suffix, "StillIndex", lambda *args: made.append(args) or plain(*args))
    assert drafter.propose(sequence(1, [5], [6], key=1), 2)[0] == [7, 8]
    assert not made
    for number in (2, 3):
        assert drafter.propose(sequence(number, [5], [6, 7], key=number), 1)[0] == [8]
    assert len(made) == 1


def speculator(seconds, draft, **config):
    """One whose drafter always proposes the same."""
    return Speculator(SpeculativeConfig(method=lambda ids: draft, **config), 100, seconds)


def rounds(one, right, count=200):
    """Draft for a sequence again and again; `right`: whether the tokens come as drafted. Returns the lengths."""
    seq = sequence(0, [1], max_tokens=10**6)
    lengths = []
    for _ in range(count):
        one.begin_step([seq], 1, 1, False)
        draft = one.draft(seq, 100)
        lengths.append(len(draft))
        seq.token_ids += [*draft, 50] if right else [50]
    return lengths


def test_drafts_are_as_long_as_their_rows_are_worth():
    free = rounds(speculator(lambda rows: 1.0, [3] * 8), right=True)
    dear = rounds(speculator(lambda rows: float(rows), [3] * 8), right=True)
    assert free[0] >= 1
    assert free[-1] == 8
    assert max(dear) <= 1
    assert sum(dear) < 30, "rows that cost as much as a step of their own are never worth it"


def test_drafts_that_are_never_right_are_given_up_but_for_probes():
    lengths = rounds(speculator(lambda rows: 1.0 + 0.05 * rows, [3] * 8), right=False, count=400)
    assert sum(lengths[100:]) <= 300 / 10
    assert sum(lengths[100:]) >= 300 / 20, "no probe: drafts that become good would never be noticed"


@pytest.mark.parametrize("plateau", [2, 16])
def test_rows_that_took_no_time_when_measured_are_not_free(plateau):
    one = speculator(lambda rows: max(1.0, 1.0 + 0.5 * (rows - plateau)), [3] * 8)
    lengths = rounds(one, right=False, count=400)
    assert sum(lengths[100:]) <= 300 / 4


def test_a_probe_cuts_no_draft_that_pays():
    lengths = rounds(speculator(lambda rows: 1.0 + 0.01 * rows, [3] * 8), right=True, count=100)
    assert lengths[20:] == [8] * 80


def waits_of(one, count):
    """Whether a sequence of wrong drafts would wait, at each of its tokens."""
    grown = sequence(1000, [1], max_tokens=10**6)
    waits = []
    for _ in range(count):
        waits.append(one.pays_to_wait(grown))
        if waits[-1]:
            one.begin_step([grown], 1, 1, False)
            one.draft(grown, 100)
        grown.token_ids.append(50)
    return waits


@pytest.mark.parametrize(("driver", "paying"), [(0.0, False), (2.0, True)])
def test_what_a_step_takes_beside_its_rows_is_saved_by_drafts_too(driver, paying):
    """Rows that each take as long as the first never pay, unless a step takes more than they do."""
    one = Speculator(SpeculativeConfig(method=lambda ids: [3] * 8), 100, lambda rows: float(rows))
    seq = sequence(0, [1], max_tokens=10**6)
    lengths = []
    for _ in range(200):
        one.begin_step([seq], 1, 1, False)
        lengths.append(len(one.draft(seq, 100)))
        seq.token_ids += [3] * (lengths[-1] + 1)
        one.note_driver(driver)
    assert min(lengths[-50:]) > 0 if paying else sum(lengths[-50:]) <= 4, "probes"


def test_a_drafter_that_takes_long_saves_none_of_its_own_time():
    def slow(ids):
        time.sleep(0.002)
        return [3] * 8

    one = Speculator(SpeculativeConfig(method=slow), 100, lambda rows: 0.001 * rows)
    seq = sequence(0, [1], max_tokens=10**6)
    for _ in range(30):
        begin = time.perf_counter()
        one.begin_step([seq], 1, 1, False)
        seq.token_ids += [*one.draft(seq, 100), 3]
        one.note_driver(time.perf_counter() - begin)
    assert one._driver_seconds < 0.001


def test_a_source_that_is_seldom_right_does_not_speak_for_another():
    """A validation's drafts after those of rollouts, and what a sample drafts once it left an earlier one."""
    one = Speculator(SpeculativeConfig(method="suffix"), 100, lambda rows: 1.0 + 0.1 * rows)
    one._usual["texts"] = Tally(offered=100.0, accepted=2.0)
    one._usual["key"] = Tally(offered=100.0, accepted=98.0)
    one.finish(sequence(0, [5], [*range(10, 60)], key=1))
    for key, tokens, length in ((1, [10], 8), (2, [10, 11, 12], 0), (1, [10, 11, 99, 10, 11], 0)):
        seq = sequence(key + len(tokens), [5], tokens, key=key)
        one.begin_step([seq], 1, 1, False)
        assert len(one.draft(seq, 100)) == length, (key, tokens)
    seq = sequence(9, [5], [10], key=1)
    for tokens, right in (([], 8), ([*range(11, 20)], 8), ([99, 10, 11], 0)):
        seq.token_ids += tokens
        one.begin_step([seq], 1, 1, False)
        assert len(one.draft(seq, 100)) == right, tokens


def test_a_sequence_waits_for_drafts_only_where_they_promise_a_token():
    for seconds, draft in ((lambda rows: 1.0, []), (lambda rows: float(rows), [3] * 8)):
        one = speculator(seconds, draft)
        rounds(one, right=True)
        waits = waits_of(one, 400)
        assert sum(waits) == (400 / PROBE_EVERY - 1 if seconds(2) == 1.0 else 3), "probes that cost more are rarer"
    one = speculator(lambda rows: 1.0, [3] * 8)
    rounds(one, right=True)
    assert all(one.pays_to_wait(sequence(number, [1])) for number in range(5))


def test_probes_are_rarer_where_who_waits_misses_steps():
    """Overlapped steps go on without a sequence that waits: two missed ones are 1 % of 200 tokens."""
    drafts = SpeculativeConfig(method=lambda ids: [3])
    one = Speculator(drafts, 100, lambda rows: 1.0, overlaps=True)
    rounds(one, right=False)
    waits = waits_of(one, 1000)
    assert [number for number, wait in enumerate(waits) if wait] == [16, 218, 420, 622, 824]


@pytest.mark.parametrize("answers", [True, False])
def test_a_drafter_that_takes_longer_than_it_saves_is_asked_for_probes_only(answers):
    """One that fails after a while, too."""
    asked = []

    def slow(ids):
        asked.append(len(ids))
        time.sleep(0.01)
        return [3] * (8 // answers)

    one = Speculator(SpeculativeConfig(method=slow), 100, lambda rows: 0.001)
    rounds(one, right=True, count=40)
    assert len(asked) <= 3, "at the start, where the first call may load something, and for a probe"


def test_a_first_call_that_loads_something_is_not_held_against_a_drafter():
    asked = []

    def loading(ids):
        asked.append(len(ids))
        time.sleep(0.5 if len(asked) == 1 else 0.0)
        return [3] * 8

    one = Speculator(SpeculativeConfig(method=loading), 100, lambda rows: 1.0)
    assert rounds(one, right=True, count=40)[-1] == 8


def test_a_drafter_may_give_integers_of_any_kind():
    for tokens in (np.array([3, 4]), torch.tensor([3, 4]), [np.int64(3), 4], iter([3, 4])):
        one = Speculator(SpeculativeConfig(method=lambda ids, tokens=tokens: tokens), 100, lambda rows: 1.0)
        seq = sequence(0, [1])
        one.begin_step([seq], 1, 1, False)
        draft = one.draft(seq, 100)
        assert draft == [3, 4][: len(draft)] != []
        assert all(type(token) is int for token in draft)


def lengths_of_two(one, queue=False, calls=(0, 0), ahead=500):
    """How many tokens are drafted for two sequences, one of which is ahead; rows are free, and drafts right."""
    pair = [sequence(number, [1], [2] * done, max_tokens=1000) for number, done in ((0, 0), (1, ahead))]
    for seq, call in zip(pair, calls, strict=True):
        seq.call = call
    one.begin_step(pair, 2, 2, queue)
    return [len(one.draft(seq, 100)) for seq in pair]


def ended(one, tokens, limit=20):
    """Let many sequences end with so many tokens."""
    for number in range(2000):  # so many that a mean of them is their value, rounded
        one.finish(sequence(1000 + number, [1], [2] * tokens, max_tokens=limit))
    return one


def test_who_is_ahead_of_a_call_that_ends_at_its_limits_needs_no_drafts():
    """A call ends with its last sequence. Not so where others wait, in calls of their own, or where ends come early."""

    def made(tokens=20):
        one = ended(speculator(lambda rows: 1.0 + 0.01 * rows, [3] * 8), tokens)
        rounds(one, right=True)
        return one

    assert lengths_of_two(made()) == [8, 0]
    assert lengths_of_two(made(), ahead=50) == [8, 8]
    assert lengths_of_two(made(), queue=True) == [8, 8]
    assert lengths_of_two(made(), calls=(0, 1)) == [8, 8]
    assert lengths_of_two(made(tokens=10)) == [8, 8]


def test_the_lead_that_needs_no_drafts_grows_with_what_drafts_give():
    """Where drafts seldom count, a token ahead is a lead that the others won't make up for."""
    one = ended(speculator(lambda rows: 1.0 + 0.01 * rows, []), 20)
    rounds(one, right=True, count=600)
    one.drafter.function = lambda ids: [3] * 8
    first, second = lengths_of_two(one, ahead=1)
    assert first > 0 == second


def test_drafts_end_before_the_last_token_and_at_the_limit():
    one = speculator(lambda rows: 1.0, [3] * 8, num_speculative_tokens=5)
    for left, expected in ((1, 0), (2, 1), (4, 3), (100, 5)):
        seq = sequence(left, [1], max_tokens=left)
        one.begin_step([seq], 1, 1, False)
        one._usual["function"] = Tally(offered=10.0**6, accepted=10.0**6)
        assert len(one.draft(seq, 100)) == expected


def test_a_drafter_that_fails_or_gives_no_token_ids_drafts_nothing(caplog):
    class Broken:
        def __index__(self):
            raise RuntimeError("a device is gone")

    def failing(ids):
        raise KeyError("x")

    def failing_later(ids):
        yield Broken()

    for function in (
        failing,
        failing_later,
        lambda ids: [Broken()],
        lambda ids: None,
        lambda ids: [100],
        lambda ids: [-1],
        lambda ids: [True],
        lambda ids: "a",
    ):
        one = Speculator(SpeculativeConfig(method=function), 100, lambda rows: 1.0)
        sequences = [sequence(number, [1]) for number in range(3)]
        one.begin_step(sequences, 3, 3, False)
        caplog.clear()
        assert [one.draft(seq, 100) for seq in sequences] == [[]] * 3
        assert len(caplog.records) == 1
        assert "drafter" in caplog.text


def start(prompts, budget, blocks=2000, max_tokens=1000):
    """Return a scheduler whose drafts are all right, and sequences, calls of their own, with their prompts computed."""
    scheduler = Scheduler(
        BlockManager(blocks, 4), len(prompts), budget, speculator=speculator(lambda rows: 1.0, [3] * 8)
    )
    sequences = [sequence(number, prompt, max_tokens=max_tokens) for number, prompt in enumerate(prompts)]
    for seq in sequences:
        seq.call = seq.seq_id
        scheduler.add(seq)
    while not all(seq.num_completion_tokens for seq in sequences):
        step(scheduler)
    return scheduler, sequences


def step(scheduler):
    """Give each sequence the tokens that it drafted, and one more."""
    batch = scheduler.schedule()
    assert batch.num_tokens <= scheduler.max_num_batched_tokens
    sampling = [seq for seq in batch.sequences if seq.samples_now]
    scheduler.postprocess(batch)
    for seq in sampling:
        for token in seq.draft:
            seq.token_ids.append(token)
            scheduler.accept(seq)
        seq.token_ids.append(3)


@pytest.mark.parametrize(("count", "budget"), [(2, 8), (2, 2), (30, 64), (8, 8)])
def test_drafts_take_what_nobody_else_wants_of_a_step(count, budget):
    scheduler, sequences = start([[number] for number in range(count)], budget)
    for _ in range(40):
        step(scheduler)
    assert min(seq.num_completion_tokens for seq in sequences) > 40
    assert bool(scheduler.stats.draft_tokens) == (budget > count)
    records = scheduler.speculator._records
    waits = [records[seq.seq_id].tally.promised >= 1 for seq in sequences]
    assert all(scheduler.speculator.pays_to_wait(seq) for seq, wait in zip(sequences, waits, strict=True) if wait)
    assert any(waits) == (budget > count), "who never has room for drafts waits for none"


def test_drafts_preempt_nobody_and_fill_the_block_that_a_sequence_has():
    scheduler, (first, second) = start([[1, 1], [2] * 4], 64, blocks=3, max_tokens=8)
    batch = scheduler.schedule()
    assert batch.sequences == [first, second]
    assert scheduler.blocks.num_free == 0, "the second one's next token took the last block"
    assert len(first.draft) == 1
    assert scheduler.stats.preemptions == 0


@pytest.mark.parametrize("free", range(1, 12))
def test_drafts_leave_a_free_block_for_each_running_sequence(free):
    scheduler, sequences = start([[1], [2]], 64)
    while scheduler.blocks.num_free > free:
        scheduler.blocks._new_block()
    scheduler.schedule()
    drafted = sum(len(seq.block_table) - -(-seq.num_tokens // 4) for seq in sequences)
    assert (drafted > 0) == (free > 2)
    assert not drafted or scheduler.blocks.num_free >= len(sequences)


def test_who_has_most_tokens_to_come_drafts_first():
    scheduler, (short, long) = start([[1], [2]], 8)
    short.max_tokens = 100
    scheduler.schedule()
    assert len(long.draft) > len(short.draft)
