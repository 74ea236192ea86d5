"""A plain call of an exact model, `model(input_ids, attention_mask, position_ids)`: run packed, so that no bit of a row
depends on padding or on other rows. Whatever the attention would misread is refused."""

from __future__ import annotations

import functools
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils.generic import can_return_tuple

from ..kernels import ops
from ..kernels.contract import NumericsError
from .attention import sequence_lengths
from .paged import group_size


def packing(kind: type[PreTrainedModel]) -> type[PreTrainedModel]:
    """Return a base model's class whose forward packs the tokens that it is given, and unpacks its hidden states.

    Calls with a `layout`, the engine's and token_logprobs', are packed already and pass. Otherwise each row of
    `input_ids` int64 [B, T] or `inputs_embeds` is one sequence from position 0, whatever its padding; or several,
    which `position_ids` [B or 1, T] tell apart. `attention_mask` [B, T] is 0 at padding, left, right or both. Hidden
    states are zeros at padding. Raises ValueError or TypeError for a call that means anything else, and
    NotImplementedError for one with a HF cache.
    """

    @can_return_tuple
    def pack_forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        cu_seq_lens_q: Tensor | None = None,
        **kwargs,
    ):
        if use_cache or past_key_values is not None or kwargs.pop("cache", None) is not None:  # as 5.24 calls them
            raise NotImplementedError("an exact model has no HF cache (use_cache=False); generate with samebits.LLM")
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give either input_ids or inputs_embeds")
        given: Any = input_ids if inputs_embeds is None else inputs_embeds
        keep = kept_tokens(attention_mask, given.shape[:2]).to(given.device)
        lengths = _lengths(keep, position_ids)
        if cu_seq_lens_q is not None and cu_seq_lens_q.tolist() != [0, *accumulate(lengths)]:
            raise ValueError("cu_seq_lens_q names other sequences than position_ids and attention_mask do")
        layout = ops.packed_layout(lengths, group_size(self.config), given.device)
        name = "input_ids" if inputs_embeds is None else "inputs_embeds"
        out = kind.forward(
            self, **{name: given[keep][None]}, position_ids=layout.on(given.device).positions.long()[None],
            use_cache=False, layout=layout, **kwargs,
        )  # fmt: skip
        out.last_hidden_state = _unpacked(out.last_hidden_state, keep)
        if out.hidden_states is not None:
            out.hidden_states = tuple(_unpacked(states, keep) for states in out.hidden_states)
        return out

    @functools.wraps(kind.forward)
    def forward(self, *args, **kwargs):
        if "kv_caches" not in kwargs:  # a trainer's call
            check_uncompiled(self)
        if kwargs.get("layout") is not None:
            return kind.forward(self, *args, **kwargs)
        return pack_forward(self, *args, **kwargs)

    eager = torch.compiler.disable(forward, reason="a compiler may fuse what has to be rounded")
    return type(kind.__name__, (kind,), {"forward": eager, "__module__": kind.__module__})


def check_uncompiled(model: nn.Module) -> None:
    """Raise NumericsError for a compiled module in a model: a compiler may fuse what has to be rounded.

    A model that is compiled as a whole is run as it is, and passes.
    """
    for name, module in model.named_modules():
        if name and (module._compiled_call_impl is not None or hasattr(module, "_orig_mod")):
            raise NumericsError(f"module {name!r} was given to torch.compile; exact modules can't be compiled")


def kept_tokens(attention_mask: Tensor | None, shape: torch.Size) -> Tensor:
    """Return where the tokens are, bool [B, T], by a mask of 1 at tokens and 0 at padding.

    Raises ValueError where padding is between tokens, or the mask is no such mask.
    """
    if attention_mask is None:
        return torch.ones(shape, dtype=torch.bool)
    if not isinstance(attention_mask, Tensor):
        raise TypeError(f"attention_mask is a {type(attention_mask).__name__}; give a tensor [B, T]")
    if attention_mask.shape != shape:
        raise ValueError(f"attention_mask {list(attention_mask.shape)} doesn't fit tokens {list(shape)}")
    mask = attention_mask.cpu()
    if not ((mask == 0) | (mask == 1)).all():
        raise ValueError("attention_mask is 1 where a token is and 0 at padding; tell sequences apart by position_ids")
    mask = mask.bool()
    if not mask.any():
        raise ValueError("attention_mask hides every token")
    starts = mask & ~mask.roll(1, 1)
    starts[:, 0] = mask[:, 0]
    if (starts.sum(1) > 1).any():
        raise ValueError("attention_mask has a hole; padding may be at the ends only")
    return mask


def _lengths(keep: Tensor, position_ids: Tensor | None) -> list[int]:
    rows = [n for n in keep.sum(1).tolist() if n]
    if position_ids is None:
        return rows
    if position_ids.dim() != 2 or position_ids.shape[0] not in (1, len(keep)) or position_ids.shape[1] != keep.shape[1]:
        raise ValueError(f"position_ids {list(position_ids.shape)} don't fit tokens {list(keep.shape)}")
    return sequence_lengths(position_ids.expand(keep.shape)[keep], rows)


def _unpacked(states: Tensor, keep: Tensor) -> Tensor:
    """Return states [1, tokens, H] at their places in [B, T, H], and zeros at padding."""
    if keep.all():
        return states.view(*keep.shape, -1)
    where = keep[..., None].expand(*keep.shape, states.shape[-1])
    return states.new_zeros(where.shape).masked_scatter(where, states)
