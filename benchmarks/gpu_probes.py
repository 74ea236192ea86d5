"""The first two minutes on a GPU: small checks that say whether the gates are worth their time."""

from __future__ import annotations

import functools
import itertools
import math
import shutil
import sys
import threading
from collections.abc import Callable
from importlib import import_module
from typing import Any

import numpy as np
import predicted_bits
import torch

from samebits.kernels import ops
from samebits.kernels.triton.schedules import Tile

from gpu_bits import gate_attention, wide_exponents
from isolate import note

linear = import_module("samebits.kernels.triton.linear")
paged = import_module("samebits.kernels.triton.attention")
SIZES = {False: (2048, 1024), True: (128, 48)}  # depth and features of a product; for tiny runs


class Report:
    """Counts comparisons and keeps what differs, as the gates' reports do."""

    def __init__(self) -> None:
        self.found: dict[str, Any] = {"compared": 0, "differ": [], "information": {}}

    def expect(self, case: str, equal: bool) -> None:
        """Count a comparison that has to hold."""
        self.found["compared"] += 1
        if not equal:
            self.found["differ"].append(case)


def half(device: torch.device) -> torch.dtype:
    """The 16-bit type to probe with: interpreted products of bfloat16 take long."""
    return torch.bfloat16 if device.type == "cuda" else torch.float16


def product(x: torch.Tensor, w: torch.Tensor, tile: Tile | None = None) -> torch.Tensor:
    """x @ w.T by our kernels, in fp32."""
    return linear.products(x, [w], [None], torch.float32, tile)[0]


def some_tiles(device: torch.device) -> list[Tile]:
    """One tile of each class of instruction: mma.sync (16, 32 rows), wgmma (64, 128), the copy engine where it is."""
    plain = [(16, 32, 4, 4, True), (16, 64, 4, 4, False), (32, 64, 4, 4, True), (64, 64, 4, 4, True)]
    found = [Tile(*tile) for tile in [*plain, (64, 128, 4, 8, False), (128, 128, 3, 8, False)]]
    if device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0):
        found += [Tile(m, n, 3, 8, False, tma=True) for m, n in ((64, 128), (128, 128), (128, 256))]
    return found if device.type == "cuda" else found[:4]


def compiler(device: torch.device, tiny: bool) -> dict[str, Any]:
    """Is there a compiler for Triton's launchers, and does one kernel run and agree with fp64? If not, stop here."""
    report = Report()
    tools = {name: shutil.which(name) for name in ("cc", "gcc", "clang", "ncu", "compute-sanitizer")}
    report.found["information"] = {"python": sys.version.split()[0], **tools}
    if device.type == "cuda" and not (tools["cc"] or tools["gcc"] or tools["clang"]):
        report.found["stop"] = "no C compiler (cc, gcc or clang): Triton cannot build its launchers"
        return report.found
    depth, features = SIZES[tiny]
    x = wide_exponents(40, depth, device=device, dtype=half(device))
    w = wide_exponents(features, depth, device=device, dtype=half(device))
    scale = x.double().abs() @ w.double().abs().t()
    error = float(((product(x, w).double() - x.double() @ w.double().t()).abs() / scale).max())
    report.expect(f"one product [40, {depth}] x [{features}, {depth}] and fp64: {error:.1e}", error < 2e-6)
    report.found["information"]["error of a product, of the sum of magnitudes"] = error
    if report.found["differ"]:
        report.found["stop"] = "the first product is wrong"
    return report.found


def tiles(device: torch.device, tiny: bool) -> dict[str, Any]:
    """Do all classes of tiles add up in one order?"""
    report, (depth, features) = Report(), SIZES[tiny]
    x = wide_exponents(40 if tiny else 1100, depth, device=device, dtype=half(device))
    w = wide_exponents(features, depth, device=device, dtype=half(device))
    whole = product(x, w, some_tiles(device)[0])
    for tile in some_tiles(device):
        note(str(tile))
        report.expect(f"{tile} on {list(x.shape)} x {list(w.shape)}", torch.equal(product(x, w, tile), whole))
    return report.found


def ragged(device: torch.device, tiny: bool) -> dict[str, Any]:
    """Rows, features and depths that no tile divides; fewer rows than a tile; a depth that blocks of K don't divide."""
    report, dtype = Report(), half(device)
    depths, widths = ((72,), (33,)) if tiny else ((2048, 2056, 1000), (1000, 1037, 4104))
    for depth, features in itertools.product(depths, widths):
        w = wide_exponents(features, depth, device=device, dtype=dtype)
        x = wide_exponents(20 if tiny else 1037, depth, device=device, dtype=dtype)
        whole = product(x, w, some_tiles(device)[0])
        for tile, rows in itertools.product(some_tiles(device)[1:], (1, 7, len(x)) if tiny else (1, 63, 65, len(x))):
            case = f"{tile}: {rows} rows, {features} features, depth {depth}"
            note(case)
            report.expect(case, torch.equal(product(x[:rows].clone(), w, tile), whole[:rows]))
    return report.found


