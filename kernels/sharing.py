"""Sequences of a batch whose KV begins with the same blocks, which one pass can read for several: a schedule."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np


def shared_blocks(block_tables: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """Return how many first blocks each sequence shares with the one after it, the last with none, int [sequences].

    block_tables, starts: of a `PagedLayout`.
    """
    sizes = np.diff(starts, append=len(block_tables))
    most = np.minimum(sizes, np.append(sizes[1:], 0))
    rows = np.flatnonzero(most)
    rows = rows[block_tables[starts[rows]] == block_tables[starts[rows + 1]]]
    common = np.zeros(len(most), np.int64)
    if rows.size:
        columns = np.minimum(np.arange(most[rows].max() + 1), most[rows, None] - 1)
        same = block_tables[starts[rows, None] + columns] == block_tables[starts[rows + 1, None] + columns]
        same[:, -1] = False
        common[rows] = np.minimum(same.argmin(1), most[rows])
    return common


def sharing_runs(tokens: Sequence[int], common: Sequence[int], most: int) -> Iterator[tuple[int, int, int]]:
    """Yield (first, last, depth) of runs of neighbours that together spare the most reads of what they share.

    tokens: of each; common: what each shares with the next one; most: the tokens of a run, at most.
    """
    first = 0
    while first < len(common):
        last, depth, total = first, common[first], tokens[first]
        while last < len(common) and total + tokens[last + 1] <= most:
            less = min(depth, common[last])
            if less * (last + 1 - first) <= depth * (last - first):  # one more reads less in common
                break
            last, depth, total = last + 1, less, total + tokens[last + 1]
        if last > first:
            yield first, last, depth
        first = last + 1
