"""Decoder layers that follow each other in one launch: the other files' rows and panels, with no Python between them.

What is row-wise runs on one thread where the rows are few: waking the others costs more. What a layer computes with is
in tables of addresses, made once: to hand over hundreds of arrays costs more than a layer.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from numba import carray, float32, prange

from ..backend import LayerParts
from ..layout import PagedLayout
from .attention import BLOCK, attend, place, write_token
from .elementwise import ACTIVATIONS, add_row, gated_products, narrow_row, norm_row, widen_row
from .experts import gated_experts
from .functions import route_row
from .jit import composed, inline, own_storage, region
from .linear import NO_LOW_RANK, LowRank, products, unpacked_product
from .simd import LANES, PANEL, narrow, pointer, widen

_ROWS = 512  # that go through all layers together: the scratch of more doesn't stay in cache
_SERIAL_ROWS = 4
_NO_FLOAT = float32(0.0)
_LINEAR = np.dtype([
    ("panels", "i8"), ("bias", "i8"), ("down", "i8"), ("up", "i8"),  # addresses
    ("count", "i8"), ("biases", "i8"), ("down_count", "i8"), ("up_count", "i8"),  # of panels, and of bias's elements
    ("depth", "i8"), ("features", "i8"), ("rank", "i8"), ("scale", "f8"),
])  # fmt: skip
_NO_LINEAR = (0,) * 12  # fields
_NORM = np.dtype([("weight", "i8"), ("width", "i8"), ("eps", "f8")])  # width 0: there is none
_LAYER = np.dtype([
    ("scale", "f8"), ("window", "i8"), ("activation", "i8"),
    ("router", "i8"), ("gate_up", "i8"), ("down", "i8"),  # addresses
    ("experts", "i8"), ("gate_up_panels", "i8"), ("down_panels", "i8"), ("inner", "i8"), ("normalises", "i8"),
])  # fmt: skip
_NO_EXPERTS = (0,) * 8  # fields


@inline
def _weight(linear, like):
    """Return a linear as `products` takes it."""
    return (
        carray(pointer(linear.panels, like), (linear.count, linear.depth, PANEL)),
        carray(pointer(linear.bias, like), (linear.biases,)),
        carray(pointer(linear.down, _NO_FLOAT), (linear.down_count, linear.depth, LANES)),
        carray(pointer(linear.up, _NO_FLOAT), (linear.up_count, linear.rank, PANEL)),
        linear.scale,
    )


@inline
def _norm_weight(norm, like):
    return carray(pointer(norm.weight, like), (norm.width,))


@inline
def _widen_rows(x, out):
    for i in range(x.shape[0]):
        widen_row(x[i], out[i])


@inline
def _narrow_rows(x, out):
    for i in range(x.shape[0]):
        narrow_row(x[i], out[i])


@inline
def _place_share(q, k, v, q_norm, q_eps, k_norm, k_eps, cos, sin, slot_mapping, k_cache, v_cache, turned):
    """Write keys, normed and turned, and values to the cache, and queries, treated alike, to fp32 `turned`.

    q, k, v: the products, fp32 [T, heads * D].
    """
    dim = cos.shape[1]
    heads, kv_heads = turned.shape[1], k_cache.shape[1]
    queries = np.empty((2, heads, dim), cos.dtype)
    keys = np.empty((2, kv_heads, dim), cos.dtype)
    values = np.empty((kv_heads, dim), cos.dtype)
    given_queries, given_keys = queries[0].reshape(heads * dim), keys[0].reshape(kv_heads * dim)
    placed, given_values = queries[1].reshape(heads * dim), values.reshape(kv_heads * dim)
    out = turned.reshape(turned.shape[0], heads * dim)
    for t in range(q.shape[0]):
        narrow_row(q[t], given_queries)
        narrow_row(k[t], given_keys)
        narrow_row(v[t], given_values)
        place(queries[0], q_norm, q_eps, cos[t], sin[t], queries[1])
        place(keys[0], k_norm, k_eps, cos[t], sin[t], keys[1])
        write_token(keys[1], values, slot_mapping[t], k_cache, v_cache)
        widen_row(placed, out[t])


@inline
def _round_rows(x, like):
    for i in range(x.shape[0]):
        for j in range(x.shape[1]):
            x[i, j] = widen(narrow(x[i, j], like))


@inline
def _share(rows, part, parts):
    """Return the rows of one of several about equal parts."""
    return slice(rows * part // parts, rows * (part + 1) // parts)


@inline
def _add_share(x, update, weight, eps, total, normed, wide):
    """Round `update` fp32 and add it to x; norm the sums, where there is a norm, and write them to fp32 `wide`, too."""
    rounded = np.empty(x.shape, x.dtype)
    _narrow_rows(update, rounded)
    for i in range(x.shape[0]):
        add_row(x[i], rounded[i], total[i])
        if weight.size:
            norm_row(total[i], weight, eps, normed[i])
            widen_row(normed[i], wide[i])


@inline
def _gate_share(gate, up, kind, like, out):
    """Write activation(gate) * up to fp32 `out`, all three rounded to the dtype of the array `like`."""
    stored = np.empty((3, gate.shape[1]), like.dtype)
    for i in range(gate.shape[0]):
        gated_products(gate[i], up[i], kind, stored, out[i])


@inline
def _route_share(logits, normalises, ids, weights):
    for i in range(logits.shape[0]):
        route_row(logits[i], normalises, ids[i], weights[i])


@region
def _place_rows(parts, q, k, v, q_norm, q_eps, k_norm, k_eps, cos, sin, slot_mapping, k_cache, v_cache, turned):
    if parts == 1:
        _place_share(q, k, v, q_norm, q_eps, k_norm, k_eps, cos, sin, slot_mapping, k_cache, v_cache, turned)
    else:
        for part in prange(parts):
            at = _share(q.shape[0], part, parts)
            _place_share(
                q[at], k[at], v[at], q_norm, q_eps, k_norm, k_eps, cos[at], sin[at], slot_mapping[at],
                k_cache, v_cache, turned[at],
            )  # fmt: skip


@region
def _add_rows(parts, x, update, weight, eps, total, normed, wide):
    if parts == 1:
        _add_share(x, update, weight, eps, total, normed, wide)
    else:
        for part in prange(parts):
            at = _share(x.shape[0], part, parts)
            _add_share(x[at], update[at], weight, eps, total[at], normed[at], wide[at])


@region
def _gate_rows(parts, gate, up, kind, like, out):
    if parts == 1:
        _gate_share(gate, up, kind, like, out)
    else:
        for part in prange(parts):
            at = _share(gate.shape[0], part, parts)
            _gate_share(gate[at], up[at], kind, like, out[at])


@region
def _route_rows(parts, logits, normalises, ids, weights):
    if parts == 1:
        _route_share(logits, normalises, ids, weights)
    else:
        for part in prange(parts):
            at = _share(logits.shape[0], part, parts)
            _route_share(logits[at], normalises, ids[at], weights[at])


@inline
def _mix(parts, layer, x, wide, programs, ids, out):
    """Write the sums of a layer's experts for the rows `wide` to fp32 `out`, and who they are to `ids` [rows, k]."""
    rows, hidden = wide.shape
    like = x[0, 0]
    router = carray(pointer(layer.router, like), (layer.experts, hidden))
    gate_up = carray(pointer(layer.gate_up, like), (layer.experts, layer.gate_up_panels, hidden, PANEL))
    down = carray(pointer(layer.down, like), (layer.experts, layer.down_panels, layer.inner, PANEL))
    logits, weights = np.empty((rows, layer.experts), np.float32), np.empty(ids.shape, np.float32)
    chosen = np.empty(ids.shape, np.int64)
    unpacked_product(wide, router, wide[0, :0], logits)
    _route_rows(parts, logits, layer.normalises != 0, chosen, weights)
    flat = weights.reshape(weights.size)
    gated_experts(wide, x, gate_up, down, layer.inner, chosen, flat, layer.activation, programs, out)
    for i in range(rows):
        for j in range(ids.shape[1]):
            ids[i, j] = chosen[i, j]


