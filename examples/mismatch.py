"""Diagnose and calibrate, end to end: HF `generate` in bf16 as the foreign engine, SmolLM2 in fp32 as the trainer.

Writes rollouts.jsonl, exact.jsonl, diagnosis.html, calibration.html and report.md with its pictures into a folder.
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer

from samebits import LLM, SamplingParams
from samebits.integrations.rollouts import Rollout, write_rollouts
from samebits.model.checkpoint import resolve
from samebits.server import mismatch, report
from samebits.trainer import exact_model


def questions(tokenizer, count: int) -> list[tuple[list[int], str]]:
    """Prompts with one right answer each."""
    rng = random.Random(0)
    pairs = []
    for _ in range(count):
        a, b = rng.randint(2, 20), rng.randint(2, 20)
        message = [{"role": "user", "content": f"What is {a} + {b}? Answer with the number."}]
        text = tokenizer.apply_chat_template(message, add_generation_prompt=True, tokenize=False)
        pairs.append((tokenizer.encode(text, add_special_tokens=False), str(a + b)))
    return pairs


def reward(text: str, answer: str) -> float:
    return float(answer in text.replace(".", " ").replace(",", " ").split())


@torch.no_grad()
def foreign(path: Path, tokenizer, pairs, n: int, max_tokens: int):
    """Rollouts with the log-probs that HF's own bf16 model samples from."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    torch.manual_seed(0)
    for group, (prompt, answer) in enumerate(tqdm(pairs, desc="Sampling with HF in bf16", unit="prompt")):
        out = model.generate(
            torch.tensor([prompt]), do_sample=True, temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=max_tokens,
            num_return_sequences=n, output_logits=True, return_dict_in_generate=True,
            pad_token_id=tokenizer.pad_token_id,
        )  # fmt: skip
        logprobs = torch.stack(out.logits, 1).float().log_softmax(-1)
        for row, scores in zip(out.sequences[:, len(prompt) :], logprobs, strict=True):
            tokens = row.tolist()
            ends = [i for i, t in enumerate(tokens) if t == model.generation_config.eos_token_id]
            tokens = tokens[: ends[0] + 1] if ends else tokens
            ids = torch.tensor(tokens)
            values = scores[: len(tokens)].gather(1, ids[:, None])[:, 0].double().numpy()
            yield Rollout(
                ids.numpy(), values, np.array(prompt), group=str(group),
                reward=reward(tokenizer.decode(tokens), answer),
                top_token_ids=scores[: len(tokens)].argmax(-1).numpy(),
            )  # fmt: skip


def exact(path: Path, pairs, n: int, max_tokens: int):
    """Rollouts of the exact engine."""
    params = SamplingParams(n=n, max_tokens=max_tokens, seed=1)
    outputs = LLM(path, kv_cache_memory_bytes=2**29).generate([prompt for prompt, _ in pairs], params)
    for group, (output, (prompt, answer)) in enumerate(zip(outputs, pairs, strict=True)):
        for c in output.completions:
            values = np.array(c.logprobs)
            yield Rollout(
                np.array(c.token_ids),
                values,
                np.array(prompt),
                old=values,
                reward=reward(c.text or "", answer),
                group=str(group),
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2", help="checkpoint directory, hub id or smollm2")
    parser.add_argument("--prompts", type=int, default=48)
    parser.add_argument("-n", type=int, default=8, help="samples of each prompt")
    parser.add_argument("--max-tokens", type=int, default=24)
    parser.add_argument("--out", type=Path, default=Path("mismatch"))
    args = parser.parse_args()
    path = resolve(args.model)
    tokenizer = AutoTokenizer.from_pretrained(path)
    pairs = questions(tokenizer, args.prompts)
    args.out.mkdir(parents=True, exist_ok=True)
    engine, reference = args.out / "rollouts.jsonl", args.out / "exact.jsonl"
    write_rollouts(engine, foreign(path, tokenizer, pairs, args.n, args.max_tokens))
    write_rollouts(reference, exact(path, pairs, args.n, args.max_tokens))

    scorer = exact_model(path)
    found = mismatch.diagnose(engine, scorer)
    null = mismatch.diagnose(reference, scorer)
    calibration, candidates = mismatch.calibrate_files(engine, reference, scorer)
    snippets = {}
    if calibration.verdict.recommended is not None:
        snippets = mismatch.snippets("decoupled", candidates[calibration.verdict.recommended])
    (args.out / "diagnosis.html").write_text(
        report.diagnosis_page(found, "SmolLM2 in bf16 against fp32", tokenizer.decode)
    )
    (args.out / "calibration.html").write_text(report.calibration_page(calibration, "Calibration", snippets))
    (args.out / "diagnosis.png").write_bytes(report.diagnosis_plot(found))
    (args.out / "calibration.png").write_bytes(report.calibration_plot(calibration))
    text = report.markdown(found, null, calibration, snippets, tokenizer.decode)
    (args.out / "report.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
