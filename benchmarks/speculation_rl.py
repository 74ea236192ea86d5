"""The savings of drafts in training: two runs of one task, with suffix drafts and without, whose steps take turns.

python benchmarks/speculation_rl.py MODEL [--steps 24] [--task counting | words | FILE.jsonl] [--chat] [--json FILE]

MODEL: a checkpoint that answers some of the problems, such as one of `samebits train --model tiny --task counting`, or
one that learns them first (`smollm2 --supervise-until 0.55`); `words`, sums told in words, are for a model that talks
(`smollm2 --task words --chat`).
The curves are compared as bits. Printed: rollout seconds of the steps at which more than half of the answers were
right, and seconds of validations with fixed seeds, each ten updates after the one before it. Both engines warm up
first, and which run begins alternates.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import random
import statistics
import tempfile
import time

from transformers import AutoTokenizer

from samebits import LLM, SamplingParams
from samebits.model import resolve
from samebits.trainer import exact_model
from samebits.trainer.rl import TrainConfig, Trainer, make_task
from samebits.trainer.rl.tasks import GeneratedTask, MathGrader, Problem, Task
from samebits.trainer.rl.tiny import fine_tune

GAP = 10  # updates between validations

BothTimes = tuple[float, float]  # seconds without drafts, and with them


class Words(GeneratedTask):
    """Sums told in words, answered in free text of which the last number counts."""

    def __init__(self, num_problems: int | None = None):
        super().__init__(num_problems=num_problems)
        self.grader = MathGrader()

    def draw(self, rng: random.Random) -> Problem:
        """Two small numbers of things, and their sum."""
        a, b = rng.randint(2, 9), rng.randint(2, 9)
        name = rng.choice(("Anna", "Ben", "Lily", "Max", "Nora", "Tom"))
        things = rng.choice(("apples", "books", "coins", "pens", "shells", "stamps"))
        question = f"{name} has {a} {things} and gets {b} more. How many {things} does {name} have now?"
        return Problem(question, str(a + b))

    def reward(self, problem: Problem, text: str) -> float:
        """1 for the right sum, else 0."""
        return float(self.grader.equal(problem.answer, text))


def task(args: argparse.Namespace) -> Task:
    """The task by its name."""
    if args.task == "words":
        return Words(args.num_problems)
    return make_task(args.task, **({} if args.task.endswith(".jsonl") else {"num_problems": args.num_problems}))


def supervise(args: argparse.Namespace, folder: str) -> None:
    """Write the model as it is after supervised steps on the task's problems with their answers."""
    model = exact_model(args.model, "float32").train()
    tokenizer = AutoTokenizer.from_pretrained(resolve(args.model))
    for chance in fine_tune(model, tokenizer, task(args), args.supervise_until, batch_size=8, lr=5e-5):
        print(f"supervised: {chance:.0%} of the answers are right", flush=True)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def trainer(args: argparse.Namespace, model: str, drafts: bool) -> Trainer:
    """A run, with drafts or without."""
    engine: dict = {"kv_cache_memory_bytes": args.kv_cache_mib << 20}
    if drafts:
        engine["speculative_config"] = {"method": "suffix", "num_speculative_tokens": args.num_speculative_tokens}
    config = TrainConfig(
        model=model,
        steps=args.steps,
        groups_per_step=args.groups_per_step,
        group_size=args.group_size,
        lr=args.lr,
        chat=args.chat,
        sampling=SamplingParams(max_tokens=args.max_tokens),
        engine=engine,
    )
    return Trainer(config, task(args))


def validate(one: Trainer, count: int, temperature: float) -> tuple[float, float]:
    """Return the mean reward of a validation, and its seconds."""
    start = time.perf_counter()
    reward = one.evaluate(count, temperature)
    return reward, time.perf_counter() - start


def without_times(metrics: dict[str, float]) -> dict[str, float]:
    """Return what must be equal: all metrics but times."""
    return {name: value for name, value in metrics.items() if "second" not in name}


