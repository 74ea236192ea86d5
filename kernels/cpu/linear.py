"""The CPU matrix product: out = bias + x @ weight.T. To the bias of an output element are added, one after the other,
the sums of blocks of K, each an ascending chain of fused multiply-adds.

Weights are walked in panels of PANEL output features, stored [depth, PANEL]. Rollout packs them once (`pack`);
training packs a panel at a time into a scratch that stays in cache. Both feed the same tiles: the same bits.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numba import float32, prange

from .copies import pack_panel, transpose
from .jit import inline, parallel, storage
from .pages import new_memory
from .simd import LANES, PANEL, blocked_one, blocked_panel, matmul_panel, narrow, widen

_NO_BIAS, _NO_OUT = np.empty(0, np.float32), np.empty((0, 0), np.float32)
_NO_LOW_RANK = np.empty((0, 0, LANES), np.float32), np.empty((0, 0, PANEL), np.float32), 0.0
_LIKE = {dtype: storage(torch.zeros(1, dtype=dtype)) for dtype in (torch.float32, torch.bfloat16, torch.float16)}
_ROWS = 64  # of a low-rank update's inner product, that a thread computes at a time


@inline
def _panel_product(x, panel, panel_index, out, following):
    """Add a panel's products to `out`.

    following: the panel that comes next, to fetch it meanwhile.
    """
    rows, depth = x.shape
    features = out.shape[1]
    first = panel_index * PANEL
    last = min(first + PANEL, features)
    ahead = following.ctypes.data
    if last - first == PANEL:
        blocked_panel(x.ctypes.data, depth, panel, 0, PANEL, depth, out.ctypes.data + 4 * first, features, rows, ahead)
    else:  # the ragged last panel goes through a scratch of full width
        scratch = np.zeros((rows, PANEL), np.float32)
        scratch[:, : last - first] = out[:, first:last]
        blocked_panel(x.ctypes.data, depth, panel, 0, PANEL, depth, scratch.ctypes.data, PANEL, rows, ahead)
        out[:, first:last] = scratch[:, : last - first]


@inline
def _start_panel(panel_index, bias, out):
    for r in range(out.shape[0]):
        for j in range(panel_index * PANEL, min((panel_index + 1) * PANEL, out.shape[1])):
            out[r, j] = bias[j] if bias.size else float32(0.0)


@inline
def packed_product(x, panels, p, bias, out):
    """Compute panel p of bias + x @ weight.T, weight as `pack` lays it out."""
    _start_panel(p, bias, out)
    _panel_product(x, panels[p], p, out, panels[min(p + 1, panels.shape[0] - 1)])


@inline
def packed_products(x, p, a, b, c, bias_a, bias_b, bias_c, out_a, out_b, out_c):
    """Compute panel p of those of three weights, one after the other."""
    first, second = a.shape[0], a.shape[0] + b.shape[0]
    if p < first:
        packed_product(x, a, p, bias_a, out_a)
    elif p < second:
        packed_product(x, b, p - first, bias_b, out_b)
    else:
        packed_product(x, c, p - second, bias_c, out_c)


@parallel
def _linear_packed(x, a, b, c, bias_a, bias_b, bias_c, out_a, out_b, out_c):
    for p in prange(a.shape[0] + b.shape[0] + c.shape[0]):
        packed_products(x, p, a, b, c, bias_a, bias_b, bias_c, out_a, out_b, out_c)


@inline
def _low_rank_rows(x, down, first, rows, inner):
    """Compute some rows of `inner` = x @ down.T."""
    depth, width = x.shape[1], inner.shape[1]
    source = x.ctypes.data + 4 * first * depth
    for p in range(down.shape[0]):
        target = inner.ctypes.data + 4 * (first * width + p * LANES)
        blocked_one(source, depth, down[p], 0, LANES, depth, target, width, rows, down.ctypes.data)


@parallel
def _low_rank_inner(x, down_a, down_b, down_c, inner_a, inner_b, inner_c):
    for chunk in prange((x.shape[0] + _ROWS - 1) // _ROWS):
        first = chunk * _ROWS
        rows = min(_ROWS, x.shape[0] - first)
        _low_rank_rows(x, down_a, first, rows, inner_a)
        _low_rank_rows(x, down_b, first, rows, inner_b)
        _low_rank_rows(x, down_c, first, rows, inner_c)


@inline
def _add_low_rank(inner, up, p, scale, like, out):
    """Round a panel of `out` to the dtype of the array `like`, and add scale * (inner @ up.T) to it."""
    rows, width = inner.shape
    first = p * PANEL
    update = np.zeros((rows, PANEL), np.float32)
    address = inner.ctypes.data
    blocked_panel(address, width, up[p], 0, PANEL, up.shape[1], update.ctypes.data, PANEL, rows, up[p].ctypes.data)
    for r in range(rows):
        for j in range(min(PANEL, out.shape[1] - first)):
            out[r, first + j] = widen(narrow(out[r, first + j], like[0])) + scale * update[r, j]


@inline
def _adapted_product(x, panels, p, bias, out, inner, up, scale, like):
    packed_product(x, panels, p, bias, out)
    if up.shape[0]:
        _add_low_rank(inner, up, p, scale, like, out)


@parallel
def _linear_low_rank(
    x, like, a, b, c, bias_a, bias_b, bias_c, out_a, out_b, out_c,
    down_a, down_b, down_c, inner_a, inner_b, inner_c, up_a, up_b, up_c, scale_a, scale_b, scale_c,
):  # fmt: skip
    if x.shape[0] <= _ROWS:  # by one thread: waking the others twice costs more
        _low_rank_rows(x, down_a, 0, x.shape[0], inner_a)
        _low_rank_rows(x, down_b, 0, x.shape[0], inner_b)
        _low_rank_rows(x, down_c, 0, x.shape[0], inner_c)
    first, second = a.shape[0], a.shape[0] + b.shape[0]
    for p in prange(second + c.shape[0]):
        if p < first:
            _adapted_product(x, a, p, bias_a, out_a, inner_a, up_a, float32(scale_a), like)
        elif p < second:
            _adapted_product(x, b, p - first, bias_b, out_b, inner_b, up_b, float32(scale_b), like)
        else:
            _adapted_product(x, c, p - second, bias_c, out_c, inner_c, up_c, float32(scale_c), like)


@inline
def _packed_panel(weight, p):
    """Return fp32 [depth, PANEL]: panel p of a weight, zero-padded."""
    panel = np.zeros((weight.shape[1], PANEL), np.float32)
    pack_panel(weight[p * PANEL : (p + 1) * PANEL], panel)
    return panel


@parallel
def _linear_unpacked(x, weight, bias, out):
    for p in prange((weight.shape[0] + PANEL - 1) // PANEL):
        panel = _packed_panel(weight, p)
        _start_panel(p, bias, out)
        _panel_product(x, panel, p, out, panel)


@parallel
def _linear_resume(x, weight, out):
    rows, depth = x.shape
    for p in prange((weight.shape[0] + PANEL - 1) // PANEL):
        panel = _packed_panel(weight, p)
        first, last = p * PANEL, min((p + 1) * PANEL, out.shape[1])
        whole = np.zeros((rows, PANEL), np.float32)
        whole[:, : last - first] = out[:, first:last]
        address = panel.ctypes.data
        matmul_panel(x.ctypes.data, depth, panel, 0, PANEL, depth, whole.ctypes.data, PANEL, rows, address)
        out[:, first:last] = whole[:, : last - first]


def pack(weight: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """Return a weight [features, depth] as [panels, depth, PANEL], zero-padded, of its dtype; in `out` if given."""
    return _panels(weight, out, PANEL)


def _panels(weight: torch.Tensor, out: torch.Tensor | None, width: int) -> torch.Tensor:
    features, depth = weight.shape
    panels = new_memory(weight, -(-features // width), depth, width) if out is None else out
    panels[features // width :] = 0  # the ragged last panel's other columns
    _pack(storage(weight.contiguous()), storage(panels))
    return panels


@parallel
def _pack(weight, panels):
    width = panels.shape[2]
    for p in prange(panels.shape[0]):
        transpose(weight[p * width : (p + 1) * width], panels[p])


def pack_low_rank(down: torch.Tensor, up: torch.Tensor, scale: float) -> tuple[np.ndarray, np.ndarray, float]:
    """Return scale * up(down(x)), down fp32 [rank, depth] and up fp32 [features, rank], as `linear_packed` takes it."""
    return storage(_panels(down, None, LANES)), storage(pack(up)), float(scale)


def packed_rows(packed: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Return rows of the weight that `pack` was given, e.g. for a tied embedding."""
    return packed[rows // PANEL, :, rows % PANEL]


def _start(bias: torch.Tensor | None) -> np.ndarray:
    return _NO_BIAS if bias is None else storage(bias.float())


def linear_packed(
    x: torch.Tensor,
    weights: list[tuple[np.ndarray, int, torch.Tensor | None]],
    dtype: torch.dtype = torch.float32,
    low_ranks: Sequence[tuple[np.ndarray, np.ndarray, float] | None] = (),
) -> list[torch.Tensor]:
    """Return bias + x @ weight.T, [rows, features] in `dtype`, for each of up to three weights, in one launch.

    x [rows, depth]; weights: (`storage` of panels from `pack`, features, bias or None). low_ranks: for each weight,
    what `pack_low_rank` gave, whose value is added to the rounded product in fp32, and the sum is rounded; or None.
    """
    x = x.float().contiguous()
    outs = [x.new_empty(x.shape[0], features) for _, features, _ in weights]
    panels = [p for p, _, _ in weights]
    none = 3 - len(weights)
    args = (
        *panels, *[panels[0][:0]] * none,
        *[_start(bias) for *_, bias in weights], *[_NO_BIAS] * none,
        *[out.numpy() for out in outs], *[_NO_OUT] * none,
    )  # fmt: skip
    if any(low_ranks):
        downs, ups, scales = zip(*(each or _NO_LOW_RANK for each in (*low_ranks, *[None] * none)), strict=True)
        inners = [np.zeros((x.shape[0], down.shape[0] * LANES), np.float32) for down in downs]
        if x.shape[0] > _ROWS:
            _low_rank_inner(x.numpy(), *downs, *inners)
        _linear_low_rank(x.numpy(), _LIKE[dtype], *args, *downs, *inners, *ups, *scales)
    else:
        _linear_packed(x.numpy(), *args)
    return [out.to(dtype) for out in outs]


def linear_unpacked(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """Return bias + x @ weight.T, [rows, features] in `dtype`; weight [features, depth] of any strides."""
    x = x.float().contiguous()
    out = x.new_empty(x.shape[0], weight.shape[0])
    _linear_unpacked(x.numpy(), storage(weight.float()), _start(bias), out.numpy())
    return out.to(dtype)


def gradient_product(x: torch.Tensor, weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return x @ weight.T in `dtype`, for a backward pass."""
    return linear_unpacked(x, weight, None, dtype)


def linear_resume(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
    """Add x @ weight.T to `out`, in place, fp32: one chain an element, which goes on from what it holds."""
    wide = x.float().contiguous()
    _linear_resume(wide.numpy(), storage(weight.float()), out.numpy())
