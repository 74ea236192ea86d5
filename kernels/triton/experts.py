"""Mixture of experts on GPUs."""

from __future__ import annotations

import torch

from ..backend import ExpertPlan
from .linear import products


def plan_experts(ids: torch.Tensor, experts: int) -> ExpertPlan:
    flat = ids.reshape(-1)
    pairs = flat.argsort(stable=True)
    places = torch.empty_like(pairs)
    places[pairs] = torch.arange(pairs.numel(), device=ids.device)
    ends = torch.searchsorted(flat[pairs], torch.arange(experts, device=ids.device), right=True)
    return ExpertPlan(pairs, places.view(ids.shape).sort(-1).values, ends)


def pack_experts(weight: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    return (torch.empty(weight.shape, dtype=weight.dtype, device=weight.device) if out is None else out).copy_(weight)


def grouped_packed(
    x: torch.Tensor, weight: torch.Tensor, features: int, plan: ExpertPlan, gather: bool, dtype: torch.dtype
) -> torch.Tensor:
    rows = x[plan.tokens] if gather else x
    counts = plan.ends.diff(prepend=plan.ends.new_zeros(1)).tolist()
    parts = [products(r.to(w.dtype), [w], [None], dtype)[0] for r, w in zip(rows.split(counts), weight, strict=True)]
    return torch.cat(parts)


def grouped_unpacked(
    x: torch.Tensor, weight: torch.Tensor, plan: ExpertPlan, gather: bool, dtype: torch.dtype
) -> torch.Tensor:
    return grouped_packed(x, weight, weight.shape[1], plan, gather, dtype)


def grouped_outer(x: torch.Tensor, y: torch.Tensor, plan: ExpertPlan, dtype: torch.dtype) -> torch.Tensor:
    counts = plan.ends.diff(prepend=plan.ends.new_zeros(1)).tolist()
    return torch.stack([a.t() @ b for a, b in zip(x.split(counts), y.to(x.dtype).split(counts), strict=True)]).to(dtype)


def combine(y: torch.Tensor, weights: torch.Tensor, plan: ExpertPlan, dtype: torch.dtype) -> torch.Tensor:
    total = y.new_zeros(weights.shape[0], y.shape[1], dtype=torch.float32)
    for rows in plan.places.unbind(1):
        total = total + y[rows].float() * weights.view(-1)[plan.pairs[rows]][:, None]
    return total.to(dtype)
