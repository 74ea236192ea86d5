"""What drafts save: steps and seconds with and without speculation, on SmolLM2, with every result compared as bits.

python benchmarks/speculation.py
"""

from __future__ import annotations

import argparse
import time

from samebits import LLM, SamplingParams

QUESTIONS = (
    "What is the capital of France?",
    "Write a Python function that reverses a string.",
    "What is 17 + 25? Think step by step.",
    "List the first ten prime numbers.",
)
COPY = (
    "Copy this text and change nothing: The quick brown fox jumps over the lazy dog. Pack my box with five dozen "
    "liquor jugs. How vexingly quick daft zebras jump! Sphinx of black quartz, judge my vow.\nThe quick brown fox"
)


def generate(llm: LLM, prompts: list, params: list[SamplingParams]) -> tuple[list, int, float]:
    """Return the samples' tokens and log-probs, the steps and the seconds that they took."""
    steps = llm.stats().steps
    start = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - start
    found = [[(c.token_ids, c.logprobs) for c in out.completions] for out in outputs]
    return found, llm.stats().steps - steps, seconds


def main() -> None:
    """Print a line per workload: steps and seconds without drafts and with them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--method", default="suffix", choices=("suffix", "ngram"))
    parser.add_argument("--tokens", type=int, default=64, help="of each answer")
    args = parser.parse_args()
    settings = {"kv_cache_memory_bytes": 600 << 20}
    plain = LLM("smollm2", **settings)
    drafting = LLM("smollm2", **settings, speculative_config={"method": args.method})
    questions = [plain.chat_prompt([{"role": "user", "content": text}]) for text in QUESTIONS]
    noise = [[number * 37 + 11 for number in range(40)], [number * 91 + 7 for number in range(40)]]
    workloads = (  # in this order: later ones find the rollouts of earlier ones
        ("new prompts, T=1", questions, 1.0, 1, 2),
        ("the same seeds again, T=1", questions, 1.0, 1, 2),
        ("other seeds, T=1", questions, 1.0, 2, 2),
        ("other seeds, T=0.6", questions, 0.6, 3, 2),
        ("one greedy stream that copies", [COPY], 0.0, 4, 1),
        ("nothing repeats, T=1.5", noise, 1.5, 5, 2),
    )
    print("| workload | steps | with drafts | seconds | with drafts |\n|---|---|---|---|---|")
    for name, prompts, temperature, seed, n in workloads:
        params = [
            SamplingParams(n=n, temperature=temperature, max_tokens=args.tokens, seed=100 * seed + i, ignore_eos=True)
            for i in range(len(prompts))
        ]
        expected, steps, seconds = generate(plain, prompts, params)
        found, fewer, less = generate(drafting, prompts, params)
        assert found == expected, "a draft changed a bit"
        print(f"| {name} | {steps} | {fewer} | {seconds:.2f} | {less:.2f} |", flush=True)


if __name__ == "__main__":
    main()
