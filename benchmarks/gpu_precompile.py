"""Compiles a share of the kernels that `gpu.py` launches into Triton's cache, and runs none of them.

usage: python benchmarks/gpu_precompile.py SHARE SHARES [--tiny] [--dry] [--tuning DTYPE ...]
Launches are caught on tensors that have no memory of their own. What this list lacks a part compiles when it needs it,
and reports as "compiled here". Without a GPU kernels are compiled for an H100. --dry: arguments are bound as for a
launch, and nothing is compiled. --tuning: what `tune_linear.py` tries, instead.
"""

from __future__ import annotations

import itertools
import os
import sys
import zlib
from importlib import import_module
from typing import Any

os.environ["TRITON_INTERPRET"] = "0"  # before anything imports Triton

import numpy as np
import torch
import tune_linear
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from samebits.kernels import ops
from samebits.kernels.triton.launch import settings
from samebits.kernels.triton.schedules import Tile

from gpu_bits import DTYPES, all_tiles, shapes
from gpu_probes import some_tiles

NAMES = ("linear", "attention", "attention_backward", "elementwise", "heads", "sampling", "experts", "functions")
MODULES = {name: import_module(f"samebits.kernels.triton.{name}") for name in NAMES}
ROWS = 1, 16, 17, 31, 64, 100, 128, 200, 256, 500, 1024
CPU = torch.device("cpu")


