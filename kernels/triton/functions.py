"""The functions that a model's own code calls: elementwise ones, sums and softmax of rows, the largest of a row.

Elementwise ones are torch's in fp64, rounded once to fp32 and once to the storage dtype. One program computes a row;
its block and warps follow from the row's width alone, so its tree does too.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..backend import UNARY
from .elementwise import one_row
from .launch import aligned, await_inputs, launch


@triton.jit
def _softmax(x, out, width, BLOCK: tl.constexpr):
    await_inputs()
    row = tl.program_id(0).to(tl.int64)
    j = tl.arange(0, BLOCK)
    values = tl.load(x + row * width + j, mask=j < width, other=float("-inf")).to(tl.float32)
    e = tl.exp(values - tl.max(values, 0)).to(tl.float64)
    tl.store(out + row * width + j, (e / tl.sum(e, 0)).to(tl.float32), mask=j < width)


@triton.jit
def _row_sums(x, out, width, divisor, BLOCK: tl.constexpr):
    await_inputs()
    row = tl.program_id(0).to(tl.int64)
    j = tl.arange(0, BLOCK)
    values = tl.load(x + row * width + j, mask=j < width, other=0.0).to(tl.float64)
    tl.store(out + row, (tl.sum(values, 0) / divisor).to(tl.float32))


@triton.jit
def _top_k(x, ids, width, k, BLOCK: tl.constexpr):
    await_inputs()
    row = tl.program_id(0).to(tl.int64)
    j = tl.arange(0, BLOCK)
    values = tl.load(x + row * width + j, mask=j < width, other=float("-inf")).to(tl.float32)
    values = tl.where(values == values, values, float("-inf"))  # so that a NaN can't leave a slot without a column
    left = j < width
    for slot in range(k):
        largest = tl.max(tl.where(left, values, float("-inf")), 0)
        best = tl.min(tl.where(left & (values == largest), j, BLOCK), 0)
        tl.store(ids + row * k + slot, best.to(tl.int64))
        left = left & (j != best)


def unary(x: torch.Tensor, name: str) -> torch.Tensor:
    """Return a function of each element of x, in x's shape and dtype; `name` is one of UNARY."""
    return UNARY[name](x.double()).float().to(x.dtype)


def softmax(x: torch.Tensor) -> torch.Tensor:
    """Return the softmax of each row of x, fp32 [rows, width]."""
    out = x.new_empty(x.shape, dtype=torch.float32)
    launch(_softmax, (x.shape[0],), aligned(x), out, x.shape[1], **one_row(x.shape[1]))
    return out


def row_sums(x: torch.Tensor, divisor: int) -> torch.Tensor:
    """Return the sum of each row of x [rows, width] over `divisor`, fp32 [rows]."""
    out = x.new_empty(x.shape[0], dtype=torch.float32)
    launch(_row_sums, (x.shape[0],), aligned(x), out, x.shape[1], float(divisor), **one_row(x.shape[1]))
    return out


def top_k(x: torch.Tensor, k: int) -> torch.Tensor:
    """Return the columns of the k largest of each row of x, int64 [rows, k], largest first; of equals the lower one."""
    ids = x.new_empty(x.shape[0], k, dtype=torch.int64)
    launch(_top_k, (x.shape[0],), aligned(x), ids, x.shape[1], k, **one_row(x.shape[1]))
    return ids


def route(logits: torch.Tensor, k: int, normalises: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the k experts of each row, int64 [T, k], ascending, and their weights fp32 [T, k]; see `Backend`."""
    scores = softmax(logits)
    ids = top_k(scores, k).sort(-1).values
    weights = scores.gather(-1, ids)
    return ids, weights / row_sums(weights, 1)[:, None] if normalises else weights