@inline
def _decoder_layer(
    linears, norms, layer, cache, value_width, x, wide, cos, sin, slot_mapping, items, positions, block_tables,
    block_table_starts, programs, number, ids, total, out,
):  # fmt: skip
    """Compute a layer of x, whose norm is fp32 `wide`, to `total`, and its following norm to `out` and to `wide`.

    ids: [rows, layers, k], where the layer, of this number, notes its experts; None where no layer has any.
    """
    rows, hidden, dim = x.shape[0], x.shape[1], cos.shape[1]
    like = x[0, 0]
    q, k, v, o, gate, up, down = linears[0], linears[1], linears[2], linears[3], linears[4], linears[5], linears[6]
    middle, following, of_q, of_k = norms[0], norms[1], norms[2], norms[3]
    heads, kv_heads = q.features // dim, k.features // dim
    k_cache = carray(pointer(cache[0], like), (cache[2], kv_heads, dim, BLOCK))
    v_cache = carray(pointer(cache[1], like), (cache[2], kv_heads, BLOCK, value_width))
    no_rank = np.empty((0, 0, LANES), np.float32), np.empty((0, 0, PANEL), np.float32), 0.0
    no_weight = np.empty((0, 0, PANEL), x.dtype), np.empty(0, x.dtype), no_rank[0], no_rank[1], no_rank[2]
    nowhere = np.empty((0, 0), np.float32)
    q_out, k_out = np.empty((rows, q.features), np.float32), np.empty((rows, k.features), np.float32)
    v_out = np.empty((rows, v.features), np.float32)
    turned, attended = np.empty((rows, heads, dim), np.float32), np.empty((rows, heads, dim), np.float32)
    flat, lse = attended.reshape(rows, heads * dim), np.empty((rows, heads), np.float32)
    update = np.empty((rows, hidden), np.float32)
    gate_out, up_out = np.empty((rows, gate.features), np.float32), np.empty((rows, up.features), np.float32)
    parts = programs if rows > _SERIAL_ROWS else 1

    products(wide, like, _weight(q, like), _weight(k, like), _weight(v, like), q_out, k_out, v_out)
    _place_rows(
        parts, q_out, k_out, v_out, _norm_weight(of_q, like), of_q.eps, _norm_weight(of_k, like), of_k.eps,
        cos, sin, slot_mapping, k_cache, v_cache, turned,
    )  # fmt: skip
    attend(
        turned, k_cache, v_cache, items, positions, block_tables, block_table_starts, layer.scale, layer.window,
        attended, lse, programs,
    )  # fmt: skip
    _round_rows(flat, like)
    products(flat, like, _weight(o, like), no_weight, no_weight, update, nowhere, nowhere)
    _add_rows(parts, x, update, _norm_weight(middle, like), middle.eps, total, out, wide)
    if gate.count:
        products(wide, like, _weight(gate, like), _weight(up, like), no_weight, gate_out, up_out, nowhere)
        _gate_rows(parts, gate_out, up_out, layer.activation, x, gate_out)
        products(gate_out, like, _weight(down, like), no_weight, no_weight, update, nowhere, nowhere)
    elif layer.experts:
        if ids is not None:  # else numba leaves it out: it takes long to compile
            _mix(parts, layer, x, wide, programs, ids[:, number], update)
    else:
        return
    _add_rows(parts, total, update, _norm_weight(following, like), following.eps, total, out, wide)


