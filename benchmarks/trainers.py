"""Step time of TRL's GRPO on exact rollouts and with TRL's own `generate`, in turn; ratios and JSON.

usage: python benchmarks/trainers.py [--model smollm2] [--rounds 3] [--steps 3] [--dtype float32] [--out FILE]
Each run is a process of its own. A step is rollouts, rewards, log-probs, backward, optimizer and, for samebits, weights
to the engine; the first step of a run is left out. OMP_NUM_THREADS=2 and what samebits sets of OpenMP are for both.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

KINDS = ("trl", "samebits")
PROMPTS = [f"Question {i}: what is {3 * i} plus {7 * i}, and why? Think step by step, then answer." for i in range(64)]


def run(kind: str, model: str, dtype: str, steps: int) -> dict:
    """Train some steps in this process; return seconds per step and of sending weights per step."""
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    import samebits.integrations.trl as plugin
    from samebits.model import resolve

    times: dict[str, list[float]] = {"step": [], "sync": [], "tokens": []}

    class Clock(TrainerCallback):
        def on_step_begin(self, *_, **__):
            self.start = time.perf_counter()

        def on_step_end(self, *_, **__):
            times["step"].append(time.perf_counter() - self.start)

    class Generation(plugin.ExactGeneration):
        def sync_weights(self):
            start = time.perf_counter()
            super().sync_weights()
            times["sync"].append(time.perf_counter() - start)

    def reward(completion_ids, **_):
        times["tokens"].append(sum(map(len, completion_ids)))
        return [float(len(set(ids))) for ids in completion_ids]

    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(
            output_dir=folder, max_steps=steps + 1, per_device_train_batch_size=16, num_generations=8,
            max_completion_length=64, learning_rate=1e-6, beta=0.0, bf16=False, use_cpu=True, save_strategy="no",
            report_to="none", disable_tqdm=True, model_init_kwargs={"dtype": dtype}, seed=1,
        )  # fmt: skip
        parts = {"args": config, "reward_funcs": reward, "train_dataset": Dataset.from_dict({"prompt": PROMPTS})}
        if kind == "samebits":
            plugin.ExactGeneration = Generation
            trainer = plugin.ExactGRPOTrainer(str(resolve(model)), engine={"kv_cache_memory_bytes": 2**28}, **parts)
        else:
            trainer = GRPOTrainer(str(resolve(model)), **parts)
        trainer.add_callback(Clock())
        trainer.train()
    return {name: values[1:] for name, values in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--out", type=pathlib.Path)
    parser.add_argument("--one", choices=KINDS, help="run this one here and print its times as JSON")
    options = parser.parse_args()
    if options.one:
        print(json.dumps(run(options.one, options.model, options.dtype, options.steps)))
        return
    environment = os.environ | {"OMP_NUM_THREADS": "2", "GOMP_SPINCOUNT": "10000", "OMP_WAIT_POLICY": "ACTIVE"}
    given = ["--model", options.model, "--dtype", options.dtype, "--steps", str(options.steps)]
    rounds = []
    for number in range(options.rounds):
        found = {}
        for kind in KINDS if number % 2 == 0 else KINDS[::-1]:
            command = [sys.executable, __file__, "--one", kind, *given]
            done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
            found[kind] = json.loads(done.stdout.splitlines()[-1])
        medians = {kind: statistics.median(found[kind]["step"]) for kind in KINDS}
        share = sum(found["samebits"]["sync"]) / sum(found["samebits"]["step"])
        ratio = medians["samebits"] / medians["trl"]
        print(
            f"round {number + 1}: trl {medians['trl']:.1f} s, samebits {medians['samebits']:.1f} s a step, "
            f"ratio {ratio:.2f}, weights {share:.1%} of a step",
            flush=True,
        )
        rounds.append({"times": found, "ratio": ratio, "weights_share": share})
    summary = {name: statistics.median(r[name] for r in rounds) for name in ("ratio", "weights_share")}
    print(f"median: ratio {summary['ratio']:.2f}, weights {summary['weights_share']:.1%} of a step")
    if options.out:
        options.out.write_text(
            json.dumps({"settings": vars(options) | {"out": None}, **summary, "rounds": rounds}, indent=1)
        )


if __name__ == "__main__":
    main()
