"""The common parts of all ops: a cheap way past autograd, and a way out of torch-function modes."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


def apply(function: type[torch.autograd.Function], *args):
    """Call function.apply, or its forward alone where nothing is recorded: `apply` costs as much as a small kernel."""
    return function.apply(*args) if torch.is_grad_enabled() else function.forward(_NoContext(), *args)


class _NoContext:
    """A stand-in for autograd's context: what a forward saves goes nowhere."""

    def save_for_backward(self, *tensors):
        pass

    def mark_non_differentiable(self, *tensors):
        pass


def outside_modes(op: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """Let an op run outside of torch-function modes: what it calls is its own, and exact."""

    @wraps(op)
    def run(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        if not torch._C._is_torch_function_mode_enabled():
            return op(*args, **kwargs)
        with torch._C.DisableTorchFunction():
            return op(*args, **kwargs)

    return run
