"""Sequences of a batch whose KV begins with the same blocks, which one pass can read for several: a schedule."""

from __future__ import annotations

from collections.abc import Sequence

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


def sharing_runs(tokens: Sequence[int], common: Sequence[int], most: int) -> list[tuple[int, int, int]]:
    """Return (first, last, depth) of the runs of neighbours that together spare the most reads of what they share.

    tokens: of each; common: what each shares with the next one; most: the tokens of a run, at most.
    """
    spared = [0]  # by the sequences before each
    firsts: list[int] = []  # of the run that ends with each
    for last, total in enumerate(tokens):
        spared.append(spared[last])
        firsts.append(last)
        depth = common[last - 1] if last else 0
        for first in range(last - 1, -1, -1):
            depth = min(depth, common[first])
            total += tokens[first]
            if depth == 0 or total > most:
                break
            if (sum_spared := spared[first] + depth * (last - first)) > spared[-1]:
                spared[-1] = sum_spared
                firsts[-1] = first
    runs = []
    last = len(firsts) - 1
    while last >= 0:
        if firsts[last] < last:
            runs.append((firsts[last], last, min(common[firsts[last] : last])))
        last = firsts[last] - 1
    return runs[::-1]
