"""Stages and replicas on this machine: throughput of layouts, a weight update's time, a trace of the stages' steps.

usage: python benchmarks/scale.py [--starts 2] [--rounds 5] [--dtypes bfloat16 float32] [--out FILE] [--only WORD]
                                  [--trace FILE.png] [--profile FILE]

Each layout has processes of its own and runs once a round, in turn: one thread a stage, all threads for one engine
alone. With each start they are new: what a process got of memory stays with it. --only compares the layouts whose
names have that word, and measures nothing else. --profile only measures a layer's and the head's times, for
simulate_scale.py.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import pathlib
import platform
import random
import statistics
import time
import unittest.mock
from collections.abc import Iterator
from typing import Any

import psutil
import ray
import torch
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from samebits import LLM, SamplingParams
from samebits.cli.bench import WORKLOADS, measure
from samebits.engine.model_runner import ModelRunner
from samebits.model import exact_model, resolve
from samebits.model.exact import load_config
from samebits.model.stage import split_by_size, stage_model

from stage_times import decode_seconds
from step_trace import start_trace, take_trace

HERE = pathlib.Path(__file__).parent
RESULTS = HERE / "results"
ALONE = "1 stage, all threads"


def layouts() -> dict[str, dict]:
    """Name -> settings. The KV pool is 1 GiB in all: half in each replica; a stage needs half for as many tokens."""
    half = {"kv_cache_memory_bytes": 2**29}
    return {
        ALONE: {},
        "2 stages": {"pipeline_parallel_size": 2} | half,
        "2 replicas": {"replicas": 2} | half,
    }


@contextlib.contextmanager
def ray_cluster(cpus: int) -> Iterator[str]:
    """Its address."""
    ray.init(address="local", num_cpus=cpus, include_dashboard=False, log_to_driver=False)
    try:
        yield ray.get_runtime_context().gcs_address
    finally:
        ray.shutdown()


def ray_seconds() -> float:
    """CPU time so far of Ray's own processes, which are children of this one."""
    total = 0.0
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            command = " ".join(process.cmdline())
            if ("/ray/" in command or "ray::" in command) and "ray::Host" not in command:
                total += sum(process.cpu_times()[:2])
    return total


def _take_turns(pipe: Any, model: str, dtype: str, runs: int, settings: dict) -> None:
    """Run one layout in its process: wait to be asked before each run, and send the findings after the last."""

    def turn() -> None:
        pipe.send(None)
        pipe.recv()

    pipe.send(measure(model, WORKLOADS["mixed"](), runs, dtype, True, turn, **settings)["output_tok_s"])


def throughput(
    model: str, dtype: str, chosen: dict[str, dict], starts: int, rounds: int
) -> tuple[dict[str, list[float]], list[float]]:
    """`rounds_of` so many starts."""
    rates: dict[str, list[float]] = {name: [] for name in chosen}
    shares = []
    for _ in range(starts):
        found, share = rounds_of(model, dtype, chosen, rounds)
        for name, each in found.items():
            rates[name] += each
        shares += [] if share is None else [share]
    return rates, shares


def rounds_of(
    model: str, dtype: str, chosen: dict[str, dict], rounds: int
) -> tuple[dict[str, list[float]], float | None]:
    """Output tokens/s of each round on the mixed workload, and the share of a CPU that Ray's own processes take.

    All layouts are alive and take turns, in another order each round: neighbours' load hits all alike. A first round,
    which touches memory for the first time, is not counted.
    """
    spawn = multiprocessing.get_context("spawn")
    on_ray = any(name != ALONE for name in chosen)
    pipes: dict[str, Any] = {}
    with contextlib.ExitStack() as stack:
        stack.enter_context(unittest.mock.patch.dict(os.environ, {"TQDM_DISABLE": "1"}))  # what the layouts inherit
        if on_ray:
            os.environ["RAY_ADDRESS"] = stack.enter_context(ray_cluster(2 * len(chosen)))
        for name, settings in chosen.items():
            os.environ.pop("OMP_NUM_THREADS", None)
            if name != ALONE:
                os.environ["OMP_NUM_THREADS"] = "1"
            ours, theirs = spawn.Pipe()
            pipes[name] = stack.enter_context(ours)
            spawn.Process(target=_take_turns, args=(theirs, model, dtype, rounds + 1, settings)).start()
            theirs.close()
            ours.recv()
        order = list(chosen)
        rates: dict[str, list[float]] = {}
        start, before = time.perf_counter(), ray_seconds()
        for number in tqdm(range(rounds + 1), desc=dtype, unit="round"):
            random.shuffle(order)
            for name in order:
                pipes[name].send(None)
                answer = pipes[name].recv()
                if number == rounds:
                    rates[name] = answer[1:]
        share = (ray_seconds() - before) / (time.perf_counter() - start)
    return {name: rates[name] for name in chosen}, share if on_ray else None


