"""Gradients of packed causal attention: torch's FlashAttention-2 where it agrees with fp64, Triton kernels elsewhere.

Only the forward's bits are shared with rollouts; a backward has to be right, and the same from run to run. Both are fed
with the forward's output and log-sum-exp.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

from ..backend import NumericsError
from ..layout import to_device
from .attention import padded_width
from .launch import await_inputs, launch, shared_memory
from .library_backward import candidate

BUDGETS = {torch.float32: 1e-5, torch.bfloat16: 2.0**-6, torch.float16: 2.0**-9}  # of `gradient_error`


@triton.jit
def _weights_and_grads(a, b, grad_a, grad_b, lse, delta, row, column, scale, window):
    """Return a tile's attention weights, and the gradients of its scores (Dao et al., 2022, B.2).

    a, grad_a: queries and upstream gradients, b, grad_b: keys and values, for [rows, columns]; the other way round for
    [columns, rows]. lse, delta and row, of queries, and column, of keys, are given as they spread over the result.
    """
    seen = column <= row
    if window > 0:
        seen = seen & (column > row - window)
    s = tl.dot(a, tl.trans(b), input_precision="ieee") * (scale * 1.4426950408889634)
    p = tl.where(seen, tl.exp2(s - lse * 1.4426950408889634), 0.0)
    dp = tl.dot(grad_a, tl.trans(grad_b), input_precision="ieee")
    return p, p * (dp - delta) * scale


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
    await_inputs()
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
        _, ds = _weights_and_grads(
            queries, keys, upstream, values, row_lse[:, None], row_delta[:, None],
            row[:, None], column[None, :], scale, window,
        )  # fmt: skip
        acc = tl.dot(ds.to(k.dtype.element_ty), keys, acc, input_precision="ieee")
    d = tl.arange(0, BLOCK_D)
    address = out + (row.to(tl.int64) * heads + h)[:, None] * DIM + d[None, :]
    tl.store(address, acc.to(out.dtype.element_ty), mask=(row < end)[:, None] & (d < DIM)[None, :])


@triton.jit(do_not_specialize=["window"])
def _grad_kv(
    q, k, v, grad, lse, delta, out_k, out_v, tiles, heads, kv_heads, scale, window,
    DIM: tl.constexpr, BLOCK_D: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Write the gradients of one tile of keys of a KV head: the group's heads, then queries ascending, no atomics.

    Scores are [keys, queries], so that nothing is transposed in registers: compilers were wrong there (Triton 11366).
    """
    await_inputs()
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
            p, ds = _weights_and_grads(
                keys, queries, values, upstream, row_lse[None, :], row_delta[None, :],
                row[None, :], column[:, None], scale, window,
            )  # fmt: skip
            acc_v = tl.dot(p.to(q.dtype.element_ty), upstream, acc_v, input_precision="ieee")
            acc_k = tl.dot(ds.to(q.dtype.element_ty), queries, acc_k, input_precision="ieee")
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


def dense_attention(q, k, v, lengths: Sequence[int], scale: float, window: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return packed causal attention [T, heads, D] and log-sum-exp [T, heads] by plain torch, differentiable.

    In fp64 it is the reference for gradients. Its memory grows with the square of the longest sequence.
    """
    outs, sums, group = [], [], q.shape[1] // k.shape[1]
    for a, b, c in zip(*(t.transpose(0, 1).split(list(lengths), 1) for t in (q, k, v)), strict=True):
        at = torch.arange(a.shape[1], device=a.device)
        seen = (at <= at[:, None]) & (at > at[:, None] - (window or len(at)))
        scores = (a @ b.repeat_interleave(group, 0).mT * scale).masked_fill(~seen, -torch.inf)
        outs.append((scores.softmax(-1) @ c.repeat_interleave(group, 0)).transpose(0, 1))
        sums.append(scores.logsumexp(-1).t())
    return torch.cat(outs), torch.cat(sums)


def exact_gradients(q, k, v, grad, lengths: Sequence[int], scale: float, window: int) -> tuple[torch.Tensor, ...]:
    """Return the gradients of q, k and v in fp64, by torch's autograd."""
    leaves = tuple(t.detach().double().requires_grad_() for t in (q, k, v))
    with torch.enable_grad():
        out, _ = dense_attention(leaves[0], leaves[1], leaves[2], lengths, scale, window)
    return torch.autograd.grad(out, leaves, grad.double())


def gradient_error(found: torch.Tensor, exact: torch.Tensor) -> float:
    """Return the largest relative error of a gradient [T, heads, D] among blocks of 64 tokens of a head.

    It is that of the Frobenius norm. The largest error of an element would not show that a block of keys is missing:
    in a long sequence it has a small share of each sum.
    """

    def norms(t: torch.Tensor) -> torch.Tensor:
        return torch.stack([block.square().sum((0, 2)).sqrt() for block in t.split(64)])

    return float((norms(found.double() - exact) / norms(exact)).max())


@cache
def is_proven(backward: Any, device: torch.device, dtype: torch.dtype, group: int, dim: int, windowed: bool) -> bool:
    """Return True if a backward takes such heads, repeats its bits and agrees with fp64. Tried once, on random numbers.

    backward: called as `_triton_backward`.
    """
    lengths = [700, 1, 333]
    heads = 2 * group
    window = 200 if windowed else 0
    scale = dim**-0.5
    numbers = torch.Generator(device).manual_seed(0)
    q, k, v, grad = (
        torch.randn(sum(lengths), h, dim, generator=numbers, device=device).to(dtype) for h in (heads, 2, 2, heads)
    )
    out, lse = dense_attention(q.double(), k.double(), v.double(), lengths, scale, window)  # which TF32 can't round
    given = q, k, v, out.to(dtype), lse.float().contiguous(), grad, lengths, scale, window
    try:
        first, *more = (backward(*given) for _ in range(4))
    except torch.OutOfMemoryError:
        raise  # says nothing of the next time
    except (RuntimeError, NotImplementedError):  # what it says of a head, a dtype or a device that it doesn't take
        return False
    same = all(torch.equal(a, b) for again in more for a, b in zip(first, again, strict=True))
    exact = exact_gradients(q, k, v, grad, lengths, scale, window)
    return same and all(gradient_error(a, b) < BUDGETS[dtype] for a, b in zip(first, exact, strict=True))


def serving_backward(q: torch.Tensor, kv_heads: int, lengths: Sequence[int], window: int) -> Callable[..., Any]:
    """Return what computes the gradients of such queries: torch's candidate if it has proven itself, or our kernels.

    Raises NumericsError on a GPU where our kernels would have to serve, but don't agree with fp64.
    """
    where = q.device, q.dtype, q.shape[1] // kv_heads, q.shape[2], window > 0
    library = candidate(q, lengths)
    if library is not None and is_proven(library, *where):
        return library
    if q.is_cuda and not is_proven(_triton_backward, *where):
        raise NumericsError(
            f"attention's gradients for head_dim {q.shape[2]} in {q.dtype} are not those of fp64 on this GPU, with "
            f"Triton {triton.__version__}: try another version of it, and please report this one"
        )
    return _triton_backward


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
    Raises NumericsError as `serving_backward` does.
    """
    q, k, v, grad = (t.contiguous() for t in (q, k, v, grad))
    backward = serving_backward(q, k.shape[1], lengths, window)
    return backward(q, k, v, out, lse, grad, lengths, scale, window)
