"""What a LoRA adapter costs: decode steps of an engine with one and without, in alternation, and updates of it alone.

OMP_NUM_THREADS=2 python benchmarks/adapter.py --rows 8 32
"""

import argparse
import statistics
import time

import torch
from peft import LoraConfig

from samebits import LLM, SamplingParams
from samebits.trainer import exact_model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--rows", type=int, nargs="+", default=[8, 32])
    parser.add_argument("--steps", type=int, default=100, help="of each engine, one after the other")
    args = parser.parse_args()
    config = LoraConfig(r=args.rank, lora_alpha=2 * args.rank, target_modules="all-linear", init_lora_weights=False)
    settings = {"dtype": args.dtype, "kv_cache_memory_bytes": 2**28}
    model = exact_model(args.model, args.dtype, adapter=config)
    engines = [LLM(args.model, **settings), LLM(args.model, adapter=model, **settings)]
    print(f"{torch.get_num_threads()} threads, {args.dtype}, rank {args.rank}")
    for rows in args.rows:
        params = SamplingParams(max_tokens=args.steps + 40, ignore_eos=True, seed=1)
        for llm in engines:
            for row in range(rows):
                llm.add_request([5, 6, 7, 8 + row], params)
            for _ in range(10):
                llm.step()
        seconds: list[list[float]] = [[], []]
        for _ in range(args.steps):
            for times, llm in zip(seconds, engines, strict=True):
                start = time.perf_counter()
                llm.step()
                times.append(time.perf_counter() - start)
        for llm in engines:
            while llm.has_unfinished_requests():
                llm.step()
        base, adapted = seconds
        ratios = [b / a for a, b in zip(base, adapted, strict=True)]
        print(
            f"{rows} rows: base {1e3 * statistics.median(base):.2f} ms a step, adapter "
            f"{1e3 * statistics.median(adapted):.2f} ms; ratio of medians "
            f"{statistics.median(adapted) / statistics.median(base):.3f}, of minima {min(adapted) / min(base):.3f}, "
            f"median of ratios {statistics.median(ratios):.3f}"
        )
    times = []
    for _ in range(10):
        start = time.perf_counter()
        engines[1].update_weights(model)
        times.append(time.perf_counter() - start)
    print(f"update of the adapter: median {1e3 * statistics.median(times):.1f} ms, least {1e3 * min(times):.1f} ms")


if __name__ == "__main__":
    main()
