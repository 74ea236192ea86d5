"""The functions that a model's own code calls: elementwise ones, sums and softmax of rows, the largest of a row.

What is not built on this package's `exp` is the C library's scalar fp64 function, rounded once: the contract names that
library. Sums are chains in fp64 over ascending columns.
"""

import math

import numpy as np
import torch
from numba import float32, prange

from ..backend import UNARY
from .elementwise import exp, gelu, gelu_tanh, silu, times_sigmoid
from .jit import elementwise, inline, own_storage
from .simd import narrow, widen

_SOFTPLUS_LINEAR = float32(20.0)  # torch's threshold
_KINDS = {name: kind for kind, name in enumerate(UNARY)}
_SIGMOID, _SILU, _GELU, _GELU_TANH, _TANH, _EXP, _LOG, _SOFTPLUS, _COS, _SIN = _KINDS.values()


@inline
def _value(x, kind):
    wide = float(x)
    if kind == _TANH:
        return float32(math.tanh(wide))
    if kind == _EXP:
        return float32(math.exp(wide))
    if kind == _LOG:
        return float32(math.log(wide))
    if kind == _SOFTPLUS:
        return x if x > _SOFTPLUS_LINEAR else float32(math.log1p(math.exp(wide)))
    if kind == _COS:
        return float32(math.cos(wide))
    if kind == _SIN:
        return float32(math.sin(wide))
    if kind == _GELU:
        return gelu(x)
    return gelu_tanh(x)


@elementwise
def _unary(x, kind, out):
    for i in prange(x.size):
        value = widen(x[i])
        if kind == _SIGMOID:
            value = times_sigmoid(float32(1.0), value)
        elif kind == _SILU:
            value = silu(value)
        else:
            value = _value(value, kind)
        out[i] = narrow(value, x[i])


@inline
def _softmax_row(x, out):
    largest = widen(x[0])
    for j in range(1, x.size):
        largest = max(largest, widen(x[j]))
    total = 0.0
    for j in range(x.size):
        out[j] = exp(widen(x[j]) - largest)
        total += float(out[j])
    for j in range(x.size):
        out[j] = float32(float(out[j]) / total)


@elementwise
def _softmax(x, out):
    for i in prange(x.shape[0]):
        _softmax_row(x[i], out[i])


@inline
def _row_sum(x):
    total = 0.0
    for j in range(x.size):
        total += float(widen(x[j]))
    return total


@elementwise
def _row_sums(x, divisor, out):
    for i in prange(x.shape[0]):
        out[i] = float32(_row_sum(x[i]) / divisor)


@inline
def _largest_of_row(x, ids):
    """Write the columns of the largest, largest first, to `ids`; return for each column whether it is one of them."""
    taken = np.zeros(x.size, np.bool_)
    for slot in range(ids.size):
        best = -1
        for j in range(x.size):
            if not taken[j] and (best < 0 or widen(x[j]) > widen(x[best])):
                best = j
        taken[best] = True
        ids[slot] = best
    return taken


@elementwise
def _top_k(x, ids):
    for i in prange(x.shape[0]):
        _largest_of_row(x[i], ids[i])


@inline
def route_row(logits, normalises, ids, weights):
    """Write the experts of a row, ascending, and their weights; see `Backend.route`."""
    scores = np.empty(logits.size, np.float32)
    _softmax_row(logits, scores)
    taken = _largest_of_row(scores, ids)
    slot = 0
    for j in range(scores.size):
        if taken[j]:
            ids[slot], weights[slot] = j, scores[j]
            slot += 1
    if normalises:
        total = float32(_row_sum(weights))
        for slot in range(ids.size):
            weights[slot] /= total


@elementwise
def _route(logits, normalises, ids, weights):
    for i in prange(logits.shape[0]):
        route_row(logits[i], normalises, ids[i], weights[i])


def unary(x: torch.Tensor, name: str) -> torch.Tensor:
    """Return a function of each element of x, in x's shape and dtype; `name` is one of UNARY."""
    x = x.contiguous()
    out = torch.empty_like(x)
    _unary(own_storage(x.view(-1)), _KINDS[name], own_storage(out.view(-1)))
    return out


def softmax(x: torch.Tensor) -> torch.Tensor:
    """Return the softmax of each row of x, fp32 [rows, width]."""
    out = torch.empty(x.shape, dtype=torch.float32)
    if out.numel():
        _softmax(own_storage(x.contiguous()), out.numpy())
    return out


def row_sums(x: torch.Tensor, divisor: int) -> torch.Tensor:
    """Return the sum of each row of x [rows, width] over `divisor`, fp32 [rows]."""
    out = torch.empty(x.shape[0], dtype=torch.float32)
    _row_sums(own_storage(x.contiguous()), float(divisor), out.numpy())
    return out


def top_k(x: torch.Tensor, k: int) -> torch.Tensor:
    """Return the columns of the k largest of each row of x, int64 [rows, k], largest first; of equals the lower one."""
    ids = torch.empty(x.shape[0], k, dtype=torch.int64)
    _top_k(own_storage(x.contiguous()), ids.numpy())
    return ids


def route(logits: torch.Tensor, k: int, normalises: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the k experts of each row, int64 [T, k], ascending, and their weights fp32 [T, k]; see `Backend`."""
    ids = torch.empty(logits.shape[0], k, dtype=torch.int64)
    weights = torch.empty(ids.shape, dtype=torch.float32)
    _route(logits.contiguous().numpy(), normalises, ids.numpy(), weights.numpy())
    return ids, weights
