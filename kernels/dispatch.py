"""The choice of kernels by device."""

from __future__ import annotations

import importlib
from functools import cache
from typing import TYPE_CHECKING, cast

import torch

from .backend import Backend

if TYPE_CHECKING:  # both keep the border's contract
    from . import cpu, triton

    _CPU: Backend = cpu
    _TRITON: Backend = triton

DTYPES = torch.float32, torch.bfloat16, torch.float16
BACKENDS = {"cpu": "cpu", "cuda": "triton"}


def parse_device(device: str | torch.device) -> torch.device:
    """Return the device that a name means. NotImplementedError for a kind that samebits has no kernels for."""
    kind = str(device).partition(":")[0]
    if kind not in BACKENDS:
        raise NotImplementedError(f"samebits has no kernels for device {kind!r}; supported: {', '.join(BACKENDS)}")
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
