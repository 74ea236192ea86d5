"""The CPU matrix product: out = bias + x @ weight.T. To the bias of an output element are added, one after the other,
the sums of blocks of K, each an ascending chain of fused multiply-adds.

Weights are walked in panels of PANEL output features, stored [depth, PANEL]. Rollout packs them once (`pack`);
training packs a panel at a time into a scratch that stays in cache. Both feed the same tiles: the same bits.
"""

from collections.abc import Sequence
from itertools import zip_longest

import numpy as np
import torch
from numba import float32, prange

from .copies import pack_panel, transpose
from .jit import composed, elementwise, inline, own_storage, parallel, region, storage
from .pages import join_pages, new_memory
from .simd import LANES, PANEL, blocked_one, blocked_panel, matmul_panel, narrow, widen

_NO_BIAS, _NO_OUT = np.empty(0, np.float32), np.empty((0, 0), np.float32)
NO_LOW_RANK = np.empty((0, 0, LANES), np.float32), np.empty((0, 0, PANEL), np.float32), 0.0
LowRank = tuple[np.ndarray, np.ndarray, float]  # what `pack_low_rank` gives
_LIKE = {dtype: storage(torch.zeros(1, dtype=dtype)) for dtype in (torch.float32, torch.bfloat16, torch.float16)}
_ZERO = float32(0.0)
_ROWS = 16  # of a low-rank update's inner product, that a thread computes at a time


@inline
def _panel_sums(x, panel, panel_index, bias, features, following):
    """Return a panel of bias + x @ weight.T, fp32 [rows, PANEL], zero beyond the weight's features.

    following: the panel that comes next, to fetch it meanwhile.
    """
    rows, depth = x.shape
    first = panel_index * PANEL
    sums = np.zeros((rows, PANEL), np.float32)  # side by side: rows of an output may lie in the same sets of a cache
    if bias.size:
        for r in range(rows):
            for j in range(min(PANEL, features - first)):
                sums[r, j] = widen(bias[first + j])
    source, address, like, ahead = x.ctypes.data, panel.ctypes.data, panel[0, 0], following.ctypes.data
    blocked_panel(source, depth, address, like, PANEL, depth, sums.ctypes.data, PANEL, rows, ahead)
    return sums


@inline
def _put_panel(sums, panel_index, out):
    first = panel_index * PANEL
    count = min(PANEL, out.shape[1] - first)
    for r in range(sums.shape[0]):
        part = out[r, first : first + count]
        for j in range(count):
            part[j] = sums[r, j]


@inline
def panel_product(x, panel, panel_index, bias, out, following):
    """Compute a panel of bias + x @ weight.T; see `_panel_sums`."""
    _put_panel(_panel_sums(x, panel, panel_index, bias, out.shape[1], following), panel_index, out)


@inline
def _low_rank_rows(x, down, first, rows, inner):
    """Compute some rows of `inner` = x @ down.T."""
    depth, width = x.shape[1], inner.shape[1]
    inner[first : first + rows] = float32(0.0)
    source = x.ctypes.data + 4 * first * depth
    for p in range(down.shape[0]):
        panel, target = down[p].ctypes.data, inner.ctypes.data + 4 * (first * width + p * LANES)
        blocked_one(source, depth, panel, _ZERO, LANES, depth, target, width, rows, panel)


@inline
def _add_low_rank(inner, up, p, scale, like, sums):
    """Round a panel of sums to the dtype of the element `like`, and add scale * (inner @ up.T) to it."""
    rows, width = inner.shape
    update = np.zeros((rows, PANEL), np.float32)
    source, panel = inner.ctypes.data, up[p].ctypes.data
    ahead = up[min(p + 1, up.shape[0] - 1)].ctypes.data
    blocked_panel(source, width, panel, _ZERO, PANEL, up.shape[1], update.ctypes.data, PANEL, rows, ahead)
    flat_sums, flat_update = sums.reshape(sums.size), update.reshape(update.size)
    for i in range(flat_sums.size):
        flat_sums[i] = widen(narrow(flat_sums[i], like)) + scale * flat_update[i]


