"""Packs of sequences of about equal cost, spread over ranks."""

from __future__ import annotations

import heapq
from collections.abc import Sequence


def pack(lengths: Sequence[int], max_tokens: int, ranks: int = 1) -> list[list[list[int]]]:
    """The sequences that run together: `[rank][micro-batch]` -> indices, every rank with as many micro-batches.

    Longest first into the emptiest bin, with the fewest bins such that none exceeds `max_tokens`; a longer sequence has
    a bin of its own. A bin may be empty: its rank still takes part in the collectives. Deterministic in its arguments.
    """
    if max_tokens < 1 or ranks < 1:
        raise ValueError(f"max_tokens {max_tokens} and ranks {ranks} must be positive")
    micro = max(1, -(-sum(lengths) // (max_tokens * ranks)))
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    while True:
        bins: list[list[int]] = [[] for _ in range(micro * ranks)]
        sizes = [(0, b) for b in range(len(bins))]
        fits = True
        for i in order:
            size, b = heapq.heappop(sizes)
            fits &= not bins[b] or size + lengths[i] <= max_tokens
            bins[b].append(i)
            heapq.heappush(sizes, (size + lengths[i], b))
        if fits:
            return [[sorted(bins[m * ranks + r]) for m in range(micro)] for r in range(ranks)]
        micro += 1
