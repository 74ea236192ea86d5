"""Reading once what sequences share: who shares what, and that a CPU's attention gives the same bits."""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from samebits.kernels import cpu, ops
from samebits.kernels.sharing import shared_blocks, sharing_runs

from helpers.models import DTYPES

BLOCK = cpu.BLOCK


@given(tables=st.lists(st.lists(st.integers(0, 2), max_size=5), min_size=1, max_size=6))
def test_shared_blocks_are_those_before_the_first_that_differs(tables):
    starts = np.cumsum([0, *map(len, tables)])[:-1].astype(np.int32)
    flat = np.array([*itertools.chain(*tables)], np.int32)
    expected = []
    for one, other in itertools.pairwise(tables):
        same = [a == b for a, b in zip(one, other, strict=False)] + [False]
        expected.append(same.index(False))
    assert shared_blocks(flat, starts).tolist() == [*expected, 0]


def most_spared(tokens, common, most):
    """The slow way: the reads that the best runs spare, by trying all that begin with the first neighbour."""
    if not common:
        return 0
    alone = most_spared(tokens[1:], common[1:], most)
    ends = [n for n in range(1, len(tokens)) if sum(tokens[: n + 1]) <= most]
    return max([alone, *(n * min(common[:n]) + most_spared(tokens[n + 1 :], common[n + 1 :], most) for n in ends)])


@given(st.data())
def test_no_other_runs_of_neighbours_spare_more_reads(data):
    common = data.draw(st.lists(st.sampled_from([0, 1, 1, 2, 50]), max_size=8))
    tokens = data.draw(st.lists(st.integers(1, 3), min_size=len(common) + 1, max_size=len(common) + 1))
    most, before, spared = data.draw(st.integers(1, 12)), 0, 0
    for first, last, depth in sharing_runs(tokens, common, most):
        assert before <= first < last <= len(common)
        assert depth == min(common[first:last]) > 0
        assert sum(tokens[first : last + 1]) <= most
        before = last + 1
        spared += depth * (last - first)
    assert spared == most_spared(tokens, common, most)


def test_who_shares_little_does_not_keep_others_from_sharing_more():
    assert sharing_runs([1] * 7, [1, 50, 50, 50, 50, 1], 6) == [(1, 5, 50)]
    assert sharing_runs([1] * 20, [1] * 19, 8) == [(0, 7, 1), (8, 15, 1), (16, 19, 1)]
    assert sharing_runs([], [], 8) == sharing_runs([1], [], 8) == sharing_runs([9, 9], [3], 8) == []


