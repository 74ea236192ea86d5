"""Backwards of attention that torch brings along: candidates, which serve once they have proven themselves on a device.

Both are called as `attention_backward._triton_backward` is, with tensors that are contiguous.
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from ..layout import to_device
from .launch import multiprocessors

Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
_MOST_BYTES = 1 << 30
_mode = threading.Lock()  # torch has one for the process
# While it is on, torch refuses other threads' cuBLAS without this; the size is what Hopper has by default.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def flash_backward(q, k, v, out, lse, grad, lengths: Sequence[int], scale: float, window: int) -> Gradients:
    """Return the gradients by FlashAttention-2 (Dao, 2023) in its deterministic mode, for 16-bit types."""
    starts = to_device(np.cumsum([0, *lengths], dtype=np.int32), q.device)
    state, most = torch.zeros(2, dtype=torch.uint64, device=q.device), max(lengths)
    settings: Any = torch.utils.deterministic
    with _mode:
        before, fill = torch.get_deterministic_debug_mode(), settings.fill_uninitialized_memory
        settings.fill_uninitialized_memory = False  # gradients are written whole
        torch.set_deterministic_debug_mode("error")  # not use_deterministic_algorithms: that sets up Inductor, too
        try:
            return torch.ops.aten._flash_attention_backward(
                grad, q, k, v, out, lse.t().contiguous(), starts, starts, most, most, 0.0, True, state, state[:0],
                scale=scale, window_size_left=window - 1 if window else -1, window_size_right=0,
            )  # fmt: skip
        finally:
            settings.fill_uninitialized_memory = fill
            torch.set_deterministic_debug_mode(before)


def padded_sums(lse: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
    """Return log-sum-exp [T, heads] as the memory-efficient kernels want it: [sequences, heads, longest, up to 32s].

    The padding is infinite: a row there has no weights.
    """
    padded = lse.new_full((len(lengths), lse.shape[1], -(-max(lengths) // 32) * 32), math.inf)
    for sums, part in zip(padded, lse.split(list(lengths)), strict=True):
        sums[:, : len(part)] = part.t()
    return padded


def efficient_backward(q, k, v, out, lse, grad, lengths: Sequence[int], scale: float, window: int) -> Gradients:
    """Return the gradients by the memory-efficient kernels (Rabe and Staats, 2021) that xformers calls, too.

    They compute fp32 on matrix units, in three TF32 products each. One split of the keys makes them repeat their bits;
    they want keys and values for every query head, whose gradients are added up here.
    """
    starts = to_device(np.cumsum([0, *lengths], dtype=np.int32), q.device)
    most, group, none = max(lengths), q.shape[1] // k.shape[1], torch.empty(0, device=q.device)
    keys, values = (t.repeat_interleave(group, 1)[None] for t in (k, v))
    causal_from_top_left = 1
    dq, dk, dv, _ = torch.ops.aten._efficient_attention_backward(
        grad[None], q[None], keys, values, None, out[None], starts, starts, most, most, padded_sums(lse, lengths),
        0.0, none, none, causal_from_top_left, False, scale=scale, num_splits_key=1, window_size=window or None,
    )  # fmt: skip
    dk, dv = (t[0].unflatten(1, (-1, group)).sum(2) for t in (dk, dv))
    return dq[0], dk, dv


def candidate(q: torch.Tensor, lengths: Sequence[int]) -> Callable[..., Gradients] | None:
    """Return the backward to try for such queries; None if it would take more than 1 GiB beside them.

    FlashAttention's deterministic mode has an fp32 gradient of q for each of many programs; the memory-efficient one
    has keys, values and their gradients for every query head.
    """
    if q.dtype == torch.float32:
        return efficient_backward if 4 * q.nbytes <= _MOST_BYTES else None
    copies = -(-multiprocessors(q.device) // max(1, len(lengths) * q.shape[1]))
    return flash_backward if copies * 4 * q.numel() <= _MOST_BYTES else None
