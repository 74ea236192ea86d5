"""A layer's heads between its products and attention, in one launch: norms, rotary embedding, the cache's new rows.

Each step rounds to the storage dtype, as launches of their own would.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..backend import HeadNorms
from ..layout import PagedLayout
from .attention import BLOCK, cache_row, instead, is_strange, rows_dense
from .elementwise import norm_scale, several_rows
from .launch import aligned, await_inputs, launch


@triton.jit
def _halves(row, half, i, mask):
    """Load both halves of heads, in fp32."""
    return (
        tl.load(row + i, mask=mask, other=0.0).to(tl.float32),
        tl.load(row + half + i, mask=mask, other=0.0).to(tl.float32),
    )


@triton.jit
def _turned(x, partner, cos, sin, kind: tl.constexpr):
    """Return x * cos + partner * sin, each step rounded."""
    return (x * cos).to(kind).to(tl.float32) + (partner * sin).to(kind).to(tl.float32)


@triton.jit(do_not_specialize_on_alignment=["slot_mapping"])
def _place_heads(
    q, k, v, q_weight, k_weight, cos, sin, slot_mapping, q_out, k_cache, v_cache,
    stride_q, stride_k, stride_v, heads, kv_heads, width, q_eps, k_eps,
    NORM: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Norm and turn some heads of one token, queries' or keys'; keys go to their slot with their values.

    A warp has heads of its own: a sum of squares is the one that a norm's launch adds up. The pairs that are turned are
    half a head apart.
    """
    await_inputs()
    token, number, of_q = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(1) < tl.cdiv(heads, ROWS)
    head = tl.where(of_q, number, number - tl.cdiv(heads, ROWS)) * ROWS + tl.arange(0, ROWS)
    kind: tl.constexpr = q.dtype.element_ty
    half, i, j = width // 2, tl.arange(0, BLOCK // 2)[None, :], tl.arange(0, BLOCK)[None, :]
    present = (head < tl.where(of_q, heads, kv_heads))[:, None]
    mask = present & (i < half)
    row = tl.where(of_q, q + token * stride_q, k + token * stride_k) + (head * width)[:, None]
    a, b = _halves(row, half, i, mask)
    if NORM:
        x = tl.load(row + j, mask=present & (j < width), other=0.0).to(tl.float32)
        scale = norm_scale(x, width, tl.where(of_q, q_eps, k_eps))[:, None]
        weight_a, weight_b = _halves(tl.where(of_q, q_weight, k_weight), half, i, i < half)
        a = (weight_a * (a * scale)).to(kind).to(tl.float32)
        b = (weight_b * (b * scale)).to(kind).to(tl.float32)
    cos_a, cos_b = _halves(cos + token * width, half, i, i < half)
    sin_a, sin_b = _halves(sin + token * width, half, i, i < half)
    first, second = _turned(a, -b, cos_a, sin_a, kind).to(kind), _turned(b, a, cos_b, sin_b, kind).to(kind)
    if of_q:
        out = q_out + token * heads * width + (head * width)[:, None] + i
        tl.store(out, first, mask=mask)
        tl.store(out + half, second, mask=mask)
    else:
        slot = tl.load(slot_mapping + token).to(tl.int64)
        mask &= slot >= 0  # padding has no slot
        place = cache_row(slot, head, kv_heads, KEYS)[:, None] * width + i
        values = v + token * stride_v + (head * width)[:, None] + i
        value_a, value_b = tl.load(values, mask=mask, other=0.0), tl.load(values + half, mask=mask, other=0.0)
        strange = (tl.max(is_strange(value_a) | is_strange(value_b), 1) > 0)[:, None]  # see attention.py
        tl.store(k_cache + place, instead(strange, float("nan"), first), mask=mask)
        tl.store(k_cache + place + half, instead(strange, float("nan"), second), mask=mask)
        tl.store(v_cache + place, instead(strange, 0.0, value_a), mask=mask)
        tl.store(v_cache + place + half, instead(strange, 0.0, value_b), mask=mask)


def place_heads(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    norms: HeadNorms | None,
    tables: tuple[torch.Tensor, torch.Tensor],
    layout: PagedLayout,
    cache: tuple[torch.Tensor, torch.Tensor],
) -> torch.Tensor:
    """Return q [T, heads, D], normed and turned; write k, treated alike, and v to the cache. See `Backend`."""
    tokens, heads, dim = q.shape
    q, k, v = (aligned(t) if norms else rows_dense(t) for t in (q, k, v))
    out, kv_heads = q.new_empty(q.shape), k.shape[1]
    (q_weight, q_eps), (k_weight, k_eps) = norms or ((out, 0.0), (out, 0.0))
    shape = several_rows(dim)
    launch(
        _place_heads, (tokens, sum(-(-count // shape["ROWS"]) for count in (heads, kv_heads))),
        q, k, v, aligned(q_weight), aligned(k_weight), *(t.contiguous() for t in tables),
        layout.on(q.device).slot_mapping, out, *cache,
        q.stride(0), k.stride(0), v.stride(0), heads, kv_heads, dim, q_eps, k_eps,
        NORM=norms is not None, KEYS=BLOCK, **shape,
    )  # fmt: skip
    return out
