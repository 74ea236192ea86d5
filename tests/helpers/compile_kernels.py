"""Compiles every Triton kernel, for GPUs that need not be there.

`compile_kernels.py CAPABILITY [DTYPE ...] [--few]` prints one JSON line for each configuration of each kernel, with
--few for one of each. Launches are caught where they would happen, so signatures are those of real calls.
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
import subprocess
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module

import numpy as np
import torch
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import compiler as nvidia
from triton.compiler import ASTSource
from triton.runtime.jit import mangle_type

from samebits.kernels import ops
from samebits.kernels.backend import ExpertPlan
from samebits.kernels.triton.schedules import Tile, tables

NAMES = ("linear", "attention", "attention_backward", "elementwise", "heads", "sampling", "experts", "functions")
MODULES = [import_module(f"samebits.kernels.triton.{name}") for name in NAMES]
linear, attention, backward, elementwise, heads, sampling, experts, functions = MODULES
SHARED_MEMORY = {80: 166_912, 86: 101_376, 90: 232_448, 100: 232_448}  # bytes a program may have
caught: dict[tuple, dict] = {}
said = threading.local()  # what ptxas said last in a thread
knobs.nvidia.dump_ptxas_log = True
nvidia.print = lambda text: setattr(said, "text", text)  # by which Triton gives it away


def programs(registers: int, warps: int, shared: int, capability: int) -> int:
    """Return how many programs a multiprocessor holds: 64 K registers, given out in 256s per warp, 1 KB kept apart."""
    per_warp = -(-32 * registers // 256) * 256
    room = SHARED_MEMORY[capability] + 1024
    return min(65536 // (per_warp * warps), room // (shared + 1024), 64 // warps, 32)


def catch(kernel, grid, *args, **options):
    """In the place of `launch`: remembers the compilation that this call needs."""
    constants, signature, attributes = {}, {}, {}
    given = dict(zip(kernel.arg_names, args, strict=False)) | {
        k: v for k, v in options.items() if k in kernel.arg_names
    }
    for place, param in enumerate(kernel.params):
        value = given[param.name]
        fixed = not param.do_not_specialize and isinstance(value, int) and not isinstance(value, bool) and value == 1
        if param.is_constexpr or fixed:
            signature[param.name] = "constexpr"
            constants[place,] = value
            continue
        signature[param.name] = mangle_type(value)
        free = param.do_not_specialize or param.do_not_specialize_on_alignment
        if not free and (isinstance(value, torch.Tensor) or (isinstance(value, int) and value % 16 == 0)):
            attributes[place,] = [["tt.divisibility", 16]]
    settings = {k: v for k, v in options.items() if k not in kernel.arg_names} | {"enable_fp_fusion": False}
    key = (
        kernel.fn.__name__,
        *signature.values(),
        *constants.items(),
        *settings.items(),
        *map(str, attributes.items()),
    )
    caught[key] = dict(kernel=kernel, signature=signature, constants=constants, attributes=attributes, options=settings)


def reductions(ttgir: str) -> list[str]:
    """How the elements that each `sum` or `max` of a row takes lie over a program's threads."""
    layouts = dict(re.findall(r"(#\w+) = (#ttg\.\w+<\{.*\}>)", ttgir))
    found = re.findall(r'"tt\.reduce".*?\}\) : \((tensor<[^>]*>)', ttgir, re.DOTALL)
    return [re.sub(r"#\w+", lambda name: layouts.get(name[0], name[0]), kind) for kind in found]


