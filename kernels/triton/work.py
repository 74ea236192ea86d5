"""Which rows of a batch share a tile of attention: a schedule, planned on the host."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np

SMALL_ROWS = 16  # rows (token, head of the group) of a decode tile
LARGE_ROWS = 128
_LEAST_GAIN = 8  # reading prompts once is worth a merge if it spares this part of all segments: 1 / 8


def tile_tokens(group: int) -> int:
    """Return the query tokens that fit the smallest tile."""
    return max(1, (SMALL_ROWS if group <= SMALL_ROWS else LARGE_ROWS) // group)


def work_items(lengths: Seq[int], group: int, item_tokens: int | None = None) -> np.ndarray:
    """Return rows (first token, tokens, sequence, 0, place), int32 [n, 5]: query tokens that share a tile; small first.

    place: a row of a small item's partial results, for its first token; the others' follow. item_tokens: the tokens of
    an item, all small; None fits them to the tiles.
    """
    small, large, first, place = [], [], 0, 0
    step = item_tokens or max(1, LARGE_ROWS // group)
    for sequence, length in enumerate(lengths):
        if item_tokens is None and length * group <= SMALL_ROWS:
            small.append((first, length, sequence, 0, place))
            place += length
        else:
            parts = range(first, first + length, step)
            large += [(start, min(step, first + length - start), sequence, 0, start) for start in parts]
        first += length
    return np.array(small + large, np.int32).reshape(-1, 5)


def small_lengths(lengths: Seq[int], group: int) -> list[int]:
    """Return the tokens of the small ones among the first `work_items`."""
    return [length for length in lengths if length * group <= SMALL_ROWS]


def share_reads(
    items: np.ndarray, lengths: Seq[int], group: int, block_tables: np.ndarray, starts: np.ndarray, segment: int
) -> np.ndarray:
    """Return `items`, and before them such as read segments of KV that neighbours in the batch share, once for all.

    A shared item is (first token, tokens, its first sequence, -segments, place): its rows are those of several small
    items, which begin with the segment after, as their fourth number says. Without enough to gain, items stay as they
    are. segment: the blocks of a segment; starts: of each sequence in `block_tables`.
    """
    few = len(small_lengths(lengths, group))
    if few < 2:
        return items
    sizes = np.diff(starts, append=len(block_tables)) // segment
    common = _common_segments(items[:few, 2], block_tables, starts, sizes, segment)
    shared, own, spared, i = [], items.copy(), 0, 0
    while i < few - 1:
        count, depth, j = int(items[i, 1]), int(sizes[items[i, 2]]), i
        while j < few - 1 and (count + items[j + 1, 1]) * group <= SMALL_ROWS:
            deep = min(depth, int(common[j]))
            if deep * (j + 1 - i) <= depth * (j - i):  # one more reads less in common
                break
            depth, count, j = deep, count + int(items[j + 1, 1]), j + 1
        if j > i:
            shared.append((items[i, 0], count, items[i, 2], -depth, items[i, 4]))
            own[i : j + 1, 3] = depth
            spared += depth * (j - i)
        i = j + 1
    if spared * _LEAST_GAIN < sizes[items[:few, 2]].sum() + few:
        return items
    return np.concatenate((np.array(shared, np.int32).reshape(-1, 5), own))


def _common_segments(
    sequences: np.ndarray, block_tables: np.ndarray, starts: np.ndarray, sizes: np.ndarray, segment: int
) -> np.ndarray:
    """Return the number of first segments that each of the sequences shares with the one after it; 0 across a gap."""
    one, other = sequences[:-1], sequences[1:]
    most = np.where(other == one + 1, np.minimum(sizes[one], sizes[other]), 0)
    for i in np.flatnonzero(most):
        count = most[i] * segment
        a, b = starts[one[i]], starts[other[i]]
        differ = block_tables[a : a + count] != block_tables[b : b + count]
        most[i] = int(differ.argmax()) // segment if differ.any() else most[i]
    return most
