"""What only a rollout does to a model, to the same bits: weights packed once, fewer launches.

The trainer's copy keeps HF's parameters and calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..kernels import ops
from ..kernels.backend import HeadNorms, LayerParts
from .attention import AttentionCall
from .coverage import UnderMode
from .exact import is_exact
from .experts import is_experts, pack_experts
from .linear import ExactLinear, UnsupportedModelError, products
from .places import Places
from .roles import ExactMLP, ExactRMSNorm
from .routing import hand_over, routers
from .selfcheck import SelfCheck


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
    """Attention whose heads are normed, turned and kept in one launch, to the same bits as the model's code."""

    observed: AttentionCall

    def forward(self, hidden_states: Tensor, position_embeddings: Any, layout=None, kv_caches=None, **kwargs):
        """Return the attention's output [1, T, hidden] over the paged cache, and no weights."""
        module: Any = self
        shape = *hidden_states.shape[1:-1], -1, module.head_dim
        projected = products(hidden_states, module.q_proj, module.k_proj, module.v_proj)
        q, k, v = (x.view(shape) for x in projected)
        norms = _head_norms(self)
        if norms is None and "q_norm" in self._modules:
            q = module.q_norm(q[None])[0]  # as the model's code calls it
            k = module.k_norm(k[None])[0]
        cos, sin = (t[0] for t in position_embeddings)
        assert cos.shape[-1] == module.head_dim, "a rotary embedding of part of a head"
        kernels = ops.backend(q.device)
        k_cache, v_cache = kv_caches[module.layer_idx]
        q = kernels.place_heads(q, k, v, norms, (cos, sin), layout, (k_cache, v_cache))
        out, _ = kernels.attention(q, k_cache, v_cache, layout, self.observed.scaling, self.observed.window)
        return module.o_proj(out.to(q.dtype).reshape(1, out.shape[0], -1)), None


class FusedRouter(nn.Module):
    """A router that takes the largest of a softmax, in two launches, to the same bits as its own code.

    normalises: the weights of a token's experts are over their sum.
    """

    normalises = True

    def forward(self, hidden_states: Tensor):
        """Return logits [T, experts], weights and ids [T, k]."""
        module: Any = self
        logits = ops.linear(hidden_states.reshape(-1, hidden_states.shape[-1]), module.weight, dtype=torch.float32)
        ids, weights = ops.route(logits, module.routing.top_k, self.normalises)
        choose = module.routing.choose
        if choose is not None and choose(ids) is not ids:  # others are given, whose weights are to be gathered
            return super().forward(hidden_states)
        return logits, weights, ids


class PlainRouter(FusedRouter):
    """A `FusedRouter` whose weights are the softmax's."""

    normalises = False


def _unobserved(*modules: Any) -> bool:
    """True if nobody has put a hook on one of the modules."""
    return not any(m._forward_hooks or m._forward_pre_hooks for m in modules)


def _head_norms(attention: Any) -> HeadNorms | None:
    """Return the norms of queries' and keys' heads as kernels take them; None for other kinds, or watched ones."""
    norms = [attention._modules.get(name) for name in ("q_norm", "k_norm")]
    for norm in norms:
        if type(norm) is not FusedNorm or not _unobserved(norm) or norm.weight.shape != (attention.head_dim,):
            return None
    return _weight_and_eps(norms[0]), _weight_and_eps(norms[1])


def _weight_and_eps(norm: FusedNorm) -> tuple[Tensor, float]:
    return norm.weight.detach(), norm.variance_epsilon


class _ReadLayer(NamedTuple):
    """What one launch of a layer takes: the linears, whose packed weights come and go, their biases, and the rest."""

    places: Places
    linears: list[ExactLinear]
    biases: list[Tensor | None]
    parts: LayerParts


def _read_layer(layer: Any) -> _ReadLayer | None:
    """Return what one launch of the layer takes; None where it needs several."""
    places = Places()
    attention, mlp = places.module(layer, "self_attn"), places.module(layer, "mlp")
    norms = [places.module(layer, "post_attention_layernorm")]
    if following := places.attribute(vars(layer), "following"):
        norms.append(places.module(*following))
    if type(mlp) is not ExactMLP or not isinstance(attention, FusedAttention) or "q_norm" in attention._modules:
        return None
    linears = [places.module(attention, name) for name in ("q_proj", "k_proj", "v_proj", "o_proj")]
    linears += [places.module(mlp, name) for name in ("gate_proj", "up_proj", "down_proj")]
    if any(type(linear) is not ExactLinear or linear.packed is None for linear in linears):
        return None
    adapted = any(places.attribute(vars(linear), "low_rank") is not None for linear in linears)
    if adapted or not all(isinstance(norm, FusedNorm) for norm in norms) or not places.unchanged():
        return None
    storage = ops.backend(norms[0].weight.device).storage
    biases = [places.parameter(linear, "bias") for linear in linears]
    middle, *after = [(storage(places.parameter(norm, "weight")), norm.variance_epsilon) for norm in norms]
    call = attention.observed
    parts = LayerParts([], middle, after[0] if after else None, mlp.activation, call.scaling, call.window)
    return _ReadLayer(places, linears, biases, parts)


