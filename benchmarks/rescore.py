"""Re-scoring of grouped rollouts against the engine's own prefill of the same tokens, in turn in one process.

usage: python benchmarks/rescore.py [--prompts 8] [-n 8] [--prompt-len 128] [--completion-len 128] [--rounds 3]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

import numpy as np

from samebits import LLM, SamplingParams
from samebits.model.checkpoint import resolve
from samebits.trainer import exact_model, rescore


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("-n", type=int, default=8, help="samples of each prompt")
    parser.add_argument("--prompt-len", type=int, default=128)
    parser.add_argument("--completion-len", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    rng, path = np.random.default_rng(0), resolve(args.model)
    model = exact_model(path)
    ids = rng.integers(100, 40_000, (args.prompts, args.prompt_len)).tolist()
    pairs = [(p, rng.integers(100, 40_000, args.completion_len).tolist()) for p in ids for _ in range(args.n)]
    sequences = [prompt + completion for prompt, completion in pairs]
    total = sum(map(len, sequences))

    def engine(prefix_caching: bool, **params):
        llm = LLM(path, kv_cache_memory_bytes=2**30, enable_prefix_caching=prefix_caching)

        def run() -> None:
            llm.reset_prefix_cache()
            llm.generate(sequences, SamplingParams(max_tokens=1, seed=0, **params), use_tqdm=False)

        return run

    calls = {
        "engine's prefill, prefix cache off": engine(False),
        "engine's prefill": engine(True),
        "engine's prefill with prompt_logprobs": engine(True, prompt_logprobs=0),
        "rescore, share_prefixes off": lambda: list(rescore(model, pairs, share_prefixes=False)),
        "rescore": lambda: list(rescore(model, pairs)),
    }
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(args.rounds):
        for name, call in calls.items():
            begin = time.perf_counter()
            call()
            seconds[name].append(time.perf_counter() - begin)
    rates = {name: round(total / statistics.median(values)) for name, values in seconds.items()}
    print(json.dumps({"tokens": total, "tok_s": rates}, indent=1))


if __name__ == "__main__":
    main()
