"""The roles that samebits has modules for: recognised by a module's structure, proven by probing its own forward.

A probe runs a module on random numbers, with its weights and children replaced, so that the result's form shows: a
norm's, say, is w n(x). What has no role here keeps its own code; see `coverage`.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN

from ..kernels import ops
from .linear import ExactLinear, gated

_PLACEHOLDERS = {"gate_proj", "up_proj", "down_proj"}


class ExactRMSNorm(nn.Module):
    """RMSNorm by the exact op; see `ops.rms_norm`. offset: added to the weight; a norm without one has ones."""

    weight: nn.Parameter
    variance_epsilon: float
    offset = 0.0

    def forward(self, x: Tensor) -> Tensor:
        """Return the normed rows in x's dtype."""
        weight = getattr(self, "weight", None)
        if weight is not None and not self.offset:
            return ops.rms_norm(x, weight, self.variance_epsilon)
        wide = x.float()
        weight = wide.new_ones(x.shape[-1]) if weight is None else weight.float() + self.offset
        return ops.rms_norm(wide, weight, self.variance_epsilon).to(x.dtype)


class ExactMLP(nn.Module):
    """A gated MLP whose activation is the exact op; see `ops.gated_activation`."""

    activation: str
    gate_proj: nn.Module
    up_proj: nn.Module
    down_proj: nn.Module

    def forward(self, x: Tensor) -> Tensor:
        """Return down(activation(gate(x)) * up(x))."""
        return self.down_proj(gated(x, self.gate_proj, self.up_proj, self.activation))


class ExactRotary(nn.Module):
    """Rotary tables by the exact op; see `ops.rotary_tables`. Kinds of layers may have frequencies of their own."""

    @torch.no_grad()
    def forward(self, x: Tensor, position_ids: Tensor, layer_type: str | None = None) -> tuple[Tensor, Tensor]:
        """Return cos and sin in x's dtype, in which FSDP2 hands them to layers, too.

        Raises TypeError if `inv_freq` is no longer fp32.
        """
        inv_freq, scaling = _frequencies(self, layer_type)
        if inv_freq.dtype != torch.float32:
            raise TypeError(f"inv_freq was cast to {inv_freq.dtype}; load with dtype=... instead of model.to(...)")
        cos, sin = ops.rotary_tables(position_ids, inv_freq, float(scaling))
        return cos.to(x.dtype), sin.to(x.dtype)


def _frequencies(rotary: nn.Module, layer_type: str | None) -> tuple[Any, Any]:
    """Return a rotary embedding's frequencies and the factor of its tables, by transformers' names."""
    kind = "" if layer_type is None else f"{layer_type}_"
    return getattr(rotary, f"{kind}inv_freq", None), getattr(rotary, f"{kind}attention_scaling", None)


Role = tuple[type[nn.Module], dict[str, Any]]  # the exact class, and attributes that it needs


@torch.no_grad()
def role_of(module: nn.Module) -> Role | None:
    """Return the role that a module has, or None."""
    if type(module) is nn.Linear:
        return ExactLinear, {}
    for probe in (_norm, _gated_mlp, _rotary):
        if (role := probe(module)) is not None:
            return role
    return None


def activation_of(gate: Callable[[Tensor, Tensor], Tensor]) -> str | None:
    """Return the activation, by HF's name, whose product with `up` a function of (gate, up) is; None for others."""
    generator = torch.Generator().manual_seed(0)
    size = torch.logspace(0, 3, 7)  # where gates of some families are clamped, too
    first, second = (torch.randn(5, 7, generator=generator, dtype=torch.float64) * size for _ in range(2))
    found = gate(first, second)
    if not isinstance(found, Tensor) or found.shape != first.shape:
        return None
    names = ops.backend(torch.device("cpu")).ACTIVATIONS
    return next((name for name in names if torch.allclose(found.double(), ACT2FN[name](first) * second, 1e-6)), None)


def _with(module: nn.Module, kind: str, new: dict[str, Any]) -> nn.Module:
    """Return a shallow copy of a module with other entries in its `_parameters` or `_modules`."""
    other = copy.copy(module)
    vars(other)[kind] = vars(module)[kind] | new
    return other