class FusedLayer(nn.Module):
    """A decoder layer whose sums take the norms after them along; one of few rows is a single launch.

    following: the module that holds the norm after this layer, and its name there; empty where there is none here.
    """

    following: tuple[nn.Module, str] | tuple[()] = ()
    _last_read: _ReadLayer | None = None

    def forward(self, hidden_states: Tensor | Residual, **kwargs) -> Tensor | Residual:
        """Return the layer's output, with its norm where that follows here."""
        module: Any = self
        hand_over(self, kwargs)
        read = self._read(hidden_states.total if isinstance(hidden_states, Residual) else hidden_states)
        if read is not None:
            return self._launch(hidden_states, read, **kwargs)
        attended, _ = module.self_attn(hidden_states=module.input_layernorm(hidden_states), **kwargs)
        hidden_states = add(hidden_states, attended, module.post_attention_layernorm)
        update = module.mlp(module.post_attention_layernorm(hidden_states))
        return add(hidden_states, update, getattr(*self.following) if self.following else None)

    def _read(self, total: Tensor) -> _ReadLayer | None:
        """Return what one launch takes; None where the layer needs several."""
        if total.shape[-2] > ops.backend(total.device).LAYER_ROWS:
            return None
        if self._last_read is None or not self._last_read.places.unchanged():
            self._last_read = _read_layer(self)
        return self._last_read

    def _launch(
        self, x: Tensor | Residual, read: _ReadLayer, position_embeddings=None, layout=None, kv_caches=None, **kwargs
    ) -> Tensor | Residual:
        """Return the layer's output, with its norm where that follows here, by one launch."""
        module: Any = self
        total, normed = (x.total if isinstance(x, Residual) else x), module.input_layernorm(x)
        rows = total.view(-1, total.shape[-1]), normed.view(-1, total.shape[-1])
        tables = position_embeddings[0][0], position_embeddings[1][0]
        launch: Any = ops.backend(total.device).decoder_layer
        weights = [linear.packed.memory for linear in read.linears]  # type: ignore[union-attr]
        storage = ops.backend(total.device).storage
        wide = [None if bias is None else storage(bias.float()) for bias in read.biases]  # its values may have changed
        parts = read.parts._replace(biases=wide)
        out, after = launch(*rows, weights, parts, tables, kv_caches[module.self_attn.layer_idx], layout)
        return out.view(total.shape) if after is None else Residual(out.view(total.shape), after.view(total.shape))


def pack_weights(model: PreTrainedModel) -> None:
    """Keep each weight of an exact model once, packed for the product."""
    embedding: Any = model.get_input_embeddings()
    head: Any = model.get_output_embeddings()
    tied = None not in (embedding, head) and embedding.weight is head.weight
    for module in model.modules():
        if isinstance(module, ExactLinear) and module.exact:
            module.packed = ops.PackedWeight.pack(module.weight)
            module.weight = None  # type: ignore[assignment]
        elif is_experts(module):
            pack_experts(module)
    if tied and head.packed is not None:
        _share(embedding, head.packed)


@torch.no_grad()
def _share(embedding: Any, packed: ops.PackedWeight) -> None:
    """Have an embedding look its rows up in lm_head's packed weight; its own forward may scale them."""
    ids = torch.arange(4, device=embedding.weight.device)
    expected = embedding(ids)
    own = type(embedding)
    embedding.packed = packed
    embedding.weight = nn.Parameter(embedding.weight.new_empty(0), requires_grad=False)
    embedding.__class__ = PackedEmbedding if own is nn.Embedding else type(own.__name__, (own, PackedEmbedding), {})
    try:
        same = torch.equal(embedding(ids), expected)
    except (RuntimeError, IndexError):
        same = False
    if not same:
        raise UnsupportedModelError(f"a tied {own.__name__} that doesn't look rows up as nn.Embedding does")


class _Call(NamedTuple):
    """A module's call."""

    args: tuple
    kwargs: dict[str, Any]
    result: Any

    @property
    def given(self) -> Any:
        """The hidden states that it was given."""
        return self.args[0] if self.args else self.kwargs.get("hidden_states")


