"""Diagnose and calibrate, end to end: vLLM or HF `generate` in bf16 as the foreign engine, SmolLM2 in fp32 trained.

Writes rollouts.jsonl, exact.jsonl, diagnosis.html, calibration.html and report.md with its pictures into a folder.
Rollouts that are there already are used again.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import subprocess
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer

from samebits import LLM, SamplingParams
from samebits.integrations.rollouts import Rollout, read_rollouts, write_rollouts
from samebits.model.checkpoint import resolve
from samebits.server import mismatch, report
from samebits.trainer import exact_model


def questions(count: int) -> list[tuple[str, int]]:
    """(prompt, answer): sums after three worked ones, which a small model gets right about half of the time."""
    rng = random.Random(0)
    asked = []
    for _ in range(count):
        pairs = [(rng.randint(2, 12), rng.randint(2, 12)) for _ in range(4)]
        shown = "".join(f"{a} + {b} = {a + b}\n" for a, b in pairs[:3])
        a, b = pairs[3]
        asked.append((f"{shown}{a} + {b} =", a + b))
    return asked


def rewarded(rollouts: Iterable[Rollout], tokenizer, answers: list[int]) -> Iterator[Rollout]:
    """Reward 1 where the first number is the sum."""
    for rollout in rollouts:
        number = re.match(r"\s*(\d+)", tokenizer.decode(rollout.token_ids))
        rollout.reward = float(number is not None and int(number[1]) == answers[int(rollout.group or 0)])
        yield rollout


def vllm_rollouts(python: str, path: Path, prompts: list[list[int]], n: int, max_tokens: int) -> Iterator[Rollout]:
    with tempfile.TemporaryDirectory() as folder:
        job, out = Path(folder) / "job.json", Path(folder) / "out.jsonl"
        job.write_text(json.dumps({
            "model": str(path), "dtype": "bfloat16", "prompts": prompts, "n": n, "max_tokens": max_tokens,
            "out": str(out),
        }))  # fmt: skip
        subprocess.run([python, str(Path(__file__).with_name("vllm_rollouts.py")), str(job)], check=True)
        yield from read_rollouts(out)


@torch.no_grad()
def hf_rollouts(path: Path, tokenizer, prompts: list[list[int]], n: int, max_tokens: int) -> Iterator[Rollout]:
    """With the log-probs that HF's own bf16 model samples from."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    torch.manual_seed(0)
    for group, prompt in enumerate(tqdm(prompts, desc="Sampling with HF in bf16", unit="prompt")):
        out = model.generate(
            torch.tensor([prompt]), do_sample=True, temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=max_tokens,
            num_return_sequences=n, output_logits=True, return_dict_in_generate=True,
            pad_token_id=tokenizer.pad_token_id,
        )  # fmt: skip
        logprobs = torch.stack(out.logits, 1).float().log_softmax(-1)
        for row, scores in zip(out.sequences[:, len(prompt) :], logprobs, strict=True):
            ends = (row == model.generation_config.eos_token_id).nonzero().flatten().tolist()
            ids = row[: ends[0] + 1] if ends else row
            scores = scores[: len(ids)]
            values = scores.gather(1, ids[:, None])[:, 0].double()
            yield Rollout(
                ids.numpy(), values.numpy(), np.array(prompt), group=str(group), top_token_ids=scores.argmax(-1).numpy()
            )


def exact_rollouts(path: Path, prompts: list[list[int]], n: int, max_tokens: int) -> Iterator[Rollout]:
    params = SamplingParams(n=n, max_tokens=max_tokens, seed=1)
    outputs = LLM(path, kv_cache_memory_bytes=2**29).generate(prompts, params)
    for group, output in enumerate(outputs):
        for c in output.completions:
            values = np.array(c.logprobs)
            yield Rollout(np.array(c.token_ids), values, np.array(prompts[group]), old=values, group=str(group))


def write_report(out: Path, engine: Path, reference: Path, path: Path, tokenizer, title: str) -> str:
    scorer = exact_model(path)
    found, null = (mismatch.diagnose(file, scorer) for file in (engine, reference))
    calibration, candidates = mismatch.calibrate_files(engine, reference, scorer)
    chosen = calibration.verdict.recommended
    snippets = {} if chosen is None else mismatch.snippets("decoupled", candidates[chosen])
    first, second = report.diagnosis(found, tokenizer.decode, null), report.calibration(calibration, snippets)
    (out / "diagnosis.html").write_text(report.page(title, first))
    (out / "calibration.html").write_text(report.page("Calibration", second))
    for part in (*first, *second):
        if isinstance(part, report.Plot):
            (out / f"{part.name}.png").write_bytes(part.draw())
    text = f"## Diagnosis\n\n{report.markdown(first)}\n## Calibration\n\n{report.markdown(second)}"
    (out / "report.md").write_text(text)
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="checkpoint directory, hub id or smollm2")
    parser.add_argument("--vllm-python", help="an interpreter that has vLLM; without it, HF's generate samples")
    parser.add_argument("--prompts", type=int, default=192)
    parser.add_argument("-n", type=int, default=8, help="samples of each prompt")
    parser.add_argument("--max-tokens", type=int, default=24)
    parser.add_argument("--out", type=Path, default=Path("mismatch"))
    args = parser.parse_args()
    path = resolve(args.model)
    tokenizer = AutoTokenizer.from_pretrained(path)
    texts, answers = zip(*questions(args.prompts), strict=True)
    prompts = [tokenizer.encode(text) for text in texts]
    args.out.mkdir(parents=True, exist_ok=True)
    engine, reference = args.out / "rollouts.jsonl", args.out / "exact.jsonl"
    if not engine.exists():
        sizes = prompts, args.n, args.max_tokens
        sampled = vllm_rollouts(args.vllm_python, path, *sizes) if args.vllm_python else None
        sampled = sampled or hf_rollouts(path, tokenizer, *sizes)
        write_rollouts(engine, rewarded(sampled, tokenizer, list(answers)))
    if not reference.exists():
        sampled = exact_rollouts(path, prompts, args.n, args.max_tokens)
        write_rollouts(reference, rewarded(sampled, tokenizer, list(answers)))
    name = "vLLM" if args.vllm_python else "HF generate"
    print(write_report(args.out, engine, reference, path, tokenizer, f"{name} in bf16 against fp32"))


if __name__ == "__main__":
    main()
