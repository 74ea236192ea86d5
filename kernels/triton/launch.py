"""How every kernel is launched: with the compiler settings that are part of the contract."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from triton import knobs

INTERPRETED = knobs.runtime.interpret  # kernels run in Python, on CPU tensors: for tests


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
    """Launch a kernel without fusing a * b + c: whether the compiler fuses may depend on schedule and version."""
    if 0 in grid:
        return
    if INTERPRETED:
        options = {k: v for k, v in options.items() if k not in ("num_warps", "num_stages")}
        kernel[grid](*args, **options)
        return
    device = next(a for a in args if isinstance(a, torch.Tensor)).device
    with torch.cuda.device(device):
        kernel[grid](*args, enable_fp_fusion=False, **options)


@cache
def _properties(device: torch.device) -> Any:
    return torch.cuda.get_device_properties(device)


def multiprocessors(device: torch.device) -> int:
    """Return the number of the device's multiprocessors; 4 in the interpreter."""
    return 4 if INTERPRETED else _properties(device).multi_processor_count


def current_stream(device: torch.device) -> int:
    """Return the handle of the device's current stream; 0 in the interpreter."""
    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0


@cache
def has_copy_engine(device: torch.device) -> bool:
    """Return whether the device copies tiles by itself (TMA): compute capability 9.0 and later."""
    return INTERPRETED or torch.cuda.get_device_capability(device) >= (9, 0)


def shared_memory(device: torch.device) -> int:
    """Return the bytes of shared memory that one program may have."""
    return 1 << 18 if INTERPRETED else _properties(device).shared_memory_per_block_optin


def aligned(t: torch.Tensor) -> torch.Tensor:
    """Return the tensor, or a copy, contiguous and from an address divisible by 16.

    How many elements a thread loads may depend on it, and with them the order of a sum within a program.
    """
    t = t.contiguous()
    return t.clone() if t.data_ptr() % 16 else t