def update_seconds(model: str, dtype: str, repeats: int = 11) -> dict[int, list[float]]:
    """Time updates from a module to an engine in this process and to 2 replicas, of one thread each, in turn.

    The first three, which make groups and touch memory for the first time, are not counted."""
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    settings: dict[str, Any] = {"dtype": dtype, "kv_cache_memory_bytes": 2**26, "skip_tokenizer_init": True}
    source = exact_model(model, dtype)
    times: dict[int, list[float]] = {1: [], 2: []}
    with contextlib.ExitStack() as stack:
        engines = {count: stack.enter_context(LLM(model, replicas=count, **settings)) for count in times}
        for _ in tqdm(range(repeats + 3), desc=f"updates, {dtype}", unit="round"):
            for count, llm in engines.items():
                start = time.perf_counter()
                llm.update_weights(source)
                times[count].append(time.perf_counter() - start)
    return {count: found[3:] for count, found in times.items()}


def trace(model: str, in_flight: int = 4) -> dict:
    """Start and end of each step in each of 2 stages, seconds; the share of time in which both work."""
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    llm = LLM(model, pipeline_parallel_size=2, batches_in_flight=in_flight, kv_cache_memory_bytes=2**29,
              skip_tokenizer_init=True)  # fmt: skip
    work = WORKLOADS["mixed"]()
    prompts = [[min(t, llm.model_config.vocab_size - 1) for t in p] for p in work["prompts"]]
    llm.generate(prompts[:2], SamplingParams(max_tokens=4), use_tqdm=False)
    start_trace(llm)
    params = [SamplingParams(max_tokens=m, ignore_eos=True) for m in work["output_lens"]]
    llm.generate(prompts, params, use_tqdm=False)
    stages = take_trace(llm)
    layers = split_by_size(llm.path, 2)
    llm.close()
    origin = min(s[0][0] for s in stages)
    steps = [[(a - origin, b - origin) for a, b in s] for s in stages]
    end = max(s[-1][1] for s in steps)
    both = sum(max(0.0, min(b, d) - max(a, c)) for a, b in steps[0] for c, d in steps[1])
    return {
        "layers": layers,
        "steps": steps,
        "seconds": end,
        "busy": [sum(b - a for a, b in s) / end for s in steps],
        "both": both / end,
    }


def draw(found: dict, file: pathlib.Path) -> None:
    """The steps of half a second in the middle of the run, one row a stage, a colour for each batch in flight."""
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(10, 2.4), layout="constrained")
    middle = found["seconds"] / 3
    colours = ["#4c72b0", "#dd8452", "#55a868", "#c44e52"]
    for row, steps in enumerate(found["steps"]):
        for number, (a, b) in enumerate(steps):
            if middle < b and a < middle + 0.5:
                axes.barh(-row, b - a, left=a, height=0.8, color=colours[number % 4], edgecolor="white")
    axes.set_xlim(middle, middle + 0.5)
    names = [f"stage {i}\nlayers {a}-{b - 1}" for i, (a, b) in enumerate(found["layers"])]
    axes.set_yticks([0, -1], names)
    axes.set_xlabel("seconds; colours: the batches in flight, in turn")
    shares = ", ".join(f"{100 * x:.0f} %" for x in found["busy"])
    axes.set_title(f"Steps of two stages: busy {shares} of the time, both at once {100 * found['both']:.0f} %", size=10)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=120)


def overhead_seconds(model: str) -> float:
    """Return the driver's time for a step beside the model: schedule, plan, take the tokens."""
    llm = LLM(model, kv_cache_memory_bytes=2**29, skip_tokenizer_init=True)
    worker = llm.engine.executor.workers[0]
    model_seconds = []
    execute = worker.execute_model

    def timed(*args):
        start = time.perf_counter()
        out = execute(*args)
        out.wait()
        model_seconds.append(time.perf_counter() - start)
        return out

    worker.execute_model = timed
    llm.generate([[5, 6, 7]] * 32, SamplingParams(max_tokens=64, ignore_eos=True), use_tqdm=False)
    return (llm.stats().step_seconds - sum(model_seconds)) / len(model_seconds)


