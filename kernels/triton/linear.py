"""The matrix product on tensor cores: out = x @ weight.T + bias, fp32 accumulators, one rounding.

The tree, for one output element: K is cut into `chunks(K, N)` chunks; in a chunk, a chain of matrix-unit steps over
ascending K from zero; the chunks' sums are added ascending in fp32; then the bias. BLOCK_M, BLOCK_N, stages, warps,
whether chunks are computed by one program or by several, and which unit copies the operands are schedules. No sum
depends on which arrives first: the last program of a tile to finish adds all of its chunks, in their order.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from .launch import current_stream, launch, multiprocessors
from .schedules import Tile, linear_tile

BLOCK_K = {torch.bfloat16: 64, torch.float16: 64, torch.float32: 32}
MIN_CHUNK = 1024
FULL_WIDTH = 4096  # with as many output features, tiles alone fill a GPU


def chunks(depth: int, features: int) -> int:
    """Return the number of parts that K = `depth` is cut into for N = `features`: part of the contract."""
    return max(1, min(depth // MIN_CHUNK, FULL_WIDTH // features))


@triton.jit
def _load_tile(pointer, rows, row_mask, stride, k, depth, EVEN_K: tl.constexpr, BLOCK_K: tl.constexpr):
    columns = k + tl.arange(0, BLOCK_K)
    address = pointer + rows.to(tl.int64)[:, None] * stride + columns[None, :]
    if EVEN_K:
        return tl.load(address, mask=row_mask[:, None], other=0.0)
    return tl.load(address, mask=row_mask[:, None] & (columns < depth)[None, :], other=0.0)


@triton.jit
def _place(tile, tiles_m, tiles_n, GROUP_M: tl.constexpr):
    """Return a tile's place from its number; neighbours share rows of x and the weight while L2 holds them."""
    span = GROUP_M * tiles_n
    first = tile // span * GROUP_M
    count = tl.minimum(tiles_m - first, GROUP_M)
    return first + tile % span % count, tile % span // count


