"""The changes that a rollout alone makes to a model, to the same bits: weights packed once, fewer launches.

The trainer's copy keeps HF's parameters and calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..kernels import ops
from ..kernels.backend import DecoderLayers, ExpertParts, HeadNorms, LayerParts
from .attention import AttentionCall
from .coverage import UnderMode
from .exact import is_exact
from .experts import WEIGHTS, is_experts, pack_experts
from .linear import ExactLinear, UnsupportedModelError, products
from .places import Places
from .roles import ExactMLP, ExactRMSNorm, other_state
from .routing import RoutedExperts, routers, routing_by
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

    READS = "q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm"
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

    READS = ("weight",)
    normalises = True

    def forward(self, hidden_states: Tensor):
        """Return logits [T, experts], weights and ids [T, k]."""
        module: Any = self
        logits = ops.linear(hidden_states.reshape(-1, hidden_states.shape[-1]), module.weight, dtype=torch.float32)
        ids, weights = ops.route(logits, module.routing.top_k, self.normalises)
        choose = module.routing.choose
        if choose is not None and choose(ids) is not None:  # others are given, whose weights are to be gathered
            return super().forward(hidden_states)
        return logits, weights, ids


class PlainRouter(FusedRouter):
    """A `FusedRouter` whose weights are the softmax's."""

    normalises = False


class FusedMixture(nn.Module):
    """A block of a router and its experts alone, which a launch of layers computes, too."""

    READS = "gate", "experts"

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Return each row's sum over its experts."""
        module: Any = self
        rows = hidden_states.view(-1, hidden_states.shape[-1])
        _, weights, ids = module.gate(rows)
        return module.experts(rows, ids, weights).view(hidden_states.shape)


def _head_norms(attention: Any) -> HeadNorms | None:
    """Return the norms of queries' and keys' heads as kernels take them; None for other kinds, or watched ones."""
    norms = [attention._modules.get(name) for name in ("q_norm", "k_norm")]
    if any(type(norm) is not FusedNorm or norm._forward_hooks or norm._forward_pre_hooks for norm in norms):
        return None
    if any(norm.weight.shape != (attention.head_dim,) for norm in norms):
        return None
    queries, keys = [(norm.weight.detach(), norm.variance_epsilon) for norm in norms]
    return queries, keys


class _SeveralLaunchesError(Exception):
    """A layer isn't of the kind that one launch computes, or somebody watches a part of it."""


class _Launch(NamedTuple):
    """Layers that follow each other, the places of their KV, and their launch, which holds as long as its places do.

    A launch is one call of the backend: on CPUs of one kernel, on GPUs of all of the layers' kernels in turn.
    is_half: it is of one layer, up to the norm before its MLP.
    """

    places: list[Places]
    layers: list[FusedLayer]
    indices: list[int]
    compute: DecoderLayers
    is_half: bool

    def holds(self) -> bool:
        """True if all is where it was read."""
        return all(places.unchanged() for places in self.places)


def _array(parameter: Tensor | None, dtype: torch.dtype) -> Any:
    """Return a parameter as kernels take it, or None."""
    if parameter is None:
        return None
    if parameter.dtype != dtype or not parameter.is_contiguous():
        raise _SeveralLaunchesError
    return ops.backend(parameter.device).storage(parameter)


def _read_linear(places: Places, parent: Any, name: str, dtype: torch.dtype) -> tuple[Any, int, Any, Any]:
    linear = places.module(parent, name)
    packed = places.passing(vars(linear), "packed") if type(linear) is ExactLinear else None
    if packed is None or packed.panels.dtype != dtype:
        raise _SeveralLaunchesError
    low_rank = places.attribute(vars(linear), "low_rank")
    memory = None if low_rank is None else places.attribute(vars(low_rank), "memory")
    return packed.memory, packed.features, _array(places.parameter(linear, "bias"), dtype), memory


def _read_norm(places: Places, place: tuple[nn.Module, str], dtype: torch.dtype) -> tuple[Any, float]:
    norm = places.module(*place)
    if type(norm) is not FusedNorm:
        raise _SeveralLaunchesError
    return _array(places.parameter(norm, "weight"), dtype), norm.variance_epsilon


