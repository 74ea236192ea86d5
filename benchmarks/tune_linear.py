"""Finds the fastest tile of each size of product on this GPU and writes it to kernels/triton/schedules.json.

A tile decides no bit (`benchmarks/gpu.py` proves it of every one), so a table may be replaced at any time.

usage: python benchmarks/tune_linear.py [--seconds 300] [--shapes 0.6B 1.7B]
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import time
from collections import defaultdict

import torch
from triton.testing import do_bench_cudagraph

from samebits.kernels.triton.linear import BLOCK_K, chunks, products
from samebits.kernels.triton.schedules import Tile, add_table, linear_tile

from gpu_bits import QWEN3, shapes, wide_exponents

ROWS = {  # the bound of a bucket, and the rows at which it is tuned; those that matter most come first
    torch.bfloat16: {16: 8, 1 << 40: 2048, 64: 64, 256: 256, 32: 32, 128: 128, 512: 512},
    torch.float32: {16: 8, 1 << 40: 1024, 64: 64, 256: 256},
}
WIDTHS = 2048, 4096, 8192, 1 << 40  # bounds of the output features


def candidates(dtype: torch.dtype, rows: int):
    """Tiles worth a trial: not much taller than the rows, split only where that could help, large ones persistent."""
    half = dtype != torch.float32
    heights = [m for m in ((16, 32, 64, 128) if half else (16, 32, 64)) if m < 2 * rows or m == 16]
    widths = (16, 32, 64, 128) if half else (16, 32, 64)
    block_k, room = BLOCK_K[dtype], torch.cuda.get_device_properties(0).shared_memory_per_block_optin
    for m, n, stages, warps in itertools.product(heights[-2:], widths, (3, 5, 8, 12, 20) if half else (2, 3), (4, 8)):
        deep = stages > 5 and m * n > 64 * 64  # large tiles hide the latency of memory with fewer stages
        tall = m * n >= 128 * 128 and warps == 4  # spills
        fits = (m + n) * block_k * dtype.itemsize * stages <= room
        if fits and not deep and not tall and (warps == 4 or m * n >= 64 * 64):
            for split in (True, False) if rows <= 512 else (False,):
                yield Tile(m, n, stages, warps, split)
    if half and rows >= 128 and torch.cuda.get_device_capability() >= (9, 0):
        for (m, n), stages in itertools.product(((64, 128), (64, 256), (128, 128), (128, 256), (256, 128)), (3, 4)):
            for warps in (4, 8) if m * n < 128 * 128 else (8,):
                yield Tile(m, n, stages, warps, False, tma=True)


def microseconds(x: torch.Tensor, weights: list[torch.Tensor], tile: Tile | None) -> float | None:
    """None for a tile that does not fit."""
    try:
        call = lambda: [products(x, [w], [None], x.dtype, tile) for w in weights]  # noqa: E731
        # as a graph: launching takes Python longer than a small product takes the GPU
        return do_bench_cudagraph(call, rep=10, return_mode="median") * 1e3 / len(weights)
    except Exception as error:
        if "OutOfResources" in type(error).__name__ or "PassManager" in str(error):
            return None
        raise


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=300, help="no further bucket is begun after so long")
    parser.add_argument("--shapes", nargs="+", default=["0.6B", "1.7B"], choices=[s for s in QWEN3 if s != "tiny"])
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("torch sees no NVIDIA GPU: there is nothing to tune here")
    device = torch.device("cuda")
    gpu, begin = torch.cuda.get_device_name(device), time.monotonic()
    for dtype, buckets in ROWS.items():
        sizes = defaultdict(set)
        for features, depth in (s for size in args.shapes for s in shapes(size).values()):
            sizes[next(bound for bound in WIDTHS if features <= bound)].add((features, depth))
        table = {
            (most, width): linear_tile(device, dtype, min(most, 1 << 20), min(width, 1 << 20))
            for most, width in itertools.product(sorted(buckets), sorted(sizes))
        }
        for (most, rows), width in itertools.product(buckets.items(), sorted(sizes)):
            if time.monotonic() - begin > args.seconds:
                print("no time left: the other sizes keep the tiles that they have")
                break
            scores: dict[Tile, list[float]] = defaultdict(list)
            for features, depth in sizes[width]:
                x = wide_exponents(rows, depth, device=device, dtype=dtype)
                copies = max(1, min(32, (128 << 20) // (x.element_size() * features * depth)))
                weights = [wide_exponents(features, depth, device=device, dtype=dtype) for _ in range(copies)]
                whole = products(x, weights[:1], [None], dtype)[0]
                base = microseconds(x, weights, None) or 1.0
                for tile in candidates(dtype, rows):
                    if tile.tma and tile.block_n > 128 and chunks(depth, features) > 1:
                        continue  # it would run with 128
                    took = microseconds(x, weights, tile)
                    if took is None:
                        scores[tile].append(float("inf"))
                        continue
                    if not torch.equal(products(x, weights[:1], [None], dtype, tile)[0], whole):
                        sys.exit(
                            f"{tile} changes bits at {dtype} [{features}, {depth}]: do not use this GPU, and report it"
                        )
                    scores[tile].append(took / base)
            scores = {tile: found for tile, found in scores.items() if len(found) == len(sizes[width])}
            best = min(scores, key=lambda tile: statistics.geometric_mean(scores[tile]))
            print(
                f"{dtype} rows <= {most}, features <= {width}: {best}, {statistics.geometric_mean(scores[best]):.2f} x"
            )
            table[most, width] = best
            add_table(gpu, "float32" if dtype == torch.float32 else "16-bit", [(*k, tile) for k, tile in table.items()])


if __name__ == "__main__":
    main()
