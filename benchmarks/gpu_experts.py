"""A mixture-of-experts layer on this GPU: is each schedule the same bits, and what does the layer cost?"""

from __future__ import annotations

import functools
import itertools
import types
from collections.abc import Callable, Iterable
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from samebits.kernels import ops
from samebits.kernels.exact_mode import ExactMode, Routing
from samebits.kernels.triton.schedules import Tile

QWEN3_30B = 2048, 768, 128, 8  # hidden, an expert's intermediate, experts, experts of a token
TINY = 64, 40, 8, 2
experts = import_module("samebits.kernels.triton.experts")


def layer(device: torch.device, shape: tuple[int, int, int, int], dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Return weights of a router [E, H], gate_up [E, 2 I, H] and down [E, H, I], random."""
    hidden, inner, count, _ = shape
    with torch.device(device):
        router = torch.randn(count, hidden, dtype=dtype) / hidden**0.5
        gate_up = torch.randn(count, 2 * inner, hidden, dtype=dtype) / hidden**0.5
        return router, gate_up, torch.randn(count, hidden, inner, dtype=dtype) / inner**0.5


def route(x: Tensor, router: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return ids int64 and weights fp32, [T, k], as a model's own code finds them."""
    with ExactMode(Routing(router.shape[0], k)):
        scores = torch.nn.functional.softmax(torch.nn.functional.linear(x, router), dim=-1)
        weights, ids = torch.topk(scores, k, dim=-1)
        return ids, weights / weights.sum(-1, keepdim=True)


def run(x: Tensor, weights: tuple[Tensor, Tensor, Tensor], k: int) -> Tensor:
    """Return what a layer's router and experts make of x."""
    ids, scores = route(x, weights[0], k)
    return ops.experts(x, *weights[1:], ids, scores, "silu")


def tiles(dtype: torch.dtype) -> Iterable[Tile]:
    heights, widths = ((16, 32), (64,)) if dtype == torch.float32 else ((16, 32, 64, 128), (64, 128))
    return [Tile(m, n, 3, 8 if m >= 64 else 4, False) for m, n in itertools.product(heights, widths)]


def gate(device: torch.device, tiny: bool, digest: Callable[[list[Tensor]], str]) -> dict[str, Any]:
    """Compare a row alone and in batches, each tile, permuted slots, gradients of two runs, a graph on other tokens.

    digest: of tensors, a hash of their bits.
    """
    shape = TINY if tiny else QWEN3_30B
    k, most = shape[3], 12 if tiny else 1100
    report: dict[str, Any] = {"compared": 0, "differ": [], "hashes": {}}

    def expect(what: str, a: Tensor, b: Tensor) -> None:
        report["compared"] += 1
        if not torch.equal(a, b):
            report["differ"].append(what)

    dtypes = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
    for name, dtype in [("bfloat16", torch.bfloat16)] if tiny else dtypes.items():
        torch.manual_seed(0)
        weights = layer(device, shape, dtype)
        x = torch.randn(most, shape[0], device=device, dtype=dtype)
        whole, (ids, scores) = run(x, weights, k), route(x, weights[0], k)
        report["hashes"][name] = digest([whole])
        for rows in [slice(0, n) for n in (1, 2, 7, 33, 128, 500)] + [slice(5, 6), slice(most - 9, most)]:
            expect(f"{name}: rows {rows.start} to {rows.stop}", run(x[rows], weights, k), whole[rows])
        order = torch.rand(ids.shape, device=device).argsort(-1)
        permuted = ids.gather(1, order), scores.gather(1, order)
        expect(f"{name}: permuted slots", ops.experts(x, *weights[1:], *permuted, "silu"), whole)
        kept = experts.experts_tile
        for tile in tiles(dtype):
            experts.experts_tile = lambda *_, tile=tile: tile
            expect(f"{name}: {tile}", run(x, weights, k), whole)
        experts.experts_tile = kept
        inputs = [t.requires_grad_() for t in (x[:130].clone(), *weights)]
        grads = [torch.autograd.grad(run(inputs[0], tuple(inputs[1:]), k).sum(), inputs) for _ in range(2)]
        for a, b in zip(*grads, strict=True):
            expect(f"{name}: gradients of two runs", a, b)
        with torch.no_grad():
            expect_graph(device, functools.partial(expect, f"{name}: a graph"), x, weights, k)
        del inputs, grads
    return report


def expect_graph(device: torch.device, expect: Any, x: Tensor, weights: tuple[Tensor, Tensor, Tensor], k: int) -> None:
    """Record a graph of a few tokens, and replay it for others, whose experts are others: the host decides nothing."""
    if device.type != "cuda":
        return
    given = x[:16].clone()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run(given, weights, k)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run(given, weights, k)
    for start in (16, 64, 300):
        given.copy_(x[start : start + 16])
        graph.replay()
        expect(out, run(x[start : start + 16], weights, k))


def theirs(weights: tuple[Tensor, Tensor, Tensor]) -> Any:
    """Return transformers' own experts on `torch._grouped_mm`, for x, ids and scores in x's dtype."""
    from transformers.integrations.moe import grouped_mm_experts_forward
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    count, twice, hidden = weights[1].shape
    config = types.SimpleNamespace(
        num_experts=count, hidden_size=hidden, moe_intermediate_size=twice // 2, hidden_act="silu",
        _experts_implementation="grouped_mm",
    )  # fmt: skip
    with torch.device("meta"):
        module = Qwen3MoeExperts(config)
    module.gate_up_proj, module.down_proj = (torch.nn.Parameter(w, requires_grad=False) for w in weights[1:])
    return functools.partial(grouped_mm_experts_forward, module)


def times(device: torch.device, tiny: bool, copy_rate: float, timers: tuple[Any, Any]) -> list[dict[str, Any]]:
    """Time a layer of Qwen3-30B-A3B in bfloat16, microseconds; of the bound by bandwidth, active experts read once.

    timers: the seconds of a call on a device, and of a graph of it.
    """
    seconds, graph_seconds = timers
    shape = TINY if tiny else QWEN3_30B
    torch.manual_seed(0)
    weights = layer(device, shape, torch.bfloat16)
    peer, found = theirs(weights), []
    with torch.no_grad():
        for tokens in (1, 3) if tiny else (1, 8, 32, 128, 512, 2048, 8192):
            x = torch.randn(tokens, shape[0], device=device).bfloat16()
            ids, scores = route(x, weights[0], shape[3])
            call = functools.partial(ops.experts, x, *weights[1:], ids, scores, "silu")
            active = ids.unique().numel()
            bound = active * (weights[1][0].nbytes + weights[2][0].nbytes) / copy_rate
            ours = graph_seconds(device, call)
            router = graph_seconds(device, functools.partial(route, x, weights[0], shape[3]))
            grouped = seconds(device, functools.partial(peer, x, ids, scores.bfloat16()))
            found.append(
                {"tokens": tokens, "active": active, "router_us": router * 1e6, "experts_us": ours * 1e6,
                 "grouped_mm_us": grouped * 1e6, "of_bound": bound / ours, "of_grouped_mm": grouped / ours}
            )  # fmt: skip
    return found
