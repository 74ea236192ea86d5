"""Gradients of packed causal attention: torch's FlashAttention-2 where it proves itself, Triton kernels elsewhere.

Only the forward's bits are shared with rollouts; a backward has to be right, and the same from run to run. Both are fed
with the forward's output and log-sum-exp.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

from ..layout import to_device
from .attention import padded_width
from .launch import launch, multiprocessors, shared_memory

_MOST_BYTES = 1 << 30
_mode = threading.Lock()  # torch has one for the process


@triton.jit
def _weights_and_grads(q, k, v, grad, lse, delta, row, column, scale, window):
    """Return a tile's attention weights, and the gradients of its scores, [rows, columns] (Dao et al., 2022, B.2)."""
    seen = column[None, :] <= row[:, None]
    if window > 0:
        seen = seen & (column[None, :] > row[:, None] - window)
    s = tl.dot(q, tl.trans(k), input_precision="ieee") * (scale * 1.4426950408889634)
    p = tl.where(seen, tl.exp2(s - (lse * 1.4426950408889634)[:, None]), 0.0)
    dp = tl.dot(grad, tl.trans(v), input_precision="ieee")
    return p, p * (dp - delta[:, None]) * scale


@triton.jit
def _rows_of(t, token, h, heads, mask, DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    d = tl.arange(0, BLOCK_D)
    address = t + (token.to(tl.int64) * heads + h)[:, None] * DIM + d[None, :]
    return tl.load(address, mask=mask[:, None] & (d < DIM)[None, :], other=0.0)


@triton.jit
def _query_tile(q, grad, lse, delta, row, end, h, heads, DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """Load queries and upstream gradients [rows, D], log-sum-exp and delta [rows] of a head."""
    mask, place = row < end, row * heads + h
    queries = _rows_of(q, row, h, heads, mask, DIM, BLOCK_D)
    upstream = _rows_of(grad, row, h, heads, mask, DIM, BLOCK_D)
    return queries, upstream, tl.load(lse + place, mask=mask, other=0.0), tl.load(delta + place, mask=mask, other=0.0)


@triton.jit(do_not_specialize=["window"])
def _grad_q(
    q, k, v, grad, lse, delta, out, tiles, heads, kv_heads, scale, window,
    DIM: tl.constexpr, BLOCK_D: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Write the gradient of one tile of queries of a head; keys ascending.

    tiles [n, 3]: first token, the sequence's first and end.
    """
    tile, h = tl.program_id(0), tl.program_id(1)
    first, start, end = tl.load(tiles + 3 * tile), tl.load(tiles + 3 * tile + 1), tl.load(tiles + 3 * tile + 2)
    kv_head = h // (heads // kv_heads)
    row = first + tl.arange(0, TILE)
    queries, upstream, row_lse, row_delta = _query_tile(q, grad, lse, delta, row, end, h, heads, DIM, BLOCK_D)
    acc = tl.zeros((TILE, BLOCK_D), tl.float32)
    low = start
    if window > 0:
        low = start + tl.maximum(first - start - window + 1, 0) // TILE * TILE
    for begin in range(low, tl.minimum(first + TILE, end), TILE):
        column = begin + tl.arange(0, TILE)
        keys = _rows_of(k, column, kv_head, kv_heads, column < end, DIM, BLOCK_D)
        values = _rows_of(v, column, kv_head, kv_heads, column < end, DIM, BLOCK_D)
        _, ds = _weights_and_grads(queries, keys, values, upstream, row_lse, row_delta, row, column, scale, window)
        acc = tl.dot(ds.to(k.dtype.element_ty), keys, acc, input_precision="ieee")
    d = tl.arange(0, BLOCK_D)
    address = out + (row.to(tl.int64) * heads + h)[:, None] * DIM + d[None, :]
    tl.store(address, acc.to(out.dtype.element_ty), mask=(row < end)[:, None] & (d < DIM)[None, :])


@triton.jit(do_not_specialize=["window"])
def _grad_kv(
    q, k, v, grad, lse, delta, out_k, out_v, tiles, heads, kv_heads, scale, window,
    DIM: tl.constexpr, BLOCK_D: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Write the gradients of one tile of keys of a KV head: the group's heads, then queries ascending, no atomics."""
    tile, kv_head = tl.program_id(0), tl.program_id(1)
    first, end = tl.load(tiles + 3 * tile), tl.load(tiles + 3 * tile + 2)
    group = heads // kv_heads
    column = first + tl.arange(0, TILE)
    column_mask = column < end
    keys = _rows_of(k, column, kv_head, kv_heads, column_mask, DIM, BLOCK_D)
    values = _rows_of(v, column, kv_head, kv_heads, column_mask, DIM, BLOCK_D)
    acc_k = tl.zeros((TILE, BLOCK_D), tl.float32)
    acc_v = tl.zeros((TILE, BLOCK_D), tl.float32)
    stop = end
    if window > 0:
        stop = tl.minimum(end, first + TILE + window - 1)
    for h in range(kv_head * group, (kv_head + 1) * group):
        for begin in range(first, stop, TILE):
            row = begin + tl.arange(0, TILE)
            queries, upstream, row_lse, row_delta = _query_tile(q, grad, lse, delta, row, end, h, heads, DIM, BLOCK_D)
            p, ds = _weights_and_grads(queries, keys, values, upstream, row_lse, row_delta, row, column, scale, window)
            acc_v = tl.dot(tl.trans(p).to(q.dtype.element_ty), upstream, acc_v, input_precision="ieee")
            acc_k = tl.dot(tl.trans(ds).to(q.dtype.element_ty), queries, acc_k, input_precision="ieee")
    d = tl.arange(0, BLOCK_D)
    address = (column.to(tl.int64) * kv_heads + kv_head)[:, None] * DIM + d[None, :]
    mask = column_mask[:, None] & (d < DIM)[None, :]
    tl.store(out_k + address, acc_k.to(out_k.dtype.element_ty), mask=mask)
    tl.store(out_v + address, acc_v.to(out_v.dtype.element_ty), mask=mask)


def _triton_backward(q, k, v, out, lse, grad, lengths: Sequence[int], scale: float, window: int):
    """Return the gradients by our kernels, without atomics: every sum has one order."""
    _, heads, dim = q.shape
    kv_heads = k.shape[1]
    delta = (grad.float() * out.float()).sum(-1)
    wide, width = q.element_size() == 4, padded_width(dim)
    tile = 64 if not wide else 32 if width <= 64 else 16
    ends = np.cumsum(lengths)
    tiles = np.array(
        [(first, end - n, end) for n, end in zip(lengths, ends, strict=True) for first in range(end - n, end, tile)],
        np.int32,
    ).reshape(-1, 3)
    where = to_device(tiles, q.device)
    grads = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    common = (where, heads, kv_heads, scale, window)
    stages = 2 if shared_memory(q.device) >= 160_000 else 1
    warps = 8 if width > 64 or wide else 4
    shape: dict = dict(DIM=dim, BLOCK_D=width, TILE=tile, num_warps=warps, num_stages=stages)
    launch(_grad_q, (len(tiles), heads), q, k, v, grad, lse, delta, grads[0], *common, **shape)
    launch(_grad_kv, (len(tiles), kv_heads), q, k, v, grad, lse, delta, grads[1], grads[2], *common, **shape)
    return grads


def _library_backward(q, k, v, out, lse, grad, lengths: Sequence[int], scale: float, window: int):
    """Return the gradients by FlashAttention-2 (Dao, 2023) in its deterministic mode, an operator of torch's."""
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


@cache
def library_serves(device: torch.device, dtype: torch.dtype, group: int, dim: int, windowed: bool) -> bool:
    """Return True if the library takes such heads, repeats its bits and agrees with our kernels.

    Tried once, on random sequences.
    """
    lengths, heads, window, scale = [700, 1, 333], 2 * group, 200 if windowed else 0, dim**-0.5
    tokens, numbers = sum(lengths), torch.Generator(device).manual_seed(0)
    q, k, v, grad = (
        torch.randn(tokens, h, dim, generator=numbers, device=device).to(dtype) for h in (heads, 2, 2, heads)
    )
    sequence, at = torch.arange(3).repeat_interleave(torch.tensor(lengths)), torch.arange(tokens)
    seen = (sequence[:, None] == sequence) & (at <= at[:, None]) & (at > at[:, None] - (window or tokens))
    scores = torch.einsum("qhd,khd->hqk", q.float(), k.float().repeat_interleave(group, 1)) * scale
    scores = scores.masked_fill(~seen.to(device), -torch.inf)
    out = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v.float().repeat_interleave(group, 1)).to(dtype)
    given = q, k, v, out, scores.logsumexp(-1).t().contiguous(), grad, lengths, scale, window
    try:
        first, *more = (_library_backward(*given) for _ in range(4))
    except torch.OutOfMemoryError:
        raise  # says nothing of the next time
    except (RuntimeError, NotImplementedError):  # what it says of a head, a dtype or a device that it doesn't take
        return False
    same = all(torch.equal(a, b) for again in more for a, b in zip(first, again, strict=True))
    pairs = zip(first, _triton_backward(*given), strict=True)
    return same and all((a.float() - b.float()).abs().max() < b.float().abs().max() / 32 for a, b in pairs)


def attention_backward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    grad: torch.Tensor,
    lengths: Sequence[int],
    scale: float,
    window: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of q, k and v in their dtype, for packed sequences [T, heads, D].

    out, grad [T, heads, D]; lse [T, heads] fp32; lengths: of the sequences; window: keys a query sees, 0 is all.
    """
    q, k, v, grad = (t.contiguous() for t in (q, k, v, grad))
    served = library_serves(q.device, q.dtype, q.shape[1] // k.shape[1], q.shape[2], window > 0)
    # In its deterministic mode it has an fp32 gradient of q for each of many programs.
    copies = -(-multiprocessors(q.device) // max(1, len(lengths) * q.shape[1]))
    served = served and copies * 4 * q.numel() <= _MOST_BYTES
    return (_library_backward if served else _triton_backward)(q, k, v, out, lse, grad, lengths, scale, window)
