"""The CPU backend behind `samebits.kernels.ops`: fp32 arithmetic on fp32, bf16 or fp16 storage."""

import numpy as np
import torch
from tqdm import tqdm

from .attention import BLOCK, attention, new_kv_cache, work_items, write_kv
from .elementwise import ACTIVATIONS, gated_activation, rms_norm, rotary_tables
from .jit import storage
from .linear import linear_packed, linear_resume, linear_unpacked, pack, packed_rows
from .sampling import distribution


def warm_up(dtype: torch.dtype) -> None:
    """Compiles every forward kernel for a storage dtype, or loads it from the cache; a bar shows when that is long."""
    x, zeros = torch.zeros(1, 16, dtype=torch.float32), np.zeros(1, np.int32)
    cache = new_kv_cache(1, 1, 16, dtype)
    kv = torch.zeros(1, 1, 16, dtype=dtype)
    one = np.ones(1)
    row: tuple = one, np.zeros(1, np.int64), one, one * 0, [[]]
    draw = np.zeros(1, np.int64), np.zeros(1, np.uint64), np.zeros(1, np.int64), np.zeros(1, np.int64)
    calls = (
        lambda: linear_packed(x, [(storage(pack(x.to(dtype))), 1, None)]),
        lambda: linear_unpacked(x, x, None),
        lambda: rms_norm(x, x[0], 1e-5),
        lambda: gated_activation(x, x, "silu"),
        lambda: rotary_tables(torch.zeros(1, dtype=torch.long), x[0], 1.0),
        lambda: write_kv(kv, kv, zeros, *cache),
        lambda: attention(x[None], *cache, work_items([1], 1), zeros, zeros, zeros, 1.0, 0),
        lambda: distribution(x, *row, *draw),  # type: ignore[call-arg]
    )
    for call in tqdm(calls, desc="Compiling kernels (once a machine)", unit="kernel", delay=2):
        call()


__all__ = [
    "ACTIVATIONS",
    "BLOCK",
    "attention",
    "distribution",
    "gated_activation",
    "linear_packed",
    "linear_resume",
    "linear_unpacked",
    "new_kv_cache",
    "pack",
    "packed_rows",
    "rms_norm",
    "rotary_tables",
    "storage",
    "warm_up",
    "work_items",
    "write_kv",
]
