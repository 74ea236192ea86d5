"""A layer's heads between its products and attention, in one launch: norms, rotary embedding, the cache's new rows.

Each step rounds to the storage dtype, as launches of their own would.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..backend import HeadNorms
from ..layout import PagedLayout
from .attention import BLOCK, cache_row, rows_dense
from .elementwise import norm_scale, one_row
from .launch import aligned, await_inputs, launch


@triton.jit(do_not_specialize_on_alignment=["slot_mapping"])
def _place_heads(
    q, k, v, q_weight, k_weight, cos, sin, slot_mapping, q_out, k_cache, v_cache,
    stride_q, stride_k, stride_v, heads, kv_heads, width, q_eps, k_eps,
    NORM: tl.constexpr, BLOCK: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Norm and turn one head of one token; a key goes to its slot with its value.

    The pairs that are turned are half a head apart: each number loads its partner, too, and norms it.
    """
    await_inputs()
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    source, weight, eps = q + token * stride_q + head * width, q_weight, q_eps
    if head >= heads:
        source, weight, eps = k + token * stride_k + (head - heads) * width, k_weight, k_eps
    kind = q.dtype.element_ty
    j = tl.arange(0, BLOCK)
    mask, first = j < width, j < width // 2
    partner = tl.where(first, j + width // 2, j - width // 2)
    x = tl.load(source + j, mask=mask, other=0.0).to(tl.float32)
    other = tl.load(source + partner, mask=mask, other=0.0).to(tl.float32)
    if NORM:
        scale = norm_scale(x, width, eps)
        x = tl.load(weight + j, mask=mask, other=0.0).to(tl.float32) * (x * scale)
        other = tl.load(weight + partner, mask=mask, other=0.0).to(tl.float32) * (other * scale)
        x, other = x.to(kind).to(tl.float32), other.to(kind).to(tl.float32)
    other = tl.where(first, -other, other)
    by_cos = x * tl.load(cos + token * width + j, mask=mask, other=0.0).to(tl.float32)
    by_sin = other * tl.load(sin + token * width + j, mask=mask, other=0.0).to(tl.float32)
    turned = (by_cos.to(kind).to(tl.float32) + by_sin.to(kind).to(tl.float32)).to(kind)
    if head < heads:
        tl.store(q_out + (token * heads + head) * width + j, turned, mask=mask)
    else:
        slot = tl.load(slot_mapping + token).to(tl.int64)
        mask = j < tl.where(slot >= 0, width, 0)  # padding has no slot
        place = cache_row(slot, head - heads, kv_heads, KEYS) * width + j
        value = tl.load(v + token * stride_v + (head - heads) * width + j, mask=mask)
        tl.store(k_cache + place, turned, mask=mask)
        tl.store(v_cache + place, value, mask=mask)


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
    launch(
        _place_heads, (tokens, heads + kv_heads),
        q, k, v, aligned(q_weight), aligned(k_weight), *(t.contiguous() for t in tables),
        layout.on(q.device).slot_mapping, out, *cache,
        q.stride(0), k.stride(0), v.stride(0), heads, kv_heads, dim, q_eps, k_eps,
        NORM=norms is not None, KEYS=BLOCK, **one_row(dim),
    )  # fmt: skip
    return out