class Share:
    """A substitute for `launch` that compiles what falls to this share, each kind of call once."""

    def __init__(self, share: int, shares: int, settings: dict[str, bool]):
        self.share, self.shares, self.settings = share, shares, settings
        self.seen: set[str] = set()
        self.compiled = 0
        self.failed: list[str] = []
        self.unsupported: list[str] = []

    def __call__(self, kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
        name = kernel.fn.__name__
        key = repr((name, [_kind(a) for a in args], sorted((k, str(v)) for k, v in options.items())))
        if key in self.seen or zlib.crc32(key.encode()) % self.shares != self.share:
            return
        self.seen.add(key)
        try:
            kernel.warmup(*args, grid=grid, **self.settings, **options)
            self.compiled += 1
        except Exception as error:  # the next ones are compiled all the same
            kept = self.unsupported if "PassManager" in str(error) else self.failed  # the gates skip such a tile
            kept.append(f"{name}: {type(error).__name__} {str(error)[:100]}")


class NoDriver:
    """A substitute for Triton's driver where there is no GPU: it says what to compile for."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def _kind(argument: Any) -> Any:
    """Return what Triton specialises a kernel on."""
    if isinstance(argument, torch.Tensor):
        return str(argument.dtype), argument.data_ptr() % 16 == 0
    if isinstance(argument, int):
        return argument == 1, argument % 16 == 0
    return str(getattr(argument, "block_shape", type(argument).__name__))


def catch(launch: Any, device: torch.device, multiprocessors: int, shared_memory: int, copy_engine: bool) -> None:
    """Put `launch` in the place of the kernels' own. device: whose table of tiles is used."""
    MODULES["linear"].has_copy_engine = MODULES["attention"].has_copy_engine = lambda _: copy_engine
    for module in MODULES.values():
        module.launch = launch
        if hasattr(module, "multiprocessors"):
            module.multiprocessors = lambda _: multiprocessors
        if hasattr(module, "shared_memory"):
            module.shared_memory = lambda _: shared_memory
    MODULES["attention_backward"].candidate = lambda *_: None
    schedules = import_module("samebits.kernels.triton.schedules")
    table = schedules._table
    schedules._table = lambda _, dtype: table(device, dtype)


def linears(size: str, dtype: torch.dtype, tiles: list[Tile], rows: tuple[int, ...]) -> None:
    """Launch the products of a model's shape, with the table's tiles and with all."""
    products = MODULES["linear"].products
    half = dtype != torch.float32
    for part, (features, depth) in shapes(size).items():
        features = min(features, 4096) if part == "lm_head" else features
        w = torch.empty(features, depth, dtype=dtype)
        joined = {"qkv": [features // 2, features // 4, features // 4], "gate_up": [features // 2] * 2}.get(part)
        for count in rows:
            x = torch.empty(count, depth, dtype=dtype)
            for out in {torch.float32, dtype}:
                products(x, [w], [None], out)
            if half and joined:
                products(x, list(w.split(joined)), [None] * len(joined), dtype)
            if half and part == "gate_up":
                MODULES["linear"].gated_products(x, list(w.split(joined)), [None, None], "silu", dtype)
        for tile in tiles:
            x = torch.empty(1100 if tile.tma else 130, depth, dtype=dtype)
            for out in {torch.float32, dtype} if tile.tma else {torch.float32}:
                products(x, [w], [None], out, tile)


def tuning(dtype: torch.dtype, room: int, copy_engine: bool) -> None:
    """Launch every tile that tuning tries on products in one chunk and in two."""
    for rows in tune_linear.ROWS[dtype].values():
        for tile in tune_linear.candidates(dtype, rows, room, copy_engine):
            x = torch.empty(max(rows, tile.block_m), 2048, dtype=dtype)
            q, k = (torch.empty(features, 2048, dtype=dtype) for features in (2048, 1024))
            for weights in ([q], [k], [q, k, k]):
                MODULES["linear"].products(x, weights, [None] * len(weights), dtype, tile)


def others(dtype: torch.dtype, heads: tuple[int, int, int], widths: tuple[int, ...], vocab: int) -> None:
    """Launch attention, its gradients, norms, activations and sampling."""
    paged, backward, rows = (MODULES[n] for n in ("attention", "attention_backward", "elementwise"))
    query_heads, kv_heads, dim = heads
    q, kv = (torch.empty(2633, n, dim, dtype=dtype) for n in (query_heads, kv_heads))
    cache = paged.new_kv_cache(60, kv_heads, dim, dtype, CPU)
    ints, items = torch.zeros(4000, dtype=torch.int32), torch.zeros(90, 5, dtype=torch.int32)
    for window, (small, splits) in itertools.product((0, 700), ((1, 1), (1, 3), (6, 1), (6, 4), (0, 1))):
        paged.attention(q, *cache, items, ints, ints, ints, 0.1, window, [1] * small, 2000, splits=splits)
    paged.write_kv(kv, kv, ints, *cache)
    backward._triton_backward(q, kv, kv, q, torch.empty(2633, query_heads), q, [2000, 600, 33], 0.1, 0)
    layout = ops.packed_layout([2633], query_heads // kv_heads, CPU)
    for norms in (None, ((q[0, 0], 1e-6), (q[0, 0], 1e-6))):
        MODULES["heads"].place_heads(q, kv, kv, norms, (q[:, 0], q[:, 0]), layout, cache)
    for width in widths:
        x, weight = torch.empty(300, width, dtype=dtype), torch.empty(width, dtype=dtype)
        rows.rms_norm(x, weight, 1e-6)
        rows.add_rms_norm(x, x, weight, 1e-6)
        rows.rms_norm_backward(x, x, weight, torch.empty(300))
        rows.gated_activation(x, x, "silu")
        rows.gated_activation_backward(x, x, x, "silu")
    params, none = ops.RowParams.repeat(8), np.zeros(8, np.int64)
    settings = params.temperature, params.top_k, params.top_p, params.min_p, params.masks, params.mask_rows
    counters = none.astype(np.uint64), none, none
    for targets in (torch.full((8,), -1), none):
        MODULES["sampling"].sample(torch.empty(8, vocab), *settings, targets, *counters)


def main() -> None:
    tiny = "--tiny" in sys.argv
    if "--dry" in sys.argv:
        knobs.runtime.jit_cache_hook = lambda **_: True  # "this one is there already"
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    found = torch.cuda.get_device_properties(0) if device.type == "cuda" else None
    if found is None:
        driver.set_active(NoDriver())
    room, copy_engine = found.shared_memory_per_block_optin if found else 232_448, not found or found.major >= 9
    launch = Share(int(sys.argv[1]), int(sys.argv[2]), settings(early=copy_engine))
    catch(launch, device, found.multi_processor_count if found else 132, room, copy_engine)
    if "--tuning" in sys.argv:
        for name in sys.argv[sys.argv.index("--tuning") + 1 :]:
            tuning(DTYPES[name], room, copy_engine)
    for dtype in () if "--tuning" in sys.argv else DTYPES.values():
        if tiny:
            linears("tiny", dtype, some_tiles(device)[:1], (1, 17))
            others(dtype, (4, 2, 16), (64,), 600)
            continue
        linears("1.7B", dtype, list(all_tiles(dtype)), ROWS)
        linears("0.6B", dtype, [], ROWS)
        others(dtype, (16, 8, 128), (128, 1024, 2048, 3072, 6144), 151_936)
    done = "bound" if "--dry" in sys.argv else "compiled"
    print(f"{launch.compiled} {done}, {len(launch.failed)} failed", *launch.failed[:3], sep="; ")
    sys.exit(int(bool(launch.failed)))


if __name__ == "__main__":
    main()
