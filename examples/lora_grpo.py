"""GRPO with a LoRA adapter on exact rollouts: a tiny model learns to sort, and its base never moves.

python examples/lora_grpo.py --output-dir runs/lora --figure curves.png
"""

import argparse
import json
import pathlib

from peft import LoraConfig
from transformers import AutoTokenizer

from samebits import LLM, SamplingParams
from samebits.cli import plots
from samebits.trainer import exact_model, save_weights
from samebits.trainer.rl import TrainConfig, Trainer, make_task
from samebits.trainer.rl.tiny import fine_tune, make_tiny_model


def make_base(folder: pathlib.Path, task) -> None:
    """Write a tiny model that has learned from solved problems until a fifth of its answers is right."""
    if (folder / "config.json").exists():
        return
    draft = folder.with_name("untrained")
    make_tiny_model(draft, task.alphabet)
    model = exact_model(draft)
    for chance in fine_tune(model, AutoTokenizer.from_pretrained(draft), task):
        print(f"\rlearning from solved problems: {chance:.0%} right", end="", flush=True)
    print()
    save_weights(model, folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output-dir", type=pathlib.Path, default=pathlib.Path("runs/lora"))
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--figure", type=pathlib.Path)
    args = parser.parse_args()
    task = make_task("sorting")
    base = args.output_dir / "base"
    make_base(base, task)
    adapter = LoraConfig(r=args.rank, lora_alpha=2 * args.rank, target_modules="all-linear")
    config = TrainConfig(
        model=str(base), steps=args.steps, lr=args.lr, groups_per_step=32, sampling=SamplingParams(max_tokens=10),
        engine={"adapter": adapter, "kv_cache_memory_bytes": 2**26},
    )  # fmt: skip
    trainer = Trainer(config, task)
    rows = []
    for _ in range(args.steps):
        rows.append(trainer.step())
        row = rows[-1]
        print(f"step {row['step']:3.0f}  reward {row['reward']:.3f}  difference {row['max_difference']:g}", flush=True)
    (args.output_dir / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    if args.figure:
        args.figure.write_bytes(plots.curves(rows))

    folder = args.output_dir / "adapter"
    save_weights(trainer.model, folder)  # PEFT's files: adapter_config.json and adapter_model.safetensors
    prompt = task.problem(0).prompt
    answer = LLM(str(base), adapter=folder).generate(prompt, SamplingParams(temperature=0, max_tokens=10))[0]
    print(f"{prompt!r} -> {answer.completions[0].text!r}")


if __name__ == "__main__":
    main()
