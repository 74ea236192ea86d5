"""What only a rollout does to a model, to the same bits: weights packed once, fewer launches. The trainer's copy keeps
HF's parameters and calls."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from ..kernels import ops
from ..model.exact import ExactLinear, ExactRMSNorm, SharedInput

_SHARED_INPUTS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))  # one launch each


class PackedEmbedding(nn.Embedding):
    """An embedding tied to a packed lm_head: looks its rows up there instead of keeping a second copy."""

    packed: ops.PackedWeight

    def forward(self, ids: Tensor) -> Tensor:
        """Return the ids' rows of the packed weight."""
        return self.packed.rows(ids)


class FusedAttention(nn.Module):
    """The attention of a supported model with the rotary embedding in one launch: the same bits as the model's code."""

    def forward(self, hidden_states: Tensor, position_embeddings: Any, layout=None, kv_caches=None, **kwargs):
        """Return the attention's output [1, T, hidden] over the paged cache, and no weights."""
        module: Any = self
        shape = *hidden_states.shape[1:-1], -1, module.head_dim
        q, k, v = (p(hidden_states).view(shape) for p in (module.q_proj, module.k_proj, module.v_proj))
        if hasattr(self, "q_norm"):
            q, k = module.q_norm(q[None])[0], module.k_norm(k[None])[0]  # as the model's code calls them
        cos, sin = (t[0] for t in position_embeddings)
        assert cos.shape[-1] == module.head_dim, "a rotary embedding of part of a head"
        q, k = ops.backend(q.device).rotary(q, k, cos, sin)
        of_all = module.config.model_type == "mistral" and module.config.sliding_window
        window = getattr(self, "sliding_window", of_all) or 0
        out, _ = ops.paged_attention(q, k, v, kv_caches[module.layer_idx], layout, module.scaling, window)
        return module.o_proj(out.to(q.dtype).reshape(1, out.shape[0], -1)), None


class FusedNorm(ExactRMSNorm):
    """A norm that can take the sum before it along, in one launch."""

    _ahead: tuple[Any, Any] = None, None  # the last sum and its norm

    def add(self, x: Tensor, update: Tensor) -> Tensor:
        """x + update; its norm, which comes next, is then there."""
        rows = x.view(-1, x.shape[-1]), update.view(-1, x.shape[-1])
        both = ops.backend(x.device).add_rms_norm(*rows, self.weight, self.variance_epsilon)
        total, normed = (t.view(x.shape) for t in both)
        self.__dict__["_ahead"] = total, normed  # a module's own way to set what is no parameter takes long
        return total

    def forward(self, x: Tensor) -> Tensor:
        """Return the normed rows, computed ahead by `add` where x is its sum."""
        total, normed = self.__dict__.pop("_ahead", FusedNorm._ahead)
        return super().forward(x) if x is not total else normed


class FusedLayer(nn.Module):
    """A decoder layer of a supported model whose sums take the norms after them along."""

    following: tuple[FusedNorm, ...] = ()  # the norm after this layer, if there is one here; a tuple: no child of it

    def forward(self, hidden_states: Tensor, **kwargs) -> Tensor:
        """Return the layer's output; residual sums and norms are one kernel each."""
        module: Any = self
        attended, _ = module.self_attn(hidden_states=module.input_layernorm(hidden_states), **kwargs)
        hidden_states = module.post_attention_layernorm.add(hidden_states, attended)
        update = module.mlp(module.post_attention_layernorm(hidden_states))
        return self.following[0].add(hidden_states, update) if self.following else hidden_states + update


def pack_weights(model: PreTrainedModel) -> None:
    """Rollout-only layout: each weight lives once, packed for the product."""
    embedding: Any = model.get_input_embeddings()
    head: Any = model.get_output_embeddings()
    tied = None not in (embedding, head) and embedding.weight is head.weight
    for module in model.modules():
        if isinstance(module, ExactLinear) and module.route == "fma":
            module.packed = ops.PackedWeight.pack(module.weight)
            module.weight = None  # type: ignore[assignment]
    for module in model.modules():
        for names in _SHARED_INPUTS:
            group = [getattr(module, name, None) for name in names]
            if all(isinstance(m, ExactLinear) and m.packed is not None for m in group):
                SharedInput(group)  # type: ignore[arg-type]
    if tied and head.packed is not None:
        embedding.__class__ = PackedEmbedding
        embedding.packed = head.packed
        embedding.weight = None


def fuse(model: PreTrainedModel) -> None:
    """Replaces what the kernels compute in fewer launches, to the same bits."""
    base: Any = model.base_model
    if not isinstance(base.layers[0].input_layernorm, ExactRMSNorm):
        return
    following: tuple[Any, ...] = ()
    for module in (base.norm, *reversed(base.layers)):
        if isinstance(module, ExactRMSNorm):
            module.__class__ = FusedNorm
            following = (module,)
        elif not isinstance(module, nn.Identity):
            inner = module.self_attn
            inner.__class__ = type("FusedAttention", (FusedAttention, type(inner)), {})
            module.__class__ = type("FusedLayer", (FusedLayer, type(module)), {})
            module.input_layernorm.__class__ = module.post_attention_layernorm.__class__ = FusedNorm
            module.following, following = following, (module.input_layernorm,)
