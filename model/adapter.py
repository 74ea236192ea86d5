"""LoRA adapters (Hu et al., 2021) on an exact model: PEFT's configurations, files and modules, with exact products.

A trainer's adapter is PEFT's own code, whose two factors are `Factor`s. An engine keeps the factors beside each linear
(`attach`). Both compute base(x), rounded as ever, plus scale * B(A(x)) in fp32, and round the sum.
"""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import json
import os
import pathlib
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, TypeGuard

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PretrainedConfig

from ..kernels import ops
from .linear import ExactLinear, UnsupportedModelError

if TYPE_CHECKING:
    from peft import LoraConfig, PeftModel
else:
    LoraConfig = Any  # PEFT is an extra

Adapter: TypeAlias = LoraConfig | nn.Module | str | os.PathLike  # `load_adapter_config` says of what kinds

PREFIX = "base_model.model."  # of a base model's names in PEFT's files and models
FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
_SUPPORTED = frozenset({  # settings that may have any value; others must have their default
    "r", "lora_alpha", "use_rslora", "target_modules", "exclude_modules", "layers_to_transform", "layers_pattern",
    "rank_pattern", "alpha_pattern", "init_lora_weights", "task_type", "auto_mapping", "peft_version", "revision",
    "base_model_name_or_path", "inference_mode",
})  # fmt: skip
_PLACES = "supported: the linears of decoder layers"
_STARTS = (True, False, "gaussian", "orthogonal")  # ways to begin that leave the base as it is


class Placement(NamedTuple):
    """An adapter's addition to one linear: rank rows of A, and the factor before B(A(x))."""

    rank: int
    scale: float


class Factor(nn.Linear):
    """A or B of an adapter: the product in fp32 whatever the dtypes of x and weight, for the sum to be rounded once."""

    def forward(self, x: Tensor) -> Tensor:
        """Return x @ weight.T, fp32."""
        return ops.linear(x.float(), self.weight.float())


def library() -> Any:
    """Return the module `peft`. ImportError that says what to install."""
    try:
        import peft
    except ImportError as error:
        raise ImportError(f"adapters need the extra 'lora': pip install 'samebits[lora]' ({error})") from error
    return peft


def is_folder(source: object) -> TypeGuard[str | os.PathLike]:
    """True for a folder with PEFT's files."""
    return isinstance(source, str | os.PathLike) and (pathlib.Path(source) / FILE).is_file()


def load_adapter_config(adapter: Adapter) -> LoraConfig:
    """Return the checked configuration of an adapter: given, of a PEFT model, or of a folder with PEFT's files.

    Raises UnsupportedModelError, naming the setting, for what samebits does not cover.
    """
    peft = library()
    if isinstance(adapter, peft.PeftModel):
        config = adapter.active_peft_config
    elif isinstance(adapter, peft.PeftConfig):
        config = adapter
    elif is_folder(adapter):
        config = peft.PeftConfig.from_pretrained(os.fspath(adapter))
    else:
        raise ValueError(f"adapter {adapter!r}: expected a peft.LoraConfig, a PEFT model, or a folder with {FILE}")
    if type(config) is not peft.LoraConfig:
        raise UnsupportedModelError(f"adapter type {type(config).__name__}; supported: LoraConfig")
    usual = peft.LoraConfig()
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if field.name not in _SUPPORTED and value != getattr(usual, field.name):
            raise UnsupportedModelError(
                f"adapter setting {field.name}={value!r} is not covered; leave it at its default"
            )
    if config.init_lora_weights not in _STARTS:
        raise UnsupportedModelError(f"adapter setting init_lora_weights={config.init_lora_weights!r} changes the base")
    return copy.deepcopy(config)


def adapt(model: nn.Module, adapter: Adapter) -> PeftModel:
    """Return PEFT's model around an exact one, with the adapter's weights where it brings some."""
    peft = library()
    config = load_adapter_config(adapter)
    if is_folder(adapter):
        adapted = peft.PeftModel.from_pretrained(model, os.fspath(adapter), is_trainable=True)  # type: ignore[arg-type]
    else:
        config.task_type = config.task_type or "CAUSAL_LM"
        adapted = peft.get_peft_model(model, config)
    if isinstance(adapter, nn.Module):
        state = peft.get_peft_model_state_dict(adapter, adapter_name=adapter.active_adapter)
        peft.set_peft_model_state_dict(adapted, state)
    cover(adapted)
    return adapted


