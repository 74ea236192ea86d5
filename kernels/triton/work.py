"""The rows of a batch that share a tile of attention: a schedule, planned on the host."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..sharing import shared_blocks, sharing_runs

SMALL_ROWS = 16  # rows (token, head of the group) of a decode tile
LARGE_ROWS = 128
_LEAST_GAIN = 8  # reading prompts once is worth a merge if it spares this part of all segments: 1 / 8


def tile_tokens(group: int) -> int:
    """Return the query tokens that fit the smallest tile."""
    return max(1, (SMALL_ROWS if group <= SMALL_ROWS else LARGE_ROWS) // group)


def work_items(lengths: Sequence[int], group: int, item_tokens: int | None = None) -> np.ndarray:
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


def small_lengths(lengths: Sequence[int], group: int) -> list[int]:
    """Return the tokens of the small ones among the first `work_items`."""
    return [length for length in lengths if length * group <= SMALL_ROWS]


def share_reads(
    items: np.ndarray, lengths: Sequence[int], group: int, block_tables: np.ndarray, starts: np.ndarray, segment: int
) -> np.ndarray:
    """Return `items`, and before them such as read segments of KV that neighbours in the batch share, once for all.

    A shared item is (first token, tokens, its first sequence, -segments, place): its rows are those of several small
    items, which begin with the segment after, as their fourth number says. Without enough to gain, items stay as they
    are. segment: the blocks of a segment; starts: of each sequence in `block_tables`.
    """
    few = len(small_lengths(lengths, group))
    if few < 2:
        return items
    sequences, tokens = items[:few, 2], items[:few, 1].tolist()
    sizes = np.diff(starts, append=len(block_tables)) // segment
    common = np.where(np.diff(sequences) == 1, shared_blocks(block_tables, starts)[sequences[:-1]] // segment, 0)
    shared, own, spared = [], items.copy(), 0
    for first, last, depth in sharing_runs(tokens, common.tolist(), SMALL_ROWS // group):
        shared.append((items[first, 0], sum(tokens[first : last + 1]), items[first, 2], -depth, items[first, 4]))
        own[first : last + 1, 3] = depth
        spared += depth * (last - first)
    if spared * _LEAST_GAIN < sizes[sequences].sum() + few:
        return items
    return np.concatenate((np.array(shared, np.int32).reshape(-1, 5), own))
