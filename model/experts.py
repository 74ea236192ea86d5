"""Mixture of experts: transformers' experts by `ops.experts`, and routers, which keep their own code.

transformers' experts classes look their forward up in a registry by name, as attention does. A router is whatever
module computes a top-k over experts: the trace of `coverage` finds it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..kernels import ops
from .attention import PACKED
from .linear import UnsupportedModelError
from .roles import activation_of, other_state

WEIGHTS = ("gate_up_proj", "down_proj")  # of an experts module: [experts, 2 intermediate, hidden], [experts, hidden, I]


def is_experts(module: nn.Module) -> bool:
    """True for experts that look their forward up in transformers' registry."""
    return hasattr(module, "is_transposed")


def experts_forward(module: Any, hidden: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """Return the weighted sum of each token's experts, [T, hidden]; ids int64 [T, k], weights [T, k]."""
    return ops.experts(hidden, module.gate_up_proj, module.down_proj, ids, weights, module.activation)


def check_experts(name: str, module: Any) -> str:
    """Return the activation of experts. Raises UnsupportedModelError, saying what is missing, for other layouts."""
    problems = {
        "transposed weights": module.is_transposed,
        "biases": module.has_bias,
        "no gate": not module.has_gate,
        "interleaved gate and up": not module.is_concatenated,
        "a norm after each expert": getattr(module, "has_post_expert_norm", False),
        "expert parallelism": getattr(module, "_is_expert_parallel", False),
        "weights of other names": not all(isinstance(getattr(module, w, None), nn.Parameter) for w in WEIGHTS),
        "further weights": bool(other_state(module, WEIGHTS)) and not module.has_bias,
    }
    found = [problem for problem, there in problems.items() if there]
    activation = None if found else activation_of(lambda gate, up: module._apply_gate(torch.cat((gate, up), -1)))
    if activation is None:
        found = found or ["a gate of its own"]
        raise UnsupportedModelError(f"experts {name!r} ({type(module).__name__}) have {', '.join(found)}: not covered")
    return activation


def use_exact_experts(model: PreTrainedModel) -> None:
    """Have all experts of a model computed by `ops.experts`."""
    found = {name: module for name, module in model.named_modules() if is_experts(module)}
    for name, module in found.items():
        module.activation = check_experts(name, module)  # type: ignore[assignment]
    if found:
        from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

        ALL_EXPERTS_FUNCTIONS.register(PACKED, experts_forward)
        model.set_experts_implementation(PACKED)


def pack_experts(module: Any) -> None:
    """Put experts' packed weights in their parameters' places."""
    for name in WEIGHTS:
        weight = getattr(module, name)
        delattr(module, name)
        setattr(module, name, ops.PackedWeight.pack(weight))