def cover(model: nn.Module) -> None:
    """Make the factors of all adapters in an exact model exact.

    Raises UnsupportedModelError, naming the module, for whatever else PEFT has put into it.
    """
    for name, layer in _layers(model):
        base = layer.base_layer
        if type(base) is not ExactLinear:
            raise UnsupportedModelError(f"an adapter on {name!r}, a {type(base).__name__}; {_PLACES}")
        if layer.merged:
            raise UnsupportedModelError(f"the adapter of {name!r} is merged into the base; call unmerge_adapter()")
        for key, down in layer.lora_A.items():
            up = layer.lora_B[key]
            plain = isinstance(layer.lora_dropout[key], nn.Identity) and key not in layer.lora_variant
            if not plain or down.bias is not None or up.bias is not None:
                raise UnsupportedModelError(f"adapter {key!r} of {name!r} has dropout, a bias or is a variant of LoRA")
            for factor in (down, up):
                if factor.weight.dtype not in (torch.float32, base.weight.dtype):
                    raise UnsupportedModelError(f"adapter {key!r} of {name!r} is {factor.weight.dtype}; use float32")
                if type(factor) is nn.Linear:
                    factor.__class__ = Factor


def _layers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield PEFT's layers by their linears' names in the base model. UnsupportedModelError for others than LoRA's."""
    from peft.tuners.lora import Linear
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    def within(prefix: str, parent: nn.Module) -> Iterator[tuple[str, Any]]:
        for name, module in parent.named_children():  # not `named_modules`: most are within a layer
            if isinstance(module, Linear):
                # torch's activation checkpointing puts itself between
                yield (prefix + name).removeprefix(PREFIX).replace("_checkpoint_wrapped_module.", ""), module
            elif isinstance(module, BaseTunerLayer | AuxiliaryTrainingWrapper):
                what = f"module {prefix + name!r} is PEFT's {type(module).__name__}"
                raise UnsupportedModelError(f"{what}; supported: lora.Linear")
            else:
                yield from within(f"{prefix}{name}.", module)

    return within("", model)


def active_layers(model: nn.Module) -> Iterator[tuple[str, Any, str]]:
    """Yield PEFT's layers that the active adapter is on, by their linears' names, and the adapter's name."""
    for name, layer in _layers(model):
        active = [key for key in layer.active_adapters if key in layer.lora_A]
        if len(active) > 1:
            raise UnsupportedModelError(f"several adapters are active: {', '.join(active)}; an engine has one")
        if active:
            yield name, layer, active[0]


def is_adapted(model: nn.Module) -> bool:
    """True if PEFT has put something into the model or around it."""
    return any("peft_config" in vars(module) for module in (model, getattr(model, "base_model", model)))


def placements(model: nn.Module) -> dict[str, Placement]:
    """Return what the active adapter of a model adds, by the names of the linears in the base model."""
    return {name: Placement(layer.r[key], layer.scaling[key]) for name, layer, key in active_layers(model)}


def adapter_state(model: nn.Module) -> dict[str, Tensor]:
    """Return the active adapter's tensors by their names in PEFT's files."""
    state = {}
    for name, layer, key in active_layers(model):
        state[tensor_name(name, "A")] = layer.lora_A[key].weight
        state[tensor_name(name, "B")] = layer.lora_B[key].weight
    return state


def updated_state(model: nn.Module) -> dict[str, Tensor]:
    """Return what an update of an engine brings: the active adapter alone, or the state dict of a model without one."""
    return adapter_state(model) if is_adapted(model) else model.state_dict()


def tensor_name(linear: str, factor: str) -> str:
    """Return the name in PEFT's files of a linear's factor, "A" or "B"."""
    return f"{PREFIX}{linear}.lora_{factor}.weight"


def is_adapter_tensor(name: str) -> bool:
    """True for an adapter's tensor, by its name in PEFT's files."""
    return name.startswith(PREFIX)


def resolve_placements(base: PretrainedConfig, adapter: LoraConfig) -> dict[str, Placement]:
    """Return what an adapter adds to a base model of this configuration, as PEFT finds it on one without data."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(base)
        return placements(library().get_peft_model(model, copy.deepcopy(adapter)))


def describe(placed: Mapping[str, Placement]) -> str:
    """Return the contract's line on an adapter: where it is, its ranks and scales."""
    if not placed:
        return "none"
    kinds = ", ".join(sorted({f"rank {rank} scale {scale!r}" for rank, scale in placed.values()}))
    where = ", ".join(sorted({name.rpartition(".")[2] for name in placed}))
    digest = hashlib.sha256(json.dumps(sorted(placed.items())).encode()).hexdigest()[:12]
    return f"LoRA on {len(placed)} linears ({where}), {kinds}; + scale * B(A(x)) in fp32, rounded; {digest}"


def attach(model: nn.Module, placed: Mapping[str, Placement]) -> None:
    """Put an adapter of zeros beside these linears of an engine's model; names that it has not are passed over."""
    for name, module in model.named_modules():
        if name in placed:
            if type(module) is not ExactLinear:
                raise UnsupportedModelError(f"an adapter on {name!r}, a {type(module).__name__}; {_PLACES}")
            rank, scale = placed[name]
            down = torch.zeros(rank, module.in_features, dtype=torch.float32, device=module.weight.device)
            up = torch.zeros(module.out_features, rank, dtype=torch.float32, device=module.weight.device)
            module.low_rank = ops.LowRank(down, up, scale)
