"""Diagnose and calibrate, end to end: SmolLM2 trained in fp32 on the rollouts of a foreign engine.

The engine is one with int8 or fp8 (e4m3) weights, one scale for each matrix, HF `generate` in bf16, or vLLM in bf16.
The task: is a thing alive, yes or no? Writes rollouts.jsonl, exact.jsonl, diagnosis.html, calibration.html,
calibration.json and report.md with its pictures into a folder. Rollouts that are there already are used again.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer

from samebits import LLM, SamplingParams
from samebits.cli import calibration, mismatch, report
from samebits.cli.provenance import provenance_of
from samebits.integrations.rollouts import Rollout, read_rollouts, write_rollouts
from samebits.model.checkpoint import resolve
from samebits.trainer import exact_model

ADJECTIVES = "old quiet red small tired bright cold wild lost happy broken gentle strange young heavy empty"
ALIVE = "teacher horse soldier kitten cat dog farmer doctor nurse wolf eagle mouse queen king baby sailor"
LIFELESS = "river mountain song letter window bakery storm bridge stone chair lamp cloud spoon road coin"
QUESTION = re.compile(r"Is the \w+ (\w+) a living being")


def prompts_of(tokenizer, count: int) -> list[list[int]]:
    pairs = list(itertools.product(ADJECTIVES.split(), (*ALIVE.split(), *LIFELESS.split())))
    random.Random(0).shuffle(pairs)
    asked = [f"Is the {adjective} {noun} a living being? Answer yes or no." for adjective, noun in pairs[:count]]
    return [
        tokenizer.apply_chat_template([{"role": "user", "content": text}], add_generation_prompt=True)["input_ids"]
        for text in asked
    ]


def rewarded(rollouts: Iterable[Rollout], tokenizer) -> Iterator[Rollout]:
    """Reward 1 for an answer whose first yes or no is right."""
    for rollout in rollouts:
        asked = QUESTION.search(tokenizer.decode(rollout.prompt_token_ids))
        answer = re.search(r"\b(yes|no)\b", tokenizer.decode(rollout.token_ids).lower())
        right = "yes" if asked[1] in ALIVE.split() else "no"
        rollout.reward = float(answer is not None and answer[1] == right)
        yield rollout


def vllm_rollouts(python: str, path: Path, prompts: list[list[int]], n: int, max_tokens: int) -> Iterator[Rollout]:
    with tempfile.TemporaryDirectory() as folder:
        job, out = Path(folder) / "job.json", Path(folder) / "out.jsonl"
        job.write_text(json.dumps({
            "model": str(path), "dtype": "bfloat16", "prompts": prompts, "n": n, "max_tokens": max_tokens,
            "out": str(out),
        }))  # fmt: skip
        subprocess.run(
            [python, str(Path(__file__).with_name("vllm_rollouts.py")), str(job)], check=True, stdout=sys.stderr
        )
        yield from read_rollouts(out)


@torch.no_grad()
def hf_rollouts(path: Path, tokenizer, prompts: list[list[int]], n: int, max_tokens: int) -> Iterator[Rollout]:
    """Yield rollouts with the log-probs that HF's own bf16 model samples from."""
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


def in_fp8(weight: torch.Tensor) -> torch.Tensor:
    scale = weight.abs().max() / torch.finfo(torch.float8_e4m3fn).max
    return (weight / scale).to(torch.float8_e4m3fn).float() * scale


def in_int8(weight: torch.Tensor) -> torch.Tensor:
    scale = weight.abs().max() / 127
    return (weight / scale).round() * scale


