"""A model's forward over packed tokens and a paged cache, as an engine's steps and the checks at loading run it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..kernels import ops

Caches = list[tuple[Tensor, Tensor]]


def group_size(config: Any) -> int:
    """Return the query heads per KV head."""
    return config.num_attention_heads // config.num_key_value_heads


def head_dim(config: Any) -> int:
    """Return the numbers of a head's key."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def new_kv_caches(model: PreTrainedModel, num_blocks: int) -> Caches:
    """Return one (k, v) pair per layer."""
    config = model.config
    shape = num_blocks, config.num_key_value_heads, head_dim(config)
    new = ops.backend(model.device).new_kv_cache
    return [new(*shape, model.dtype, model.device) for _ in range(config.num_hidden_layers)]


def hidden_states(
    model: PreTrainedModel, given: Tensor, layout: ops.PagedLayout, kv_caches: Caches | None = None, **more: Any
) -> Tensor:
    """Return the hidden states [T, H] of token ids [T], or of hidden states [T, H] of the stage before.

    more: other arguments of the layers.
    """
    positions = layout.on(model.device).positions.long()[None]
    return model.base_model(
        **_named(given), position_ids=positions, use_cache=False, layout=layout, kv_caches=kv_caches, **more
    ).last_hidden_state[0]


def plain_call(model: PreTrainedModel, given: Tensor) -> Any:
    """Return what a plain call returns for one sequence, of token ids or of hidden states as above."""
    return (model.base_model if model.get_output_embeddings() is None else model)(**_named(given))


def _named(given: Tensor) -> dict[str, Tensor]:
    return {"inputs_embeds" if given.is_floating_point() else "input_ids": given[None]}


def takes_tokens(model: PreTrainedModel) -> bool:
    """True for a model, or its first stage; False for a stage that continues another's hidden states."""
    return not getattr(model, "first_layer", 0)


def random_input(model: PreTrainedModel, tokens: int) -> Tensor:
    """Return what a model or a stage takes for some tokens: ids int64 [T], or hidden states [T, H]."""
    generator = torch.Generator().manual_seed(0)
    if takes_tokens(model):
        return torch.randint(model.config.vocab_size, (tokens,), generator=generator).to(model.device)
    hidden: Any = torch.randn(tokens, model.config.hidden_size, generator=generator)
    return hidden.to(model.device, model.dtype)
