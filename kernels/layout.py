"""The places of a packed batch's tokens: their sequences, their positions, and the KV blocks that hold them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor


class LayoutTensors(NamedTuple):
    """A PagedLayout's arrays on a device, int32."""

    items: Tensor
    positions: Tensor
    slot_mapping: Tensor
    block_tables: Tensor
    block_table_starts: Tensor


def to_device(array: np.ndarray, device: torch.device) -> Tensor:
    """Return a host array as a tensor of a device, by a copy that nobody waits for; on a CPU, the array itself."""
    tensor = torch.from_numpy(array)
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


@dataclass
class PagedLayout:
    """The sequence and position of each token of a packed batch, and where its KV lives.

    lengths: query tokens of each sequence; positions int32 [T], each in its sequence; slot_mapping int32 [T] (block *
    BLOCK + offset, where each token's key and value go); block j of sequence i is
    block_tables[block_table_starts[i] + j], int32; items int32 [n, ...]: see `Backend.work_items`; the first
    `shared_items` read for several sequences. num_blocks: how many a cache for this batch alone needs; 0 where the
    cache is somebody else's.
    """

    lengths: list[int]
    positions: np.ndarray
    slot_mapping: np.ndarray
    block_tables: np.ndarray
    block_table_starts: np.ndarray
    items: np.ndarray
    num_blocks: int = 0
    shared_items: int = 0
    uploaded: LayoutTensors | None = field(default=None, repr=False)

    def on(self, device: torch.device) -> LayoutTensors:
        """Return the arrays as int32 tensors of a device: one copy, the first time."""
        if self.uploaded is None:
            arrays = self.items, self.positions, self.slot_mapping, self.block_tables, self.block_table_starts
            flat = to_device(np.concatenate([a.reshape(-1) for a in arrays]), device)
            parts = flat.split([a.size for a in arrays])
            self.uploaded = LayoutTensors(*(p.view(a.shape) for p, a in zip(parts, arrays, strict=True)))
        return self.uploaded

    @property
    def longest(self) -> int:
        """The largest position + 1."""
        return int(self.positions.max(initial=-1)) + 1


def place_tokens(
    lengths: Sequence[int], cached: Sequence[int], tables: Sequence[Sequence[int]], block_size: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return a `PagedLayout`'s positions, slot mapping, block tables and their starts.

    lengths: query tokens of each sequence; cached: the tokens before them; tables: the blocks of all its tokens.
    """
    ranges = [np.arange(start, start + n, dtype=np.int32) for start, n in zip(cached, lengths, strict=True)]
    positions = np.concatenate(ranges)
    sizes = [len(table) for table in tables]
    block_tables = np.fromiter(chain.from_iterable(tables), np.int32, sum(sizes))
    starts = np.concatenate(([0], np.cumsum(sizes)[:-1])).astype(np.int32)
    blocks = block_tables[np.repeat(starts, lengths) + positions // block_size]
    return positions, blocks * np.int32(block_size) + positions % block_size, block_tables, starts
