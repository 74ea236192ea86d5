"""The table of `samebits verify --coverage`: how each class of a model's modules computes, or what is not covered."""

from __future__ import annotations

import os
from collections import Counter
from typing import Any, NamedTuple

import psutil
import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from .checkpoint import resolve
from .coverage import UnderMode
from .exact import check_config, check_structure, exact_model, load_config, make_exact, parse_dtype
from .experts import is_experts
from .families import TESTED
from .layers import keep_layers
from .linear import ExactLinear, UnsupportedModelError
from .roles import ExactMLP, ExactRMSNorm, ExactRotary
from .rollout import prepare_rollout
from .stage import fill_tables


class Survey(NamedTuple):
    """rows: class, how many modules, how they compute. problem: what is not covered; then there are no rows."""

    model_type: str
    rows: list[tuple[str, int, str]]
    problem: str | None = None

    @property
    def tested(self) -> bool:
        """True for a family that the tests cover."""
        return self.model_type in TESTED


def survey(name: str | os.PathLike, dtype: str | None = None, device: str = "cpu") -> Survey:
    """Return how a checkpoint's modules compute; of a folder with a config alone, with random weights.

    Then only the layers up to the first of the last kind are made, with their real sizes; MemoryError where these are
    more than the machine has free.
    """
    path = resolve(name)
    config = load_config(path)
    try:
        check_config(config)
        with torch.device("meta"):
            model: Any = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
        classes = {place: type(module).__name__ for place, module in model.named_modules()}
        if any(path.glob("*.safetensors")):
            model = exact_model(path, dtype, device)
        else:
            model = make_exact(_with_random_weights(model, parse_dtype(dtype, device, config), device))
        counts = Counter((classes[place], _how(module)) for place, module in model.named_modules())
        prepare_rollout(model)
    except UnsupportedModelError as error:
        return Survey(config.model_type, [], str(error))
    return Survey(config.model_type, [(kind, count, how) for (kind, how), count in counts.items() if how])


def _with_random_weights(model: PreTrainedModel, dtype: torch.dtype, device: str) -> PreTrainedModel:
    """Return a model without data as one of random weights that has a layer of each kind."""
    check_structure(model)
    types = getattr(model.config, "layer_types", None) or [""] * model.config.num_hidden_layers
    base: Any = model.base_model
    kinds = [(kind, *map(type, layer.modules())) for kind, layer in zip(types, base.layers, strict=True)]
    keep_layers(model, (0, max(map(kinds.index, kinds)) + 1))
    needed = sum(p.numel() * max(p.itemsize, dtype.itemsize) for p in model.parameters())
    free = psutil.virtual_memory().available
    if needed > free:
        raise MemoryError(f"a layer of each kind takes {needed >> 30} GiB, {free >> 30} are free: give smaller sizes")
    model.to_empty(device=device)
    fill_tables(model)
    model.apply(model._init_weights)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model.to(device).eval()  # type: ignore[arg-type]


def _how(module: nn.Module) -> str:
    """Return how a module of an exact model computes; empty where it only arranges others or moves data."""
    call = getattr(module, "observed", None)
    if isinstance(module, UnderMode):
        routing = module.routing
        return "own code, exact functions" + (f"; {routing.top_k} of {routing.num_experts} experts" if routing else "")
    if call is not None:
        return f"attention, window {call.window}" if call.window else "attention"
    if isinstance(module, ExactLinear):
        return "linear" if type(module) is ExactLinear else "lm_head"
    if isinstance(module, ExactRMSNorm):
        return "norm" + (" of 1 + weight" if module.offset else "")
    if isinstance(module, ExactMLP):
        return f"gated MLP, {module.activation}"
    if isinstance(module, ExactRotary):
        return "rotary tables"
    return f"experts, {module.activation}" if is_experts(module) else ""
