"""The attention function that transformers calls: paged for rollout, packed for training, the same kernel for both."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from transformers import AttentionInterface, AttentionMaskInterface

from ..kernels import ops

NAME = "samebits"  # for any model of transformers, whose rows are whole sequences or packed by their positions
PACKED = "samebits_packed"  # for models of ours, which bring a layout; transformers makes no mask for it
OBSERVED = "samebits_observed"  # the same, which notes at each attention module how it is called
_HARMLESS = frozenset({  # keywords that say nothing which the layout does not
    "position_ids", "position_embeddings", "cache_position", "use_cache", "layout", "kv_caches", "dropout",
    "sliding_window", "is_causal",
})  # fmt: skip


class AttentionCall(NamedTuple):
    """A model's call of attention. problems: what it asks for that samebits' attention has no meaning for."""

    scaling: float
    window: int
    kv_heads: int
    key_dim: int
    problems: tuple[str, ...]


def sequence_lengths(positions: torch.Tensor, rows: list[int]) -> list[int]:
    """Return the lengths of the sequences in rows of given lengths: one starts wherever positions start again.

    positions int64 [T], of all rows. ValueError unless each sequence counts from 0.
    """
    positions = positions.cpu()
    bounds = torch.tensor([0, *rows]).cumsum(0)
    starts = torch.unique(torch.cat((bounds[:-1], (positions.diff() != 1).nonzero().flatten() + 1)))
    if (positions[starts] != 0).any():
        raise ValueError(
            "position_ids must run 0, 1, 2 ... in each sequence, padding apart; leave them out where each row is one"
        )
    return torch.cat((starts, bounds[-1:])).diff().tolist()


def attention_forward(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    sliding_window: int | None = None,
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
        raise ValueError('this attention is that of models from exact_model; for others there is "samebits"')
    q, k, v = (t.transpose(1, 2).reshape(batch * tokens, -1, dim) for t in (query, key, value))
    window = sliding_window or 0
    if kv_caches is not None:
        out, _ = ops.paged_attention(q, k, v, kv_caches[module.layer_idx], layout, scaling, window)
        out = out.to(q.dtype)
    else:
        out = ops.attention(q, k, v, layout, scaling, window)
    return out.view(batch, tokens, heads, dim), None


def observed_forward(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **kwargs,
) -> tuple[torch.Tensor, None]:
    """Note the call as `module.observed`; attend as `attention_forward` does where that can, else return zeros."""
    meant = [name for name, value in kwargs.items() if value is not None and value is not False]
    problems = [f"takes {name!r}" for name in meant if name not in _HARMLESS]
    window = kwargs.get("sliding_window") or 0
    other_mask = attention_mask is not None and getattr(attention_mask, "window", None) != window
    checks = {
        "brings a mask of its own, or a window in its mask alone": other_mask,
        "is not causal": kwargs.get("is_causal") is False,
        "gives no scale": scaling is None,
        "does not get the keywords that the model is called with": kwargs.get("layout") is None,
        f"has values of {value.shape[-1]} numbers and keys of {key.shape[-1]}": value.shape[-1] != key.shape[-1],
    }
    problems += [problem for problem, there in checks.items() if there]
    module.observed = AttentionCall(scaling or 0.0, window, key.shape[1], key.shape[-1], tuple(problems))
    if problems:
        return query.new_zeros(query.shape[0], query.shape[2], query.shape[1], value.shape[-1]), None
    return attention_forward(module, query, key, value, attention_mask, scaling, **kwargs)  # type: ignore[arg-type]


def plain_forward(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    position_ids: torch.Tensor | None = None,
    layout: ops.PagedLayout | None = None,
    **kwargs,
) -> tuple[torch.Tensor, None]:
    """Return what `attention_forward` does; without a layout, of sequences that `position_ids` [B or 1, T] part."""
    if attention_mask is not None:
        raise ValueError(f'attn_implementation="{NAME}" takes no mask of scores; use samebits.trainer.exact_model')
    if layout is None:
        batch, heads, tokens, _ = query.shape
        lengths = [tokens] * batch
        if position_ids is not None:
            lengths = sequence_lengths(position_ids.expand(batch, tokens).reshape(-1), lengths)
        layout = ops.packed_layout(lengths, heads // key.shape[1], query.device)
    return attention_forward(module, query, key, value, None, scaling, layout=layout, **kwargs)


def no_mask(*args, attention_mask: torch.Tensor | None = None, **kwargs) -> None:
    """Return the mask that `plain_forward` takes: none. ValueError where `attention_mask` [B, T] hides a token."""
    if attention_mask is not None and not attention_mask.all():
        raise ValueError(
            f'attn_implementation="{NAME}" takes no padding; give each row alone, or use samebits.trainer.exact_model'
        )


def window_mask(*args, local_size: int | None = None, device: Any = None, **kwargs) -> torch.Tensor | None:
    """Return a mask that says which window it would have, for `observed_forward`; None without one."""
    if local_size is None:
        return None
    mask = torch.zeros(1, 1, 1, 1, dtype=torch.bool, device=device)
    mask.window = local_size  # type: ignore[attr-defined]
    return mask


AttentionInterface.register(NAME, plain_forward)
AttentionInterface.register(PACKED, attention_forward)
AttentionInterface.register(OBSERVED, observed_forward)
AttentionMaskInterface.register(NAME, no_mask)
AttentionMaskInterface.register(OBSERVED, window_mask)