@inline
def _packed_product(x, panels, p, bias, out, inner, up, scale, like):
    """Compute panel p of bias + x @ weight.T, and of its low-rank update where there is one."""
    sums = _panel_sums(x, panels[p], p, bias, out.shape[1], panels[min(p + 1, panels.shape[0] - 1)])
    if up.shape[0]:
        _add_low_rank(inner, up, p, float32(scale), like, sums)
    _put_panel(sums, p, out)


@region
def products(x, like, a, b, c, out_a, out_b, out_c):
    """Compute the products of x [rows, depth] and three weights, as `_packed_weight` gives them, in fp32.

    Where one has a low-rank update, the product is rounded to the dtype of the element `like` before the sum.
    """
    panels_a, bias_a, down_a, up_a, scale_a = a
    panels_b, bias_b, down_b, up_b, scale_b = b
    panels_c, bias_c, down_c, up_c, scale_c = c
    rows = x.shape[0]
    inner_a = np.empty((rows, down_a.shape[0] * LANES), np.float32)
    inner_b = np.empty((rows, down_b.shape[0] * LANES), np.float32)
    inner_c = np.empty((rows, down_c.shape[0] * LANES), np.float32)
    if down_a.shape[0] + down_b.shape[0] + down_c.shape[0]:
        if rows <= _ROWS:  # by one thread: waking the others twice costs more
            _low_rank_rows(x, down_a, 0, rows, inner_a)
            _low_rank_rows(x, down_b, 0, rows, inner_b)
            _low_rank_rows(x, down_c, 0, rows, inner_c)
        else:
            for chunk in prange((rows + _ROWS - 1) // _ROWS):
                first = chunk * _ROWS
                count = min(_ROWS, rows - first)
                _low_rank_rows(x, down_a, first, count, inner_a)
                _low_rank_rows(x, down_b, first, count, inner_b)
                _low_rank_rows(x, down_c, first, count, inner_c)
    end_a, end_b = panels_a.shape[0], panels_a.shape[0] + panels_b.shape[0]
    for p in prange(end_b + panels_c.shape[0]):
        if p < end_a:
            _packed_product(x, panels_a, p, bias_a, out_a, inner_a, up_a, scale_a, like)
        elif p < end_b:
            _packed_product(x, panels_b, p - end_a, bias_b, out_b, inner_b, up_b, scale_b, like)
        else:
            _packed_product(x, panels_c, p - end_b, bias_c, out_c, inner_c, up_c, scale_c, like)


@composed
def _linear_packed(x, like, a, b, c, out_a, out_b, out_c):
    products(x, like[0], a, b, c, out_a, out_b, out_c)


@inline
def _packed_panel(weight, p):
    """Return fp32 [depth, PANEL]: panel p of a weight, zero-padded."""
    panel = np.zeros((weight.shape[1], PANEL), np.float32)
    pack_panel(weight[p * PANEL : (p + 1) * PANEL], panel)
    return panel


@region
def unpacked_product(x, weight, bias, out):
    """Compute `out` = bias + x @ weight.T, in fp32."""
    for p in prange((weight.shape[0] + PANEL - 1) // PANEL):
        panel = _packed_panel(weight, p)
        panel_product(x, panel, p, bias, out, panel)


@composed
def _linear_unpacked(x, weight, bias, out):
    unpacked_product(x, weight, bias, out)


@parallel
def _linear_resume(x, weight, out):
    rows, depth = weight.shape
    for p in prange((x.shape[0] + PANEL - 1) // PANEL):
        panel = _packed_panel(x, p)
        part, sums = out[p * PANEL : (p + 1) * PANEL], np.zeros((rows, PANEL), np.float32)
        transpose(part, sums)
        address = panel.ctypes.data
        matmul_panel(weight.ctypes.data, depth, address, _ZERO, PANEL, depth, sums.ctypes.data, PANEL, rows, address)
        transpose(sums[:, : part.shape[0]], part)


def pack(weight: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """Return a weight [features, depth] as [panels, depth, PANEL], zero-padded, of its dtype; in `out` if given."""
    features, depth = weight.shape
    panels = new_memory(weight, -(-features // PANEL), depth, PANEL) if out is None else out
    _pack(storage(weight.contiguous()), own_storage(panels))
    if out is None:
        join_pages(panels)
    return panels


@elementwise
def _pack(weight, panels):
    width = panels.shape[2]
    if weight.shape[0] % width:
        panels[weight.shape[0] // width :] = 0  # the ragged last panel's other columns
    for p in prange(panels.shape[0]):
        transpose(weight[p * width : (p + 1) * width], panels[p])


def pack_low_rank(down: torch.Tensor, up: torch.Tensor, scale: float, out: LowRank | None = None) -> LowRank:
    """Return scale * up(down(x)), down fp32 [rank, depth] and up fp32 [features, rank], as `linear_packed` takes it.

    out: the result of an earlier call for the same shapes and scale; it is overwritten and returned.
    """
    if out is None:
        rank, depth = down.shape
        down_panels = down.new_empty(-(-rank // LANES), depth, LANES)  # by torch: numpy aligns to less than a vector
        up_panels = up.new_empty(-(-len(up) // PANEL), rank, PANEL)
        out = own_storage(down_panels), own_storage(up_panels), float(scale)
    _pack(own_storage(down.contiguous()), out[0])
    _pack(own_storage(up.contiguous()), out[1])
    return out


def packed_rows(packed: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Return rows of the weight that `pack` was given, e.g. for a tied embedding."""
    return packed[rows // PANEL, :, rows % PANEL]


def _start(bias: torch.Tensor | None) -> np.ndarray:
    return _NO_BIAS if bias is None else storage(bias.float())


def _packed_weight(panels: np.ndarray, bias: torch.Tensor | None, low_rank: LowRank | None) -> tuple:
    """Return a weight as `products` takes it."""
    of_bias = panels[:0, 0, 0] if bias is None else storage(bias)
    return panels, of_bias, *(low_rank or NO_LOW_RANK)


def linear_packed(
    x: torch.Tensor,
    weights: list[tuple[np.ndarray, int, torch.Tensor | None]],
    dtype: torch.dtype = torch.float32,
    low_ranks: Sequence[LowRank | None] = (),
) -> list[torch.Tensor]:
    """Return bias + x @ weight.T, [rows, features] in `dtype`, for each of up to three weights, in one launch.

    x [rows, depth]; weights: (`storage` of panels from `pack`, features, bias or None). low_ranks: for each weight,
    what `pack_low_rank` gave, whose value is added to the rounded product in fp32, and the sum is rounded; or None.
    """
    x = x.float().contiguous()
    outs = [x.new_empty(x.shape[0], features) for _, features, _ in weights]
    given = [
        _packed_weight(panels, bias, low_rank)
        for (panels, _, bias), low_rank in zip_longest(weights, low_ranks)  # type: ignore[misc]
    ]
    none = 3 - len(weights)
    panels = weights[0][0]
    like = _LIKE[dtype] if any(low_ranks) else panels[:1, 0, 0]
    nothing = [_packed_weight(panels[:0], None, None)] * none
    _linear_packed(x.numpy(), like, *given, *nothing, *[out.numpy() for out in outs], *[_NO_OUT] * none)
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
    """Add x @ weight.T to `out`, in place, fp32: one chain an element, which goes on from what it holds.

    Panels are of x: the gradient of logits, of which there are many, comes transposed, and is packed as its rows lie.
    """
    _linear_resume(storage(x.float()), weight.float().contiguous().numpy(), out.numpy())
