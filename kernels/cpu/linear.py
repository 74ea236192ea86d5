"""The CPU matrix product: out = bias + x @ weight.T, one ascending chain of fused multiply-adds per output element.

Weights are walked in panels of PANEL output features, stored [depth, PANEL]. Rollout packs them once (`pack`);
training packs a panel at a time into a scratch that stays in cache. Both feed the same tiles: the same bits.
"""

import numpy as np
import torch
from numba import prange

from .jit import inline, parallel
from .simd import PANEL, PANEL_VECTORS, make_matmul

_matmul_f32 = make_matmul(PANEL_VECTORS, bf16=False)
_matmul_bf16 = make_matmul(PANEL_VECTORS, bf16=True)


def _make_panel_product(matmul):
    @inline
    def panel_product(x, panel, panel_index, out):
        rows, depth = x.shape
        features = out.shape[1]
        first = panel_index * PANEL
        address = x.ctypes.data
        if features - first >= PANEL:
            matmul(address, depth, panel, PANEL, depth, out.ctypes.data + 4 * first, features, rows)
        else:  # the ragged last panel goes through a scratch of full width
            width = features - first
            scratch = np.zeros((rows, PANEL), np.float32)
            scratch[:, :width] = out[:, first:]
            matmul(address, depth, panel, PANEL, depth, scratch.ctypes.data, PANEL, rows)
            out[:, first:] = scratch[:, :width]

    return panel_product


_product_f32 = _make_panel_product(_matmul_f32)
_product_bf16 = _make_panel_product(_matmul_bf16)


@parallel
def _linear_packed_f32(x, panels, out):
    for p in prange(panels.shape[0]):
        _product_f32(x, panels[p].ctypes.data, p, out)


@parallel
def _linear_packed_bf16(x, panels, out):
    for p in prange(panels.shape[0]):
        _product_bf16(x, panels[p].ctypes.data, p, out)


@parallel
def _linear_unpacked(x, weight, out):
    features, depth = weight.shape
    for p in prange((features + PANEL - 1) // PANEL):
        scratch = np.zeros((depth, PANEL), np.float32)
        first = p * PANEL
        for j in range(min(PANEL, features - first)):
            for k in range(depth):
                scratch[k, j] = weight[first + j, k]
        _product_f32(x, scratch.ctypes.data, p, out)


def pack(weight: torch.Tensor) -> torch.Tensor:
    """[features, depth] -> [panels, depth, PANEL], zero-padded, same dtype."""
    features, depth = weight.shape
    whole = features // PANEL
    panels = weight.new_zeros(-(-features // PANEL), depth, PANEL)
    panels[:whole] = weight[: whole * PANEL].view(whole, PANEL, depth).transpose(1, 2)
    if features % PANEL:
        panels[whole, :, : features % PANEL] = weight[whole * PANEL :].t()
    return panels


def packed_rows(panels: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Rows of the weight that `pack` was given, e.g. for a tied embedding."""
    return panels[rows // PANEL, :, rows % PANEL]


def start(bias: torch.Tensor | None, rows: int, features: int) -> torch.Tensor:
    """What the chains start from: the bias, or zero."""
    if bias is None:
        return torch.zeros(rows, features)
    return bias.float().expand(rows, features).contiguous()


def linear_packed(x: torch.Tensor, panels: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """out [rows, features] fp32 += x [rows, depth] fp32 @ weight.T, with `panels` from `pack` in fp32 or bf16."""
    if panels.dtype == torch.bfloat16:
        _linear_packed_bf16(x.numpy(), panels.view(torch.int16).numpy(), out.numpy())
    else:
        _linear_packed_f32(x.numpy(), panels.numpy(), out.numpy())
    return out


def linear_unpacked(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """out [rows, features] fp32 += x [rows, depth] fp32 @ weight.T; weight fp32 [features, depth] with any strides."""
    _linear_unpacked(x.numpy(), weight.numpy(), out.numpy())
    return out
