"""Decoder layers of the usual kind, kernel after kernel: their modules' calls can take longer than the kernels."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch

from ..backend import LayerParts
from ..dispatch import outside_modes
from ..layout import PagedLayout
from .attention import attention
from .elementwise import add_rms_norm, gated_activation
from .heads import place_heads
from .linear import gated_packed, linear_packed
from .work import small_lengths


class DecoderLayers:
    """Decoder layers that follow each other; see `backend.DecoderLayers`."""

    def __init__(self, layers: Sequence[LayerParts]):
        # weights may go while these layers stay: whoever calls them has seen that they are there
        self._layers = [
            parts._replace(linears=[(weakref.ref(panels), *rest) for panels, *rest in parts.linears])
            for parts in layers
        ]

    @outside_modes
    def __call__(
        self,
        x: torch.Tensor,
        normed: torch.Tensor,
        tables: tuple[torch.Tensor, torch.Tensor],
        caches: Sequence[tuple[torch.Tensor, torch.Tensor]],
        layout: PagedLayout,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the last layer's output and its following norm's, if there is one, [rows, hidden] in x's dtype."""
        after: torch.Tensor | None = normed
        for parts, cache in zip(self._layers, caches, strict=True):
            middle, following, *_ = parts.norms
            assert middle is not None and after is not None, "a layer has a norm before each of its halves"
            x, normed = add_rms_norm(x, _attended(parts, after, tables, cache, layout), *middle)
            if parts.is_half:
                after = normed
                continue
            update, after = _activated(parts, normed), None
            if following is None:
                x = x + update
            else:
                x, after = add_rms_norm(x, update, *following)
        return x, after


def _attended(
    parts: LayerParts,
    normed: torch.Tensor,
    tables: tuple[torch.Tensor, torch.Tensor],
    cache: tuple[torch.Tensor, torch.Tensor],
    layout: PagedLayout,
) -> torch.Tensor:
    *projections, out = parts.linears[:4]
    _, _, of_q, of_k = parts.norms
    rows, dim = tables[0].shape
    q, k, v = (t.view(rows, -1, dim) for t in _linears(normed, projections))
    small = small_lengths(layout.lengths, q.shape[1] // k.shape[1])
    q = place_heads(q, k, v, None if of_q is None or of_k is None else (of_q, of_k), tables, layout, cache)
    del k, v
    at = layout.on(q.device)
    where = at.items, at.positions, at.block_tables, at.block_table_starts
    attended, _ = attention(
        q, *cache, *where, parts.scale, parts.window, small, layout.longest, layout.shared_items
    )  # fmt: skip
    return _linears(attended.view(rows, -1), [out])[0]


def _activated(parts: LayerParts, normed: torch.Tensor) -> torch.Tensor:
    *_, gate, up, down = parts.linears
    if gate[3] is None and up[3] is None:
        inner = gated_packed(normed, _weight(gate), _weight(up), parts.activation, normed.dtype)
    else:
        of_gate, of_up = _linears(normed, [gate, up])
        inner = gated_activation(of_gate, of_up, parts.activation)
    return _linears(inner, [down])[0]


def _weight(linear: tuple[Any, int, Any, Any]) -> tuple[torch.Tensor, int, torch.Tensor | None]:
    panels, features, bias, _ = linear
    return panels(), features, bias


def _linears(x: torch.Tensor, linears: list[tuple[Any, int, Any, Any]]) -> list[torch.Tensor]:
    return linear_packed(x, [_weight(each) for each in linears], x.dtype, [low_rank for *_, low_rank in linears])
