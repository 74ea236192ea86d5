"""Mixture of experts on tensor cores: rows sorted by expert, each times its expert's weight, and a token's sum.

The tree of an output element is one chain of matrix-unit steps over ascending K, from zero: experts by themselves fill
a GPU, so that K is not cut into chunks as for `linear`. A tile finds its expert by counting in the running sum of
tiles; the grid is the most that there can be. So nothing waits for the host, and a graph holds for any choice.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..backend import ExpertPlan
from .elementwise import gated_halves
from .launch import await_inputs, launch
from .linear import BLOCK_K, _load_tile
from .schedules import Tile

_COLUMNS = 512  # of a token's sum that one program computes


def experts_tile(dtype: torch.dtype, pairs: int, experts: int) -> Tile:
    """Return the tile for the mean number of rows of an expert: a schedule, which decides no bit."""
    rows = pairs / min(experts, pairs)
    if dtype == torch.float32:
        return Tile(16 if rows <= 16 else 32, 64, 3, 4, False)
    if rows <= 32:
        return Tile(16 if rows <= 16 else 32, 64, 4, 4, False)
    return Tile(64, 128, 4, 8, False) if rows <= 64 else Tile(128, 128, 3, 8, False)


@triton.jit
def _rows_of(ends, expert, experts):
    """Return the first row of an expert, and the row after its last."""
    first = tl.load(ends + expert - 1, mask=expert > 0, other=0).to(tl.int32)
    return first, tl.load(ends + expert).to(tl.int32)


@triton.jit
def _expert_of(ends, experts, tile, BLOCK_M: tl.constexpr, EXPERTS: tl.constexpr):
    """Return a tile's expert, and its place among the expert's tiles; `experts` for a tile that is nobody's."""
    e = tl.arange(0, EXPERTS)
    last = tl.load(ends + e, mask=e < experts, other=0).to(tl.int32)
    first = tl.load(ends + e - 1, mask=(e > 0) & (e < experts), other=0).to(tl.int32)
    tiles = tl.cdiv(last - first, BLOCK_M)
    tile_ends = tl.cumsum(tiles, 0)  # of whole numbers: in any order
    expert = tl.sum(((tile_ends <= tile) & (e < experts)).to(tl.int32), 0)
    return expert, tile - tl.sum(tl.where(e < expert, tiles, 0), 0)


