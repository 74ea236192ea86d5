"""The linears of an exact model: HF's parameters in training; packed, with an adapter or without, in an engine."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from ..kernels import ops


class UnsupportedModelError(NotImplementedError):
    """The model has a part that decides bits and that samebits does not cover."""


class ExactLinear(nn.Linear):
    """nn.Linear on `ops.linear`.

    packed: replaces `weight` in an engine. low_rank: an engine's adapter beside it. exact: False for the lm_head of a
    control, which has torch's product.
    """

    packed: ops.PackedWeight | None = None
    low_rank: ops.LowRank | None = None
    exact = True

    def forward(self, x: Tensor) -> Tensor:
        """Return x @ weight.T + bias in x's dtype, plus, once packed, the adapter's part where there is one."""
        if self.packed is None or self.low_rank is None:
            return ops.linear(x, self.packed or self.weight, self.bias)
        return ops.linears(x, [self.packed], [self.bias], [self.low_rank])[0]


def products(x: Tensor, *modules: nn.Module) -> list[Tensor]:
    """Return each linear's output for x: in one launch where all are packed, and nobody watches or replaced one."""
    linears = _packed(modules)
    if linears is None:
        return [m(x) for m in modules]
    weights = [m.packed for m in linears]
    biases = [m.bias for m in linears]
    return ops.linears(x, weights, biases, [m.low_rank for m in linears])  # type: ignore[arg-type]


def gated(x: Tensor, gate: nn.Module, up: nn.Module, activation: str) -> Tensor:
    """Return activation(gate(x)) * up(x): of `products`, or in one launch where they have no adapters either."""
    linears = _packed((gate, up))
    if linears is None or any(m.low_rank is not None for m in linears):
        of_gate, of_up = products(x, gate, up)
        return ops.gated_activation(of_gate, of_up, activation)
    return ops.gated_linears(x, [m.packed for m in linears], [m.bias for m in linears], activation)  # type: ignore[misc]


def _packed(modules: Sequence[nn.Module]) -> list[ExactLinear] | None:
    """Return the modules if they are packed linears, and nobody watches or replaced one."""
    found = [m for m in modules if isinstance(m, ExactLinear) and m.packed is not None and not m._forward_hooks]
    return found if len(found) == len(modules) else None
