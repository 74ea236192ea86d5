"""The CPU matrix product: out = bias + x @ weight.T, one ascending chain of fused multiply-adds per output element.

Weights are walked in panels of PANEL output features, stored [depth, PANEL]. Rollout packs them once (`pack`);
training packs a panel at a time into a scratch that stays in cache. Both feed the same tiles: the same bits.
"""

import numpy as np
import torch
from numba import prange

from .jit import inline, parallel, storage
from .simd import PANEL, matmul_panel


@inline
def _panel_product(x, panel, panel_index, out):
    rows, depth = x.shape
    features = out.shape[1]
    first = panel_index * PANEL
    if features - first >= PANEL:
        matmul_panel(x.ctypes.data, depth, panel, 0, PANEL, depth, out.ctypes.data + 4 * first, features, rows)
    else:  # the ragged last panel goes through a scratch of full width
        scratch = np.zeros((rows, PANEL), np.float32)
        scratch[:, : features - first] = out[:, first:]
        matmul_panel(x.ctypes.data, depth, panel, 0, PANEL, depth, scratch.ctypes.data, PANEL, rows)
        out[:, first:] = scratch[:, : features - first]


@parallel
def _linear_packed(x, panels, out):
    for p in prange(panels.shape[0]):
        _panel_product(x, panels[p], p, out)


@parallel
def _linear_unpacked(x, weight, out):
    features, depth = weight.shape
    for p in prange((features + PANEL - 1) // PANEL):
        panel = np.zeros((depth, PANEL), np.float32)
        first = p * PANEL
        for j in range(min(PANEL, features - first)):
            for k in range(depth):
                panel[k, j] = weight[first + j, k]
        _panel_product(x, panel, p, out)


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
    _linear_packed(x.numpy(), storage(panels), out.numpy())
    return out


def linear_unpacked(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """out [rows, features] fp32 += x [rows, depth] fp32 @ weight.T; weight fp32 [features, depth] with any strides."""
    _linear_unpacked(x.numpy(), weight.numpy(), out.numpy())
    return out
