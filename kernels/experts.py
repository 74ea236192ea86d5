"""Mixture of experts: a token's experts, each a gated MLP, and the sum of what they say by the router's weights.

The tree is that of `linear` for each expert, a rounding to the storage dtype after each op, and a sum in fp32 over a
token's experts by ascending id: neither the order of slots nor an expert's other tokens decide a bit.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .backend import ExpertPlan
from .dispatch import backend
from .modes import apply, outside_modes
from .packed import PackedWeight


class _Experts(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, gate_up, down, ids, weights, activation):
        kernels = backend(x.device)
        plan = kernels.plan_experts(ids, gate_up.shape[0])
        both = kernels.grouped(x.detach(), gate_up.detach(), plan, True, x.dtype)
        hidden = kernels.gated_halves(both, activation)
        y = kernels.grouped(hidden, down.detach(), plan, False, x.dtype)
        ctx.save_for_backward(x, gate_up, down, weights, *plan, both, y)
        ctx.activation = activation
        return kernels.combine(y, weights.detach().float(), plan, x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        x, gate_up, down, weights, *order, both, y = (t.detach() for t in ctx.saved_tensors)
        plan, kernels = ExpertPlan(*order), backend(x.device)
        grad_y, grad_weights = kernels.combine_backward(grad, y, weights.float(), plan)
        gate, up = both.chunk(2, -1)
        grad_hidden = kernels.grouped(grad_y, down.transpose(1, 2), plan, False, x.dtype)
        grads = kernels.gated_activation_backward(grad_hidden, gate, up, ctx.activation)
        grad_both = torch.cat(grads, -1)
        grad_x = grad_gate_up = grad_down = None
        if ctx.needs_input_grad[0]:
            grad_rows = kernels.grouped(grad_both, gate_up.transpose(1, 2), plan, False, torch.float32)
            grad_x = kernels.combine(grad_rows, torch.ones_like(weights, dtype=torch.float32), plan, x.dtype)
        if ctx.needs_input_grad[1]:
            grad_gate_up = kernels.grouped_outer(grad_both, x[plan.tokens], plan, gate_up.dtype)
        if ctx.needs_input_grad[2]:
            hidden = kernels.gated_halves(both, ctx.activation)
            grad_down = kernels.grouped_outer(grad_y, hidden, plan, down.dtype)
        return grad_x, grad_gate_up, grad_down, None, grad_weights.to(weights.dtype), None


@outside_modes
def experts(
    x: Tensor,
    gate_up: Tensor | PackedWeight,
    down: Tensor | PackedWeight,
    ids: Tensor,
    weights: Tensor,
    activation: str,
) -> Tensor:
    """Return for each token the sum of its experts' gated MLPs by its weights, [T, H] in x's dtype.

    x [T, H]; gate_up [E, 2 I, H], whose first I rows are the gate's; down [E, H, I]; ids int64 [T, k], a token's
    experts in any order; weights [T, k], by which the sum is taken in fp32. activation: HF's `hidden_act`. Packed
    weights are for rollout only: there is no backward then.

    Raises ValueError for shapes that don't fit, and on CPUs for ids that are no expert's.
    """
    _check(x, gate_up, down, ids, weights, activation)
    if isinstance(gate_up, PackedWeight):
        assert isinstance(down, PackedWeight)
        given = x.detach(), gate_up.memory, down.memory, gate_up.features // 2, ids, weights.detach().float()
        return backend(x.device).packed_experts(*given, activation)
    return apply(_Experts, x, gate_up, down, ids, weights, activation)


def _check(x, gate_up, down, ids, weights, activation) -> None:
    if isinstance(gate_up, PackedWeight) != isinstance(down, PackedWeight):
        raise ValueError("experts: pack both gate_up and down, or neither")
    if activation not in backend(x.device).ACTIVATIONS:
        known = ", ".join(backend(x.device).ACTIVATIONS)
        raise ValueError(f"experts: activation {activation!r}; supported: {known}")
    if ids.shape != weights.shape or ids.dim() != 2 or ids.shape[0] != x.shape[0]:
        shapes = f"x {list(x.shape)}, ids {list(ids.shape)}, weights {list(weights.shape)}"
        raise ValueError(f"experts: {shapes}; ids and weights must be [{x.shape[0]}, k]")
    if isinstance(gate_up, Tensor):
        experts, twice, depth = gate_up.shape
        if depth != x.shape[-1] or tuple(down.shape) != (experts, depth, twice // 2) or twice % 2:
            shapes = f"x {list(x.shape)}, gate_up {list(gate_up.shape)}, down {list(down.shape)}"
            raise ValueError(f"experts: {shapes}; must be [T, H], [E, 2 I, H], [E, H, I]")
