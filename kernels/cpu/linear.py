"""The CPU matrix product: out = bias + x @ weight.T, one ascending chain of fused multiply-adds per output element.

Weights are walked in panels of PANEL output features, stored [depth, PANEL]. Rollout packs them once (`pack`);
training packs a panel at a time into a scratch that stays in cache. Both feed the same tiles: the same bits.
"""

import numpy as np
import torch
import torch.nn.functional as F
from numba import float32, prange

from .jit import inline, parallel, storage
from .simd import PANEL, matmul_panel

_NO_BIAS, _NO_OUT = np.empty(0, np.float32), np.empty((0, 0), np.float32)


@inline
def _panel_product(x, panel, panel_index, out, following):
    """Add a panel's products to `out`: the chains go on from what it holds.

    following: the panel that comes next, to fetch it meanwhile.
    """
    rows, depth = x.shape
    features = out.shape[1]
    first = panel_index * PANEL
    last = min(first + PANEL, features)
    ahead = following.ctypes.data
    if last - first == PANEL:
        matmul_panel(x.ctypes.data, depth, panel, 0, PANEL, depth, out.ctypes.data + 4 * first, features, rows, ahead)
    else:  # the ragged last panel goes through a scratch of full width
        scratch = np.zeros((rows, PANEL), np.float32)
        scratch[:, : last - first] = out[:, first:last]
        matmul_panel(x.ctypes.data, depth, panel, 0, PANEL, depth, scratch.ctypes.data, PANEL, rows, ahead)
        out[:, first:last] = scratch[:, : last - first]


@inline
def _start_panel(panel_index, bias, out):
    for r in range(out.shape[0]):
        for j in range(panel_index * PANEL, min((panel_index + 1) * PANEL, out.shape[1])):
            out[r, j] = bias[j] if bias.size else float32(0.0)


@inline
def _packed_product(x, panels, p, bias, out):
    _start_panel(p, bias, out)
    _panel_product(x, panels[p], p, out, panels[min(p + 1, panels.shape[0] - 1)])


@parallel
def _linear_packed(x, a, b, c, bias_a, bias_b, bias_c, out_a, out_b, out_c):
    first, second = a.shape[0], a.shape[0] + b.shape[0]
    for p in prange(second + c.shape[0]):
        if p < first:
            _packed_product(x, a, p, bias_a, out_a)
        elif p < second:
            _packed_product(x, b, p - first, bias_b, out_b)
        else:
            _packed_product(x, c, p - second, bias_c, out_c)


@parallel
def _linear_unpacked(x, weight, bias, resume, out):
    features, depth = weight.shape
    for p in prange((features + PANEL - 1) // PANEL):
        panel = np.zeros((depth, PANEL), np.float32)
        first = p * PANEL
        for j in range(min(PANEL, features - first)):
            for k in range(depth):
                panel[k, j] = weight[first + j, k]
        if not resume:
            _start_panel(p, bias, out)
        _panel_product(x, panel, p, out, panel)


def pack(weight: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """Return a weight [features, depth] as [panels, depth, PANEL], zero-padded, of its dtype; in `out` if given."""
    features, depth = weight.shape
    whole = features // PANEL
    panels = weight.new_empty(-(-features // PANEL), depth, PANEL) if out is None else out
    panels[:whole] = weight[: whole * PANEL].view(whole, PANEL, depth).transpose(1, 2)
    if features % PANEL:
        panels[whole] = F.pad(weight[whole * PANEL :].t(), (0, PANEL - features % PANEL))
    return panels


def packed_rows(packed: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Return rows of the weight that `pack` was given, e.g. for a tied embedding."""
    return packed[rows // PANEL, :, rows % PANEL]


def _start(bias: torch.Tensor | None) -> np.ndarray:
    return _NO_BIAS if bias is None else storage(bias.float())


def linear_packed(
    x: torch.Tensor,
    weights: list[tuple[np.ndarray, int, torch.Tensor | None]],
    dtype: torch.dtype = torch.float32,
) -> list[torch.Tensor]:
    """Return bias + x @ weight.T, [rows, features] in `dtype`, for each of up to three weights, in one launch.

    x [rows, depth]; weights: (`storage` of panels from `pack`, features, bias or None).
    """
    x = x.float().contiguous()
    outs = [x.new_empty(x.shape[0], features) for _, features, _ in weights]
    panels = [p for p, _, _ in weights]
    none = 3 - len(weights)
    _linear_packed(
        x.numpy(), *panels, *[panels[0][:0]] * none,
        *[_start(bias) for *_, bias in weights], *[_NO_BIAS] * none,
        *[out.numpy() for out in outs], *[_NO_OUT] * none,
    )  # fmt: skip
    return [out.to(dtype) for out in outs]


def linear_unpacked(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """Return bias + x @ weight.T, [rows, features] in `dtype`; weight [features, depth] of any strides."""
    x = x.float().contiguous()
    out = x.new_empty(x.shape[0], weight.shape[0])
    _linear_unpacked(x.numpy(), storage(weight.float()), _start(bias), False, out.numpy())
    return out.to(dtype)


def gradient_product(x: torch.Tensor, weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return x @ weight.T in `dtype`, for a backward pass."""
    return linear_unpacked(x, weight, None, dtype)


def linear_resume(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
    """Add x @ weight.T to `out`, in place, fp32: the chains go on from what it holds."""
    wide = x.float().contiguous()
    _linear_unpacked(wide.numpy(), storage(weight.float()), _NO_BIAS, True, out.numpy())
