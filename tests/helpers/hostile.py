"""Processes whose settings are hostile to numerics: `python -m helpers.hostile CHECKPOINT CASE ...`.

A case is a setting, the side that has it (engine, trainer or both), and whether from the side's loading on or from its
use on: "flush-to-zero/engine/use". Each rolls out and scores, and prints the bits of both sides, or the refusal.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import json
import sys
from collections.abc import Iterator

import torch

from samebits import LLM, SamplingParams
from samebits.trainer import exact_model, token_logprobs

PROMPTS = [[17, 900, 3, 44], [5] * 70, [9, 8, 7]]
PARAMS = SamplingParams(n=2, max_tokens=12, seed=1, temperature=0.8, ignore_eos=True)
DOWNWARD, UPWARD, TO_ZERO = 0x400, 0x800, 0xC00  # x86's FE_*


@contextlib.contextmanager
def changed(change, restore) -> Iterator[None]:
    change()
    try:
        yield
    finally:
        restore()


def rounding(mode: int):
    libm = ctypes.CDLL("libm.so.6")
    return changed(lambda: libm.fesetround(mode), lambda: libm.fesetround(0))


def value(setter, new, old):
    return changed(lambda: setter(new), lambda: setter(old))


SETTINGS = {
    "none": contextlib.nullcontext,
    "torch.compile": contextlib.nullcontext,
    "flush-to-zero": lambda: value(torch.set_flush_denormal, True, False),
    "round down": lambda: rounding(DOWNWARD),
    "round up": lambda: rounding(UPWARD),
    "round to zero": lambda: rounding(TO_ZERO),
    "default dtype float64": lambda: value(torch.set_default_dtype, torch.float64, torch.float32),
    "default dtype bfloat16": lambda: value(torch.set_default_dtype, torch.bfloat16, torch.float32),
    "autocast bfloat16": lambda: torch.autocast("cpu", torch.bfloat16),
    "autocast float16": lambda: torch.autocast("cpu", torch.float16),
    "inference mode": torch.inference_mode,
    "no grad": torch.no_grad,
    "deterministic": lambda: value(torch.use_deterministic_algorithms, True, False),
    "matmul medium": lambda: value(torch.set_float32_matmul_precision, "medium", "highest"),
    "anomaly": torch.autograd.detect_anomaly,
    **{f"{n} threads": lambda n=n: value(torch.set_num_threads, n, 1) for n in (1, 2, 3, 4)},
}


def digest(rows) -> str:
    return hashlib.sha256(repr(rows).encode()).hexdigest()[:16]


def run(checkpoint: str, setting: str, side: str, when: str) -> dict[str, str]:
    """Return the digest of each side, or its refusal."""

    def around(which: str, begins: str):
        return SETTINGS[setting]() if side in (which, "both") and when == begins else contextlib.nullcontext()

    found = {}
    with contextlib.ExitStack() as stack:
        stack.enter_context(around("engine", "load"))
        try:
            llm = LLM(checkpoint, kv_cache_memory_bytes=2**22)
            stack.enter_context(around("engine", "use"))
            outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
            sequences = [out.prompt_token_ids + c.token_ids for out in outputs for c in out.completions]
            rows = [(c.token_ids, c.logprobs) for out in outputs for c in out.completions]
            found["engine"] = digest([lp for _, logprobs in rows for lp in logprobs])
            found["tokens"] = digest(sequences)
        except RuntimeError as error:
            found["engine"] = str(error)
    if "tokens" not in found:
        return found
    with contextlib.ExitStack() as stack:
        stack.enter_context(around("trainer", "load"))
        try:
            model = exact_model(checkpoint)
            stack.enter_context(around("trainer", "use"))
            scorer = torch.compile(model) if setting == "torch.compile" else model
            scored = token_logprobs(scorer, sequences, PARAMS)
            lengths = [len(p) for p in PROMPTS for _ in range(2)]
            rows = [lp[n:].detach().tolist() for lp, n in zip(scored, lengths, strict=True)]
            found["trainer"] = digest([lp for row in rows for lp in row])
        except RuntimeError as error:
            found["trainer"] = str(error)
    return found


if __name__ == "__main__":
    print(json.dumps({case: run(sys.argv[1], *case.split("/")) for case in sys.argv[2:]}))