def split_k(device: torch.device, tiny: bool) -> dict[str, Any]:
    """Split products, thousands of times: the last program to arrive adds the parts up, whoever it is."""
    report, (depth, features) = Report(), SIZES[tiny]
    x = wide_exponents(33, depth, device=device, dtype=half(device))
    w = wide_exponents(features, depth, device=device, dtype=half(device))
    split = [tile for tile in some_tiles(device) if tile.split]
    whole, wrong = product(x, w, Tile(16, 64, 4, 4, False)), torch.zeros((), dtype=torch.int64, device=device)
    launches = 12 if tiny else 3000
    for i in range(launches):
        rows = 1 + i % 33
        wrong += (product(x[:rows], w, split[i % len(split)]) != whole[:rows]).any()
    report.expect(f"{int(wrong)} of {launches} launches", int(wrong) == 0)
    left = [int(b.count_nonzero()) for key, found in linear._scratch.items() if torch.int32 in key for b in found]
    report.expect(f"arrival counters left: {left}", not any(left))
    return report.found


def streams(device: torch.device, tiny: bool) -> dict[str, Any]:
    """Two threads with streams of their own, at once: an engine beside a trainer."""
    report, (depth, features) = Report(), SIZES[tiny]
    if device.type != "cuda":
        return report.found
    weights = [wide_exponents(features, depth, device=device, dtype=half(device)) for _ in range(2)]
    x = wide_exponents(16, depth, device=device, dtype=half(device))
    expected = [product(x, w, Tile(16, 64, 4, 4, False)) for w in weights]
    wrong = torch.zeros(2, dtype=torch.int64, device=device)
    torch.cuda.synchronize(device)

    def work(which: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream(device)):
            for _ in range(3000):
                found = product(x, weights[which], Tile(16, 32, 4, 4, True))
                wrong[which] += (found != expected[which]).any()
            torch.cuda.current_stream().synchronize()

    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for which, count in enumerate(wrong.tolist()):
        report.expect(f"stream {which}: {count} of 3000 split products", count == 0)
    return report.found