def profile(model: str) -> dict:
    """Times of one layer and of the head by tokens and context, fitted by least squares; one thread."""
    torch.set_num_threads(1)
    path, config = resolve(model), load_config(resolve(model))
    count = config.num_hidden_layers
    models = (stage_model(path, "float32", "cpu", part) for part in ((1, 2), (count - 1, count)))
    layer, last = (ModelRunner(model, 2048) for model in models)
    points = [(tokens, 0) for tokens in (1, 4, 16, 64, 128)] + [(16, 512), (16, 2048)]
    times = [decode_seconds(layer, tokens, context) for tokens, context in points]
    rows = torch.tensor([[1.0, t, t * (c + 1)] for t, c in points], dtype=torch.float64)
    base, token, key = torch.linalg.lstsq(rows, torch.tensor(times, dtype=torch.float64)[:, None])[0].flatten().tolist()
    heads = [(n, decode_seconds(last, n, 0) - decode_seconds(layer, n, 0)) for n in (1, 16, 64)]
    rows = torch.tensor([[1.0, n] for n, _ in heads], dtype=torch.float64)
    head = torch.linalg.lstsq(rows, torch.tensor([[t] for _, t in heads], dtype=torch.float64))[0].flatten().tolist()
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return {
        "model": model,
        "device": f"1 thread of {platform.processor() or platform.machine()}, float32, torch {torch.__version__}",
        "layers": count,
        "layer_seconds": {"base": max(base, 0.0), "per_token": token, "per_context_token": max(key, 0.0)},
        "head_seconds": {"base": max(head[0], 0.0), "per_row": head[1]},
        "overhead_seconds": overhead_seconds(model),
        "hidden_bytes_per_token": 4 * config.hidden_size,
        "weight_bytes": sum(p.nbytes for p in exact_model(path).parameters()),
        "kv_bytes_per_token_layer": 2 * 4 * config.num_key_value_heads * head_dim,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    dtypes = ["bfloat16", "float32", "float16"]
    parser.add_argument("--dtypes", nargs="+", default=dtypes[:2], choices=dtypes)
    parser.add_argument("--starts", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5, help="of each start")
    parser.add_argument("--only", default="", metavar="WORD")
    parser.add_argument("--out", type=pathlib.Path, help="default: benchmarks/results/scale[_WORD].json")
    parser.add_argument("--trace", type=pathlib.Path, default=HERE.parent / "docs" / "pipeline_trace.png")
    parser.add_argument("--profile", nargs="?", type=pathlib.Path, const=RESULTS / "stage_times.json")
    args = parser.parse_args()
    if not any(args.only in name for name in layouts()):
        parser.error(f"--only {args.only}: choose a word of one of {', '.join(layouts())}")
    if args.profile:
        args.profile.write_text(json.dumps(profile(args.model), indent=1) + "\n")
        print(args.profile.read_text())
        return
    args.out = args.out or RESULTS / f"scale{args.only and '_'}{args.only}.json"
    console = Console()
    results: dict[str, dict] = {}
    for dtype in args.dtypes:
        chosen = {name: s for name, s in layouts().items() if args.only in name}
        rates, shares = throughput(args.model, dtype, chosen, args.starts, args.rounds)
        table = Table(f"layout, {dtype}", "output tok/s (median)", "runs", f"of {ALONE}")
        ratios: dict[str, float] = {}
        for name, each in rates.items():
            if ALONE in rates:
                ratios[name] = statistics.median(a / b for a, b in zip(each, rates[ALONE], strict=True))
            shown = f"{ratios[name]:.3f} x" if name in ratios else ""
            table.add_row(name, f"{statistics.median(each):.0f}", " ".join(f"{x:.0f}" for x in each), shown)
        console.print(table)
        if shares:
            console.print(f"Ray's own processes took {100 * statistics.mean(shares):.1f} % of a CPU")
        results[dtype] = {"output_tok_s": rates, "ratios": ratios, "ray_cpu": shares}
        if args.only:
            continue
        updates = results[dtype]["update_seconds"] = update_seconds(args.model, dtype)
        ray.shutdown()  # the two replicas': the next layouts have a cluster of their own
        medians = {n: statistics.median(t) for n, t in updates.items()}
        console.print(f"weight update: an engine here {medians[1]:.2f} s, 2 replicas {medians[2]:.2f} s: "
                      f"{medians[2] / medians[1]:.2f} x")  # fmt: skip
    summary = {"cpus": os.cpu_count(), "torch": torch.__version__, "dtypes": results}
    if not args.only:
        found = trace(args.model)
        draw(found, args.trace)
        console.print(f"2 stages, 4 batches in flight: busy {found['busy']}, both at once {found['both']:.2f}")
        summary["trace"] = {k: v for k, v in found.items() if k != "steps"}
    args.out.write_text(json.dumps(summary, indent=1) + "\n")


if __name__ == "__main__":
    main()
