"""The CPU backend behind `samebits.kernels.ops`: fp32 arithmetic on fp32, bf16 or fp16 storage."""

import platform

import numpy as np
import torch
from tqdm import tqdm

from ..backend import ExpertParts, LayerParts
from ..layout import PagedLayout
from .attention import BLOCK, attention, new_kv_cache, place_heads, share_reads, tile_tokens, work_items, write_kv
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
    pack_experts,
    packed_experts,
    plan_experts,
)
from .functions import route, row_sums, softmax, top_k, unary
from .jit import storage
from .layer import DecoderLayers
from .linear import gradient_product, linear_packed, linear_resume, linear_unpacked, pack, pack_low_rank, packed_rows
from .sampling import sample
from .simd import CHAIN

GRAPHS = False  # can a step be recorded and replayed?
LOGIT_ROWS = 256  # in memory at a time, where a trainer doesn't say
decoder_layers = DecoderLayers


def check_device(device: torch.device) -> None:
    """Accept the device: any CPU will do."""


def trees(device: torch.device) -> dict[str, str]:
    """Return the fields of the numerics contract that these kernels decide."""
    return {
        "linear": f"bias, then blocks of {CHAIN} of K, ascending, each an fp32 fma chain from 0",
        "attention": f"online softmax over key blocks of {BLOCK}, ascending; pairwise sums; fp32 weights",
        "norm": "16 interleaved fma chains, pairwise; 1/sqrt; weight * (x * rstd)",
        "activation": "x / (1 + exp(-x)); exp: Taylor 7",
        "experts": "each product as linear; a token's sum: fp32 fma over ascending experts; weights in fp32",
        "functions": "sigmoid, silu, softmax by exp: Taylor 7; others fp64, rounded to fp32; sums in fp64, ascending; "
        "topk: of equals the lower column",
        "logprob": "fp32 logits / T; sum of exp in fp64 by groups of 256; log in fp64; one rounding to fp32",
        "libm": " ".join(platform.libc_ver()) or platform.platform(terse=True),
    }


def gated_packed(
    x: torch.Tensor,
    gate: tuple[np.ndarray, int, torch.Tensor | None],
    up: tuple[np.ndarray, int, torch.Tensor | None],
    name: str,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Return `gated_activation` of `linear_packed` of a gate and its up, [rows, features] in `dtype`."""
    products = linear_packed(x, [gate, up], dtype)
    return gated_activation(products[0], products[1], name)


def warm_up(dtype: torch.dtype, device: torch.device, experts: bool = False) -> None:
    """Compile every forward kernel for a storage dtype, or load it from the cache; a bar shows when that is long.

    experts: those of mixtures of experts, too.
    """
    x, zeros = torch.zeros(1, 16, dtype=torch.float32), np.zeros(1, np.int32)
    cache = new_kv_cache(1, 1, 16, dtype, device)
    layout = PagedLayout([1], zeros, zeros, zeros, zeros, work_items([1], 1))
    kv, stored = torch.zeros(1, 1, 16, dtype=dtype), x.to(dtype)
    one = np.ones(1)
    row: tuple = one, np.zeros(1, np.int64), one, one * 0, np.zeros((1, 1), np.uint32), np.zeros(1, np.int64)
    draw = torch.zeros(1, dtype=torch.long), np.zeros(1, np.uint64), np.zeros(1, np.int64), np.zeros(1, np.int64)
    weight = storage(pack(stored)), 1, None
    norm = stored[0], 1e-5
    linear = storage(pack(stored.expand(16, 16))), 16, None, None
    of_layer = storage(stored[0]), 1e-5
    parts = LayerParts([linear] * 7, [of_layer, of_layer, None, None], "silu", 1.0, 0)

    def run(parts: LayerParts) -> None:
        decoder_layers([parts])(stored, stored, (stored, stored), [cache], layout)

    calls = (
        lambda: linear_packed(x, [weight]),
        lambda: linear_unpacked(x, x, None),
        lambda: rms_norm(stored, stored[0], 1e-5),
        lambda: add_rms_norm(stored, stored, stored[0], 1e-5),
        lambda: gated_activation(stored, stored, "silu"),
        lambda: rotary_tables(torch.zeros(1, dtype=torch.long), x[0], 1.0),
        lambda: place_heads(kv, kv, kv, (norm, norm), (stored, stored), layout, cache),
        lambda: attention(x[None], *cache, layout, 1.0, 0),
        lambda: run(parts),
        lambda: sample(x, *row, *draw),  # type: ignore[call-arg]
        *[lambda: run(parts._replace(linears=[linear] * 4, experts=_warm_up_experts(dtype)))] * experts,
    )
    for call in tqdm(calls, desc="Compiling kernels (once per machine)", unit="kernel", delay=2):
        call()


def _warm_up_experts(dtype: torch.dtype) -> ExpertParts:
    """Compile the kernels of routers, and of packed and plain experts; return what a layer takes of them."""
    scores = softmax(torch.zeros(1, 2))
    row_sums(scores, 1)
    unary(scores, "sigmoid")
    ids, weights = route(scores, 1, True)
    plan = plan_experts(top_k(scores, 1), 2)
    x, gate_up = torch.zeros(1, 16, dtype=dtype), torch.zeros(2, 32, 16, dtype=dtype)
    gated = gated_halves(grouped(x, gate_up, plan, True, dtype), "silu")
    combine(grouped(gated, gate_up[:, :16], plan, False, dtype), weights, plan, dtype)
    panels, down_panels = (storage(pack_experts(weight)) for weight in (gate_up, gate_up[:, :16]))
    packed_experts(x, panels, down_panels, 16, ids, weights, "silu")
    return ExpertParts(storage(torch.zeros(2, 16, dtype=dtype)), 1, True, panels, down_panels, 16)
