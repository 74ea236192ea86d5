"""What all ops share: the choice of kernels by device, a cheap way past autograd, a way out of torch-function modes."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import cache, wraps
from typing import TYPE_CHECKING, ParamSpec, TypeVar, cast

import torch

from .backend import Backend

if TYPE_CHECKING:  # both keep the border's contract
    from . import cpu, triton

    _CPU: Backend = cpu
    _TRITON: Backend = triton

_DTYPES = torch.float32, torch.bfloat16, torch.float16
DTYPES = {"cpu": _DTYPES, "cuda": _DTYPES}
BACKENDS = {"cpu": "cpu", "cuda": "triton"}

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


def parse_device(device: str | torch.device) -> torch.device:
    """Return the device that a name means. NotImplementedError for a kind that samebits has no kernels for."""
    kind = str(device).partition(":")[0]
    if kind not in BACKENDS:
        raise NotImplementedError(f"samebits has no kernels for device {kind!r}; supported: {', '.join(DTYPES)}")
    return torch.device(device)


@cache
def backend(device: torch.device) -> Backend:
    """Return the kernels for a device.

    Raises NotImplementedError where there are none, RuntimeError with what is missing where they can't run.
    """
    device = parse_device(device)
    kernels = cast(Backend, importlib.import_module(f".{BACKENDS[device.type]}", __package__))
    kernels.check_device(device)
    return kernels


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
