"""A decoder layer in one launch: the other files' rows and panels, with no Python between them.

What is row-wise runs on one thread where the rows are few: waking the others costs more.
"""

from __future__ import annotations

import numpy as np
import torch
from numba import prange

from ..backend import LayerParts
from ..layout import PagedLayout
from .attention import attend, write_token
from .elementwise import ACTIVATIONS, add_row, gated_products, narrow_row, norm_row, turn, widen_row
from .jit import inline, own_storage, parallel
from .linear import packed_product, packed_products
from .simd import narrow, widen

ROWS = 256  # at most: the scratch of more is better allocated by torch
_SERIAL_ROWS = 16
_NO_BIAS = np.empty(0, np.float32)


@inline
def _widen_rows(x, out):
    for i in range(x.shape[0]):
        widen_row(x[i], out[i])


@inline
def _narrow_rows(x, out):
    for i in range(x.shape[0]):
        narrow_row(x[i], out[i])


@inline
def _rotate_and_write(q, k, v, cos, sin, slot_mapping, k_cache, v_cache, turned):
    """Write keys, turned, and values to the cache, and turned queries to fp32 `turned`; q, k, v: the products, fp32."""
    dim = cos.shape[1]
    heads, kv_heads = turned.shape[1], k_cache.shape[1]
    queries = np.empty((2, heads, dim), cos.dtype)
    keys = np.empty((2, kv_heads, dim), cos.dtype)
    values = np.empty((kv_heads, dim), cos.dtype)
    for t in range(q.shape[0]):
        _narrow_rows(q[t].reshape(heads, dim), queries[0])
        _narrow_rows(k[t].reshape(kv_heads, dim), keys[0])
        _narrow_rows(v[t].reshape(kv_heads, dim), values)
        turn(queries[0], cos[t], sin[t], queries[1])
        turn(keys[0], cos[t], sin[t], keys[1])
        write_token(keys[1], values, slot_mapping[t], k_cache, v_cache)
        _widen_rows(queries[1], turned[t])


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
def _add_rows(x, update, weight, eps, total, normed):
    """Round `update` fp32 and add it to x; norm the sums, where there is a norm."""
    rounded = np.empty(x.shape, x.dtype)
    _narrow_rows(update, rounded)
    for i in range(x.shape[0]):
        add_row(x[i], rounded[i], total[i])
        if weight.size:
            norm_row(total[i], weight, eps, normed[i])


@inline
def _gate_rows(gate, up, kind, like, out):
    """Write activation(gate) * up to fp32 `out`, all three rounded to the dtype of the array `like`."""
    stored = np.empty((3, gate.shape[1]), like.dtype)
    for i in range(gate.shape[0]):
        gated_products(gate[i], up[i], kind, stored, out[i])


@parallel
def _decoder_layer(
    x, normed, q, k, v, o, gate, up, down, bias_q, bias_k, bias_v, bias_o, bias_gate, bias_up, bias_down,
    middle, middle_eps, following, following_eps, kind, cos, sin, k_cache, v_cache,
    slot_mapping, items, positions, block_tables, block_table_starts, scale, window, programs, total, out,
):  # fmt: skip
    rows, hidden = x.shape
    dim, width, keys = cos.shape[1], down.shape[1], k_cache.shape[1] * cos.shape[1]
    heads = o.shape[1] // dim
    wide = np.empty((rows, hidden), np.float32)
    q_out = np.empty((rows, heads * dim), np.float32)
    k_out, v_out = np.empty((rows, keys), np.float32), np.empty((rows, keys), np.float32)
    turned, attended = np.empty((rows, heads, dim), np.float32), np.empty((rows, heads, dim), np.float32)
    lse = np.empty((rows, heads), np.float32)
    flat = attended.reshape(rows, heads * dim)
    parts = programs if rows > _SERIAL_ROWS else 1
    update = np.empty((rows, hidden), np.float32)
    gate_out, up_out = np.empty((rows, width), np.float32), np.empty((rows, width), np.float32)

    _widen_rows(normed, wide)
    for p in prange(q.shape[0] + k.shape[0] + v.shape[0]):
        packed_products(wide, p, q, k, v, bias_q, bias_k, bias_v, q_out, k_out, v_out)
    if parts == 1:
        _rotate_and_write(q_out, k_out, v_out, cos, sin, slot_mapping, k_cache, v_cache, turned)
    else:
        for part in prange(parts):
            at = _share(rows, part, parts)
            _rotate_and_write(
                q_out[at], k_out[at], v_out[at], cos[at], sin[at], slot_mapping[at], k_cache, v_cache, turned[at]
            )
    for program in prange(programs):
        attend(
            program, programs, turned, k_cache, v_cache, items, positions, block_tables, block_table_starts,
            scale, window, attended, lse,
        )  # fmt: skip
    _round_rows(flat, x[0, 0])
    for p in prange(o.shape[0]):
        packed_product(flat, o, p, bias_o, update)
    if parts == 1:
        _add_rows(x, update, middle, middle_eps, total, out)
        _widen_rows(out, wide)
    else:
        for part in prange(parts):
            at = _share(rows, part, parts)
            _add_rows(x[at], update[at], middle, middle_eps, total[at], out[at])
            _widen_rows(out[at], wide[at])
    for p in prange(gate.shape[0] + up.shape[0]):
        packed_products(wide, p, gate, up, up[:0], bias_gate, bias_up, bias_up, gate_out, up_out, up_out)
    if parts == 1:
        _gate_rows(gate_out, up_out, kind, x, gate_out)
    else:
        for part in prange(parts):
            at = _share(rows, part, parts)
            _gate_rows(gate_out[at], up_out[at], kind, x, gate_out[at])
    for p in prange(down.shape[0]):
        packed_product(gate_out, down, p, bias_down, update)
    if parts == 1:
        _add_rows(total, update, following, following_eps, total, out)
    else:
        for part in prange(parts):
            at = _share(rows, part, parts)
            _add_rows(total[at], update[at], following, following_eps, total[at], out[at])


def decoder_layer(
    x: torch.Tensor,
    normed: torch.Tensor,
    weights: list[np.ndarray],
    parts: LayerParts,
    tables: tuple[torch.Tensor, torch.Tensor],
    cache: tuple[torch.Tensor, torch.Tensor],
    layout: PagedLayout,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the layer's output and its following norm, [rows, hidden] in x's dtype; see `DecoderLayer`."""
    total, out = torch.empty_like(x), torch.empty_like(x)
    biases = [_NO_BIAS if bias is None else bias for bias in parts.biases]
    (middle, middle_eps), following = parts.middle_norm, parts.following_norm
    last, last_eps = (middle[:0], 0.0) if following is None else following
    where = layout.slot_mapping, layout.items, layout.positions, layout.block_tables, layout.block_table_starts
    _decoder_layer(
        own_storage(x.contiguous()), own_storage(normed.contiguous()), *weights, *biases,
        middle, middle_eps, last, last_eps, ACTIVATIONS.index(parts.activation),
        *[own_storage(t.contiguous()) for t in (*tables, *cache)], *where,
        parts.scale, parts.window, torch.get_num_threads(), own_storage(total), own_storage(out),
    )  # fmt: skip
    return total, None if following is None else out