@composed
def _decoder_layers(
    x, normed, linears, norms, layers, caches, value_width, cos, sin, slot_mapping, items, positions, block_tables,
    block_table_starts, programs, ids, total, out,
):  # fmt: skip
    wide = np.empty(x.shape, np.float32)
    _widen_rows(normed, wide)
    for i in range(layers.size):
        _decoder_layer(
            linears[i], norms[i], layers[i], caches[i], value_width, total if i else x, wide, cos, sin, slot_mapping,
            items, positions, block_tables, block_table_starts, programs, i, ids, total, out,
        )  # fmt: skip


class DecoderLayers:
    """Decoder layers that follow each other, in one launch; see `backend.DecoderLayers`."""

    def __init__(self, layers: Sequence[LayerParts]):
        entries = [[_linear_entry(*each) for each in parts.linears] for parts in layers]
        self._linears = np.array([[*of_layer, *[_NO_LINEAR] * (7 - len(of_layer))] for of_layer in entries], _LINEAR)
        self._norms = np.array([[_norm_entry(norm) for norm in parts.norms] for parts in layers], _NORM)
        self._layers = np.array([_layer_entry(parts) for parts in layers], _LAYER)
        self._k = max((parts.experts.k for parts in layers if parts.experts is not None), default=0)
        self._ends_in_norm = layers[-1].is_half or layers[-1].norms[1] is not None

    def __call__(
        self,
        x: torch.Tensor,
        normed: torch.Tensor,
        tables: tuple[torch.Tensor, torch.Tensor],
        caches: Sequence[tuple[torch.Tensor, torch.Tensor]],
        layout: PagedLayout,
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """Return the last layer's output, its following norm's and the experts chosen; see `backend.DecoderLayers`."""
        total, out = torch.empty_like(x), torch.empty_like(x)
        ids = torch.zeros(len(x), len(self._layers), self._k, dtype=torch.int64) if self._k else None
        places = np.array([(k.data_ptr(), v.data_ptr(), len(k)) for k, v in caches])
        arrays = [*(own_storage(t.contiguous()) for t in (x, normed, *tables)), own_storage(total), own_storage(out)]
        for at, items in _parts(layout.items, len(x)):
            given, of_norm, cos, sin, *results = (rows[at] for rows in arrays)
            _decoder_layers(
                given, of_norm, self._linears, self._norms, self._layers, places, caches[0][1].shape[-1], cos, sin,
                layout.slot_mapping[at], items, layout.positions[at], layout.block_tables, layout.block_table_starts,
                torch.get_num_threads(), None if ids is None else ids[at].numpy(), *results,
            )  # fmt: skip
        return total, out if self._ends_in_norm else None, ids


def _parts(items: np.ndarray, rows: int) -> Iterator[tuple[slice, np.ndarray]]:
    """Return about _ROWS rows at a time, and their items: the keys that a row sees are of its part or an earlier one's.

    What shares a pass over the keys stays together.
    """
    if rows <= _ROWS:
        yield slice(rows), items
        return
    starts = items[items[:, 3] > 0, 0]
    firsts = starts[np.searchsorted(starts, np.arange(0, rows, _ROWS), "right") - 1]
    for first, end in itertools.pairwise([*firsts, rows]):
        own = items[(items[:, 0] >= first) & (items[:, 0] < end)]
        own[:, 0] -= first
        yield slice(first, end), own


def _address(array: np.ndarray) -> int:
    return array.__array_interface__["data"][0]


def _linear_entry(panels: np.ndarray, features: int, bias: np.ndarray | None, low_rank: LowRank | None) -> tuple:
    down, up, scale = low_rank or NO_LOW_RANK
    addresses = _address(panels), 0 if bias is None else _address(bias), _address(down), _address(up)
    counts = len(panels), 0 if bias is None else len(bias), len(down), len(up)
    return *addresses, *counts, panels.shape[1], features, up.shape[1], scale


def _layer_entry(parts: LayerParts) -> tuple:
    kind = parts.scale, parts.window, ACTIVATIONS.index(parts.activation or "silu")
    if parts.experts is None:
        return *kind, *_NO_EXPERTS
    router, _, normalises, gate_up, down, inner = parts.experts
    addresses = _address(router), _address(gate_up), _address(down)
    return *kind, *addresses, len(router), gate_up.shape[1], down.shape[1], inner, normalises


def _norm_entry(norm: tuple[np.ndarray, float] | None) -> tuple:
    return (0, 0, 0.0) if norm is None else (_address(norm[0]), len(norm[0]), norm[1])
