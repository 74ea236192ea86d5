"""Throughput workloads and their measurement for this engine; `benchmarks/throughput.py` adds the peers."""

from __future__ import annotations

import functools
import random
import time
from collections.abc import Callable

import psutil
from tqdm import tqdm

VOCAB = 49_000


def workload(name: str, count: int, n: int, prompt: tuple[int, int], output: tuple[int, int]) -> dict:
    """Prompts of random tokens, each to be sampled n times. prompt, output: least and most of their tokens."""
    rng = random.Random(0)
    prompts = [[rng.randrange(10, VOCAB) for _ in range(rng.randint(*prompt))] for _ in range(count)]
    return {"name": name, "prompts": prompts, "n": n, "output_lens": [rng.randint(*output) for _ in range(count)]}


WORKLOADS: dict[str, Callable[[], dict]] = {
    "mixed": functools.partial(workload, "mixed", 32, 1, (32, 128), (32, 128)),
    "grouped": functools.partial(workload, "grouped", 8, 16, (256, 256), (64, 64)),  # the shape of a GRPO step
    "short": functools.partial(workload, "short", 32, 1, (16, 16), (48, 48)),
}


def measure(
    model: str,
    work: dict,
    repeats: int,
    dtype: str | None,
    exact: bool,
    turn: Callable[[], object] = lambda: None,
    **settings,
) -> dict:
    """Return the engine's times: EOS ignored, T=1, log-probs on; two tokens of each sample first, then `repeats` runs.

    Each run starts with an empty prefix cache.

    turn: called before each run, to wait for others. settings: more of `EngineConfig`.
    """
    from ..engine import LLM, SamplingParams

    if repeats < 1:
        raise ValueError(f"repeats must be at least 1, got {repeats}")
    begin = time.perf_counter()
    settings = {"skip_tokenizer_init": True, "kv_cache_memory_bytes": 2**30, **settings}
    llm = LLM(model, dtype=dtype, exact=exact, **settings)
    llm.generate([[1, 2, 3]], SamplingParams(max_tokens=1), use_tqdm=False)
    start_seconds = time.perf_counter() - begin
    ceiling = llm.model_config.vocab_size - 1
    prompts = [[min(t, ceiling) for t in p] for p in work["prompts"]]
    params = [SamplingParams(n=work["n"], max_tokens=m, ignore_eos=True) for m in work["output_lens"]]
    tokens = work["n"] * sum(work["output_lens"])
    llm.generate(prompts, SamplingParams(n=work["n"], max_tokens=2, ignore_eos=True), use_tqdm=False)
    seconds = []
    for _ in tqdm(range(repeats), desc=f"{work['name']}, exact={exact}", unit="run", delay=2):
        llm.reset_prefix_cache()
        turn()
        before = llm.stats()
        begin = time.perf_counter()
        llm.generate(prompts, params, use_tqdm=False)
        seconds.append(time.perf_counter() - begin)
    after = llm.stats()
    llm.close()
    return {
        "engine": "samebits" if exact else "samebits, switches off",
        "workload": work["name"],
        "dtype": llm.config.dtype,
        "output_tok_s": [round(tokens / s, 1) for s in seconds],
        "prompt_tokens_computed": after.prompt_tokens_computed - before.prompt_tokens_computed,
        "draft_tokens": after.draft_tokens - before.draft_tokens,
        "accepted_tokens": after.accepted_tokens - before.accepted_tokens,
        "tokens_per_step": round(tokens / (after.steps - before.steps), 2),
        "start_seconds": round(start_seconds, 2),
        "weights_mb": round(llm.weight_bytes / 1e6),
        "kv_mb": round(llm.kv_cache_bytes / 1e6),
        "resident_mb": round(psutil.Process().memory_info().rss / 1e6),
    }
