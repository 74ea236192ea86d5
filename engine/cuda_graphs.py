"""Decode steps as CUDA graphs: a whole forward in one launch, over buffers that stay where they are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..kernels import ops

_BUCKETS = 1, 2, 4, *range(8, 64, 8), *range(64, 257, 32), 384, 512


def capture(run: Callable[[], Tensor], device: torch.device, pool: Any) -> tuple[Callable[[], None], Tensor]:
    """(replay, the tensor that it fills). `run` runs before it is recorded: what it compiles or allocates for good is
    there then. Other threads may use the device meanwhile, to load new weights."""
    with torch.cuda.device(device):
        side, main = torch.cuda.Stream(), torch.cuda.current_stream()
        side.wait_stream(main)
        with torch.cuda.stream(side):
            run()
        main.wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool, stream=side, capture_error_mode="thread_local"):
            out = run()
    return graph.replay, out


@dataclass
class _Bucket:
    """A graph of `size` sequences and its inputs: int32 numbers in one buffer, hidden states where a stage gets them.

    numbers: token ids, positions, slots, table starts (`size` each), items (3 * size), block tables.
    """

    size: int
    numbers: Tensor
    hidden: Tensor | None
    replay: Callable[[], None]
    out: Tensor


class DecodeGraphs:
    """Runs steps in which every sequence computes one token. Their number is rounded up to a bucket; the rows that are
    too many have no sequence, write nothing and are read by nobody.

    forward(given, layout): token ids int64 [T], or hidden states [T, hidden] of the stage before, to hidden states.
    longest: tokens of the longest sequence that may come.
    """

    def __init__(
        self,
        forward: Callable[[Tensor, ops.PagedLayout], Tensor],
        device: torch.device,
        group: int,
        largest: int,
        longest: int,
    ):
        self._forward, self._device, self._group, self._longest = forward, device, group, longest
        self._blocks = -(-longest // ops.backend(device).BLOCK)
        most = min(largest, _BUCKETS[-1])
        self.sizes = sorted({most, *(size for size in _BUCKETS if size < most)})
        self._buckets: dict[int, _Bucket] = {}
        self._pool: Any = None

    def fits(self, layout: ops.PagedLayout) -> bool:
        return len(layout.lengths) <= self.sizes[-1] and all(length == 1 for length in layout.lengths)

    def clear(self) -> None:
        """Forgets all graphs, and frees their memory: KV pages or weights move."""
        self._buckets.clear()
        self._pool = None

    def run(self, layout: ops.PagedLayout, token_ids: np.ndarray, hidden: Tensor | None) -> Tensor:
        """Hidden states [T, hidden]; the next run overwrites them."""
        count = len(layout.lengths)
        size = next(s for s in self.sizes if s >= count)
        bucket = self._buckets.get(size) or self._capture(size, hidden)
        self._fill(bucket, layout, token_ids, hidden)
        bucket.replay()
        return bucket.out[:count]

    def _fill(self, bucket: _Bucket, layout: ops.PagedLayout, token_ids: np.ndarray, hidden: Tensor | None) -> None:
        size, count = bucket.size, len(layout.lengths)
        host = np.zeros(7 * size + layout.tables.size, np.int32)
        columns = host[: 4 * size].reshape(4, size)
        columns[:, :count] = token_ids, layout.positions, layout.slots, layout.table_starts
        columns[2, count:] = -1  # no slot: nothing is written
        host[4 * size : 4 * size + layout.items.size] = layout.items.reshape(-1)  # the others have 0 tokens
        host[7 * size :] = layout.tables
        bucket.numbers[: host.size].copy_(ops.to_device(host, self._device), non_blocking=True)
        if bucket.hidden is not None and hidden is not None:
            bucket.hidden[:count].copy_(hidden)

    def _capture(self, size: int, hidden: Tensor | None) -> _Bucket:
        numbers = torch.zeros(7 * size + size * self._blocks, dtype=torch.int32, device=self._device)
        numbers[2 * size : 3 * size] = -1
        ids, positions, slots, starts = numbers[: 4 * size].view(4, size).unbind()
        items, tables = numbers[4 * size : 7 * size].view(size, 3), numbers[7 * size :]
        layout = ops.PagedLayout(
            [1] * size,
            np.full(size, self._longest - 1, np.int32),  # the host sees the longest that may come
            *(np.empty(0, np.int32),) * 3,
            ops.backend(self._device).work_items([1] * size, self._group),
            uploaded=ops.LayoutTensors(items, positions, slots, tables, starts),
        )
        given = None if hidden is None else hidden.new_zeros((size, hidden.shape[1]))
        if self._pool is None and self._device.type == "cuda":
            self._pool = torch.cuda.graph_pool_handle()
        replay, out = capture(
            lambda: self._forward(ids.long() if given is None else given, layout), self._device, self._pool
        )
        self._buckets[size] = _Bucket(size, numbers, given, replay, out)
        return self._buckets[size]
