"""Drafts: where they come from, how many there are, and that what is remembered stays bounded. No model."""

import itertools
import random
from array import array

import pytest

from samebits.scheduler import Sequence, SpeculativeConfig, Speculator, suffix
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


@pytest.mark.parametrize("min_match", [1, 2, 3])
@pytest.mark.parametrize("shared", [False, True])
def test_drafts_come_from_places_of_the_longest_match(monkeypatch, min_match, shared):
    monkeypatch.setattr(suffix, "MAX_PLACES", 10**6)
    drafted = 0
    for case in range(20):
        rng = random.Random(case)
        drafter = SuffixDrafter(min_match, shared, window=8)
        prompt = [rng.randrange(3) for _ in range(rng.randint(1, 12))]
        tail = prompt[-min_match:]
        earlier = []
        for number in range(4):
            seq = sequence(number, prompt, key=number)
            for _ in range(rng.randint(5, 40)):
                own = tail + seq.completion_token_ids
                best, after = longest_match([prompt, own, *(earlier if shared else [])], own)
                tokens, shares = drafter.propose(seq, 1)
                assert bool(tokens) == (best >= min_match)
                if tokens:
                    places = drafter._cursors[number].places
                    known = [text.tokens[i] for text, i in places if i < len(text.tokens)]
                    assert not {*after} - {*known}, "a place of the longest match was left out"
                    most = max(known.count(t) for t in known)
                    assert known.count(tokens[0]) == most
                    assert shares == [most / len(known)]
                    drafted += 1
                seq.token_ids.append(rng.randrange(3))
            drafter.propose(seq, 1)
            drafter.finish(seq)
            earlier.append(tail + seq.completion_token_ids)
    assert drafted > 500


def test_a_rollout_of_the_same_random_numbers_goes_before_all_others():
    drafter = SuffixDrafter(2, True, window=8)
    for number, (key, tokens) in enumerate([(7, [5, 1, 2, 9]), (8, [5, 1, 2, 3]), (9, [5, 1, 2, 3])]):
        seq = sequence(number, [5, 5], tokens, key)
        drafter.propose(seq, 1)
        drafter.finish(seq)
    assert drafter.propose(sequence(10, [5, 5], [5, 1, 2], key=7), 3)[0] == [9]
    assert drafter.propose(sequence(11, [5, 5], [5, 1, 2], key=6), 3)[0] == [3]


def test_drafts_follow_most_places_and_then_those_that_agreed():
    drafter = SuffixDrafter(2, True, window=8)
    for number, tokens in enumerate([[1, 2, 3], [1, 2, 4, 6], [1, 2, 4, 7], [1, 2, 4, 7]]):
        seq = sequence(number, [8, 9], tokens, key=number)
        drafter.propose(seq, 1)
        drafter.finish(seq)
    assert drafter.propose(sequence(9, [8, 9], [1, 2], key=9), 5) == ([4, 7], [3 / 4, 2 / 3])


def test_prompts_of_other_salts_share_nothing():
    drafter = SuffixDrafter(1, True, window=8)
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
    drafter = SuffixDrafter(2, True, window=8)
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
        places = [text.tokens[i] for text, i in pool.find([*run])]
        assert bool(places) == any(following)
        assert {*places} <= {*itertools.chain(*following)}
        found += len(places)
    assert found > 100


def after(text, run):
    """The slow way: the tokens that follow a run in a text."""
    return [text[i] for i in range(len(run), len(text)) if tuple(text[i - len(run) : i]) == run]


def test_what_is_remembered_is_bounded(monkeypatch):
    monkeypatch.setattr(suffix, "MAX_HISTORY", 500)
    drafter = SuffixDrafter(2, True, window=3)
    resident = sequence(10**6, [1, 1], [2])
    drafter.propose(resident, 1)  # its prompt's group never ends
    for number in range(300):
        seq = sequence(number, [1, number % 9], range(number, number + 20), key=number)
        drafter.propose(seq, 1)
        drafter.finish(seq)
        assert drafter._history_tokens == sum(len(t) for kept in drafter._history.values() for _, t in kept) <= 500
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


def speculator(seconds, draft, **config):
    """One whose drafter always proposes the same."""
    return Speculator(SpeculativeConfig(method=lambda ids: draft, **config), 100, seconds)


def rounds(one, right, count=200):
    """Draft for a sequence again and again; `right`: whether the tokens come as drafted. Returns the lengths."""
    seq = sequence(0, [1], max_tokens=10**6)
    lengths = []
    for _ in range(count):
        one.begin_step(1, 1)
        draft = one.draft(seq)
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


def test_drafts_end_before_the_last_token_and_at_the_limit():
    one = speculator(lambda rows: 1.0, [3] * 8, num_speculative_tokens=5)
    one.begin_step(1, 1)
    for left, expected in ((1, 0), (2, 1), (4, 3), (100, 5)):
        seq = sequence(left, [1], max_tokens=left)
        one._all.offered = one._all.accepted = 10.0**6
        assert len(one.draft(seq)) == expected


def test_a_drafter_that_fails_or_gives_no_token_ids_drafts_nothing(caplog):
    def failing(ids):
        raise KeyError("x")

    for function in (
        failing,
        lambda ids: None,
        lambda ids: [100],
        lambda ids: [-1],
        lambda ids: [True],
        lambda ids: "a",
    ):
        one = Speculator(SpeculativeConfig(method=function), 100, lambda rows: 1.0)
        one.begin_step(1, 1)
        caplog.clear()
        for number in range(3):
            assert one.draft(sequence(number, [1])) == []
        assert len(caplog.records) == 1
        assert "drafter" in caplog.text