def rounded_rollouts(
    rounded: Callable[[torch.Tensor], torch.Tensor], path: Path, prompts: list[list[int]], n: int, max_tokens: int
) -> Iterator[Rollout]:
    """Yield rollouts of weights that were rounded as a quantised engine's are: all linear layers but lm_head."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    for name, weight in model.named_parameters():
        if weight.dim() == 2 and "embed" not in name:
            weight.detach().copy_(rounded(weight.detach()))
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        AutoTokenizer.from_pretrained(path).save_pretrained(folder)
        for rollout in sampled(LLM(folder, kv_cache_memory_bytes=2**29), prompts, n, max_tokens, seed=2):
            rollout.old = None  # the trainer's are those of the weights before they were rounded
            yield rollout


def exact_rollouts(path: Path, prompts: list[list[int]], n: int, max_tokens: int) -> Iterator[Rollout]:
    return sampled(LLM(path, kv_cache_memory_bytes=2**29), prompts, n, max_tokens, seed=1)


def sampled(llm: LLM, prompts: list[list[int]], n: int, max_tokens: int, seed: int) -> Iterator[Rollout]:
    params = SamplingParams(n=n, max_tokens=max_tokens, seed=seed)
    made = provenance_of(llm.weight_checksums(), llm.contract, params)
    for group, output in enumerate(llm.generate(prompts, params.per_prompt(len(prompts)))):
        for c in output.completions:
            values = np.array(c.logprobs)
            yield Rollout(
                np.array(c.token_ids), values, np.array(prompts[group]), old=values, group=str(group), provenance=made
            )


def write_once(path: Path, rollouts: Iterator[Rollout]) -> None:
    """Whole or not at all; what is there already is kept, and nothing is sampled."""
    if not path.exists():
        part = path.with_suffix(".part")
        write_rollouts(part, rollouts)
        part.rename(path)


def write_report(
    out: Path, engine: Path, reference: Path, path: Path, tokenizer, title: str, batch_size: int, margin: float
) -> str:
    scorer = exact_model(path)
    found, null = (mismatch.diagnose(file, scorer) for file in (engine, reference))
    calibrated = calibration.calibrate_files(engine, reference, scorer, batch_size=batch_size, margin=margin)
    chosen = calibrated.result.verdict.recommended
    snippets = {} if chosen is None else mismatch.snippets("decoupled", calibrated.candidates[chosen])
    first, second = report.diagnosis(found, tokenizer.decode, null), report.calibration(calibrated, snippets)
    (out / "diagnosis.html").write_text(report.page(title, first))
    (out / "calibration.html").write_text(report.page(f"Calibration: {title}", second))
    (out / "calibration.json").write_text(report.strict_json(report.calibration_numbers(calibrated, snippets)))
    for part in (*first, *second):
        if isinstance(part, report.Plot):
            (out / f"{part.name}.png").write_bytes(part.draw("png"))
    measured, advised = (
        report.markdown([part for part in parts if isinstance(part, report.Plot) or not part.detail])
        for parts in (first, second)
    )
    text = f"## Diagnosis\n\n{measured}\n## Calibration\n\n{advised}"
    (out / "report.md").write_text(text)
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="checkpoint directory, hub id or smollm2")
    parser.add_argument("--engine", choices=("int8", "fp8", "hf", "vllm"), default="int8")
    parser.add_argument("--vllm-python", help="an interpreter that has vLLM, for --engine vllm")
    parser.add_argument("--batch-size", type=int, default=4096, help="sequences in a training batch")
    parser.add_argument("--margin", type=float, default=0.01, help="difference of cosines that is none in practice")
    parser.add_argument("--prompts", type=int, default=464, help="at most 496")
    parser.add_argument("-n", type=int, default=8, help="samples of each prompt")
    parser.add_argument("--max-tokens", type=int, default=4)
    parser.add_argument("--out", type=Path, default=Path("mismatch"))
    args = parser.parse_args()
    path = resolve(args.model)
    tokenizer = AutoTokenizer.from_pretrained(path)
    args.out.mkdir(parents=True, exist_ok=True)
    engine, reference = args.out / "rollouts.jsonl", args.out / "exact.jsonl"
    sizes = prompts_of(tokenizer, args.prompts), args.n, args.max_tokens
    if args.engine == "vllm" and not args.vllm_python:
        parser.error("--engine vllm needs --vllm-python")
    made = {
        "fp8": ("fp8 weights", lambda: rounded_rollouts(in_fp8, path, *sizes)),
        "int8": ("int8 weights", lambda: rounded_rollouts(in_int8, path, *sizes)),
        "hf": ("HF generate in bf16", lambda: hf_rollouts(path, tokenizer, *sizes)),
        "vllm": ("vLLM in bf16", lambda: vllm_rollouts(args.vllm_python, path, *sizes)),
    }
    name, rollouts = made[args.engine]
    if not engine.exists():
        write_once(engine, rewarded(rollouts(), tokenizer))
    write_once(reference, rewarded(exact_rollouts(path, *sizes), tokenizer))
    print(
        write_report(args.out, engine, reference, path, tokenizer, f"{name} against fp32", args.batch_size, args.margin)
    )


if __name__ == "__main__":
    main()
