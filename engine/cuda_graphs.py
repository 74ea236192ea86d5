"""Steps of few tokens as CUDA graphs: a whole forward in one launch, over buffers that stay where they are."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..kernels import ops

logger = logging.getLogger(__name__)

_BUCKETS = 1, 2, 4, *range(8, 64, 8), *range(64, 257, 32), 384, 512


@contextmanager
def _without_collections() -> Iterator[None]:
    """Let no cycle be collected: what it frees may call CUDA, which a stream that is recorded forbids."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def capture(run: Callable[[], Tensor], device: torch.device, pool: Any, side: Any) -> tuple[Callable[[], None], Tensor]:
    """(replay, the tensor that it fills). `run` runs before it is recorded: what it compiles or allocates for good is
    there then. Other threads may use the device meanwhile, to load new weights. side: the stream to record on, the same
    for all graphs of a pool, whose memory they can't share otherwise."""
    with torch.cuda.device(device):
        main = torch.cuda.current_stream()
        side.wait_stream(main)
        with torch.cuda.stream(side):
            run()
        main.wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        recording = torch.cuda.graph(graph, pool=pool, stream=side, capture_error_mode="thread_local")
        with _without_collections(), recording:
            out = run()
    return graph.replay, out


@dataclass
class _Bucket:
    """A graph of `size` tokens and its inputs.

    given: token ids, or hidden states where a stage gets them; numbers, int32 in one buffer: positions, slot
    mapping, block table starts (`size` each), items (`items` numbers; the first `shared` read for several), tables.
    """

    size: int
    shared: int
    items: int
    given: Tensor
    numbers: Tensor
    replay: Callable[[], None]
    out: Tensor


class StepGraphs:
    """Runs steps of few tokens. Their number is rounded up to a bucket; the rows that are too many have no sequence,
    write nothing and are read by nobody. Steps that decode alone have graphs of their own, so do those that read once
    what sequences share; others share prompts' tokens out to the same small tiles.

    forward(given, layout): token ids int64 [T], or hidden states [T, hidden] of the stage before, to hidden states.
    group: query heads of a KV head. max_num_seqs, max_num_batched_tokens: of a step; longest: of a sequence, in tokens.
    """

    def __init__(
        self,
        forward: Callable[[Tensor, ops.PagedLayout], Tensor],
        device: torch.device,
        group: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        longest: int,
    ):
        self._forward, self._device, self._group, self._longest = forward, device, group, longest
        self._kernels = ops.backend(device)
        self._blocks = -(-longest // self._kernels.BLOCK)
        most = min(max_num_batched_tokens, _BUCKETS[-1])
        self.sizes = sorted({most, min(max_num_seqs, most), *(size for size in _BUCKETS if size < most)})
        self._buckets: dict[tuple[int, int, bool], _Bucket] = {}
        self._pool: Any = None
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def fits(self, layout: ops.PagedLayout) -> bool:
        """True if a recorded graph has room for the step's tokens."""
        return len(layout.positions) <= max(self.sizes, default=0)

    def clear(self) -> None:
        """Forget all graphs, and free their memory: KV blocks or weights move."""
        self._buckets.clear()
        self._pool = None

    def run(self, layout: ops.PagedLayout, given: Tensor) -> Tensor:
        """Return hidden states [T, hidden]; the next run overwrites them."""
        count = len(given)
        size = next(s for s in self.sizes if s >= count)
        decodes = len(layout.lengths) == count
        kind = size, 1 if decodes else self._kernels.tile_tokens(self._group), decodes and layout.shared_items > 0
        bucket = None
        try:
            bucket = self._buckets.get(kind) or self._capture(*kind, given)
        except torch.OutOfMemoryError:
            logger.warning("no memory for a graph of %d tokens: such steps run without from now on", size)
            self.sizes = [s for s in self.sizes if s < size]
            self._pool = self._pool if self._buckets else None
        if bucket is None:  # not in the handler, whose traceback holds what the attempt took
            return self._forward(given, layout)
        self._fill(bucket, layout, decodes)
        bucket.given[:count].copy_(given)
        bucket.replay()
        return bucket.out[:count]

    def _fill(self, bucket: _Bucket, layout: ops.PagedLayout, decodes: bool) -> None:
        size, count, sequences = bucket.size, len(layout.positions), len(layout.lengths)
        shared, own = np.split(layout.items, [layout.shared_items])
        if not decodes:
            own = self._kernels.work_items(layout.lengths, self._group, self._kernels.tile_tokens(self._group))
        tables = 3 * size + bucket.items
        host = np.zeros(tables + layout.block_tables.size, np.int32)
        columns = host[: 3 * size].reshape(3, size)
        columns[:2, :count] = layout.positions, layout.slot_mapping
        columns[1, count:] = -1  # no slot: nothing is written
        columns[2, :sequences] = layout.block_table_starts
        items = host[3 * size : tables].reshape(-1, own.shape[1])  # the others have 0 tokens
        items[bucket.shared : bucket.shared + len(own)] = own
        if bucket.shared:
            items[: len(shared)] = shared
        host[tables:] = layout.block_tables
        bucket.numbers[: host.size].copy_(ops.to_device(host, self._device), non_blocking=True)

    def _capture(self, size: int, tokens: int, shares: bool, given: Tensor) -> _Bucket:
        """Record a graph of `size` tokens. tokens: the most that an item has; shares: some read for several."""
        given = given.new_zeros((size, *given.shape[1:]))
        own = self._kernels.work_items([tokens] * size, self._group)
        shared = size // 2 if shares else 0  # each reads for two or more
        width = own.shape[1]
        taken = (shared + size) * width
        numbers = torch.zeros(3 * size + taken + size * self._blocks, dtype=torch.int32, device=self._device)
        numbers[size : 2 * size] = -1
        positions, slot_mapping, starts = numbers[: 3 * size].view(3, size).unbind()
        items, tables = numbers[3 * size : 3 * size + taken].view(-1, width), numbers[3 * size + taken :]
        layout = ops.PagedLayout(
            [tokens] * size,  # the host sees the longest that may come
            np.full(size, self._longest - 1, np.int32),
            *(np.empty(0, np.int32),) * 3,
            own,
            shared_items=shared,
            uploaded=ops.LayoutTensors(items, positions, slot_mapping, tables, starts),
        )
        if self._pool is None and self._device.type == "cuda":
            self._pool = torch.cuda.graph_pool_handle()
        replay, out = capture(lambda: self._forward(given, layout), self._device, self._pool, self._stream)
        bucket = self._buckets[size, tokens, shares] = _Bucket(size, shared, taken, given, numbers, replay, out)
        return bucket
