"""Decoder layers of the usual kind, kernel after kernel: their modules' calls can take longer than the kernels."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch

from ..backend import ExpertParts, LayerParts
from ..layout import PagedLayout
from ..modes import outside_modes
from .attention import attention
from .elementwise import add_rms_norm, gated_activation
from .experts import packed_experts
from .functions import route
from .heads import place_heads
from .linear import gated_packed, linear_packed
from .work import small_lengths


class DecoderLayers:
    """Decoder layers that follow each other; see `backend.DecoderLayers`."""

    def __init__(self, layers: Sequence[LayerParts]):
        self._layers = [_without_packed(parts) for parts in layers]
        self._k = max((parts.experts.k for parts in layers if parts.experts is not None), default=0)

    @outside_modes
    def __call__(
        self,
        x: torch.Tensor,
        normed: torch.Tensor,
        tables: tuple[torch.Tensor, torch.Tensor],
        caches: Sequence[tuple[torch.Tensor, torch.Tensor]],
        layout: PagedLayout,
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """Return the last layer's output, its following norm's and the experts chosen; see `backend.DecoderLayers`."""
        after: torch.Tensor | None = normed
        ids = torch.zeros(len(x), len(self._layers), self._k, dtype=torch.int64, device=x.device)
        for number, (parts, cache) in enumerate(zip(self._layers, caches, strict=True)):
            middle, following, *_ = parts.norms
            assert middle is not None and after is not None, "a layer has a norm before each of its halves"
            x, normed = add_rms_norm(x, _attended(parts, after, tables, cache, layout), *middle)
            if parts.is_half:
                after = normed
                continue
            if parts.experts is None:
                update = _activated(parts, normed)
            else:
                update, ids[:, number] = _mixed(parts.experts, normed, parts.activation)
            after = None
            if following is None:
                x = x + update
            else:
                x, after = add_rms_norm(x, update, *following)
        return x, after, ids if self._k else None


def _without_packed(parts: LayerParts) -> LayerParts:
    """Return the parts with weak references to packed weights: who calls the layers has seen that they are there."""
    linears = [(weakref.ref(panels), *rest) for panels, *rest in parts.linears]
    experts = parts.experts
    if experts is not None:
        experts = experts._replace(gate_up=weakref.ref(experts.gate_up), down=weakref.ref(experts.down))
    return parts._replace(linears=linears, experts=experts)


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


def _mixed(experts: ExpertParts, normed: torch.Tensor, activation: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each row's sum over its experts, and who they are, int64 [rows, k]."""
    router, k, normalises, gate_up, down, inner = experts
    (logits,) = linear_packed(normed, [(router, len(router), None)], torch.float32)
    ids, weights = route(logits, k, normalises)
    return packed_experts(normed, gate_up(), down(), inner, ids, weights, activation), ids


def _weight(linear: tuple[Any, int, Any, Any]) -> tuple[torch.Tensor, int, torch.Tensor | None]:
    panels, features, bias, _ = linear
    return panels(), features, bias


def _linears(x: torch.Tensor, linears: list[tuple[Any, int, Any, Any]]) -> list[torch.Tensor]:
    return linear_packed(x, [_weight(each) for each in linears], x.dtype, [low_rank for *_, low_rank in linears])