def decode_row(device: torch.device, tiny: bool) -> dict[str, Any]:
    """One decoded row against the same row of a packed prefill, with and without split segments."""
    report, dtype = Report(), half(device)
    lengths, heads, kv_heads, dim = ([70, 9], 4, 2, 16) if tiny else ([1500, 33, 600], 16, 8, 128)
    q, k, v = (torch.randn(sum(lengths), n, dim, device=device).to(dtype) for n in (heads, kv_heads, kv_heads))
    for window in (0, 40):
        layout = ops.packed_layout(lengths, heads // kv_heads, device)
        cache = paged.new_kv_cache(layout.num_blocks, kv_heads, dim, dtype, device)
        for part in cache:
            part.fill_(math.nan)
        out, lse = ops.paged_attention(q, k, v, cache, layout, dim**-0.5, window)
        at, one = layout.on(device), torch.tensor([[0, 1, 0, 0, 0]], dtype=torch.int32, device=device)
        sequence = [i for i, length in enumerate(lengths) for _ in range(length)]
        for token, splits in itertools.product(range(0, len(q), max(1, len(q) // (4 if tiny else 12))), (1, 3)):
            case = f"window {window}, token {token} of lengths {lengths}, {splits} splits"
            note(case)
            found = paged.attention(
                q[token : token + 1], *cache, one, at.positions[token : token + 1], at.block_tables,
                at.block_table_starts[sequence[token]][None], dim**-0.5, window, [1], max(lengths), splits=splits,
            )  # fmt: skip
            report.expect(case, torch.equal(found[0][0], out[token]) and torch.equal(found[1][0], lse[token]))
    return report.found


def graphs(device: torch.device, tiny: bool) -> dict[str, Any]:
    """Two graphs replayed in turn on inputs that change, against eager launches."""
    from samebits.engine.cuda_graphs import capture

    report, (depth, features) = Report(), SIZES[tiny]
    if device.type != "cuda":
        return report.found
    weights = [wide_exponents(features, depth, device=device, dtype=half(device)) for _ in range(4)]
    side, pool, recorded = torch.cuda.Stream(device), torch.cuda.graph_pool_handle(), []

    def run(x: torch.Tensor) -> torch.Tensor:
        return torch.cat([product(x, w) for w in weights])

    for rows in (3, 40):
        x = wide_exponents(rows, depth, device=device, dtype=half(device))
        recorded.append((x, *capture(functools.partial(run, x), device, pool, side)))
    wrong = torch.zeros(2, dtype=torch.int64, device=device)
    for i in range(400):
        x, replay, out = recorded[i % 2]
        x.copy_(wide_exponents(*x.shape, device=device, dtype=x.dtype))
        replay()
        wrong[i % 2] += (out.clone() != run(x)).any()
    for (x, *_), count in zip(recorded, wrong.tolist(), strict=True):
        report.expect(f"graph of {len(x)} rows: {count} of 200 replays", count == 0)
    return report.found


def cublas(device: torch.device, tiny: bool) -> dict[str, Any]:
    """Is cuBLAS a schedule of our tree? Information: where it is, it may serve as one."""
    report, found = Report(), {}
    if device.type == "cuda":
        depth, features = 2048, 6144
        w = wide_exponents(features, depth, device=device, dtype=torch.bfloat16)
        for rows in (1, 16, 64, 256, 1024, 4096):
            x = wide_exponents(rows, depth, device=device, dtype=torch.bfloat16)
            found[f"{rows} rows"] = torch.equal(torch.mm(x, w.t(), out_dtype=torch.float32), product(x, w))
        found["chunks of K in ours"] = linear.chunks(depth, features)
    report.found["information"] = found
    return report.found


def gradients(device: torch.device, tiny: bool) -> dict[str, Any]:
    """The gradients of attention against fp64, and again, from whatever would compute them."""
    if tiny:
        return gate_attention(device, [70, 9], 4, 2, 16)
    return gate_attention(device, [1000, 1, 333])  # one is longer than the window


def predicted(device: torch.device, tiny: bool) -> dict[str, Any]:
    """The bits that a model of the matrix unit predicts on a CPU, against this GPU's."""
    return predicted_bits.gate(device)


def repeats(device: torch.device, tiny: bool) -> dict[str, Any]:
    """One product of each tile and one attention, fifty times: some compilers' loops gave other bits in each run."""
    report, (depth, features) = Report(), SIZES[tiny]
    x = wide_exponents(65 if not tiny else 17, depth, device=device, dtype=half(device))
    w = wide_exponents(features, depth, device=device, dtype=half(device))
    for tile in some_tiles(device):
        note(str(tile))
        first = product(x, w, tile)
        same = torch.ones((), dtype=torch.bool, device=device)
        for _ in range(2 if tiny else 50):
            same &= (product(x, w, tile) == first).all()
        report.expect(f"{tile}, again", bool(same))
    return report.found


def accuracy(device: torch.device, tiny: bool) -> dict[str, Any]:
    """Products, norms, activations and log-probs against fp64, each within its budget."""
    report, (depth, features) = Report(), SIZES[tiny]
    kernels, rows = ops.backend(device), 9 if tiny else 300

    def expect(case: str, found: torch.Tensor, exact: torch.Tensor, scale: torch.Tensor | float, budget: float) -> None:
        error = float(((found.double() - exact).abs() / scale).max())
        report.found["information"][case] = error
        report.expect(f"{case} and fp64: {error:.1e}, of {budget:.1e}", error <= budget)

    rounding = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-9, torch.float16: 2.0**-12}
    for dtype, ulp in rounding.items():
        name = str(dtype).removeprefix("torch.")
        note(name)
        x = torch.randn(rows, depth, device=device).to(dtype)
        w = torch.randn(features, depth, device=device).to(dtype)
        scale = x.double().abs() @ w.double().abs().t()
        expect(f"{name} linear", product(x, w), x.double() @ w.double().t(), scale, 1e-6 + depth / 16 * 2.0**-24)
        wide, weight = x.double(), w[0].double()
        norm = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6) * weight
        expect(f"{name} norm", kernels.rms_norm(x, w[0], 1e-6)[0], norm, norm.abs() + 1e-3, 3e-7 + 2 * ulp)
        gated = wide * torch.sigmoid(wide) * wide.flip(0)
        found = kernels.gated_activation(x, x.flip(0).contiguous(), "silu")
        expect(f"{name} activation", found, gated, gated.abs() + 1, 1e-6 + 2 * ulp)
    logits = torch.randn(8, 600 if tiny else 151_936, device=device) * 3
    none = np.zeros(8, np.int64)
    target = torch.arange(8, device=device)
    drawn = ops.sample(logits, ops.RowParams.repeat(8), target, none.astype(np.uint64), none, none)
    exact = logits.double().log_softmax(-1).gather(1, target[:, None])[:, 0]
    expect("log-probs", drawn.scores.logprob, exact, exact.abs(), 1e-6)
    return report.found


def probes(device: torch.device, tiny: bool) -> list[tuple[str, Callable[[], dict[str, Any]]]]:
    """(name, probe), the most telling first."""
    each = compiler, tiles, predicted, decode_row, gradients, repeats, split_k, streams, ragged, graphs, cublas
    return [(f"probe {f.__name__}", functools.partial(f, device, tiny)) for f in each]
