"""Functions that a model's own code calls, differentiable, with fixed trees: what `ExactMode` maps torch's to."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .backend import UNARY
from .dispatch import backend
from .modes import apply, outside_modes


class _Unary(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, name):
        ctx.save_for_backward(x)
        ctx.name = name
        return backend(x.device).unary(x.detach(), name)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        wide = x.detach().float().requires_grad_()
        with torch.enable_grad():
            out = UNARY[ctx.name](wide)
        return torch.autograd.grad(out, wide, grad.float())[0].to(x.dtype), None


def unary(x: Tensor, name: str) -> Tensor:
    """Return a function of each element of x, in x's dtype: fp32 inside, one rounding; name: of `backend.UNARY`."""
    return apply(_Unary, x, name)


class _Softmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, dtype):
        out = backend(x.device).softmax(x.detach().reshape(-1, x.shape[-1])).view(x.shape)
        ctx.save_for_backward(out)
        ctx.dtype = x.dtype
        return out.to(dtype, copy=out.dtype == dtype)  # the caller may change it in place

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        (p,) = ctx.saved_tensors
        wide = grad.float()
        return (p * (wide - (wide * p).sum(-1, keepdim=True))).to(ctx.dtype), None


def softmax(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the softmax over the last dimension, in `dtype`: fp32 inside, its sum in fp64, one rounding."""
    return apply(_Softmax, x, dtype)


class _RowSums(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, divisor, dtype):
        ctx.shape, ctx.divisor, ctx.dtype = x.shape, divisor, x.dtype
        sums = backend(x.device).row_sums(x.detach().reshape(-1, x.shape[-1]), divisor)
        return sums.view(x.shape[:-1]).to(dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        return (grad.float() / ctx.divisor).to(ctx.dtype)[..., None].expand(ctx.shape), None, None


def row_sums(x: Tensor, divisor: int, dtype: torch.dtype) -> Tensor:
    """Return the sum over the last dimension, over `divisor`, in `dtype`: in fp64, rounded to fp32, then to `dtype`."""
    return apply(_RowSums, x, divisor, dtype)


class TopK(NamedTuple):
    """The largest of each row, [..., k]: values in x's dtype, and their columns, int64."""

    values: Tensor
    indices: Tensor


def top_k(x: Tensor, k: int) -> TopK:
    """Return the k largest over the last dimension, largest first; of equals the lower column."""
    indices = backend(x.device).top_k(x.detach().reshape(-1, x.shape[-1]), k).view(*x.shape[:-1], k)
    return TopK(x.gather(-1, indices), indices)


@outside_modes
def route(logits: Tensor, k: int, normalises: bool) -> tuple[Tensor, Tensor]:
    """Return the experts of each row of logits fp32 [T, E], int64 [T, k], ascending, and their weights fp32 [T, k].

    They are the k largest of a softmax, over their sum if `normalises`: the bits of `softmax`, `top_k` and `row_sums`,
    in one launch on CPUs. For rollout only.
    """
    return backend(logits.device).route(logits.detach(), k, normalises)
