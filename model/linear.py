"""The linears of an exact model: HF's parameters in training; packed, with an adapter or without, in an engine."""

from __future__ import annotations

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
        """Return x @ weight.T + bias in x's dtype, plus the adapter's part where there is one."""
        if self.low_rank is not None:
            assert self.packed is not None, "an engine packs its weights before it runs"
            return ops.linears(x, [self.packed], [self.bias], [self.low_rank])[0]
        return ops.linear(x, self.packed or self.weight, self.bias)


def products(x: Tensor, *modules: nn.Module) -> list[Tensor]:
    """Return each linear's output for x: in one launch where all are packed, and nobody watches or replaced one."""
    weights = []
    for module in modules:
        if not isinstance(module, ExactLinear) or module.packed is None or module._forward_hooks:
            return [m(x) for m in modules]
        weights.append(module.packed)
    return ops.linears(x, weights, [m.bias for m in modules], [m.low_rank for m in modules])  # type: ignore[misc]
