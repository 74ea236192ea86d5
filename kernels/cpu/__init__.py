"""The CPU backend behind `samebits.kernels.ops`: fp32 arithmetic on fp32 or bf16 storage."""

from .attention import BLOCK, attention, new_kv_cache, work_items, write_kv
from .elementwise import ACTIVATIONS, gated_activation, rms_norm, rotary_tables
from .linear import linear_packed, linear_resume, linear_unpacked, pack, packed_rows
from .sampling import distribution

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
    "work_items",
    "write_kv",
]
