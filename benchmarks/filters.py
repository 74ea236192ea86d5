"""The cost of top-k, top-p and min-p: a decode step's time with each beside one without, in alternation.

OMP_NUM_THREADS=2 python benchmarks/filters.py --rows 32
"""

import argparse
import statistics
import time

import torch

from samebits import LLM, SamplingParams

FILTERS = {
    "none": {},
    "top_p=0.95": {"top_p": 0.95},
    "top_k=50": {"top_k": 50},
    "min_p=0.05": {"min_p": 0.05},
    "all three": {"top_p": 0.95, "top_k": 50, "min_p": 0.05},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--steps", type=int, default=10, help="of each setting in a round")
    parser.add_argument("--rounds", type=int, default=12)
    args = parser.parse_args()
    llm = LLM(args.model, dtype=args.dtype, kv_cache_memory_bytes=2**29)
    seconds: dict[str, list[float]] = {name: [] for name in FILTERS}
    for start in range(args.rounds):
        for name, filters in FILTERS.items():
            params = SamplingParams(max_tokens=args.steps + 6, ignore_eos=True, seed=start, **filters)
            for row in range(args.rows):
                llm.add_request([5, 6, 7, 8 + row], params)
            for _ in range(4):
                llm.step()
            for _ in range(args.steps):
                begin = time.perf_counter()
                llm.step()
                seconds[name].append(time.perf_counter() - begin)
            while llm.has_unfinished_requests():
                llm.step()
    none = statistics.median(seconds["none"])
    print(f"{torch.get_num_threads()} threads, {args.dtype}, {args.rows} rows")
    for name, times in seconds.items():
        median = statistics.median(times)
        print(f"{name:12} {1000 * median:6.2f} ms a step, {median / none - 1:+.1%}")


if __name__ == "__main__":
    main()