def parse() -> argparse.Namespace:
    """Read the options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--task", default="counting")
    parser.add_argument("--num-problems", type=int, default=16, help="of a built-in task")
    parser.add_argument("--chat", action="store_true")
    parser.add_argument("--supervise-until", type=float, metavar="SHARE", help="of right answers to begin with")
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--groups-per-step", type=int, default=8)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=512)
    parser.add_argument("--lr", type=float, default=3e-5)
    parser.add_argument("--num-speculative-tokens", type=int, default=8)
    parser.add_argument("--validation", type=int, default=16, help="problems; 0: none")
    parser.add_argument("--kv-cache-mib", type=int, default=400)
    parser.add_argument("--json", type=pathlib.Path)
    args = parser.parse_args()
    if args.chat and args.supervise_until is not None:
        parser.error("--supervise-until teaches answers to plain prompts, so it goes without --chat")
    return args


def warm_up(llm: LLM) -> None:
    """Run what compiles kernels or fills caches before a time counts."""
    params = SamplingParams(n=16, max_tokens=32, seed=1, ignore_eos=True)
    llm.generate([[2, 3, 4, 5]] * 4, params, use_tqdm=False)
    llm.reset_prefix_cache()


def in_turn(runs: dict[str, Trainer], turn: int) -> list[str]:
    """Return the runs' names, in another order every second time."""
    return list(runs)[:: -1 if turn % 2 else 1]


def validate_both(args: argparse.Namespace, runs: dict[str, Trainer], temperature: float, turn: int) -> BothTimes:
    """Return the seconds of a validation without drafts and with them."""
    found = {name: validate(runs[name], args.validation, temperature) for name in in_turn(runs, turn)}
    assert found["with"][0] == found["without"][0], "a draft changed a bit"
    return found["without"][1], found["with"][1]


def summary(pairs: list[BothTimes]) -> str:
    """Both sums of seconds, their ratio, and the median of the pairs' ratios."""
    without = sum(pair[0] for pair in pairs)
    drafting = sum(pair[1] for pair in pairs)
    median = statistics.median(pair[1] / pair[0] for pair in pairs)
    return f"{drafting:.2f} / {without:.2f} s = {drafting / without:.2f}; median of {len(pairs)} ratios {median:.2f}"


def main() -> None:
    """Train both runs, on a model that learned the task first where that is asked for."""
    args = parse()
    with tempfile.TemporaryDirectory() as folder:
        if args.supervise_until is not None:
            supervise(args, folder)
        compare(args, args.model if args.supervise_until is None else folder)


def compare(args: argparse.Namespace, model: str) -> None:
    """Train both runs, compare their curves as bits, and print the ratios of their times."""
    runs = {"without": trainer(args, model, False), "with": trainer(args, model, True)}
    for one in runs.values():
        warm_up(one.llm)
    checks: dict[float, list[BothTimes]] = {0.0: [], 1.0: []} if args.validation else {}
    for temperature in checks:  # the first answers to draft from
        validate_both(args, runs, temperature, 0)
    rewards: list[float] = []
    rollouts: list[BothTimes] = []
    for step in range(args.steps):
        found = {name: runs[name].step() for name in in_turn(runs, step)}
        assert without_times(found["with"]) == without_times(found["without"]), "a draft changed a bit"
        pair = found["without"]["rollout_seconds"], found["with"]["rollout_seconds"]
        reward = found["with"]["reward"]
        print(f"step {step}: reward {reward:.3f}, rollout {pair[0]:.2f} s, with drafts {pair[1]:.2f} s", flush=True)
        rewards.append(reward)
        rollouts.append(pair)
        if step % GAP == GAP - 1:
            for temperature, pairs in checks.items():
                pairs.append(validate_both(args, runs, temperature, step // GAP))
                print(f"validation after {step + 1} updates, T={temperature:g}: {summary(pairs[-1:])}", flush=True)
    stats = runs["with"].llm.stats()
    print(f"{stats.draft_tokens} tokens drafted, {stats.accepted_tokens} accepted; all curves equal as bits")
    better = [pair for pair, reward in zip(rollouts, rewards, strict=True) if reward > 0.5]
    if better:
        print(f"rollouts above one half: {summary(better)}")
    for temperature, pairs in checks.items():
        if pairs:
            print(f"validations, T={temperature:g}: {summary(pairs)}")
    if args.json:
        found = {"arguments": vars(args), "rewards": rewards, "rollout_seconds": rollouts, "validation_seconds": checks}
        args.json.write_text(json.dumps(found, indent=2, default=str) + "\n")


if __name__ == "__main__":
    main()
