"""How every kernel is launched: with the compiler settings that are part of the contract, and early.

From compute capability 9.0 on launches are dependent ones (CUDA's programmatic dependent launch): the programs of a
kernel are set up while the kernel before it still runs, and wait in their first statement, `await_inputs`, until it is
complete. Since that is every kernel's first statement, all that came before the one before is complete, too.
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from triton import knobs
from triton.language.extra import cuda
from triton.language.target_info import cuda_capability_geq

INTERPRETED = knobs.runtime.interpret  # kernels run in Python, on CPU tensors: for tests
_INTERPRETED = tl.constexpr(INTERPRETED)


@triton.jit
def await_inputs():
    """Wait until the launch before is complete, then let the next one set its programs up. Nothing else comes first."""
    if not _INTERPRETED:
        if cuda_capability_geq(9, 0):
            cuda.gdc_wait()
            cuda.gdc_launch_dependents()


def settings(early: bool) -> dict[str, bool]:
    """Return the compiler's and the launcher's settings. early: launches may overlap, from compute capability 9.0 on.

    a * b + c is not fused: whether it is may depend on schedule and version.
    """
    return {"enable_fp_fusion": False, "launch_pdl": early}


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
    """Launch a kernel, unless its grid is empty."""
    if 0 in grid:
        return
    if INTERPRETED:
        options = {k: v for k, v in options.items() if k not in ("num_warps", "num_stages")}
        kernel[grid](*args, **options)
        return
    device = next(a for a in args if isinstance(a, torch.Tensor)).device
    here = device.index == torch.cuda.current_device()  # the guard takes as long as a small kernel
    with nullcontext() if here else torch.cuda.device(device):
        kernel[grid](*args, **settings(has_copy_engine(device)), **options)


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
