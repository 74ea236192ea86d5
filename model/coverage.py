"""The ops of a model that decide bits, and whether samebits covers each: found by running the model, not by a list of
families.

`make_exact` gives modules with a role (see `roles`) samebits' ops. Then one forward of a few tokens under an `OpTrace`
shows what else computes: those modules run their own code under `ExactMode`, and what a second trace still shows is
refused. That every op is covered does not prove the model: one that shifts tokens moves data alone. So `selfcheck`
compares schedules, as bytes, on every model that is loaded.
"""

from __future__ import annotations

import itertools
import pathlib
import sys
from collections.abc import Set
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

from .. import kernels
from ..kernels.exact_mode import ExactMode, Routing, UnsupportedOpError
from . import attention
from .experts import WEIGHTS, is_experts
from .linear import UnsupportedModelError
from .paged import head_dim, plain_call, random_input

# data movement
_MOVES = """view _unsafe_view reshape _reshape_alias transpose t permute expand slice select split split_with_sizes
unsafe_split chunk cat stack unsqueeze squeeze clone copy_ _to_copy detach alias contiguous arange zeros ones empty full
zeros_like ones_like empty_like full_like new_empty new_zeros new_ones new_full empty_strided scalar_tensor embedding
index index_select gather scatter scatter_ repeat unbind narrow fill_ zero_ lift_fresh roll flip as_strided unfold
masked_select masked_scatter nonzero _local_scalar_dense constant_pad_nd tril triu diagonal movedim flatten tile
is_pinned"""
# IEEE-754 rounds these correctly, each element by itself; or they choose one of their arguments
_ROUNDED = """add add_ sub sub_ mul mul_ div div_ neg neg_ abs sqrt reciprocal square rsub clamp clamp_ clamp_min
clamp_max minimum maximum amax amin where masked_fill masked_fill_ eq ne lt gt le ge eq_ lt_ ge_ logical_and logical_or
logical_not bitwise_and bitwise_or bitwise_not relu relu_ sign floor ceil round trunc isnan isinf isfinite any all"""
_FREE = frozenset(_MOVES.split()) | frozenset(_ROUNDED.split())
TOKENS = 5
_KERNELS = str(pathlib.Path(kernels.__file__).parent)


class UnderMode(nn.Module):
    """A module that runs its own code under `ExactMode`: mixed into its class.

    place: its name in the model. routing: how it chooses experts, of a router.
    """

    place: str
    routing: Routing | None = None

    def forward(self, *args, **kwargs):
        """Return what the module's own forward does. UnsupportedModelError for a function without an exact form."""
        try:
            with ExactMode(self.routing):
                return super().forward(*args, **kwargs)
        except UnsupportedOpError as error:
            raise UnsupportedModelError(f"{self.place} ({type(self).__name__}) is not covered: {error}") from error


class OpTrace(TorchDispatchMode):
    """A record of the ops, by calling module, whose bits may depend on more than their own arguments' values.

    modules: those of the model; a module that one of them makes for a call counts as its own code.
    """

    def __init__(self, modules: Set[nn.Module]) -> None:
        super().__init__()
        self.modules = modules
        self.found: dict[nn.Module, set[str]] = {}
        self.choices: set[tuple[nn.Module, int, int]] = set()  # module, columns and k of each top-k of a matrix

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        out = op(*args, **(kwargs or {}))
        name = op._schema.name.partition("::")[2]
        if not _is_free(name, op._schema.overload_name, args, kwargs or {}, out):
            module = self._caller()
            if module is not None:
                self.found.setdefault(module, set()).add(name)
                if name == "topk" and args[0].dim() == 2:
                    self.choices.add((module, args[0].shape[1], args[1]))
        return out

    def _caller(self) -> nn.Module | None:
        """Return the module whose code runs an op; None if samebits' kernels do, which are exact."""
        frame: Any = sys._getframe(2)
        while not frame.f_code.co_filename.startswith(_KERNELS):
            owner = frame.f_locals.get("self")
            if isinstance(owner, nn.Module) and owner in self.modules:
                return owner
            frame = frame.f_back
        return None


def _is_free(name: str, overload: str, args: tuple, kwargs: dict[str, Any], out: Any) -> bool:
    """True for an op that moves data, is rounded correctly element by element, or computes with whole numbers."""
    values = (values if isinstance(values, list | tuple) else (values,) for values in (*args, *kwargs.values(), out))
    tensors = [value for value in itertools.chain.from_iterable(values) if isinstance(value, Tensor)]
    if any(tensor.is_complex() for tensor in tensors):  # a product of these is four products and two sums
        return False
    if tensors and not any(tensor.is_floating_point() for tensor in tensors):
        return True
    fuses = kwargs.get("alpha", 1) != 1 or (name == "rsub" and len(args) > 2) or "reduce" in overload
    return name in _FREE and not fuses


@torch.no_grad()
def trace(model: PreTrainedModel) -> OpTrace:
    """Return the trace of a few tokens through a model, or a stage of one, in evaluation and in training."""
    given = random_input(model, TOKENS)
    modes = {module: module.training for module in model.modules()}
    found = OpTrace(set(modes))
    try:
        for training in (False, True):
            model.train(training)
            with found:
                plain_call(model, given)
    finally:
        for module, training in modes.items():
            module.training = training
    return found


def is_router(module: nn.Module) -> bool:
    """True for a module that chooses experts, once `cover_rest` has seen it do so."""
    return isinstance(module, UnderMode) and module.routing is not None


def cover_rest(model: PreTrainedModel) -> None:
    """Have modules without a role that compute run under `ExactMode`. UnsupportedModelError for what it can't cover."""
    names = {module: name for name, module in model.named_modules()}
    model.set_attn_implementation(attention.OBSERVED)
    first = trace(model)
    model.set_attn_implementation(attention.PACKED)
    _check_attention(model, names)
    counts = {getattr(module, WEIGHTS[0]).shape[0] for module in model.modules() if is_experts(module)}
    routings = {module: Routing(experts, k) for module, experts, k in first.choices if experts in counts}
    for module in first.found:
        if module not in (model, model.base_model):
            module.__class__ = type(type(module).__name__, (UnderMode, type(module)), {})
            module.place = names[module]
            module.routing = routings.get(module)  # type: ignore[assignment]
    left = trace(model).found if first.found else {}
    if left:
        lines = [f"{names[m] or 'the model'} ({type(m).__name__}): {', '.join(sorted(ops))}" for m, ops in left.items()]
        raise UnsupportedModelError(f"ops without an exact form: {'; '.join(lines)}")


def _check_attention(model: PreTrainedModel, names: dict[nn.Module, str]) -> None:
    """Raise UnsupportedModelError for attention that the kernels or an engine's cache don't have."""
    config: Any = model.config
    for module, name in names.items():
        call: attention.AttentionCall | None = getattr(module, "observed", None)
        if call is None:
            continue
        problems = list(call.problems)
        if not problems and (call.kv_heads, call.key_dim) != (config.num_key_value_heads, head_dim(config)):
            problems.append(f"has {call.kv_heads} KV heads of {call.key_dim} numbers, unlike its config")
        if problems:
            raise UnsupportedModelError(f"{name} ({type(module).__name__}) {', '.join(problems)}: not covered")