def _read_experts(places: Places, mlp: Any, dtype: torch.dtype) -> ExpertParts | None:
    """Return what a launch takes of a block of experts; None for another MLP, or if it is left to its module."""
    if not isinstance(mlp, FusedMixture):
        return None
    router = places.module(mlp, "gate")
    experts = places.module(mlp, "experts")
    gate_up, down = (places.passing(vars(experts), name) for name in WEIGHTS)
    if not isinstance(router, FusedRouter) or gate_up is None or down is None:
        return None
    weight = places.parameter(router, "weight")
    if {weight.dtype, gate_up.panels.dtype, down.panels.dtype} != {dtype}:
        return None
    k = cast(Any, router).routing.top_k
    return ExpertParts(_array(weight, dtype), k, router.normalises, gate_up.memory, down.memory, gate_up.features // 2)


def _read_layer(places: Places, layer: Any, dtype: torch.dtype) -> LayerParts:
    """Return what a launch of the layer takes."""
    attention = places.module(layer, "self_attn")
    mlp = places.module(layer, "mlp")
    if not isinstance(attention, FusedAttention):
        raise _SeveralLaunchesError
    dense = type(mlp) is ExactMLP
    experts = _read_experts(places, mlp, dtype)
    whole = dense or experts is not None
    following = places.attribute(vars(layer), "following") if whole else ()
    heads = ["q_norm", "k_norm"] if "q_norm" in attention._modules else []
    middle = _read_norm(places, (layer, "post_attention_layernorm"), dtype)
    last = _read_norm(places, following, dtype) if following else None
    queries, keys = [_read_norm(places, (attention, name), dtype) for name in heads] or (None, None)
    if any(norm and len(norm[0]) != attention.head_dim for norm in (queries, keys)):
        raise _SeveralLaunchesError
    linears = [_read_linear(places, attention, name, dtype) for name in ("q_proj", "k_proj", "v_proj", "o_proj")]
    if dense:
        linears += [_read_linear(places, mlp, name, dtype) for name in ("gate_proj", "up_proj", "down_proj")]
    if not places.unchanged():  # there is a hook
        raise _SeveralLaunchesError
    call = places.attribute(vars(attention), "observed")
    activation = mlp.activation if dense else mlp.experts.activation if experts is not None else ""
    return LayerParts(linears, [middle, last, queries, keys], activation, call.scaling, call.window, experts)


def _read_launch(layer: Any, device: torch.device, dtype: torch.dtype) -> _Launch | None:
    """Return the launch of a layer and as many after it as can be; None where the first needs several."""
    places: list[Places] = []
    parts: list[LayerParts] = []
    layers: list[Any] = []
    indices: list[int] = []
    while layer is not None:
        here = Places()
        if layers:  # nobody looks between the two
            here.watch(layers[-1]._forward_hooks)
            here.watch(layer._forward_pre_hooks)
        try:
            found = _read_layer(here, layer, dtype)
        except _SeveralLaunchesError:
            break
        chosen = {each.experts.k for each in (*parts, found) if each.experts is not None}
        if layers and (found.is_half or len(chosen) > 1):
            break
        parts.append(found)
        places.append(here)
        layers.append(layer)
        indices.append(here.attribute(vars(layer.self_attn), "layer_idx"))
        layer = layer.following[0] if here.attribute(vars(layer), "continued") and not found.is_half else None
    if not layers:
        return None
    return _Launch(places, layers, indices, ops.backend(device).decoder_layers(parts), parts[0].is_half)


class Ahead(NamedTuple):
    """The result of layers that the model's code is still to call: an earlier one's launch computed them, too.

    keywords: what all of them are called with.
    """

    result: Tensor | Residual
    layers: list[FusedLayer]
    keywords: dict[str, Any]

    def after(self, layer: FusedLayer, keywords: dict[str, Any]) -> Tensor | Residual | Ahead:
        """Return what a layer's call returns."""
        if layer is not self.layers[0] or not _same_objects(keywords, self.keywords):
            raise RuntimeError("the model's code calls its layers otherwise than it did when the model was loaded")
        return self._replace(layers=self.layers[1:]) if len(self.layers) > 1 else self.result


def _same_objects(ours: dict[str, Any], theirs: dict[str, Any]) -> bool:
    return ours.keys() == theirs.keys() and all(value is theirs[name] for name, value in ours.items())


class FusedLayer(nn.Module):
    """A decoder layer whose sums take the norms after them along; it and those after it may be one launch.

    following: the module that holds the norm after this layer, and its name there; empty where there is none here.
    continued: True if that module is the layer that is called next, with the same keywords.
    """

    READS = "input_layernorm", "self_attn", "post_attention_layernorm", "mlp"
    following: tuple[nn.Module, str] | tuple[()] = ()
    continued = False
    _last_launch: _Launch | None = None

    def forward(
        self, hidden_states: Tensor | Residual | Ahead, routed_experts: RoutedExperts | None = None, **kwargs
    ) -> Tensor | Residual | Ahead:
        """Return the layer's output, with its norm where that follows here."""
        module: Any = self
        if isinstance(hidden_states, Ahead):
            return hidden_states.after(self, kwargs)
        launch = self._launch(hidden_states.total if isinstance(hidden_states, Residual) else hidden_states)
        if launch is None or (routed_experts is not None and routed_experts.given is not None):
            attended, _ = module.self_attn(hidden_states=module.input_layernorm(hidden_states), **kwargs)
            hidden_states = add(hidden_states, attended, module.post_attention_layernorm)
        else:
            out = self._run(launch, hidden_states, kwargs, routed_experts)
            if not launch.is_half:
                return out
            hidden_states = cast(Residual, out)
        with routing_by(self, routed_experts):
            update = module.mlp(module.post_attention_layernorm(hidden_states))
        return add(hidden_states, update, getattr(*self.following) if self.following else None)

    def _launch(self, total: Tensor) -> _Launch | None:
        """Return the launch of this layer and those after it; None where the layer needs several."""
        if self._last_launch is None or not self._last_launch.holds():
            self._last_launch = _read_launch(self, total.device, total.dtype)
        return self._last_launch

    def _run(
        self, launch: _Launch, x: Tensor | Residual, keywords: dict[str, Any], routed: RoutedExperts | None
    ) -> Tensor | Residual | Ahead:
        """Return the output of the launch's layers."""
        module: Any = self
        total = x.total if isinstance(x, Residual) else x
        normed = module.input_layernorm(x)
        rows = total.view(-1, total.shape[-1]), normed.view(-1, total.shape[-1])
        cos, sin = keywords["position_embeddings"]
        caches = [keywords["kv_caches"][index] for index in launch.indices]
        out, after, ids = launch.compute(*rows, (cos[0], sin[0]), caches, keywords["layout"])
        if ids is not None and routed is not None:
            routed.note(module.router[0], ids)
        result: Any = out.view(total.shape)
        if after is not None:
            result = Residual(result, after.view(total.shape))
        return Ahead(result, launch.layers[1:], keywords) if len(launch.layers) > 1 else result


def pack_weights(model: PreTrainedModel) -> None:
    """Keep each weight of an exact model once, packed for the product."""
    embedding: Any = model.get_input_embeddings()
    head: Any = model.get_output_embeddings()
    tied = None not in (embedding, head) and embedding.weight is head.weight
    for module in model.modules():
        if isinstance(module, ExactLinear) and module.exact:
            module.packed = ops.PackedWeight.pack(module.weight)
            module.weight = nn.Parameter(module.weight.new_empty(0), requires_grad=False)  # some read its dtype
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


class _ModuleCall(NamedTuple):
    """A module's call."""

    args: tuple
    kwargs: dict[str, Any]
    result: Any

    @property
    def given(self) -> Any:
        """The hidden states that it was given."""
        return self.args[0] if self.args else self.kwargs.get("hidden_states")

    def like(self, other: _ModuleCall) -> bool:
        """True if two calls differ in nothing but the hidden states."""
        ours, theirs = ({**call.kwargs, "hidden_states": None} for call in (self, other))
        return len(self.args) == len(other.args) <= 1 and _same_objects(ours, theirs)


_Fused = FusedAttention | FusedLayer | FusedMixture | FusedRouter
_NORMS = "input_layernorm", "post_attention_layernorm", "q_norm", "k_norm"  # of a layer or attention, may be fused


def fuse(model: PreTrainedModel, run: Callable[[], object]) -> None:
    """Replace what the kernels compute in fewer launches, where a module's fused form gives its own bits.

    run: a forward of a few tokens over a paged cache, whose calls of attention and layers are compared.
    """
    base: Any = model.base_model
    norm = getattr(base, "norm", None)
    parts = [part for layer in base.layers for part in (layer, getattr(layer, "self_attn", None))]
    routing = [*routers(model).values()]
    mixtures = [layer.mlp for layer in base.layers if hasattr(getattr(layer, "mlp", None), "experts")]
    calls = _recorded(run, [part for part in (*parts, norm, *routing, *mixtures) if part is not None])
    for each in (norm, *(getattr(part, name, None) for part in parts for name in _NORMS)):
        if type(each) is ExactRMSNorm and not each.offset and hasattr(each, "weight"):
            each.__class__ = FusedNorm
    for router in filter(calls.get, routing):
        call = calls[router]
        routed = router.routing
        if call.args and routed.top_k < routed.num_experts:  # else the sum of all is 1, but for rare roundings
            call = _with_even_scores(call)
            if not _fuse_if_equal(router, FusedRouter, call):
                _fuse_if_equal(router, PlainRouter, call)
    for mixture in filter(calls.get, mixtures):
        _fuse_if_equal(mixture, FusedMixture, calls[mixture])
    for layer in base.layers:
        if hasattr(layer, "self_attn"):
            _fuse_if_equal(layer.self_attn, FusedAttention, calls[layer.self_attn])
    following: tuple = (norm, (base, "norm")) if isinstance(norm, FusedNorm) else ()
    for layer in reversed(base.layers):
        fused = _fuse_if_equal(layer, FusedLayer, calls[layer])
        if fused and following and calls[following[0]].given is calls[layer].result:
            layer.following = following[1]
            layer.continued = following[0] is not norm and calls[following[0]].like(calls[layer])
        following = (layer, (layer, "input_layernorm")) if fused else ()


def _with_even_scores(call: _ModuleCall) -> _ModuleCall:
    """Return a router's call with rows added whose scores are even: where one has all, many forms agree."""
    hidden, *rest = call.args
    return call._replace(args=(torch.cat((hidden, torch.zeros_like(hidden)), -2), *rest))


def _recorded(run: Callable[[], object], modules: Iterable[nn.Module]) -> dict[nn.Module, _ModuleCall]:
    """Return the modules' calls in a run."""
    calls: dict[nn.Module, _ModuleCall] = {}

    def record(module: nn.Module, args: tuple, kwargs: dict[str, Any], result: Any) -> None:
        calls[module] = _ModuleCall(args, kwargs, result)

    handles = [module.register_forward_hook(record, with_kwargs=True) for module in modules]
    try:
        run()
    finally:
        for handle in handles:
            handle.remove()
    return calls


@torch.inference_mode()
def _fuse_if_equal(module: Any, form: type[_Fused], call: _ModuleCall) -> bool:
    """Give a module its fused form, if that returns the same bits, at other positions, too: it never looks at them.

    A parameter or buffer that the form doesn't read stands against it.
    """
    own = type(module)
    if other_state(module, form.READS) or (isinstance(module, UnderMode) and not issubclass(form, FusedRouter)):
        return False
    variants = [call.kwargs]
    if call.kwargs.get("position_ids") is not None:
        variants.append(call.kwargs | {"position_ids": call.kwargs["position_ids"] + 10_000})
    expected = [module(*call.args, **kwargs) for kwargs in variants]
    module.__class__ = type(form.__name__, (form, own), {})
    try:
        found = [module(*call.args, **kwargs) for kwargs in variants]
        fused = all(map(_same, found, expected))
    except (AttributeError, AssertionError, LookupError, RuntimeError, TypeError, ValueError):
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


def forget_steps(model: PreTrainedModel) -> None:
    """Let go of what steps left in a model: launches, which hold parameters."""
    for module in model.modules():
        if isinstance(module, FusedLayer):
            module._last_launch = None


def prepare_rollout(model: PreTrainedModel) -> None:
    """Pack an exact model's weights and fuse its modules. UnsupportedModelError if its bits don't stay what they were.

    A control stays as it is.
    """
    if not is_exact(model):
        return
    check = SelfCheck(model)
    pack_weights(model)
    linears = [module for module in model.modules() if isinstance(module, ExactLinear)]
    assert all(linear.packed is not None for linear in linears if linear.low_rank is not None), "or it is passed over"
    fuse(model, check.prefill)
    check.paged()