@triton.jit(do_not_specialize=["slots"])
def _grouped(
    x, w, out, pairs, ends, experts, slots, depth, features, stride_x, stride_e, stride_f, stride_k,
    GATHER: tl.constexpr, EVEN_K: tl.constexpr, EXPERTS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Multiply rows with their experts' weights; GATHER: row i of x is that of the token of pair i."""
    await_inputs()
    expert, place = _expert_of(ends, experts, tl.program_id(0), BLOCK_M, EXPERTS)
    if expert < experts:
        first, last = _rows_of(ends, expert, experts)
        r = first + place * BLOCK_M + tl.arange(0, BLOCK_M)
        f = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
        r_mask, f_mask = r < last, f < features
        source = r
        if GATHER:
            source = (tl.load(pairs + r, mask=r_mask, other=0) // slots).to(tl.int32)
        x_rows = x + source.to(tl.int64) * stride_x
        base = w + expert.to(tl.int64) * stride_e + f.to(tl.int64)[:, None] * stride_f
        total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for k in range(0, depth, BLOCK_K):
            a = _load_tile(x_rows, r_mask, k, depth, EVEN_K, BLOCK_K)
            columns = k + tl.arange(0, BLOCK_K)
            mask = f_mask[:, None] if EVEN_K else f_mask[:, None] & (columns < depth)[None, :]
            b = tl.load(base + columns.to(tl.int64)[None, :] * stride_k, mask=mask, other=0.0)
            total = tl.dot(a, tl.trans(b), total, input_precision="ieee")
        address = out + r.to(tl.int64)[:, None] * features + f[None, :]
        tl.store(address, total.to(out.dtype.element_ty), mask=r_mask[:, None] & f_mask[None, :])


@triton.jit
def _grouped_outer(
    x, y, out, ends, experts, width, depth,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Sum x[row].T @ y[row] over each expert's rows, ascending; x [P, width], y [P, depth]."""
    await_inputs()
    expert = tl.program_id(0)
    first, last = _rows_of(ends, expert, experts)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.program_id(2) * BLOCK_K + tl.arange(0, BLOCK_K)
    total = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    for start in range(first, last, ROWS):
        r = start + tl.arange(0, ROWS)
        place = r.to(tl.int64)[:, None]
        a = tl.load(x + place * width + n[None, :], mask=(r < last)[:, None] & (n < width)[None, :], other=0.0)
        b = tl.load(y + place * depth + k[None, :], mask=(r < last)[:, None] & (k < depth)[None, :], other=0.0)
        total = tl.dot(tl.trans(a), b, total, input_precision="ieee")
    address = out + (expert.to(tl.int64) * width + n[:, None]) * depth + k[None, :]
    tl.store(address, total.to(out.dtype.element_ty), mask=(n < width)[:, None] & (k < depth)[None, :])


@triton.jit
def _combine(y, weights, pairs, places, out, slots, width, BLOCK: tl.constexpr):
    await_inputs()
    token = tl.program_id(0).to(tl.int64)
    j = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for slot in range(slots):  # ascending in expert
        row = tl.load(places + token * slots + slot).to(tl.int64)
        weight = tl.load(weights + tl.load(pairs + row))
        total = total + weight * tl.load(y + row * width + j, mask=j < width, other=0.0).to(tl.float32)
    tl.store(out + token * width + j, total.to(out.dtype.element_ty), mask=j < width)


def plan_experts(ids: torch.Tensor, experts: int) -> ExpertPlan:
    """Return the order of the pairs of ids int64 [T, k], whose values are not checked: nobody waits for them."""
    ordered, pairs = ids.reshape(-1).sort(stable=True)
    rows = torch.empty_like(pairs)
    rows[pairs] = torch.arange(pairs.numel(), device=ids.device)
    ends = torch.searchsorted(ordered, torch.arange(experts, device=ids.device), right=True)
    return ExpertPlan(pairs, rows.view(ids.shape).sort(-1).values, ends)


def packed_experts(
    x: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    inner: int,
    ids: torch.Tensor,
    weights: torch.Tensor,
    activation: str,
) -> torch.Tensor:
    """Return each token's sum of its experts' gated MLPs, [T, H] in x's dtype; see `Backend`."""
    plan = plan_experts(ids, len(gate_up))
    both = grouped(x, gate_up, plan, True, x.dtype)
    y = grouped(gated_halves(both, activation), down, plan, False, x.dtype)
    return combine(y, weights, plan, x.dtype)


def grouped(x: torch.Tensor, weight: torch.Tensor, plan: ExpertPlan, gather: bool, dtype: torch.dtype) -> torch.Tensor:
    """Return each row of x times its expert's weight, [P, features] in `dtype`; weight [E, features, depth]."""
    x = x.to(weight.dtype)
    x = x if x.stride(-1) == 1 else x.contiguous()
    experts, features, depth = weight.shape
    pairs = plan.pairs.numel()
    out = x.new_empty(pairs, features, dtype=dtype)
    if pairs == 0:
        return out
    tile, block_k = experts_tile(x.dtype, pairs, experts), BLOCK_K[x.dtype]
    grid = pairs // tile.block_m + min(experts, pairs), -(-features // tile.block_n)
    launch(
        _grouped, grid, x, weight, out, plan.pairs, plan.ends, experts, plan.places.shape[1], depth, features,
        x.stride(0), *weight.stride(),
        GATHER=gather, EVEN_K=depth % block_k == 0, EXPERTS=triton.next_power_of_2(experts),
        BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, BLOCK_K=block_k, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return out


def grouped_outer(x: torch.Tensor, y: torch.Tensor, plan: ExpertPlan, dtype: torch.dtype) -> torch.Tensor:
    """Return for each expert the sum of its rows' outer products, [E, N, K] in `dtype`; x [P, N], y [P, K]."""
    x, y = x.contiguous(), y.to(x.dtype).contiguous()
    experts, width, depth = plan.ends.numel(), x.shape[1], y.shape[1]
    out = x.new_empty(experts, width, depth, dtype=dtype)
    block, rows = (64, 32) if x.dtype == torch.float32 else (128, 64)
    launch(
        _grouped_outer, (experts, -(-width // block), -(-depth // 64)), x, y, out, plan.ends, experts, width, depth,
        BLOCK_N=block, BLOCK_K=64, ROWS=rows, num_warps=4, num_stages=3,
    )  # fmt: skip
    return out


def combine(y: torch.Tensor, weights: torch.Tensor, plan: ExpertPlan, dtype: torch.dtype) -> torch.Tensor:
    """Return the sum of a token's rows of y [P, width] by weights fp32 [T, k], ascending in expert, [T, width]."""
    tokens, slots = weights.shape
    out = y.new_empty(tokens, y.shape[1], dtype=dtype)
    launch(
        _combine, (tokens, -(-y.shape[1] // _COLUMNS)), y.contiguous(), weights.contiguous(), plan.pairs, plan.places,
        out, slots, y.shape[1], BLOCK=_COLUMNS, num_warps=4,
    )  # fmt: skip
    return out


def combine_backward(
    grad: torch.Tensor, y: torch.Tensor, weights: torch.Tensor, plan: ExpertPlan
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradients of y [P, width], in its dtype, and weights fp32 [T, k] from the sum's [T, width]."""
    by_row = grad[plan.tokens].float()
    grad_weights = torch.empty(weights.numel(), dtype=torch.float32, device=y.device)
    grad_weights[plan.pairs] = (by_row * y.float()).sum(-1)
    return (by_row * weights.reshape(-1)[plan.pairs][:, None]).to(y.dtype), grad_weights.view(weights.shape)
