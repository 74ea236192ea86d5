"""The attention function that transformers calls: paged for rollout, packed for training, the same kernel for both."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AttentionInterface

from ..kernels import ops

NAME = "samebits"


def _layout_of(query: torch.Tensor, position_ids: torch.Tensor | None, group: int) -> ops.PagedLayout:
    """The layout of a plain call without one: a sequence starts at each row and wherever positions start again."""
    batch, tokens = query.shape[0], query.shape[2]
    if position_ids is None:
        return ops.packed_layout([tokens] * batch, group, query.device)
    positions = position_ids.expand(batch, tokens).reshape(-1).cpu()
    starts = torch.cat((positions.new_tensor([0]), (positions.diff() != 1).nonzero().flatten() + 1))
    rows = torch.arange(0, batch * tokens, tokens)
    starts = torch.unique(torch.cat((starts, rows)))
    if (positions[starts] != 0).any():
        raise ValueError("position_ids must run 0, 1, 2 ... in each sequence; for left-padded rows use token_logprobs")
    ends = torch.cat((starts[1:], starts.new_tensor([batch * tokens])))
    return ops.packed_layout((ends - starts).tolist(), group, query.device)


def attention_forward(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    position_ids: torch.Tensor | None = None,
    layout: ops.PagedLayout | None = None,
    kv_caches: list[tuple[torch.Tensor, torch.Tensor]] | None = None,
    **kwargs,
) -> tuple[torch.Tensor, None]:
    """Attend with query [B, heads, T, D] to key and value [B, kv_heads, T, D]; return ([B, T, heads, D], None).

    With `kv_caches` (one pair per layer) keys and values go to the cache first; `layout` then says where everything is.
    """
    if dropout:
        raise NotImplementedError("attention dropout is not supported: the rollout has none")
    if key.shape[2] != query.shape[2]:
        raise NotImplementedError("an exact model has no HF cache (use_cache=False); generate with samebits.LLM")
    batch, heads, tokens, dim = query.shape
    if layout is None:
        layout = _layout_of(query, position_ids, heads // key.shape[1])
    q, k, v = (t.transpose(1, 2).reshape(batch * tokens, -1, dim) for t in (query, key, value))
    window = sliding_window or 0
    if kv_caches is not None:
        out, _ = ops.paged_attention(q, k, v, kv_caches[module.layer_idx], layout, scaling, window)
        out = out.to(q.dtype)
    else:
        out = ops.attention(q, k, v, layout, scaling, window)
    return out.view(batch, tokens, heads, dim), None


AttentionInterface.register(NAME, attention_forward)
