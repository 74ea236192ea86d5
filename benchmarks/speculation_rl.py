"""What drafts save in training: two runs of one task, with suffix drafts and without, whose steps take turns.

python benchmarks/speculation_rl.py MODEL [--steps 24] [--task counting | FILE.jsonl] [--chat]

MODEL: a checkpoint that answers some of the problems, such as one of `samebits train --model tiny --task counting`.
The curves are compared as bits. Printed: rollout seconds of the steps at which more than half of the answers were
right, and seconds of a validation with fixed seeds, ten updates after another one.
"""

from __future__ import annotations

import argparse
import time

from samebits import SamplingParams
from samebits.trainer.rl import TrainConfig, Trainer, make_task

GAP = 10  # updates between validations


def trainer(args: argparse.Namespace, drafts: bool) -> Trainer:
    """A run, with drafts or without."""
    engine: dict = {"kv_cache_memory_bytes": args.kv_cache_mib << 20}
    if drafts:
        engine["speculative_config"] = {"method": "suffix", "num_speculative_tokens": args.num_speculative_tokens}
    options = {} if args.task.endswith(".jsonl") else {"num_problems": args.num_problems}
    config = TrainConfig(
        model=args.model,
        steps=args.steps,
        groups_per_step=args.groups_per_step,
        group_size=args.group_size,
        lr=args.lr,
        chat=args.chat,
        sampling=SamplingParams(max_tokens=args.max_tokens),
        engine=engine,
    )
    return Trainer(config, make_task(args.task, **options))


def validate(one: Trainer, count: int, temperature: float) -> tuple[float, float]:
    """Return the mean reward of a validation, and its seconds."""
    start = time.perf_counter()
    reward = one.evaluate(count, temperature)
    return reward, time.perf_counter() - start


def without_times(metrics: dict[str, float]) -> dict[str, float]:
    """What must be equal."""
    return {name: value for name, value in metrics.items() if "second" not in name}


def parse() -> argparse.Namespace:
    """Read the options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--task", default="counting")
    parser.add_argument("--num-problems", type=int, default=16, help="of a built-in task")
    parser.add_argument("--chat", action="store_true")
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--groups-per-step", type=int, default=8)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=512)
    parser.add_argument("--lr", type=float, default=3e-5)
    parser.add_argument("--num-speculative-tokens", type=int, default=8)
    parser.add_argument("--validation", type=int, default=64, help="problems; 0: none")
    parser.add_argument("--kv-cache-mib", type=int, default=400)
    return parser.parse_args()


def main() -> None:
    """Train both runs, compare their curves as bits, and print the ratios of their times."""
    args = parse()
    runs = {"without": trainer(args, False), "with": trainer(args, True)}
    seconds: dict[str, float] = dict.fromkeys(runs, 0.0)
    steps = 0
    for step in range(args.steps):
        order = list(runs)[:: 1 if step % 2 else -1]
        found = {name: runs[name].step() for name in order}
        assert without_times(found["with"]) == without_times(found["without"]), "a draft changed a bit"
        both = [found[name]["rollout_seconds"] for name in runs]
        reward = found["with"]["reward"]
        print(f"step {step}: reward {reward:.3f}, rollout {both[0]:.2f} s, with drafts {both[1]:.2f} s", flush=True)
        if reward > 0.5:
            steps += 1
            for name in runs:
                seconds[name] += found[name]["rollout_seconds"]
        if args.validation and step % GAP == GAP - 1:
            for temperature in (0.0, 1.0):
                rewards, times = zip(
                    *(validate(runs[name], args.validation, temperature) for name in runs), strict=True
                )
                assert rewards[0] == rewards[1], "a draft changed a bit"
                ratio = f"{times[1]:.2f} / {times[0]:.2f} s = {times[1] / times[0]:.2f}"
                print(f"validation after {step + 1} updates, T={temperature:g}: {ratio}")
    stats = runs["with"].llm.stats()
    print(f"{stats.draft_tokens} tokens drafted, {stats.accepted_tokens} accepted; all curves equal as bits")
    if steps:
        ratio = seconds["with"] / seconds["without"]
        print(f"{steps} steps above one half: {seconds['with']:.2f} / {seconds['without']:.2f} s = {ratio:.2f}")


if __name__ == "__main__":
    main()
