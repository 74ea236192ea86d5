"""Steps as CUDA graphs: a whole forward in one launch, over buffers that stay where they are."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..garbage import without_collections
from ..kernels import ops

logger = logging.getLogger(__name__)

MOST_TOKENS = 4096  # of a graph: what more take, the GPU computes for longer than the host launches it
_FEW = 1, 2, 4, *range(8, 64, 8), *range(64, 257, 32), 384, 512
_BUCKETS = *_FEW, *range(768, 2048, 256), *range(2048, MOST_TOKENS + 1, 512)
_SMALL_TILES = 512  # tokens of a step of prompts whose attention is shared out to the tiles of decoding
_LEAST_PROMPT = 32  # tokens of a larger step's prompts, on average, for which there is room
_WORTH_IT = 3  # uses of a graph of many prompts' tokens: to record it takes two steps' time


def capture(run: Callable[[], Any], device: torch.device, pool: Any, side: Any) -> tuple[Callable[[], object], Any]:
    """Return the replay, and what it fills: what `run` returns. It runs before it is recorded: what it compiles or
    allocates for good is there then. Other threads may use the device meanwhile, to load new weights. side: the stream
    to record on, the same for all graphs of a pool, whose memory they can't share otherwise."""
    with torch.cuda.device(device):
        main = torch.cuda.current_stream()
        side.wait_stream(main)
        with torch.cuda.stream(side):
            run()
        main.wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        recording = torch.cuda.graph(graph, pool=pool, stream=side, capture_error_mode="thread_local")
        with without_collections(), recording:  # what they free may call CUDA, which a recorded stream forbids
            out = run()
    return graph.replay, out


class _Kind(NamedTuple):
    """The capacity of a graph: tokens, and items of attention. `shared` ones each read for two sequences or more,
    `small` ones have `most` tokens at most, `large` ones fill the tiles of prompts.
    """

    size: int
    most: int
    shared: int
    small: int
    large: int

    @property
    def num_items(self) -> tuple[int, int, int]:
        """The most items of each sort, in `work_items`' order."""
        return self.shared, self.small, self.large


