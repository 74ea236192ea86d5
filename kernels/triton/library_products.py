"""Products by cuBLAS: a schedule of `linear`'s tree on a GPU that has proven so.

A product in one chunk is a chain of matrix-unit steps over ascending K. So is cuBLAS's where it doesn't split K. Which
of its kernels computes a product follows from the sizes, the dtypes, the operands' layout and some settings of torch's;
so it gets blocks of a few numbers of rows, each compared with ours, to the bit, before it serves.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

BLOCKS = 8192, 4096, 2048, 1024, 512, 256  # of rows
_ALIGNMENT = 256  # bytes, of operands: cuBLAS picks by it, too
_proven: dict[tuple, bool] = {}
_lock = threading.Lock()

Product = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]


def multiply(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
    """Write x [rows, depth] @ weight.T to out [rows, features]."""
    if out.dtype == x.dtype:
        torch.mm(x, weight.t(), out=out)
    else:
        torch.mm(x, weight.t(), out_dtype=out.dtype, out=out)


def serve(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, ours: Product) -> int:
    """Write the first rows of x @ weight.T to `out`, and return their number: 0 where cuBLAS does not serve.

    ours: writes the product of its first two arguments to its third, by our kernels.
    """
    if x.dtype == torch.float32 or len(x) < BLOCKS[-1] or not _is_here(x.device):
        return 0
    if any(t.data_ptr() % _ALIGNMENT or not t.is_contiguous() for t in (x, weight, out)):
        return 0
    done, least = 0, min(len(x), BLOCKS[0]) / 8  # smaller blocks would each fill the GPU for too short a time
    for block in BLOCKS:
        while least <= block <= len(x) - done and _is_proven(block, weight, out.dtype, ours):
            part = slice(done, done + block)
            multiply(x[part], weight, out[part])
            done += block
    return done


def _is_here(device: torch.device) -> bool:
    """Return whether cuBLAS computes on the device, and torch doesn't pick among its kernels by their times."""
    return device.type == "cuda" and not torch.cuda.tunable.is_enabled()


def _settings() -> tuple[Any, ...]:
    """Return the settings of torch's that decide, too, which kernel cuBLAS runs."""
    return (
        torch.backends.cuda.preferred_blas_library(), torch._C._get_cublas_allow_bf16_reduced_precision_reduction(),
        torch._C._get_cublas_allow_fp16_reduced_precision_reduction(), torch._C._get_cublas_allow_fp16_accumulation(),
        torch._C._get_sm_carveout_experimental(),
    )  # fmt: skip


def _is_proven(rows: int, weight: torch.Tensor, out_dtype: torch.dtype, ours: Product) -> bool:
    """Return whether a product of these sizes has the bits of ours. Tried once, on random numbers."""
    key = weight.device, weight.dtype, out_dtype, rows, *weight.shape, *_settings()
    if key not in _proven:
        if torch.cuda.is_current_stream_capturing():
            return False
        with _lock:
            if key not in _proven:
                _proven[key] = _same(rows, weight, out_dtype, ours)
    return _proven[key]


@torch.no_grad()
def _same(rows: int, like: torch.Tensor, out_dtype: torch.dtype, ours: Product) -> bool:
    """Return whether both products of random numbers are the same bits; False, for good, without memory to try it."""
    (features, depth), device = like.shape, like.device
    numbers = torch.Generator(device).manual_seed(0)
    try:
        x, weight = (  # sums of numbers of many sizes differ at once when they are added in another order
            torch.randn(n, depth, generator=numbers, device=device, dtype=like.dtype).mul_(
                torch.exp2(torch.randint(-9, 1, (depth,), generator=numbers, device=device).to(like.dtype))
            )
            for n in (rows, features)
        )
        outs = [torch.empty(rows, features, dtype=out_dtype, device=device) for _ in range(2)]
        ours(x, weight, outs[0])
        multiply(x, weight, outs[1])
        return torch.equal(*outs)
    except torch.OutOfMemoryError:
        return False
