"""One layer's experts on a CPU: ours, packed and plain, beside transformers' implementations.

usage: python benchmarks/experts.py [--threads 2] [--rounds 15] [--clock wall] [--json FILE]

Each round times every implementation once on the same input, so that what else the machine does falls on all of them.
Each has weights of its own: it finds none that another has just read, as a layer of an engine doesn't. batched_mm has
rounds of its own: its copies of weights, up to 256 MB, leave nothing in the cache for whoever comes next.
Prints the least milliseconds of each, and the median over rounds of (the best of transformers' eager and grouped_mm) /
ours: above 1, ours is faster. Then the same for forward and backward of plain weights, as a trainer runs them, and last
for a trainer's log-probs of 4 x 128 tokens and their gradients on the whole 110 M-parameter mixture of `routing.py`.
Two threads need two idle cores: a launch ends with its last thread, so one that others preempt makes it many times
slower, and ours, which are short, the most. `nice` does not help against other sessions where Linux groups processes by
session (kernel.sched_autogroup_enabled). `--clock cpu` counts the process's CPU time, for one thread on a busy machine.
"""

from __future__ import annotations

import argparse
import copy
import functools
import json
import pathlib
import statistics
import tempfile
import time
import types
from collections.abc import Callable

import torch
from routing import MIXTURE, make_model
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.integrations.moe import batched_mm_experts_forward, grouped_mm_experts_forward
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from samebits.kernels import ops
from samebits.trainer import exact_model, token_logprobs

LAYERS = [(512, 256, 32, 4, torch.float32), (1024, 512, 32, 8, torch.bfloat16)]  # H, I, E, k
TOKENS = 1, 8, 32, 128, 512
NAMES = "packed", "plain", "eager", "grouped_mm", "batched_mm"
PEERS = "eager", "grouped_mm"
BATCHED_BYTES = 2**28  # batched_mm copies an expert's weights for each of its tokens: no more than this

Run = Callable[[Tensor, Tensor, Tensor], Tensor]


def layer(hidden: int, inner: int, experts: int, dtype: torch.dtype) -> Qwen3MoeExperts:
    config = types.SimpleNamespace(
        num_experts=experts, hidden_size=hidden, moe_intermediate_size=inner, hidden_act="silu",
        _experts_implementation="eager",
    )  # fmt: skip
    module = Qwen3MoeExperts(config).to(dtype)
    with torch.no_grad():
        for weight in module.parameters():
            weight.normal_(0, 0.02)
    return module


def implementations(modules: dict[str, Qwen3MoeExperts]) -> dict[str, Run]:
    """Return the implementations, each with the weights of the module of its name."""
    packed, plain = modules["packed"], modules["plain"]
    panels = [ops.PackedWeight.pack(w) for w in (packed.gate_up_proj, packed.down_proj)]
    return {
        "packed": lambda x, ids, scores: ops.experts(x, *panels, ids, scores, "silu"),
        "plain": lambda x, ids, scores: ops.experts(x, plain.gate_up_proj, plain.down_proj, ids, scores, "silu"),
        "eager": functools.partial(Qwen3MoeExperts.forward, modules["eager"]),
        "grouped_mm": functools.partial(grouped_mm_experts_forward, modules["grouped_mm"]),
        "batched_mm": functools.partial(batched_mm_experts_forward, modules["batched_mm"]),
    }


def batch(tokens: int, hidden: int, experts: int, k: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    scores, ids = torch.randn(tokens, experts).softmax(-1).topk(k, -1)
    return torch.randn(tokens, hidden).to(dtype), ids, (scores / scores.sum(-1, keepdim=True)).to(dtype)


def times(runs: dict[str, Callable[[], object]], rounds: int, clock: Callable[[], float]) -> dict[str, list[float]]:
    """Return the milliseconds of each run in each round."""
    found: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(rounds + 2):
        for name, run in runs.items():
            start = clock()
            run()
            if number >= 2:  # the first compile, fill caches, start threads
                found[name].append((clock() - start) * 1e3)
    return found


def ratio(found: dict[str, list[float]], ours: str, peers: tuple[str, ...]) -> float:
    """Return the median over rounds of the best peer's time by ours."""
    best = (min(round_) for round_ in zip(*(found[p] for p in peers), strict=True))
    return statistics.median(b / o for b, o in zip(best, found[ours], strict=True))


def step(module: Qwen3MoeExperts, run: Run, x: Tensor, ids: Tensor, scores: Tensor) -> None:
    inputs = x.requires_grad_(), scores.requires_grad_()
    run(inputs[0], ids, inputs[1]).sum().backward()
    for tensor in (*inputs, *module.parameters()):
        tensor.grad = None


def trainer_steps(folder: str) -> dict[str, Callable[[], None]]:
    """Return forward and backward of a whole mixture's log-probs, fp32: the exact trainer's, and transformers' own."""
    make_model(pathlib.Path(folder), **MIXTURE)
    ids = torch.randint(100, 900, (4, 128))
    models = {"plain": exact_model(folder, "float32")}
    for name in PEERS:
        models[name] = AutoModelForCausalLM.from_pretrained(folder, dtype="float32", experts_implementation=name)

    def run(name: str) -> None:
        model = models[name].train()
        if name == "plain":
            logprobs = token_logprobs(model, ids)
        else:
            logprobs = model(ids, use_cache=False).logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])
        logprobs.sum().backward()
        model.zero_grad()

    return {name: functools.partial(run, name) for name in models}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall")
    parser.add_argument("--json", type=pathlib.Path)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    clock = time.perf_counter if arguments.clock == "wall" else time.process_time
    rows = []

    def report(what: str, tokens: int, found: dict[str, list[float]], ours: tuple[str, ...]) -> None:
        least = {name: round(min(each), 3) for name, each in found.items()}
        ratios = {name: round(ratio(found, name, PEERS), 2) for name in ours}
        rows.append({"what": what, "tokens": tokens, "milliseconds": least, "best_peer_by": ratios})
        print(f"{what}, {tokens} tokens:", *(f"{n} {ms:.2f} ms" for n, ms in least.items()), "| best peer by", ratios)

    for hidden, inner, experts, k, dtype in LAYERS:
        module = layer(hidden, inner, experts, dtype)
        modules = {name: copy.deepcopy(module) for name in NAMES}
        what = f"H {hidden} I {inner} E {experts} k {k} {str(dtype).removeprefix('torch.')}"
        runs = implementations(modules)
        for tokens in TOKENS:
            given = batch(tokens, hidden, experts, k, dtype)
            copied = tokens * k * 3 * hidden * inner * dtype.itemsize
            bound = {name: functools.partial(run, *given) for name, run in runs.items()}
            batched_mm = bound.pop("batched_mm")
            batched = {"batched_mm": batched_mm} if copied <= BATCHED_BYTES else {}
            with torch.no_grad():
                found = times(bound, arguments.rounds, clock) | times(batched, arguments.rounds, clock)
            report(what, tokens, found, ("packed", "plain"))
        steps = {n: functools.partial(step, modules[n], runs[n], *given) for n in ("plain", *PEERS)}
        report(f"{what}, forward and backward", tokens, times(steps, max(arguments.rounds // 2, 3), clock), ("plain",))
    with tempfile.TemporaryDirectory() as folder:
        whole = times(trainer_steps(folder), max(arguments.rounds // 2, 3), clock)
    report("the whole mixture float32, forward and backward", 512, whole, ("plain",))
    if arguments.json:
        arguments.json.write_text(json.dumps({"threads": arguments.threads, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
