"""The Triton backend behind `samebits.kernels.ops`: NVIDIA GPUs, bf16, fp16 or fp32 (IEEE) storage.

Nothing here waits for the GPU. Kernels are compiled at their first use, once per machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

try:
    import triton
except ImportError as error:
    raise RuntimeError("GPU kernels need Triton: pip install 'samebits[gpu]'") from error

from ..layout import PagedLayout
from . import attention as _paged
from . import work
from .attention import BLOCK, new_kv_cache
from .attention_backward import attention_backward
from .elementwise import (
    ACTIVATIONS,
    add_rms_norm,
    gated_activation,
    gated_activation_backward,
    gated_halves,
    rms_norm,
    rms_norm_backward,
    rotary_tables,
)
from .experts import (
    combine,
    combine_backward,
    grouped,
    grouped_outer,
    packed_experts,
    plan_experts,
)
from .functions import route, row_sums, softmax, top_k, unary
from .heads import place_heads
from .launch import INTERPRETED
from .layer import DecoderLayers
from .linear import FULL_WIDTH, MIN_CHUNK, gated_packed, linear_packed, products
from .sampling import sample
from .work import small_lengths, tile_tokens, work_items

_OLDEST = 8, 0
GRAPHS = True  # can a step be recorded and replayed?
decoder_layers = DecoderLayers
LOGIT_ROWS = 1024  # in memory at a time, where a trainer doesn't say: each part adds to all of lm_head's gradient


def check_device(device: torch.device) -> None:
    """Raise a RuntimeError with what is missing, unless kernels can run on the device."""
    if INTERPRETED:
        return
    if not torch.cuda.is_available():
        raise RuntimeError("device 'cuda': torch sees no NVIDIA GPU (torch.cuda.is_available() is False); use 'cpu'")
    if problem := compiler_problem(torch.cuda.get_device_capability(device), triton.__version__):
        raise RuntimeError(f"{torch.cuda.get_device_name(device)}: {problem}")


def compiler_problem(capability: tuple[int, int], version: str) -> str | None:
    """Return why kernels that a version of Triton compiles can't run on GPUs of a compute capability, or None."""
    if capability < _OLDEST:
        return f"compute capability {capability[0]}.{capability[1]}; 8.0 (Ampere) is needed"
    if capability == (10, 0) and tuple(map(int, version.split(".")[:2])) < (3, 7):
        return (  # Triton's issue 9871
            f"Triton {version} compiles loops of matrix products for compute capability 10.0 whose results differ from "
            "run to run; install triton>=3.7"
        )
    if capability == (10, 3):
        return (  # Triton's issues 10590 and 10821
            "Triton is known to compile wrong kernels for compute capability 10.3; use another GPU, or device='cpu'"
        )
    return None


def trees(device: torch.device) -> dict[str, str]:
    """Return the fields of the numerics contract that these kernels decide."""
    gpu = "interpreter" if INTERPRETED else "sm_{}{}".format(*torch.cuda.get_device_capability(device))
    return {
        "linear": f"K in max(1, min(K // {MIN_CHUNK}, {FULL_WIDTH} // N)) chunks of whole blocks of 64 (fp32: 32), "
        "each a chain from 0; chunks ascending, then the bias, in fp32",
        "attention": f"online softmax over key blocks of {BLOCK} in segments of {_paged.SEGMENT}, merged ascending; "
        "sums by the matrix unit; weights in the storage dtype",
        "norm": "one program a row, block and warps by its width; 1/sqrt; weight * (x * rstd)",
        "activation": "x * sigmoid, by exp(-|x|)",
        "experts": "each product one chain over blocks of 64 of K (fp32: 32), from 0; a token's sum: fp32 products and "
        "sums over ascending experts; weights in fp32",
        "functions": "softmax by exp; others fp64, rounded to fp32; sums in fp64 by one program, warps by width; "
        "topk: of equals the lower column",
        "logprob": "fp32 logits / T; sum of exp in fp64, parts of the vocabulary ascending; log in fp64; one rounding",
        "libm": f"triton {triton.__version__}, {gpu}",
    }


def warm_up(dtype: torch.dtype, device: torch.device, experts: bool = False) -> None:
    """Do nothing: kernels are compiled when they are first needed, for the shapes of the model."""


def storage(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor: the kernels read it as it is."""
    return tensor


def pack(weight: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """Return a copy of a weight [features, depth], in `out` if given: the kernels read it as it is."""
    return (torch.empty(weight.shape, dtype=weight.dtype, device=weight.device) if out is None else out).copy_(weight)


pack_experts = pack  # [E, features, depth]


def packed_rows(packed: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Return the given rows of a packed weight, [*rows.shape, depth]."""
    return packed[rows]


def pack_low_rank(
    down: torch.Tensor, up: torch.Tensor, scale: float, out: Any = None
) -> tuple[torch.Tensor, torch.Tensor, float]:
    """Return the factors as they are, and the scale."""
    return down, up, scale


def linear_unpacked(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """Return x @ weight.T + bias, [rows, features] in `dtype`; x [rows, depth], weight [features, depth]."""
    return products(x.to(weight.dtype), [weight], [bias], dtype)[0]


def gradient_product(x: torch.Tensor, weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return x @ weight.T in `dtype` with weight's precision, by cuBLAS.

    The bits are the same from run to run, which is enough for a backward pass. Sums are fp32 to their end: where cuBLAS
    gives 16 bits, it may add the parts of a split product in 16 bits, too.
    """
    x = x.to(weight.dtype)
    if x.dtype == torch.float32 or x.device.type == "cpu":
        return (x @ weight.t()).to(dtype)
    return torch.mm(x, weight.t(), out_dtype=torch.float32).to(dtype)


def linear_resume(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
    """Add x @ weight.T to `out`, in place: fp32 sums of products in weight's precision."""
    out += gradient_product(x, weight, out.dtype)


def share_reads(
    items: np.ndarray, lengths: Sequence[int], group: int, block_tables: np.ndarray, starts: np.ndarray
) -> np.ndarray:
    """Return the items, and before them such as read segments that neighbours share; see `work.share_reads`."""
    return work.share_reads(items, lengths, group, block_tables, starts, _paged.SEGMENT // BLOCK)


def write_kv(
    k: torch.Tensor, v: torch.Tensor, layout: PagedLayout, k_cache: torch.Tensor, v_cache: torch.Tensor
) -> None:
    """Write k and v [T, kv_heads, head_dim], in the cache's dtype, to the layout's slots in the cache."""
    _paged.write_kv(k, v, layout.on(k.device).slot_mapping, k_cache, v_cache)


def attention(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, layout: PagedLayout, scale: float, window: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return causal attention over the cache, of q's shape [T, heads, D] and dtype, and log-sum-exp fp32 [T, heads]."""
    at = layout.on(q.device)
    small = small_lengths(layout.lengths, q.shape[1] // k_cache.shape[1])
    where = at.items, at.positions, at.block_tables, at.block_table_starts
    return _paged.attention(q, k_cache, v_cache, *where, scale, window, small, layout.longest, layout.shared_items)
