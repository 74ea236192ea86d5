"""Finds the fastest tile of each size of product on this GPU and writes it to kernels/triton/schedules.json.

A tile decides no bit (`benchmarks/gpu.py` proves it of every one), so a table may be replaced at any time.

usage: python benchmarks/tune_linear.py [--seconds 300] [--shapes 0.6B 1.7B] [--dtypes bfloat16 float32]
Tiles are compiled ahead by a process per core.
"""

from __future__ import annotations

import argparse
import itertools
import os
import pathlib
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace

import torch
from triton.testing import do_bench_cudagraph

from samebits.kernels.triton import library_products
from samebits.kernels.triton.linear import BLOCK_K, chunks, products
from samebits.kernels.triton.schedules import Tile, add_table, linear_tile

from gpu_bits import QWEN3, joined, shapes, wide_exponents

ROWS = {  # the bound of a bucket, and the rows at which it is tuned; those that matter most come first
    torch.bfloat16: {16: 8, 1 << 40: 2048, 64: 64, 256: 256, 1024: 1024, 32: 32, 128: 128, 512: 512},
    torch.float32: {16: 8, 1 << 40: 1024, 64: 64, 256: 256},
}
WIDTHS = 2048, 4096, 8192, 1 << 40  # bounds of the output features


def candidates(dtype: torch.dtype, rows: int, room: int, copy_engine: bool) -> Iterator[Tile]:
    """Tiles worth a trial: not much taller than the rows, split only where that could help, large ones persistent.

    room: bytes of shared memory that a program may have.
    """
    half = dtype != torch.float32
    heights = [m for m in ((16, 32, 64, 128) if half else (16, 32, 64)) if m < 2 * rows or m == 16]
    widths = (16, 32, 64, 128) if half else (16, 32, 64)
    block_k = BLOCK_K[dtype]
    for m, n, stages, warps in itertools.product(heights[-2:], widths, (3, 5, 8, 12, 20) if half else (2, 3), (4, 8)):
        deep = stages > 5 and m * n > 64 * 64  # large tiles hide the latency of memory with fewer stages
        tall = m * n >= 128 * 128 and warps == 4  # spills
        fits = (m + n) * block_k * dtype.itemsize * stages <= room
        if fits and not deep and not tall and (warps == 4 or m * n >= 64 * 64):
            for split in (True, False) if rows <= 512 else (False,):
                yield Tile(m, n, stages, warps, split)
                if half and rows <= 32 and 2 * (m + n) * block_k * dtype.itemsize * stages <= room:
                    yield Tile(m, n, stages, warps, split, deep=True)  # half as many waits, one after another
    if half and rows >= 128 and copy_engine:
        for (m, n), stages in itertools.product(((64, 128), (64, 256), (128, 128), (128, 256), (256, 128)), (3, 4)):
            for warps in (4, 8) if m * n < 128 * 128 else (8,):
                yield Tile(m, n, stages, warps, False, tma=True)


def microseconds(x: torch.Tensor, weights: list[list[torch.Tensor]], tile: Tile | None) -> float | None:
    """None for a tile that does not fit."""
    try:
        call = lambda: [products(x, w, [None] * len(w), x.dtype, tile) for w in weights]  # noqa: E731
        # as a graph: launching takes Python longer than a small product takes the GPU
        return do_bench_cudagraph(call, rep=5, return_mode="median") * 1e3 / len(weights)
    except Exception as error:
        if "OutOfResources" in type(error).__name__ or "PassManager" in str(error):
            return None
        raise


def compile_ahead(arguments: list[str]) -> None:
    script, count = pathlib.Path(__file__).with_name("gpu_precompile.py"), os.cpu_count() or 1
    shares = [[sys.executable, str(script), str(i), str(count), "--tuning", *arguments] for i in range(count)]
    for process in [subprocess.Popen(share) for share in shares]:
        process.wait()


def tune(x_rows: int, dtype: torch.dtype, found: list[tuple[str, int, int]], tiles: list[Tile]) -> dict[Tile, float]:
    """Return the time of each tile that fits all of these products, by that of the table's present tile."""
    device, scores = torch.device("cuda"), defaultdict(list)
    for part, features, depth in found:
        x = wide_exponents(x_rows, depth, device=device, dtype=dtype)
        copies = max(1, min(32, (128 << 20) // (x.element_size() * features * depth)))
        weights = [
            list(wide_exponents(features, depth, device=device, dtype=dtype).split(joined(part, features)))
            for _ in range(copies)
        ]
        none = [None] * len(weights[0])
        whole = products(x, weights[0], none, dtype)
        base = microseconds(x, weights, None) or 1.0
        for tile in tiles:
            if tile.tma and tile.block_n > 128 and any(chunks(depth, len(w)) > 1 for w in weights[0]):
                continue  # it would run with 128
            took = microseconds(x, weights, tile)
            if took is None:
                continue
            if not all(map(torch.equal, products(x, weights[0], none, dtype, tile), whole)):
                sys.exit(f"{tile} changes bits at {dtype} [{features}, {depth}]: do not use this GPU, and report it")
            scores[tile].append(took / base)
    return {t: statistics.geometric_mean(each) for t, each in scores.items() if len(each) == len(found)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=300, help="no further bucket is begun after so long")
    parser.add_argument("--shapes", nargs="+", default=["0.6B", "1.7B"], choices=[s for s in QWEN3 if s != "tiny"])
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"], choices=["bfloat16", "float32"])
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("torch sees no NVIDIA GPU: there is nothing to tune here")
    begin, device = time.monotonic(), torch.device("cuda")
    properties = torch.cuda.get_device_properties(0)
    compile_ahead(args.dtypes)
    print(f"compiled ahead in {time.monotonic() - begin:.0f} s", flush=True)
    for dtype, buckets in ((t, b) for t, b in ROWS.items() if str(t).removeprefix("torch.") in args.dtypes):
        sizes = defaultdict(set)
        for part, (features, depth) in (s for size in args.shapes for s in shapes(size).items()):
            if part != "lm_head":  # its results are wider: `_tile` chooses
                sizes[next(bound for bound in WIDTHS if features <= bound)].add((part, features, depth))
        table = {
            (most, width): linear_tile(device, dtype, min(most, 1 << 20), min(width, 1 << 20))
            for most, width in itertools.product(sorted(buckets), (*sorted(sizes), 1 << 40))
        }
        for (most, rows), width in itertools.product(buckets.items(), sorted(sizes)):
            if time.monotonic() - begin > args.seconds:
                print("no time left: the other sizes keep the tiles that they have")
                break
            room, engine = properties.shared_memory_per_block_optin, properties.major >= 9
            found = sorted(sizes[width])
            scores = tune(rows, dtype, found, list(candidates(dtype, rows, room, engine)))
            best = min(scores, key=scores.__getitem__)
            if dtype != torch.float32 and rows >= library_products.BLOCKS[-1]:
                with_library = tune(rows, dtype, found, [replace(best, library=True)])
                scores |= {t: s for t, s in with_library.items() if s < scores[best]}
                best = min(scores, key=scores.__getitem__)
            print(
                f"{time.monotonic() - begin:.0f} s, {dtype} rows <= {most}, features <= {width}: {best}, "
                f"{scores[best]:.2f} x",
                flush=True,
            )
            table[most, width] = best
            name = "float32" if dtype == torch.float32 else "16-bit"
            capability = f"{properties.major}.{properties.minor}"
            add_table(properties.name, capability, name, [(*k, tile) for k, tile in table.items()])


if __name__ == "__main__":
    main()
