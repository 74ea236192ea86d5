"""The dtypes in which a model's tensors enter a forward: a trainer's, where FSDP2 may cast them, and an engine's."""

from __future__ import annotations

import copy
import re

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, PretrainedConfig

from .stored import loaded_dtypes

_WRAPPERS = re.compile(r"^base_model\.model\.|\bbase_layer\.|\b_checkpoint_wrapped_module\.")  # PEFT's and torch's


def own_name(name: str) -> str:
    """Return the name that a tensor has in a model without wrappers."""
    return _WRAPPERS.sub("", name)


def is_sharded(model: nn.Module) -> bool:
    """True if FSDP2 wraps a model, or a part of it."""
    return any(isinstance(module, FSDPModule) for module in model.modules())


def computed_dtypes(model: nn.Module, param_dtype: torch.dtype | None = None) -> dict[str, torch.dtype]:
    """Return the dtypes in which a model's parameters and stored buffers enter its forward, by their own names.

    FSDP2 casts the parameters that it shards, no buffer and none that it was told to ignore. param_dtype: to which it
    will cast those of a model that it doesn't wrap yet.
    """
    found: dict[str, torch.dtype] = {}
    casts: dict[str, torch.dtype | None] = {}
    for name, module in model.named_modules():
        cast = casts.get(name.rpartition(".")[0], param_dtype)
        if isinstance(module, FSDPModule):
            module.reshard()  # after a forward alone, its parameters are still whole, and look like ignored ones
            cast = module._get_fsdp_state()._mp_policy.param_dtype
        casts[name] = cast
        prefix = own_name(f"{name}.") if name else ""
        for key, parameter in module.named_parameters(recurse=False):
            is_cast = param_dtype is not None or isinstance(parameter, DTensor)
            found[prefix + key] = cast if cast is not None and is_cast else parameter.dtype
        for key, buffer in module.named_buffers(recurse=False):
            if key not in module._non_persistent_buffers_set:
                found[prefix + key] = buffer.dtype
    return found


_loaded: dict[tuple[str, torch.dtype], dict[str, torch.dtype]] = {}  # by config: a model takes a second to make


def engine_dtypes(config: PretrainedConfig, dtype: torch.dtype) -> dict[str, torch.dtype]:
    """Return the dtypes that a model's stored tensors have in an engine of `dtype`: some stay fp32. Empty for fp32."""
    if dtype == torch.float32:
        return {}
    key = config.to_json_string(), dtype
    if key not in _loaded:
        with torch.device("meta"):
            _loaded[key] = loaded_dtypes(AutoModelForCausalLM.from_config(copy.deepcopy(config), dtype=dtype))
    return _loaded[key]
