"""Decoder layers of the usual kind, kernel after kernel: their modules' calls can take longer than the kernels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..backend import LayerParts
from ..layout import PagedLayout
from .attention import attention
from .elementwise import add_rms_norm, gated_activation
from .heads import place_heads
from .linear import gated_packed, linear_packed
from .work import small_lengths

ROWS = 1 << 40  # any number


class DecoderLayers:
    """Decoder layers that follow each other; see `backend.DecoderLayers`."""

    def __init__(self, layers: Sequence[LayerParts]):
        self._layers = list(layers)

    def __call__(
        self,
        x: torch.Tensor,
        normed: torch.Tensor,
        tables: tuple[torch.Tensor, torch.Tensor],
        caches: Sequence[tuple[torch.Tensor, torch.Tensor]],
        layout: PagedLayout,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the last layer's output and its following norm's, if there is one, [rows, hidden] in x's dtype."""
        at, (rows, dim), last = layout.on(x.device), tables[0].shape, None
        small: list[int] | None = None
        for parts, cache in zip(self._layers, caches, strict=True):
            *projections, out, gate, up, down = parts.linears
            middle, following, of_q, of_k = parts.norms
            q, k, v = (t.view(rows, -1, dim) for t in _linears(normed, projections))
            if small is None:
                small = small_lengths(layout.lengths, q.shape[1] // k.shape[1])
            norms = None if of_q is None or of_k is None else (of_q, of_k)
            q = place_heads(q, k, v, norms, tables, layout, cache)
            attended, _ = attention(
                q, *cache, at.items, at.positions, at.block_tables, at.block_table_starts, parts.scale, parts.window,
                small, layout.longest, layout.shared_items,
            )  # fmt: skip
            update = _linears(attended.view(rows, -1), [out])[0]
            assert middle is not None, "a layer has a norm before its MLP"
            x, normed = add_rms_norm(x, update, *middle)
            update = _linears(_gated(normed, gate, up, parts.activation), [down])[0]
            if following is None:
                return x + update, None
            x, last = add_rms_norm(x, update, *following)
            normed = last
        return x, last


def _linears(x: torch.Tensor, linears: list[tuple[Any, int, Any, Any]]) -> list[torch.Tensor]:
    return linear_packed(x, [each[:3] for each in linears], x.dtype, [low_rank for *_, low_rank in linears])


def _gated(x: torch.Tensor, gate: tuple[Any, int, Any, Any], up: tuple[Any, int, Any, Any], name: str) -> torch.Tensor:
    if gate[3] is None and up[3] is None:
        return gated_packed(x, gate[:3], up[:3], name, x.dtype)
    of_gate, of_up = _linears(x, [gate, up])
    return gated_activation(of_gate, of_up, name)