class _Fixed(nn.Module):
    """A stand-in for a linear: notes its argument, and returns what it was made with, or the argument."""

    def __init__(self, result: Tensor | None = None):
        super().__init__()
        self.result = result

    def forward(self, x: Tensor) -> Tensor:
        self.given = x
        return x if self.result is None else self.result


def _arguments(module: nn.Module) -> int:
    return len(inspect.signature(module.forward).parameters)


def other_state(module: nn.Module, read: Collection[str]) -> list[str]:
    """Return parameters and buffers that aren't `read`, nor of a child that is: neutral now, they may not stay so."""
    state = (*module.named_parameters(), *module.named_buffers())
    return [name for name, _ in state if name.partition(".")[0] not in read]


def _norm(module: nn.Module) -> Role | None:
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    parameters = dict(module.named_parameters())
    plain = not other_state(module, {"weight"}) and not list(module.children())
    if not (isinstance(eps, float) and plain and _arguments(module) == 1):
        return None
    weight = parameters.get("weight", torch.ones(24))
    if weight.dim() != 1:
        return None
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(7, len(weight), generator=generator, dtype=torch.float32)  # whatever the process's default is
    x *= torch.logspace(-4, 2, 7)[:, None]  # the first row shows eps
    scales = torch.randn(len(weight), generator=generator, dtype=torch.float32)
    new = {"weight": nn.Parameter(scales.to(weight.device))} if parameters else {}
    try:
        found = _with(module, "_parameters", new)(x.to(weight.device))
    except (RuntimeError, TypeError, IndexError):
        return None
    if not isinstance(found, Tensor) or found.shape != x.shape:
        return None
    normed = x.double() * torch.rsqrt(x.double().square().mean(-1, keepdim=True) + eps)
    forms = {0.0: normed * scales, 1.0: normed * (1 + scales)} if parameters else {0.0: normed}
    for offset, expected in forms.items():
        if torch.allclose(found.cpu().double(), expected, rtol=1e-4, atol=1e-5):
            return ExactRMSNorm, {"variance_epsilon": eps, "offset": offset}
    return None


def _gated_mlp(module: nn.Module) -> Role | None:
    children = dict(module.named_children())
    linears = all(isinstance(children.get(name), nn.Linear) for name in _PLACEHOLDERS)
    others = [*(set(children) - _PLACEHOLDERS - {"act_fn"}), *other_state(module, _PLACEHOLDERS)]
    if not linears or others or _arguments(module) != 1:
        return None
    x = torch.ones(1, dtype=torch.float64)

    def run(gate: Tensor, up: Tensor) -> Tensor:
        stubs = {"gate_proj": _Fixed(gate), "up_proj": _Fixed(up), "down_proj": _Fixed()}
        out = _with(module, "_modules", stubs)(x)
        if stubs["gate_proj"].given is not x or stubs["up_proj"].given is not x:
            raise TypeError("gate and up take something else than the module's input")
        return out

    try:
        name = activation_of(run)
    except (RuntimeError, TypeError, AttributeError):
        return None
    return None if name is None else (ExactMLP, {"activation": name})


def _rotary(module: nn.Module) -> Role | None:
    kinds = getattr(module, "layer_types", None) or [None]
    tables = {name for name, _ in module.named_buffers() if name.endswith("inv_freq")}
    if other_state(module, tables) or _arguments(module) != 2 + (kinds != [None]):
        return None
    for kind in kinds:
        inv_freq, scaling = _frequencies(module, kind)
        if not (isinstance(inv_freq, Tensor) and inv_freq.dim() == 1 and isinstance(scaling, int | float)):
            return None
        if inv_freq.dtype != torch.float32:
            return None
        positions = torch.tensor([[0, 1, 7, 500, 9999]], device=inv_freq.device)
        found = module(inv_freq.new_zeros(1, 5, 8), positions, *filter(None, [kind]))
        expected = ops.rotary_tables(positions, inv_freq, float(scaling))
        if not isinstance(found, tuple) or len(found) != 2 or found[0].shape != expected[0].shape:
            return None
        if not all(torch.allclose(a, b, atol=1e-5) for a, b in zip(found, expected, strict=True)):
            return None
    return ExactRotary, {}
