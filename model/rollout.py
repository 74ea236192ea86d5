"""What only a rollout does to a model, to the same bits: weights packed once, fewer launches.

The trainer's copy keeps HF's parameters and calls.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor, nn
from transformers import PreTrainedModel

from ..kernels import ops
from .exact import ExactRMSNorm
from .linear import ExactLinear, products


class PackedEmbedding(nn.Embedding):
    """An embedding tied to a packed lm_head: looks its rows up there instead of keeping a second copy."""

    packed: ops.PackedWeight

    def forward(self, ids: Tensor) -> Tensor:
        """Return the ids' rows of the packed weight."""
        return self.packed.rows(ids)


class Residual(NamedTuple):
    """A sum of the residual stream with its norm, which the next module takes: what goes from layer to layer."""

    total: Tensor
    normed: Tensor


class FusedNorm(ExactRMSNorm):
    """A norm that takes the sum before it along."""

    def forward(self, x: Tensor | Residual) -> Tensor:  # type: ignore[override]
        """Return the normed rows, which a `Residual` has with it."""
        return x.normed if isinstance(x, Residual) else super().forward(x)


def add(x: Tensor | Residual, update: Tensor, norm: nn.Module | None) -> Tensor | Residual:
    """Return x + update, with its norm unless there is none, or somebody watches it or has put another in its place."""
    total = x.total if isinstance(x, Residual) else x
    if not isinstance(norm, FusedNorm) or norm._forward_hooks:
        return total + update
    rows = total.view(-1, total.shape[-1]), update.view(-1, total.shape[-1])
    total, normed = ops.backend(total.device).add_rms_norm(*rows, norm.weight, norm.variance_epsilon)
    return Residual(total.view(update.shape), normed.view(update.shape))


class FusedAttention(nn.Module):
    """The attention of a supported model with the rotary embedding in one launch: the same bits as the model's code."""

    def forward(self, hidden_states: Tensor, position_embeddings: Any, layout=None, kv_caches=None, **kwargs):
        """Return the attention's output [1, T, hidden] over the paged cache, and no weights."""
        module: Any = self
        shape = *hidden_states.shape[1:-1], -1, module.head_dim
        projected = products(hidden_states, module.q_proj, module.k_proj, module.v_proj)
        q, k, v = (x.view(shape) for x in projected)
        if hasattr(self, "q_norm"):
            q = module.q_norm(q[None])[0]  # as the model's code calls it
            k = module.k_norm(k[None])[0]
        cos, sin = (t[0] for t in position_embeddings)
        assert cos.shape[-1] == module.head_dim, "a rotary embedding of part of a head"
        q, k = ops.backend(q.device).rotary(q, k, cos, sin)
        of_all = module.config.model_type == "mistral" and module.config.sliding_window
        window = getattr(self, "sliding_window", of_all) or 0
        out, _ = ops.paged_attention(q, k, v, kv_caches[module.layer_idx], layout, module.scaling, window)
        return module.o_proj(out.to(q.dtype).reshape(1, out.shape[0], -1)), None


class FusedLayer(nn.Module):
    """A decoder layer of a supported model whose sums take the norms after them along.

    following: the module that holds the norm after this layer, and its name there; empty where there is none here.
    """

    following: tuple[nn.Module, str] | tuple[()] = ()

    def forward(self, hidden_states: Tensor | Residual, **kwargs) -> Tensor | Residual:
        """Return the layer's output, with its norm where that follows here."""
        module: Any = self
        attended, _ = module.self_attn(hidden_states=module.input_layernorm(hidden_states), **kwargs)
        hidden_states = add(hidden_states, attended, module.post_attention_layernorm)
        update = module.mlp(module.post_attention_layernorm(hidden_states))
        return add(hidden_states, update, getattr(*self.following) if self.following else None)


def pack_weights(model: PreTrainedModel) -> None:
    """Keep each weight of an exact model once, packed for the product."""
    embedding: Any = model.get_input_embeddings()
    head: Any = model.get_output_embeddings()
    tied = None not in (embedding, head) and embedding.weight is head.weight
    for module in model.modules():
        if isinstance(module, ExactLinear) and module.exact:
            module.packed = ops.PackedWeight.pack(module.weight)
            module.weight = None  # type: ignore[assignment]
    if tied and head.packed is not None:
        embedding.__class__ = PackedEmbedding
        embedding.packed = head.packed
        embedding.weight = None


def fuse(model: PreTrainedModel) -> None:
    """Replace what the kernels compute in fewer launches, to the same bits; a control stays as it is."""
    base: Any = model.base_model
    if not isinstance(base.layers[0].input_layernorm, ExactRMSNorm):
        return
    following: tuple = ()
    if isinstance(base.norm, ExactRMSNorm):
        base.norm.__class__ = FusedNorm
        following = (base, "norm")
    for layer in reversed(base.layers):
        attention = layer.self_attn
        attention.__class__ = type("FusedAttention", (FusedAttention, type(attention)), {})
        layer.input_layernorm.__class__ = FusedNorm
        layer.post_attention_layernorm.__class__ = FusedNorm
        layer.__class__ = type("FusedLayer", (FusedLayer, type(layer)), {})
        layer.following = following
        following = (layer, "input_layernorm")