@triton.jit(do_not_specialize=["rows", "c0", "c1", "c2"])
def _linear(
    x, w0, w1, w2, b0, b1, b2, o0, o1, o2, partials, arrivals,
    rows, depth, stride_x, n0, n1, n2, c0, c1, c2, s0, s1, s2,
    HAS_BIAS: tl.constexpr, SPLIT: tl.constexpr, EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
):  # fmt: skip
    """Multiply x [rows, depth] with up to three weights [n_i, depth]; c_i chunks of s_i each."""
    program = tl.program_id(0)
    tiles_m = tl.cdiv(rows, BLOCK_M)
    first = tiles_m * tl.cdiv(n0, BLOCK_N) * (c0 if SPLIT else 1)
    second = first + tiles_m * tl.cdiv(n1, BLOCK_N) * (c1 if SPLIT else 1)
    w, b, o, n, c, size, base, column0 = w0, b0, o0, n0, c0, s0, 0, 0
    if program >= second:
        w, b, o, n, c, size, base, column0 = w2, b2, o2, n2, c2, s2, second, n0 + n1
    elif program >= first:
        w, b, o, n, c, size, base, column0 = w1, b1, o1, n1, c1, s1, first, n0
    tiles_n = tl.cdiv(n, BLOCK_N)
    tile = program - base
    chunk = 0
    if SPLIT:
        chunk = tile // (tiles_m * tiles_n)
        tile = tile % (tiles_m * tiles_n)
    tile_m, tile_n = _place(tile, tiles_m, tiles_n, GROUP_M)
    r = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    f = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    r_mask, f_mask = r < rows, f < n
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    if SPLIT:
        start = tl.multiple_of(chunk * size, BLOCK_K)  # loads are whole vectors
        for k in range(start, tl.minimum(start + size, depth), BLOCK_K):
            a = _load_tile(x, r, r_mask, stride_x, k, depth, EVEN_K, BLOCK_K)
            d = _load_tile(w, f, f_mask, depth, k, depth, EVEN_K, BLOCK_K)
            total = tl.dot(a, tl.trans(d), total, input_precision="ieee")
    else:
        for k in range(0, tl.minimum(size, depth), BLOCK_K):
            a = _load_tile(x, r, r_mask, stride_x, k, depth, EVEN_K, BLOCK_K)
            d = _load_tile(w, f, f_mask, depth, k, depth, EVEN_K, BLOCK_K)
            total = tl.dot(a, tl.trans(d), total, input_precision="ieee")
        for part in range(1, c):
            acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
            for k in range(part * size, tl.minimum((part + 1) * size, depth), BLOCK_K):
                a = _load_tile(x, r, r_mask, stride_x, k, depth, EVEN_K, BLOCK_K)
                d = _load_tile(w, f, f_mask, depth, k, depth, EVEN_K, BLOCK_K)
                acc = tl.dot(a, tl.trans(d), acc, input_precision="ieee")
            total = total + acc

    mask = r_mask[:, None] & f_mask[None, :]
    last = True
    if SPLIT:
        if c > 1:  # partials [chunk, rows, all features]
            width = n0 + n1 + n2
            place = r.to(tl.int64)[:, None] * width + (column0 + f)[None, :]
            whole = rows.to(tl.int64) * width
            tl.store(partials + chunk * whole + place, total, mask=mask, cache_modifier=".cg")
            tl.debug_barrier()  # every thread's part is written before this program counts as done
            counter = arrivals + (base + tile)
            last = tl.atomic_add(counter, 1, sem="acq_rel") == c - 1
            if last:
                tl.store(counter, 0)  # as the next launch expects it
                total = tl.load(partials + place, mask=mask, other=0.0, cache_modifier=".cg")
                for part in range(1, c):
                    acc = tl.load(partials + part * whole + place, mask=mask, other=0.0, cache_modifier=".cg")
                    total = total + acc
    if last:
        if HAS_BIAS:
            total = total + tl.load(b + f, mask=f_mask, other=0.0).to(tl.float32)[None, :]
        address = o + r.to(tl.int64)[:, None] * n + f[None, :]
        tl.store(address, total.to(o.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["rows", "chunks"])
def _linear_persistent(
    x, w, bias, out, rows, depth, features, chunks, size,
    HAS_BIAS: tl.constexpr, CHUNKED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
):  # fmt: skip
    """Multiply with one weight; x and w are descriptors for the copy engine (TMA), which gives zeros outside of them.

    A program computes one tile after the other and copies for the next while it writes the last.
    """
    tiles_m, tiles_n = tl.cdiv(rows, BLOCK_M), tl.cdiv(features, BLOCK_N)
    for tile in tl.range(tl.program_id(0), tiles_m * tiles_n, tl.num_programs(0), flatten=not CHUNKED):
        tile_m, tile_n = _place(tile, tiles_m, tiles_n, GROUP_M)
        m, n = tile_m * BLOCK_M, tile_n * BLOCK_N
        total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for k in range(0, tl.minimum(size, depth), BLOCK_K):
            total = tl.dot(x.load([m, k]), w.load([n, k]).T, total, input_precision="ieee")
        if CHUNKED:
            for part in range(1, chunks):
                acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
                for k in range(part * size, tl.minimum((part + 1) * size, depth), BLOCK_K):
                    acc = tl.dot(x.load([m, k]), w.load([n, k]).T, acc, input_precision="ieee")
                total = total + acc
        r, f = m + tl.arange(0, BLOCK_M), n + tl.arange(0, BLOCK_N)
        if HAS_BIAS:
            total = total + tl.load(bias + f, mask=f < features, other=0.0).to(tl.float32)[None, :]
        address = out + r.to(tl.int64)[:, None] * features + f[None, :]
        tl.store(address, total.to(out.dtype.element_ty), mask=(r < rows)[:, None] & (f < features)[None, :])


_scratch: dict[tuple[torch.device, torch.dtype, int], list[torch.Tensor]] = {}


def scratch(device: torch.device, dtype: torch.dtype, size: int) -> torch.Tensor:
    """Return a buffer of the current stream, zeroed once; kernels leave counters at zero.

    Launches of one stream use it in turn. None is ever freed: graphs know the address.
    """
    buffers = _scratch.setdefault((device, dtype, current_stream(device)), [])
    if not buffers or buffers[-1].numel() < size:
        room = max(size, 2 * buffers[-1].numel() if buffers else 1 << 16)
        buffers.append(torch.zeros(room, dtype=dtype, device=device))
    return buffers[-1]


def _copyable(t: torch.Tensor) -> bool:
    """Return whether the copy engine can read the matrix: it wants addresses of rows that are divisible by 16."""
    return t.data_ptr() % 16 == 0 and t.stride(0) * t.element_size() % 16 == 0


def products(
    x: torch.Tensor,
    weights: list[torch.Tensor],
    biases: list[torch.Tensor | None],
    out_dtype: torch.dtype,
    tile: Tile | None = None,
) -> list[torch.Tensor]:
    """Return x [rows, depth] @ w.T + bias for each of up to three weights [features, depth] of x's dtype.

    One launch does it, but for persistent tiles.

    tile: the schedule; None takes this GPU's. It decides no bit.
    """
    x = x if x.stride(-1) == 1 else x.contiguous()
    weights = [w.contiguous() for w in weights]
    rows, depth = x.shape
    outs = [x.new_empty(rows, w.shape[0], dtype=out_dtype) for w in weights]
    if rows == 0:
        return outs
    sizes = [w.shape[0] for w in weights]
    counts = [chunks(depth, n) for n in sizes]
    block_k = BLOCK_K[x.dtype]
    spans = [-(-depth // c // block_k) * block_k if c > 1 else depth for c in counts]
    tile = tile or linear_tile(x.device, x.dtype, rows, sum(sizes))
    tall, programs = -(-rows // tile.block_m), multiprocessors(x.device) if tile.tma else 0
    if tile.tma and not (
        all(_copyable(t) for t in (x, *weights)) and tall * -(-min(sizes) // tile.block_n) >= programs // 2
    ):  # then one launch for all of them fills the GPU better
        tile = replace(tile, block_n=min(tile.block_n, 128), tma=False)
    if tile.tma:
        for w, bias, out, count, span in zip(weights, biases, outs, counts, spans, strict=True):
            narrow = count > 1 or out_dtype == torch.float32  # registers for a second sum, memory to store from
            block_n = min(tile.block_n, 128) if narrow else tile.block_n
            grid = min(tall * -(-w.shape[0] // block_n), programs)
            launch(
                _linear_persistent, (grid,),
                TensorDescriptor.from_tensor(x, [tile.block_m, block_k]),
                TensorDescriptor.from_tensor(w, [block_n, block_k]),
                w if bias is None else bias, out, rows, depth, w.shape[0], count, span,
                HAS_BIAS=bias is not None, CHUNKED=count > 1,
                BLOCK_M=tile.block_m, BLOCK_N=block_n, BLOCK_K=block_k, GROUP_M=8,
                num_warps=tile.warps, num_stages=tile.stages,
            )  # fmt: skip
        return outs
    tiles = [-(-rows // tile.block_m) * -(-n // tile.block_n) for n in sizes]
    split = tile.split and max(counts) > 1
    grid = sum(t * (c if split else 1) for t, c in zip(tiles, counts, strict=True))
    has_bias = any(b is not None for b in biases)
    if has_bias:
        biases = [b if b is not None else w.new_zeros(w.shape[0]) for b, w in zip(biases, weights, strict=True)]
    partials = scratch(x.device, torch.float32, max(counts) * rows * sum(sizes) if split else 1)
    arrivals = scratch(x.device, torch.int32, grid)
    none = 3 - len(weights)
    launch(
        _linear, (grid,),
        x, *weights, *[weights[0]] * none, *(biases if has_bias else weights), *[weights[0]] * none,
        *outs, *[outs[0]] * none, partials, arrivals,
        rows, depth, x.stride(0), *sizes, *[0] * none, *counts, *[1] * none, *spans, *[depth] * none,
        HAS_BIAS=has_bias, SPLIT=split, EVEN_K=depth % block_k == 0 and all(s % block_k == 0 for s in spans),
        BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, BLOCK_K=block_k, GROUP_M=8,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return outs