def compile_one(job: dict, capability: int) -> dict:
    source = ASTSource(job["kernel"], job["signature"], job["constants"], job["attributes"])
    said.text = ""
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=job["options"])
    ptx = compiled.asm["ptx"]
    names = {
        name: job["constants"][place,] for place, name in enumerate(job["signature"]) if (place,) in job["constants"]
    }
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        tool = [knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        dump = subprocess.run(tool, capture_output=True, text=True, check=True).stdout
    stack, registers = (int(re.search(rf"{name}:(\d+)", dump)[1]) for name in ("STACK", "REG"))
    return {
        "kernel": job["kernel"].fn.__name__,
        "constants": {k: v for k, v in names.items() if isinstance(v, bool | int)},
        "dtypes": sorted({s for s in job["signature"].values() if s.startswith("*")}),
        "wgmma": "wgmma" in ptx,
        "tma": "cp.async.bulk.tensor" in ptx,
        "scalar_loads": "ld.global.b16" in ptx,
        "contracted": re.search(r"\bfma\S*\.f32", ptx) is not None,  # a sum of two bf16 may be one, times 1
        "sum": "; ".join(reductions(compiled.asm["ttgir"])),
        "warnings": re.findall(r"\(C7\d+\)", said.text),  # such as products that wait for each other
        "heard": " registers" in said.text,
        "shared": compiled.metadata.shared,
        "stack": stack,
        "registers": registers,
        "programs": programs(registers, compiled.metadata.num_warps, compiled.metadata.shared, capability),
    }


def catch_all(capability: int, dtypes: list[torch.dtype]) -> None:
    """Every kernel and schedule, as a model of Qwen3's shape would launch them."""
    for module in MODULES:
        module.launch = catch
    linear.multiprocessors = lambda device: 1  # what is small goes through persistent programs, too
    linear.has_copy_engine = attention.has_copy_engine = lambda device: capability >= 90
    backward.multiprocessors = attention.multiprocessors = lambda device: 132
    backward.shared_memory = lambda device: SHARED_MEMORY[capability]
    backward.candidate = lambda *_: None
    for dtype in dtypes:
        name = "float32" if dtype == torch.float32 else "16-bit"
        mine = "{}.{}".format(*divmod(capability, 10))
        known = [table for gpu, table in tables().items() if gpu == "default" or table["capability"] == mine]
        tiles = {Tile(**tile) for table in known for _, _, tile in table.get(name, [])}
        if capability >= 90 and dtype == torch.bfloat16:
            tiles |= {Tile(16, 16, 10, 4, True, deep=True), Tile(16, 32, 10, 4, True, deep=True)}
            tiles |= {
                Tile(m, n, stages, 8, False, tma=True)
                for (m, n), stages in itertools.product(((64, 128), (128, 128), (128, 256)), (3, 4))
            }
        for tile in sorted(tiles, key=str):
            x, w, bias = (torch.empty(*shape, 2048, dtype=dtype) for shape in ((64,), (1024,), ()))
            linear.products(x, [w, w, w], [None] * 3, dtype, tile)
            linear.products(x, [w, w, w], [bias[:1024]] * 3, dtype, tile)
            kinds = ("silu", 1024, None), ("silu", 4096, None), ("silu", 1024, bias[:1024]), ("gelu", 1024, None)
            for name, width, added in kinds:  # in two chunks, and in one
                gate_up = [torch.empty(width, 2048, dtype=dtype)] * 2
                linear.gated_products(x, gate_up, [added] * 2, name, dtype, tile)
            linear.linear_tile = lambda *_, tile=tile: tile
            linear.products(x, [w], [None], torch.float32)
            for out in (dtype, torch.float32) if tile.tma else (dtype,):  # in one chunk
                linear.products(x, [torch.empty(4096, 2048, dtype=dtype)], [None], out, tile)
        shapes = [(16, 8, 128, 0), (9, 3, 64, 512)]
        if capability == 80:  # the odd ones, for one GPU: a depth that no block divides, heads of strange widths
            linear.products(torch.empty(64, 100, dtype=dtype), [torch.empty(96, 100, dtype=dtype)], [None], dtype)
            shapes += [(4, 1, 20, 0), (8, 1, 96, 0)]
        for query_heads, kv_heads, dim, window in shapes:
            q, k = torch.empty(600, query_heads, dim, dtype=dtype), torch.empty(600, kv_heads, dim, dtype=dtype)
            cache = attention.new_kv_cache(10, kv_heads, dim, dtype, torch.device("cpu"))
            ints = torch.zeros(600, dtype=torch.int32)
            items = torch.zeros(12, 5, dtype=torch.int32)
            for splits in (1, 4):
                attention.attention(q, *cache, items, ints, ints, ints, 0.1, window, [1] * 6, 2000, splits=splits)
            attention.write_kv(k, k, ints, *cache)
            lse = torch.empty(600, query_heads)
            backward.attention_backward(q, k, k, q, lse, q, [600], 0.1, window)
            layout = ops.packed_layout([600], query_heads // kv_heads, q.device)
            for norms in (None, ((k[0, 0], 1e-6), (k[0, 0], 1e-6))):
                heads.place_heads(q, k, k, norms, (k[:, 0], k[:, 0]), layout, cache)
            elementwise.rms_norm(k[0], k[0, 0], 1e-6)
        for width, rows in ((128, 1), (128, 16), (2048, 1), (2048, 7), (2048, 32)):
            x, weight = torch.empty(rows, width, dtype=dtype), torch.empty(width, dtype=dtype)
            elementwise.rms_norm(x, weight, 1e-6)
            elementwise.add_rms_norm(x, x, weight, 1e-6)
            elementwise.rms_norm_backward(x, x, weight, torch.empty(rows))
        for activation, rows in itertools.product(elementwise.ACTIVATIONS, (1, 32)):
            x = torch.empty(rows, 4096, dtype=dtype)
            elementwise.gated_activation(x, x, activation)
            elementwise.gated_activation_backward(x, x, x, activation)
        catch_experts(dtype)
    one, none = torch.ones(4).double().numpy(), torch.zeros(4).long().numpy()
    for rows in (1, 4):
        masks = np.zeros((1, 4748), np.uint32), none[:rows]
        now = one[:rows], none[:rows], one[:rows], one[:rows], *masks, torch.zeros(rows, dtype=torch.long)
        sampling.sample(torch.empty(rows, 151936), *now, *[none[:rows]] * 3)


def catch_experts(dtype: torch.dtype) -> None:
    """Catch the kernels of a layer of Qwen3-30B-A3B, on the meta device, for decoding, small and large prefills."""
    hidden, inner, count, k = 2048, 768, 128, 8
    gate_up, down = (
        torch.empty(count, *shape, dtype=dtype, device="meta") for shape in ((2 * inner, hidden), (hidden, inner))
    )
    for tokens in (1, 256, 512, 1024, 8192):
        ids = torch.empty(tokens, k, dtype=torch.long, device="meta")
        pairs = ids.view(-1)
        plan = ExpertPlan(pairs, ids, pairs.new_empty(count))
        x, weights = ids.new_empty(tokens, hidden, dtype=dtype), ids.new_empty(tokens, k, dtype=torch.float32)
        both = experts.grouped(x, gate_up, plan, True, dtype)
        gated = elementwise.gated_halves(both, "silu")
        y = experts.grouped(gated, down, plan, False, dtype)
        experts.combine(y, weights, plan, dtype)
        grad = experts.grouped(y, down.transpose(1, 2), plan, False, dtype)
        experts.grouped(torch.cat((grad, grad), 1), gate_up.transpose(1, 2), plan, False, torch.float32)
        experts.grouped_outer(y, gated, plan, dtype)
        logits = ids.new_empty(tokens, count, dtype=torch.float32)
        functions.softmax(logits)
        functions.row_sums(weights, 1)
        functions.top_k(logits, k)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("capability", type=int)
    parser.add_argument("dtypes", nargs="*")
    parser.add_argument("--few", action="store_true")
    args = parser.parse_args()
    catch_all(args.capability, [getattr(torch, name) for name in args.dtypes])
    jobs = [*caught.values()]
    if args.few:
        jobs = [*{job["kernel"].fn.__name__: job for job in reversed(jobs)}.values()]
    with ThreadPoolExecutor(2) as pool:
        for result in pool.map(lambda job: compile_one(job, args.capability), jobs):
            print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