_NORMS = "input_layernorm", "post_attention_layernorm", "q_norm", "k_norm"  # of a layer or attention, may be fused


def fuse(model: PreTrainedModel, run: Callable[[], object]) -> None:
    """Replace what the kernels compute in fewer launches, where a module's fused form gives its own bits.

    run: a forward of a few tokens over a paged cache, whose calls of attention and layers are compared.
    """
    base: Any = model.base_model
    norm = getattr(base, "norm", None)
    parts = [part for layer in base.layers for part in (layer, getattr(layer, "self_attn", None))]
    routing = [r for r in routers(model).values() if [n for n, _ in r.named_parameters()] == ["weight"]]
    calls = _recorded(run, [part for part in (*parts, norm, *routing) if part is not None])
    for each in (norm, *(getattr(part, name, None) for part in parts for name in _NORMS)):
        if type(each) is ExactRMSNorm and not each.offset and hasattr(each, "weight"):
            each.__class__ = FusedNorm
    for router in routing:
        if not [*router.buffers()]:  # one that is zero now may not stay so
            _fuse_if_equal(router, FusedRouter, calls[router]) or _fuse_if_equal(router, PlainRouter, calls[router])
    for layer in base.layers:
        if hasattr(layer, "self_attn"):
            _fuse_if_equal(layer.self_attn, FusedAttention, calls[layer.self_attn])
    following: tuple = (norm, (base, "norm")) if isinstance(norm, FusedNorm) else ()
    for layer in reversed(base.layers):
        fused = _fuse_if_equal(layer, FusedLayer, calls[layer])
        if fused and following and calls[following[0]].given is calls[layer].result:
            layer.following = following[1]
        following = (layer, (layer, "input_layernorm")) if fused else ()


def _recorded(run: Callable[[], object], modules: Iterable[nn.Module]) -> dict[nn.Module, _Call]:
    """Return the modules' calls in a run."""
    calls: dict[nn.Module, _Call] = {}

    def record(module: nn.Module, args: tuple, kwargs: dict[str, Any], result: Any) -> None:
        calls[module] = _Call(args, kwargs, result)

    handles = [module.register_forward_hook(record, with_kwargs=True) for module in modules]
    try:
        run()
    finally:
        for handle in handles:
            handle.remove()
    return calls


@torch.inference_mode()
def _fuse_if_equal(module: Any, form: type[nn.Module], call: _Call) -> bool:
    """Give a module its fused form, if that returns the same bits, at other positions, too: it never looks at them."""
    own = type(module)
    if isinstance(module, UnderMode) and not issubclass(form, FusedRouter):
        return False
    variants = [call.kwargs]
    if call.kwargs.get("position_ids") is not None:
        variants.append(call.kwargs | {"position_ids": call.kwargs["position_ids"] + 10_000})
    expected = [module(*call.args, **kwargs) for kwargs in variants]
    module.__class__ = type(form.__name__, (form, own), {})
    try:
        found = [module(*call.args, **kwargs) for kwargs in variants]
        fused = all(map(_same, found, expected))
    except (AttributeError, AssertionError, RuntimeError, TypeError, ValueError):
        fused = False
    if not fused:
        module.__class__ = own
    return fused


def _same(ours: Any, theirs: Any) -> bool:
    """True for equal tensors, or tuples of these and of None."""
    if isinstance(ours, tuple) and isinstance(theirs, tuple):
        return len(ours) == len(theirs) and all(map(_same, ours, theirs))
    if isinstance(ours, Tensor) and isinstance(theirs, Tensor):
        return ours.dtype == theirs.dtype and torch.equal(ours, theirs)
    return ours is None and theirs is None


@contextmanager
def without_low_ranks(model: nn.Module) -> Iterator[None]:
    """Set adapters aside, which need packed weights, for a while."""
    linears = [module for module in model.modules() if isinstance(module, ExactLinear)]
    before = [module.low_rank for module in linears]
    for module in linears:
        module.low_rank = None
    try:
        yield
    finally:
        for module, low_rank in zip(linears, before, strict=True):
            module.low_rank = low_rank


def prepare_rollout(model: PreTrainedModel) -> None:
    """Pack an exact model's weights and fuse its modules. UnsupportedModelError if its bits don't stay what they were.

    A control stays as it is.
    """
    if not is_exact(model):
        return
    with without_low_ranks(model):
        check = SelfCheck(model)
        pack_weights(model)
        fuse(model, check.prefill)
        check.paged()