class StepGraphs:
    """The graphs for steps of up to MOST_TOKENS tokens, rounded up to a bucket.

    The rows that are too many have no sequence, write nothing and are read by nobody. Steps that decode alone have
    graphs of their own, so do those that read once what sequences share. Others share prompts' tokens out to the same
    small tiles, unless they have many.

    All have the same tensors for what they get and return, and each its own for numbers, int32: positions, slot mapping
    and block table starts of its tokens, then items, then block tables.

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
        self._forward = forward
        self._device = device
        self._group = group
        self._longest = longest
        self._kernels = ops.backend(device)
        self._sequences = max_num_seqs
        self._tile = self._kernels.tile_tokens(group)
        self._blocks = -(-longest // self._kernels.BLOCK)
        most = min(max_num_batched_tokens, _BUCKETS[-1])
        self.sizes = sorted({most, min(max_num_seqs, most), *(size for size in _BUCKETS if size < most)})
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.clear()

    def _kind(self, layout: ops.PagedLayout) -> tuple[_Kind, list[np.ndarray]] | None:
        """Return the graph that a step needs and its items, by kind; None if it has more tokens or prompts."""
        count = len(layout.positions)
        sequences = len(layout.lengths)
        size = next((s for s in self.sizes if s >= count), None)
        if size is None:
            return None
        shared, own = np.split(layout.items, [layout.shared_items])
        if sequences == count:
            return _Kind(size, 1, size // 2 * (len(shared) > 0), size, 0), [shared, own, own[:0]]
        if size <= _SMALL_TILES:
            own = self._kernels.work_items(layout.lengths, self._group, self._tile)
            return _Kind(size, self._tile, 0, size, 0), [own[:0], own, own[:0]]
        small, large = np.split(own, [sum(length <= self._tile for length in layout.lengths)])
        few = min(size, self._sequences)  # the fewer there is room for, the more their contexts are split
        few = next((n for n in (0, 8, 32, 128) if len(small) <= n < few), few)
        most = 1 if (small[:, 1] == 1).all() else self._tile
        kind = _Kind(size, most, few // 2 * (len(shared) > 0), few, self._tiles(size))
        return (kind, [shared, small, large]) if len(large) <= kind.large else None

    def _tiles(self, size: int) -> int:
        """Return how many tiles prompts of `size` tokens may fill."""
        return len(self._kernels.work_items([size], self._group)) + size // _LEAST_PROMPT

    def clear(self) -> None:
        """Forget all graphs, and free their memory: KV blocks or weights move."""
        self._graphs: dict[_Kind, tuple[Callable[[], object], Tensor]] = {}
        self._uses: Counter[_Kind] = Counter()
        self._given = self._out = None  # type: Any
        self._pool = torch.cuda.graph_pool_handle() if self._device.type == "cuda" else None

    def run(self, layout: ops.PagedLayout, given: Tensor) -> Tensor | None:
        """Return hidden states [T, hidden], which the next run overwrites; None if no graph has room for the step."""
        found = self._kind(layout)
        if found is None:
            return None
        kind, items = found
        self._uses[kind] += 1
        if kind.large and self._uses[kind] < _WORTH_IT:
            return None
        try:
            replay, numbers = self._graphs.get(kind) or self._capture(kind, given)
        except torch.OutOfMemoryError:
            logger.warning("no memory for a graph of %d tokens: such steps run without from now on", kind.size)
            self.sizes = [s for s in self.sizes if s < kind.size and (s <= _SMALL_TILES or not kind.large)]
            self.clear()
            return None
        self._fill(kind, items, numbers, layout)
        self._given[: len(given)].copy_(given)
        replay()
        return self._out[: len(given)]

    def _fill(self, kind: _Kind, items: list[np.ndarray], numbers: Tensor, layout: ops.PagedLayout) -> None:
        size = kind.size
        count = len(layout.positions)
        sequences = len(layout.lengths)
        width = items[0].shape[1]
        tables = 3 * size + sum(kind.num_items) * width
        host = np.zeros(tables + layout.block_tables.size, np.int32)
        columns = host[: 3 * size].reshape(3, size)
        columns[:2, :count] = layout.positions, layout.slot_mapping
        columns[1, count:] = -1  # no slot: nothing is written
        columns[2, :sequences] = layout.block_table_starts
        rows = host[3 * size : tables].reshape(-1, width)  # those that are not filled have 0 tokens
        first = 0
        for most, some in zip(kind.num_items, items, strict=True):
            rows[first : first + len(some)] = some
            first += most
        host[tables:] = layout.block_tables
        numbers[: host.size].copy_(ops.to_device(host, self._device), non_blocking=True)

    def _capture(self, kind: _Kind, given: Tensor) -> tuple[Callable[[], object], Tensor]:
        """Record a graph. The largest comes first: others take their memory of it."""
        size = kind.size
        largest = self.sizes[-1]
        if kind.large and size < largest and not any(each.large for each in self._graphs):
            self._capture(_Kind(largest, 1, 0, 0, self._tiles(largest)), given)
        if self._given is None:
            self._given = given.new_zeros((largest, *given.shape[1:]))
        none = self._kernels.work_items([], self._group)
        taken = sum(kind.num_items) * none.shape[1]
        tables = min(size, self._sequences) * self._blocks
        numbers = torch.zeros(3 * size + taken + tables, dtype=torch.int32, device=self._device)
        numbers[size : 2 * size] = -1
        positions, slot_mapping, starts = numbers[: 3 * size].view(3, size).unbind()
        items = numbers[3 * size : 3 * size + taken].view(-1, none.shape[1])
        layout = ops.PagedLayout(
            [kind.most] * kind.small + [self._tile + 1] * kind.large,  # the host sees the longest that may come
            np.full(size, self._longest - 1, np.int32),
            *(np.empty(0, np.int32),) * 3,
            none,
            shared_items=kind.shared,
            uploaded=ops.LayoutTensors(items, positions, slot_mapping, numbers[3 * size + taken :], starts),
        )

        def run() -> Tensor:
            out = self._forward(self._given[:size], layout)
            if self._out is None:
                self._out = out.new_empty((largest, *out.shape[1:]))
            return self._out[:size].copy_(out)

        replay, _ = capture(run, self._device, self._pool, self._stream)
        self._graphs[kind] = replay, numbers
        return replay, numbers
