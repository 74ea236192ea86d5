"""The cost of a LoRA adapter: decode steps of an engine with one and without, in alternation, and updates of it alone.

OMP_NUM_THREADS=2 python benchmarks/adapter.py --rows 8 32 [--out FILE.json]
"""

import argparse
import json
import pathlib
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
    parser.add_argument("--out", type=pathlib.Path, help="write all as JSON")
    args = parser.parse_args()
    result: dict = {"threads": torch.get_num_threads(), "dtype": args.dtype, "rank": args.rank, "steps": {}}
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
        found = {
            "base_ms": 1e3 * statistics.median(base),
            "adapter_ms": 1e3 * statistics.median(adapted),
            "ratio_of_medians": statistics.median(adapted) / statistics.median(base),
            "ratio_of_minima": min(adapted) / min(base),
            "median_of_ratios": statistics.median(b / a for a, b in zip(base, adapted, strict=True)),
        }
        result["steps"][rows] = found
        print(f"{rows} rows: " + ", ".join(f"{name} {value:.3f}" for name, value in found.items()))
    times = []
    for _ in range(10):
        start = time.perf_counter()
        engines[1].update_weights(model)
        times.append(time.perf_counter() - start)
    result["update_ms"] = {"median": 1e3 * statistics.median(times), "least": 1e3 * min(times)}
    print("update of the adapter: median {median:.1f} ms, least {least:.1f} ms".format(**result["update_ms"]))
    if args.out is not None:
        args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
