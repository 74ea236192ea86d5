"""The time of a training step, part by part, and the memory that its log-probs need.

usage: python benchmarks/train_step.py [--model smollm2] [--groups 8] [--group-size 8] [--max-tokens 64] [--steps 5]
                                       [--json FILE]

Prints, as medians over the steps after the first: rollout and training tokens a second, and the share of the step that
handing the weights to the engine takes. Then the peak memory of `token_logprobs` with its backward at two vocabularies
and two numbers of tokens, each in a process of its own: what it needs beyond the activations must not grow with
vocabulary x tokens.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import platform
import resource
import statistics
import subprocess
import sys
import tempfile

import torch

from samebits import SamplingParams


class Lengths:
    """Rewards by length: every group has something to learn, whatever the model says."""

    def problem(self, index: int, split: str = "train"):
        from samebits.trainer.rl import Problem

        return Problem(f"Question {index}: name a river, a mountain and a city.\nAnswer:", "")

    def reward(self, problem, text: str) -> float:
        return len(text) % 10 / 10


def steps(arguments) -> dict[str, float]:
    from samebits.trainer.rl import TrainConfig, Trainer

    config = TrainConfig(
        model=arguments.model, groups_per_step=arguments.groups, group_size=arguments.group_size,
        sampling=SamplingParams(max_tokens=arguments.max_tokens, ignore_eos=True),
        engine={"kv_cache_memory_bytes": 2**30},
    )  # fmt: skip
    trainer = Trainer(config, Lengths())
    rows = [trainer.step() for _ in range(arguments.steps)][1:]
    assert all(row["max_difference"] == 0 for row in rows)
    names = ("rollout_seconds", "train_seconds", "sync_seconds")
    middle = {n: statistics.median(row[n] for row in rows) for n in (*names, "rollout_tokens_per_second")}
    middle["train_tokens_per_second"] = statistics.median(row["train_tokens_per_second"] for row in rows)
    middle["sync_share"] = statistics.median(row["sync_seconds"] / sum(row[n] for n in names) for row in rows)
    return middle


MEASURE = """
import sys, torch
from transformers import LlamaConfig, AutoModelForCausalLM
from samebits.trainer import exact_model, token_logprobs
vocab, tokens, folder = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
sizes = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1)
AutoModelForCausalLM.from_config(LlamaConfig(vocab_size=vocab, **sizes)).save_pretrained(folder)
model = exact_model(folder)
ids = [torch.randint(0, vocab, (256,)) for _ in range(tokens // 256)]
token_logprobs(model, ids[:1])[0].sum().backward()
open("/proc/self/clear_refs", "w").write("5")  # the peak starts anew
values = dict(line.split(":") for line in open("/proc/self/status"))
before = int(values["VmRSS"].split()[0])
torch.cat(token_logprobs(model, ids)).sum().backward()
values = dict(line.split(":") for line in open("/proc/self/status"))
print((int(values["VmHWM"].split()[0]) - before) * 1024)
"""


def memory(vocab: int, tokens: int) -> int:
    """Peak bytes that scoring and its backward add to a process that has done a small one (Linux)."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-c", MEASURE, str(vocab), str(tokens), folder]
        return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--groups", type=int, default=8)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--json", type=pathlib.Path)
    arguments = parser.parse_args()
    result: dict = {"machine": platform.processor() or platform.machine(), "torch": torch.__version__}
    result["step"] = steps(arguments)
    for name, value in result["step"].items():
        print(f"{name:28} {value:10.3f}")
    result["peak_bytes"] = {}
    for vocab in (1_000, 100_000):
        for tokens in (1_024, 8_192):
            peak = result["peak_bytes"][f"{vocab} x {tokens}"] = memory(vocab, tokens)
            logits = vocab * tokens * 4 / 1e6
            print(f"vocabulary {vocab:7,}, {tokens:5,} tokens: peak + {peak / 1e6:.0f} MB (logits: {logits:.0f} MB)")
    result["own_peak_rss"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
