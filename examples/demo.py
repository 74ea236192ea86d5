"""`make demo`: rollouts by the engine, recomputed by an FSDP2 trainer on two processes, compared as bits.

Then the same with torch's own ops on both sides (but for the engine's attention, since torch has none over a
paged cache), to see the mismatch that this machine has without samebits.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

PROMPTS = [
    "What is the capital of France?",
    "Write a haiku about the sea.",
    "What is 17 + 25?",
    "Explain photosynthesis in one sentence.",
    "Name three primary colours.",
    "Translate 'good morning' into Spanish.",
    "Who wrote Romeo and Juliet?",
    "Give me a recipe for pancakes.",
    "What is the boiling point of water?",
    "Tell me a short story about a robot.",
    "List two prime numbers above 50.",
    "Why is the sky blue?",
    "Write a Python function that reverses a string.",
    "What is the largest planet?",
    "Give one tip for better sleep.",
    "Summarise the plot of Cinderella.",
]
BATCHES = 8  # forwards per rank: all ranks must run the same number


def roll_out(model: str, exact: bool, max_tokens: int, n: int) -> list[dict]:
    """n samples of each prompt at T=1."""
    from samebits import LLM, SamplingParams

    llm = LLM(model, exact=exact, kv_cache_memory_bytes=2**30)
    messages = [[{"role": "user", "content": p}] for p in PROMPTS]
    outputs = llm.chat(messages, SamplingParams(n=n, temperature=1.0, max_tokens=max_tokens, seed=7))
    return [
        {"prompt": i, "start": len(o.prompt_token_ids), "ids": o.prompt_token_ids + c.token_ids, "logprobs": c.logprobs}
        for i, o in enumerate(outputs)
        for c in o.completions
    ]


def score(model_name: str, job: str) -> None:
    """One torchrun process: scores its share of the samples under FSDP2, with samebits' ops and with torch's own."""
    dist.init_process_group("gloo")
    scores = {exact: score_samples(model_name, exact, samples) for exact, samples in torch.load(job).items()}
    if dist.get_rank() == 0:
        torch.save(scores, job + ".scores")
    dist.destroy_process_group()


def score_samples(model_name: str, exact: bool, samples: list[dict]) -> list[torch.Tensor]:
    """The log-probs of all samples' completions, which the ranks share out among them."""
    from samebits.trainer import exact_model, shard, token_logprobs

    rank, world = dist.get_rank(), dist.get_world_size()
    model = shard(exact_model(model_name, exact=exact))
    mine = list(range(rank, len(samples), world))
    results: dict[int, torch.Tensor] = {}
    for batch in tqdm(range(BATCHES), desc=f"Scoring on {world} ranks", unit="batch", disable=rank != 0):
        picked = mine[batch::BATCHES] or mine[:1]
        with torch.no_grad():
            for i, logprobs in zip(picked, token_logprobs(model, [samples[i]["ids"] for i in picked]), strict=True):
                results[i] = logprobs[samples[i]["start"] :]
    gathered: list = [None] * world
    dist.all_gather_object(gathered, results)
    merged = {i: logprobs for part in gathered for i, logprobs in part.items()}
    return [merged[i] for i in range(len(samples))]


def trainer_logprobs(model: str, samples: dict[bool, list[dict]]) -> dict[bool, list[torch.Tensor]]:
    """The trainer's log-probs of both sides' samples, from two processes."""
    with tempfile.TemporaryDirectory() as folder:
        job = str(pathlib.Path(folder) / "job.pt")
        torch.save(samples, job)
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", __file__]
        threads = max(1, (os.cpu_count() or 2) // 2)
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
        subprocess.run([*command, "--model", model, "--score", job], check=True, env=environment)
        return torch.load(job + ".scores")


def compare(title: str, samples: list[dict], scores: list[torch.Tensor], console: Console) -> bool:
    """Prints the table. Returns whether all bits were equal."""
    table = Table("prompt", "tokens", "mean log-prob", "max |difference|", "tokens that differ", title=title)
    total = 0
    differing = 0
    worst = 0.0
    for i, prompt in enumerate(PROMPTS):
        pairs = [(torch.tensor(s["logprobs"]), lp) for s, lp in zip(samples, scores, strict=True) if s["prompt"] == i]
        rollout, trainer = (torch.cat(side) for side in zip(*pairs, strict=True))
        largest = (rollout - trainer).abs().max().item()
        unequal = int((rollout != trainer).sum())
        table.add_row(
            prompt[:44], str(len(rollout)), f"{statistics.fmean(rollout.tolist()):.4f}", f"{largest:.3g}", str(unequal)
        )
        total += len(rollout)
        differing += unequal
        worst = max(worst, largest)
    console.print(table)
    verdict = "bitwise equal" if differing == 0 else f"{differing} tokens differ"
    console.print(f"max |rollout - trainer| = {worst:.3g} over {total} tokens, {verdict}\n", highlight=False)
    return differing == 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2", help="checkpoint directory, hub id or smollm2")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("-n", type=int, default=4, help="samples per prompt")
    parser.add_argument("--score", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.score:
        score(args.model, args.score)
        return
    console = Console(width=110)
    samples = {exact: roll_out(args.model, exact, args.max_tokens, args.n) for exact in (True, False)}
    scores = trainer_logprobs(args.model, samples)
    equal = compare("samebits", samples[True], scores[True], console)
    off = "the same with the numerics switches off (torch's own ops)"
    compare(off, samples[False], scores[False], console)
    sys.exit(0 if equal else 1)


if __name__ == "__main__":
    main()
