"""The bounds of a decode step on a CPU: its time beside that of reading weights and KV once, in one run.

OMP_NUM_THREADS=2 python benchmarks/decode.py --dtype float32 bfloat16
Steps of one row and of a few, with each layer in one launch and in several, in alternation; then attention alone over
long contexts, its blocks as a fresh engine hands them out (ascending) and as they lie at worst (shuffled).
The bandwidth is that of passes over 512 MiB: a median before the steps, and beside each round of attention.
"""

import argparse
import statistics
import time
from unittest import mock

import numpy as np
import torch

from samebits import LLM, SamplingParams
from samebits.kernels import cpu, ops
from samebits.model.paged import group_size, head_dim, new_kv_caches
from samebits.model.rollout import FusedLayer


def _no_launch(layer: FusedLayer, total: torch.Tensor) -> None:
    """Have a layer's modules be called one by one."""


def seconds_of(run, repeats: int) -> list[float]:
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return times


def bandwidth() -> float:
    """Return the bytes a second that a pass over memory reads."""
    memory = torch.ones(2**27)
    memory.sum()
    return memory.nbytes / statistics.median(seconds_of(memory.sum, 9))


def step_seconds(llm: LLM, rows: int, steps: int, seed: int) -> float:
    """Return the median time of a decode step of `rows` sequences."""
    for row in range(rows):
        llm.add_request([5, 6, 7, 8 + row], SamplingParams(max_tokens=steps + 4, ignore_eos=True, seed=seed))
    for _ in range(4):
        llm.step()
    times = seconds_of(llm.step, steps)
    while llm.has_unfinished_requests():
        llm.step()
    return statistics.median(times)


def attention_rounds(model, sequences: int, context: int, rounds: int) -> dict[str, tuple[float, float]]:
    """Return, by the order of blocks, the seconds of a step's attention over random KV and how fast it reads that KV.

    How fast is a share of the bandwidth measured in the same round; both are medians of the rounds.
    """
    config, blocks = model.config, sequences * -(-context // cpu.BLOCK)
    caches = new_kv_caches(model, blocks)
    for cache in (each for pair in caches for each in pair):
        cache.normal_()
    size = sum(each.nbytes for pair in caches for each in pair)
    q = torch.randn(sequences, config.num_attention_heads, head_dim(config), dtype=model.dtype)
    orders = {"ascending": np.arange(blocks), "shuffled": np.random.default_rng(0).permutation(blocks)}
    layouts = {
        name: ops.PagedLayout(
            [1] * sequences,
            np.full(sequences, context - 1, np.int32),
            np.zeros(sequences, np.int32),
            order.astype(np.int32),
            np.arange(sequences, dtype=np.int32) * (blocks // sequences),
            cpu.work_items([1] * sequences, group_size(config)),
        )
        for name, order in orders.items()
    }

    def run(layout: ops.PagedLayout) -> None:
        for pair in caches:
            cpu.attention(q, *pair, layout, head_dim(config) ** -0.5, 0)

    seconds: dict[str, list[float]] = {name: [] for name in orders}
    shares: dict[str, list[float]] = {name: [] for name in orders}
    for layout in layouts.values():
        run(layout)
    for _ in range(rounds):
        peak = bandwidth()
        for name, layout in layouts.items():
            taken = statistics.median(seconds_of(lambda layout=layout: run(layout), 5))
            seconds[name].append(taken)
            shares[name].append(size / taken / peak)
    return {name: (statistics.median(seconds[name]), statistics.median(shares[name])) for name in orders}


def report(model: str, dtype: str, args: argparse.Namespace) -> None:
    llm = LLM(model, dtype=dtype, kv_cache_memory_bytes=2**28, skip_tokenizer_init=True)
    before = bandwidth()
    for rows in args.rows:
        in_several: list[float] = []
        in_one: list[float] = []
        for seed in range(args.rounds):
            with mock.patch.object(FusedLayer, "_launch", _no_launch):
                in_several.append(step_seconds(llm, rows, args.steps, seed))
            in_one.append(step_seconds(llm, rows, args.steps, seed))
        several, one = statistics.median(in_several), statistics.median(in_one)
        ratio = statistics.median(a / b for a, b in zip(in_several, in_one, strict=True))
        rate = llm.weight_bytes / one
        print(
            f"{dtype}, {rows} rows: {1e3 * one:.1f} ms a step, {1e3 * several:.1f} in several launches (rounds' ratios "
            f"{ratio:.2f}); weights at {rate / 1e9:.1f} of {before / 1e9:.1f} GB/s, {rate / before:.0%}"
        )
    others = step_seconds(llm, args.sequences, args.steps, 0)
    model = llm.engine.executor.workers[0].model
    for order, (seconds, share) in attention_rounds(model, args.sequences, args.context, args.rounds).items():
        print(
            f"{dtype}, {args.sequences} sequences of {args.context} tokens, blocks {order}: attention "
            f"{1e3 * seconds:.1f} ms, {seconds / (seconds + others):.0%} of a step; KV at {share:.0%} of the bandwidth"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--steps", type=int, default=16, help="of each kind in a round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--sequences", type=int, default=8)
    parser.add_argument("--context", type=int, default=4096)
    args = parser.parse_args()
    for dtype in args.dtype:
        report(args.model, dtype, args)


if __name__ == "__main__":
    main()