class Step:
    """Sequences of a step, in families that share first blocks, with KV in a cache that has NaN where no key is."""

    def __init__(self, families, dtype, kv_heads, group, dim, seed):
        """families: (blocks that are shared, (keys, query tokens) of each member)."""
        rng = np.random.default_rng(seed)
        tables, starts, positions, self.counts, blocks = [], [], [], [], 0
        for common, members in families:
            first = list(range(blocks, blocks + common))
            blocks += common
            for length, count in members:
                own = -(-length // BLOCK) - common
                starts.append(len(tables))
                tables += first + list(range(blocks, blocks + own))
                blocks += own
                positions += range(length - count, length)
                self.counts.append(count)
        order = rng.permutation(blocks).astype(np.int32)
        self.tables, self.starts = order[tables], np.array(starts, np.int32)
        self.positions, self.group = np.array(positions, np.int32), group
        generator = torch.Generator().manual_seed(seed)
        self.cache = cpu.new_kv_cache(blocks, kv_heads, dim, dtype, torch.device("cpu"))
        for part in self.cache:
            part.copy_(torch.randn(part.shape, generator=generator))
        ends = np.cumsum(self.counts) - 1
        for start, last in zip(starts, self.positions[ends].tolist(), strict=True):
            block = self.tables[start + last // BLOCK]
            self.cache[0][block, :, :, last % BLOCK + 1 :] = math.nan
            self.cache[1][block, :, last % BLOCK + 1 :] = math.nan
        self.q = torch.randn(len(positions), kv_heads * group, dim, generator=generator).to(dtype)

    def own(self):
        return cpu.work_items(self.counts, self.group)

    def shared(self):
        return cpu.share_reads(self.own(), self.counts, self.group, self.tables, self.starts)

    def attend(self, items, window=0):
        layout = ops.PagedLayout(self.counts, self.positions, self.positions, self.tables, self.starts, items)
        return cpu.attention(self.q, *self.cache, layout, 0.2, window)


def same_bytes(ours, theirs):
    return all(torch.equal(a.view(torch.int32), b.view(torch.int32)) for a, b in zip(ours, theirs, strict=True))


FAMILIES = st.lists(
    st.tuples(st.integers(0, 3), st.lists(st.tuples(st.integers(1, 70), st.sampled_from([1, 1, 1, 2, 9])), max_size=9)),
    min_size=1,
    max_size=4,
)


@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=40, deadline=None)
@given(
    families=FAMILIES, shape=st.sampled_from([(3, 3, 64), (1, 5, 20), (2, 1, 16)]), window=st.sampled_from([0, 0, 40])
)
def test_reading_once_what_neighbours_share_changes_no_bit(dtype, families, shape, window):
    """Groups that decode, with drafts and chunks among them; a window, in which nobody shares."""
    families = [(c, [(c * BLOCK + max(k, n), n) for k, n in members]) for c, members in families if members]
    if families:
        step = Step(families, dtype, *shape, seed=len(families))
        assert same_bytes(step.attend(step.shared(), window), step.attend(step.own(), window))


@pytest.mark.parametrize("window", [0, 40])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_value_that_is_not_finite_reaches_only_rows_that_see_it(dtype, window):
    """As that of a wrong draft may be, of a token that the sequence never has."""
    step = Step([(0, [(70, 20)])], dtype, 2, 3, 64, 0)
    expected = step.attend(step.own(), window)
    for late in (51, 62, 63, 64, 69):
        value = step.cache[1][step.tables[late // BLOCK], :, late % BLOCK]
        for strange in (math.inf, math.nan):
            kept = value.clone()
            value[:] = strange
            found = step.attend(step.own(), window)
            value[:] = kept
            before = late - 50
            assert same_bytes([t[:before] for t in found], [t[:before] for t in expected])
            assert not found[0][before:].isfinite().any()


def test_a_group_is_read_by_as_few_passes_as_its_rows_allow():
    step = Step([(2, [(80, 1)] * 16), (0, [(40, 1)]), (1, [(50, 1), (340, 300)])], torch.float32, 1, 3, 16, 0)
    items = step.shared()
    assert items[:19, 3:].tolist() == [[8, 2], *[[0, 0]] * 7] * 2 + [[1, 0]] * 3
    assert same_bytes(step.attend(items), step.attend(step.own()))
    wider = Step([(1, [(40, 1)] * 3)], torch.float32, 1, 32, 16, 0)  # a token's rows fill a tile
    assert np.array_equal(wider.shared(), wider.own())


def test_a_block_that_its_sequence_still_writes_is_not_shared():
    """Planned or not: of a block only part of which a sequence sees, the others' keys would count."""
    step = Step([(0, [(20, 1), (40, 1)])], torch.float32, 1, 2, 16, 0)
    step.tables[step.starts[1]] = step.tables[step.starts[0]]
    items = step.shared()
    assert items[:, 3:].tolist() == [[2, 1], [0, 0]]
    assert same_bytes(step.attend(items), step.attend(step.own()))


def test_negative_control_blocks_that_differ_but_count_as_shared_change_bits():
    step = Step([(1, [(70, 1)] * 2)], torch.float32, 1, 2, 16, 0)
    items = step.shared()
    items[0, 4] = 2
    assert not same_bytes(step.attend(items), step.attend(step.own()))
