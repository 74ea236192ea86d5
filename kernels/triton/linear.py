"""The matrix product on tensor cores: out = x @ weight.T + bias, fp32 accumulators, one rounding.

The tree, for one output element: K is cut into `chunks(K, N)` chunks; in a chunk, a chain of matrix-unit steps over
ascending K from zero; the chunks' sums are added ascending in fp32; then the bias. BLOCK_M, BLOCK_N, stages, warps,
whether chunks are computed by one program or by several, and which unit copies the operands are schedules. No sum
depends on which arrives first: the last program of a tile to finish adds all of its chunks, in their order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple, TypeVar

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from . import library_products
from .elementwise import ACTIVATIONS, activated, gated_activation
from .launch import aligned, await_inputs, current_stream, has_copy_engine, launch, multiprocessors
from .schedules import Tile, linear_tile

_T = TypeVar("_T")
BLOCK_K = {torch.bfloat16: 64, torch.float16: 64, torch.float32: 32}
MIN_CHUNK = 1024
FULL_WIDTH = 2048  # with as many output features, tiles alone fill a GPU


def chunks(depth: int, features: int) -> int:
    """Return the number of parts that K = `depth` is cut into for N = `features`: part of the contract."""
    return max(1, min(depth // MIN_CHUNK, FULL_WIDTH // features))


@triton.jit
def _load_tile(rows, row_mask, k, depth, EVEN_K: tl.constexpr, BLOCK_K: tl.constexpr):
    """Load columns from k on of rows that begin at the addresses `rows`."""
    columns = k + tl.arange(0, BLOCK_K)
    address = rows[:, None] + columns[None, :]
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
    HAS_BIAS: tl.constexpr, SPLIT: tl.constexpr, CHUNKED: tl.constexpr, EVEN_K: tl.constexpr, ACTIVATION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
):  # fmt: skip
    """Multiply x [rows, depth] with up to three weights [n_i, depth]; c_i chunks of s_i each.

    SPLIT: a program computes a chunk of a tile. CHUNKED: one computes several; a second sum takes registers.
    ACTIVATION: of two weights of n0 features, a gate's and its up's, write activation(gate) * up; -1: of none. A tile
    has the columns of both then, in turn: a thread has a gate beside its up.
    """
    await_inputs()
    gated: tl.constexpr = ACTIVATION >= 0
    wide: tl.constexpr = BLOCK_N // 2 if gated else BLOCK_N  # features of a tile
    program = tl.program_id(0)
    tiles_m = tl.cdiv(rows, BLOCK_M)
    first = tiles_m * tl.cdiv(n0, wide) * (c0 if SPLIT else 1)
    second = first + tiles_m * tl.cdiv(n1, wide) * (c1 if SPLIT else 1)
    w, b, o, n, c, size, base, column0 = w0, b0, o0, n0, c0, s0, 0, 0
    if program >= second:
        w, b, o, n, c, size, base, column0 = w2, b2, o2, n2, c2, s2, second, n0 + n1
    elif program >= first:
        w, b, o, n, c, size, base, column0 = w1, b1, o1, n1, c1, s1, first, n0
    tiles_n = tl.cdiv(n, wide)
    tile = program - base
    chunk = 0
    if SPLIT:
        chunk = tile // (tiles_m * tiles_n)
        tile = tile % (tiles_m * tiles_n)
    tile_m, tile_n = _place(tile, tiles_m, tiles_n, GROUP_M)
    r = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    column = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    f = column // 2 if gated else column
    r_mask, f_mask = r < rows, f < n
    x_rows = x + r.to(tl.int64) * stride_x
    if gated:  # Triton 3.9 forgets that both are aligned
        w = tl.multiple_of(tl.where(column % 2 == 0, w0, w1), 16)
    w_rows = w + f.to(tl.int64) * depth
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    if SPLIT:
        start = tl.multiple_of(chunk * size, BLOCK_K)  # loads are whole vectors
        for k in range(start, tl.minimum(start + size, depth), BLOCK_K):
            a = _load_tile(x_rows, r_mask, k, depth, EVEN_K, BLOCK_K)
            d = _load_tile(w_rows, f_mask, k, depth, EVEN_K, BLOCK_K)
            total = tl.dot(a, tl.trans(d), total, input_precision="ieee")
    else:
        for k in range(0, tl.minimum(size, depth), BLOCK_K):
            a = _load_tile(x_rows, r_mask, k, depth, EVEN_K, BLOCK_K)
            d = _load_tile(w_rows, f_mask, k, depth, EVEN_K, BLOCK_K)
            total = tl.dot(a, tl.trans(d), total, input_precision="ieee")
        if CHUNKED:
            for part in range(1, c):
                acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
                for k in range(part * size, tl.minimum((part + 1) * size, depth), BLOCK_K):
                    a = _load_tile(x_rows, r_mask, k, depth, EVEN_K, BLOCK_K)
                    d = _load_tile(w_rows, f_mask, k, depth, EVEN_K, BLOCK_K)
                    acc = tl.dot(a, tl.trans(d), acc, input_precision="ieee")
                total = total + acc

    mask = r_mask[:, None] & f_mask[None, :]
    last = True
    if SPLIT:
        if c > 1:  # partials [chunk, rows, all features]
            width = 2 * n0 if gated else n0 + n1 + n2
            place = r.to(tl.int64)[:, None] * width + (column0 + column)[None, :]
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
            biases = (tl.where(column % 2 == 0, b0, b1) if gated else b) + f
            total = total + tl.load(biases, mask=f_mask, other=0.0).to(tl.float32)[None, :]
        kind = o.dtype.element_ty
        if gated:
            gate, up = tl.split(tl.reshape(total, (BLOCK_M, BLOCK_N // 2, 2)))
            y = activated(gate.to(kind).to(tl.float32), up.to(kind).to(tl.float32), ACTIVATION)
            g = tile_n * wide + tl.arange(0, BLOCK_N // 2)
            tl.store(o + r.to(tl.int64)[:, None] * n + g[None, :], y.to(kind), mask=r_mask[:, None] & (g < n)[None, :])
        else:
            tl.store(o + r.to(tl.int64)[:, None] * n + f[None, :], total.to(kind), mask=mask)


@triton.jit(do_not_specialize=["rows", "chunks"])
def _linear_persistent(
    x, w, bias, out, rows, depth, features, chunks, size,
    HAS_BIAS: tl.constexpr, CHUNKED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
):  # fmt: skip
    """Multiply with one weight; x and w are descriptors for the copy engine (TMA), which gives zeros outside of them.

    A program computes one tile after the other and copies for the next while it writes the last.
    """
    await_inputs()
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


class _Product(NamedTuple):
    """A weight [features, depth], in `chunks` chunks of `span` of its depth, and where its product goes."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    out: torch.Tensor
    chunks: int
    span: int

    @classmethod
    def of(cls, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out_dtype: torch.dtype) -> _Product:
        features, depth = weight.shape
        count, block_k = chunks(depth, features), BLOCK_K[x.dtype]
        span = -(-depth // count // block_k) * block_k if count > 1 else depth
        return cls(weight, bias, x.new_empty(x.shape[0], features, dtype=out_dtype), count, span)

    @property
    def features(self) -> int:
        """Output features."""
        return self.weight.shape[0]


def _tile(x: torch.Tensor, features: int, out_dtype: torch.dtype) -> Tile:
    """Return this GPU's tile; for large tiles of wide results one that ptxas doesn't serialise (its warning C7515)."""
    tile = linear_tile(x.device, x.dtype, x.shape[0], features)
    wide = out_dtype == torch.float32 and x.element_size() == 2
    if wide and tile.block_m * tile.block_n >= 64 * 128 and has_copy_engine(x.device):
        return Tile(128, 128, 3, 8, split=False, tma=True, library=tile.library)
    return tile


def _width(part: _Product, tile: Tile) -> int:
    """Return the features of a persistent program's tile."""
    narrow = part.chunks > 1 or part.out.dtype == torch.float32  # registers for a second sum, memory to store from
    return min(tile.block_n, 128) if narrow else tile.block_n


def _tiles(x: torch.Tensor, part: _Product, tile: Tile) -> int:
    return triton.cdiv(x.shape[0], tile.block_m) * triton.cdiv(part.features, _width(part, tile))


def _fills(x: torch.Tensor, parts: list[_Product], tile: Tile) -> bool:
    """Return whether persistent programs can read the operands, and each product alone occupies the GPU."""
    tiles = min(_tiles(x, part, tile) for part in parts)
    return all(_copyable(t) for t in (x, *(part.weight for part in parts))) and tiles >= multiprocessors(x.device) // 2


def _launch_persistent(x: torch.Tensor, part: _Product, tile: Tile) -> None:
    block_n, block_k = _width(part, tile), BLOCK_K[x.dtype]
    stages = tile.stages + (block_n < tile.block_n and part.out.dtype != torch.float32)  # they have room for one more
    launch(
        _linear_persistent, (min(_tiles(x, part, tile), multiprocessors(x.device)),),
        TensorDescriptor.from_tensor(x, [tile.block_m, block_k]),
        TensorDescriptor.from_tensor(part.weight, [block_n, block_k]),
        part.weight if part.bias is None else part.bias, part.out,
        *x.shape, part.features, part.chunks, part.span,
        HAS_BIAS=part.bias is not None, CHUNKED=part.chunks > 1,
        BLOCK_M=tile.block_m, BLOCK_N=block_n, BLOCK_K=block_k, GROUP_M=8,
        num_warps=tile.warps, num_stages=stages,
    )  # fmt: skip


def _launch(x: torch.Tensor, parts: list[_Product], tile: Tile, activation: str | None = None) -> None:
    """Launch up to three products as one; with an activation, a gate's and its up's, to one result of both."""
    (rows, depth), block_k = x.shape, BLOCK_K[x.dtype]
    own, times = (parts, 1) if activation is None else (parts[:1], 2)  # columns of a feature
    sizes, counts = [part.features for part in own], [part.chunks for part in own]
    tiles = [-(-rows // tile.block_m) * -(-times * n // tile.block_n) for n in sizes]
    several = max(counts) > 1
    split = tile.split and several
    grid = sum(t * (c if split else 1) for t, c in zip(tiles, counts, strict=True))
    weights, biases = [part.weight for part in parts], [part.bias for part in parts]
    outs, spans = [part.out for part in own], [part.span for part in own]
    if tile.deep and all(size % (2 * block_k) == 0 for size in (depth, *spans)):
        block_k *= 2
    has_bias = any(b is not None for b in biases)
    bias_or_any = weights
    if has_bias:
        bias_or_any = [w.new_zeros(len(w)) if b is None else b for b, w in zip(biases, weights, strict=True)]
    partials = scratch(x.device, torch.float32, max(counts) * rows * times * sum(sizes) if split else 1)
    arrivals = scratch(x.device, torch.int32, grid)
    launch(
        _linear, (grid,),
        x, *_three(weights, weights[0]), *_three(bias_or_any, weights[0]), *_three(outs, outs[0]),
        partials, arrivals,
        rows, depth, x.stride(0), *_three(sizes, 0), *_three(counts, 1), *_three(spans, depth),
        HAS_BIAS=has_bias, SPLIT=split, CHUNKED=several and not split,
        EVEN_K=depth % block_k == 0 and all(s % block_k == 0 for s in spans),
        ACTIVATION=-1 if activation is None else ACTIVATIONS.index(activation),
        BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, BLOCK_K=block_k, GROUP_M=8,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip


def _three(values: list[_T], other: _T) -> list[_T]:
    return [*values, *[other] * (3 - len(values))]


def products(
    x: torch.Tensor,
    weights: list[torch.Tensor],
    biases: list[torch.Tensor | None],
    out_dtype: torch.dtype,
    tile: Tile | None = None,
) -> list[torch.Tensor]:
    """Return x [rows, depth] @ w.T + bias for each of up to three weights [features, depth] of x's dtype.

    One launch does it where each program computes one chunk; otherwise those of one chunk have a launch, and others.

    tile: the schedule; None takes this GPU's. It decides no bit.
    """
    x = x if x.stride(-1) == 1 else x.contiguous()
    parts = [_Product.of(x, w.contiguous(), b, out_dtype) for w, b in zip(weights, biases, strict=True)]
    if x.shape[0] > 0:
        tile = tile or _tile(x, sum(part.features for part in parts), out_dtype)
        left = [part for part in parts if not (tile.library and _by_library(x, part, tile))]
        if left:
            _by_kernels(x, left, tile)
    return [part.out for part in parts]


def _by_library(x: torch.Tensor, part: _Product, tile: Tile) -> bool:
    """Compute a product, most of its rows by cuBLAS; return False, with nothing done, where it does not serve."""
    if part.bias is not None or part.chunks > 1:
        return False

    def ours(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
        _by_kernels(x, [part._replace(weight=weight, out=out)], tile)

    done = library_products.serve(x, part.weight, part.out, ours)
    if 0 < done < x.shape[0]:
        ours(x[done:], part.weight, part.out[done:])
    return done > 0


def _by_kernels(x: torch.Tensor, parts: list[_Product], tile: Tile) -> None:
    if tile.tma and _fills(x, parts, tile):
        for part in parts:
            _launch_persistent(x, part, tile)
        return
    tile = replace(tile, block_n=min(tile.block_n, 128), tma=False) if tile.tma else tile
    whole, chunked = ([part for part in parts if (part.chunks > 1) == many] for many in (False, True))
    for group in [parts] if tile.split else [whole, chunked]:
        if group:
            _launch(x, group, tile)


def gated_products(
    x: torch.Tensor,
    weights: list[torch.Tensor],
    biases: list[torch.Tensor | None],
    activation: str,
    out_dtype: torch.dtype,
    tile: Tile | None = None,
) -> torch.Tensor:
    """Return activation(gate) * up of the `products`, gate and up, of two weights: in one launch, to the same bits.

    Both are rounded to `out_dtype` before. cuBLAS, persistent tiles, which have no columns to pair, and large ones that
    split, which would need registers of another program, leave it to launches of their own.
    """
    features, depth = weights[0].shape
    tile = tile or linear_tile(x.device, x.dtype, x.shape[0], 2 * features)
    splits = tile.split and chunks(depth, features) > 1
    by_library = tile.library and x.shape[0] >= library_products.BLOCKS[-1]
    if tile.tma or by_library or (splits and tile.block_m * tile.block_n > 64 * 64):
        of_gate, of_up = products(x, weights, biases, out_dtype, tile)
        return gated_activation(of_gate, of_up, activation)
    x = x if x.stride(-1) == 1 else x.contiguous()
    gate = _Product.of(x, aligned(weights[0]), biases[0], out_dtype)
    up = gate._replace(weight=aligned(weights[1]), bias=biases[1])
    if x.shape[0] > 0:
        _launch(x, [gate, up], tile, activation)
    return gate.out


def linear_packed(
    x: torch.Tensor,
    weights: list[tuple[torch.Tensor, int, torch.Tensor | None]],
    dtype: torch.dtype = torch.float32,
    low_ranks: Sequence[tuple[torch.Tensor, torch.Tensor, float] | None] = (),
) -> list[torch.Tensor]:
    """Return x @ weight.T + bias, [rows, features] in `dtype`, for each of up to three weights, in one launch.

    weights: each with its features and its bias. low_ranks: for each weight None, or scale * up(down(x)), in launches
    of their own.
    """
    outs = products(x, [w for w, _, _ in weights], [bias for *_, bias in weights], dtype)
    present = [(i, *each) for i, each in enumerate(low_ranks) if each]
    if present:
        inner = products(x.float(), [down for _, down, _, _ in present], [None] * len(present), torch.float32)
        for (i, _, up, scale), rows in zip(present, inner, strict=True):
            outs[i] = (outs[i] + products(rows, [up], [None], torch.float32)[0] * scale).to(dtype)
    return outs


def gated_packed(
    x: torch.Tensor,
    gate: tuple[torch.Tensor, int, torch.Tensor | None],
    up: tuple[torch.Tensor, int, torch.Tensor | None],
    name: str,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Return `gated_activation` of `linear_packed` of a gate and its up, in one launch: the same bits."""
    return gated_products(x, [gate[0], up[0]], [gate[2], up[2]], name, dtype)
