"""The mismatch laboratory: the same RL run on rollouts with and without training-inference mismatch.

    python benchmarks/tim_lab/run.py                 # all runs, then the report; runs that are there are not repeated
    python benchmarks/tim_lab/run.py --preset paper  # the full-size runs, for those with the GPUs

usage: run.py [--out FOLDER] [--steps N] [--seeds N] [--workers N] [--only NAME ...]
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import subprocess
import sys
import time
from dataclasses import dataclass

HERE = pathlib.Path(__file__).parent
RESULTS = HERE.parent / "results" / "tim_lab"
TASK = {"name": "sorting", "size": 4}
SIZES = {
    "hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2,
}  # fmt: skip

PAPER = """\
The papers' full-size runs, one `samebits train` each. `--no-exact` is the same run without the promise; --algorithm
is grpo or reinforce, --mode recompute, bypass or decoupled (with --correction token_tis):

  torchrun --nproc-per-node 8 --no-python samebits train --model Qwen/Qwen3-1.7B --task deepmath.jsonl \\
      --verifier math-verify --chat --dtype bfloat16 --groups-per-step 64 --group-size 8 --minibatches 4 \\
      --max-tokens 8192 --lr 1e-6 --max-tokens-per-pack 16384 --activation-checkpointing --steps 500 \\
      --algorithm grpo --mode bypass --output-dir runs/grpo-exact

64 prompts of at most 1,024 tokens a step, groups of 8, 4 updates of 128 sequences, answers of up to 8,192 tokens.
"""


@dataclass(frozen=True)
class Run:
    engine: str
    algorithm: str = "grpo"
    mode: str = "bypass"
    dtype: str = "float32"  # the trainer's
    seed: int = 0

    @property
    def name(self) -> str:
        parts = [self.engine, self.algorithm, self.mode, self.dtype, f"seed {self.seed}"]
        return ", ".join(parts)


def plan(seeds: int) -> list[Run]:
    variants = [
        (engine, algorithm, "bypass", "float32")
        for algorithm, engines in (
            ("grpo", ("exact", "switches off", "vLLM", "bf16", "int8 weights", "noise 1", "noise 2")),
            ("reinforce", ("exact", "switches off", "vLLM", "bf16", "noise 2")),
        )
        for engine in engines
    ]
    variants += [("noise 2", "grpo", mode, "float32") for mode in ("recompute", "decoupled")]
    variants += [("noise 2", "reinforce", "decoupled", "float32")]
    variants += [("fp16", "grpo", "bypass", "float32")]
    variants += [(engine, "grpo", "bypass", dtype) for engine in ("exact", "vLLM") for dtype in ("bfloat16", "float16")]
    return [Run(*variant, seed) for seed in range(seeds) for variant in variants]


def execute(run: Run, model: pathlib.Path, out: pathlib.Path, steps: int) -> None:
    """One run in this process; its log appears whole at the end.

    validation: greedy answers of an exact engine in fp32, whatever engine the run trains on, so that it tells what was
    learned and not how well the run's engine samples.
    """
    from engines import ENGINES

    from samebits import LLM, SamplingParams
    from samebits.correction import Correction, preset
    from samebits.engine.weights.spec import full_tensors
    from samebits.trainer.rl import TrainConfig, Trainer, make_task
    from samebits.trainer.rl.rollout import RolloutWorker

    settings = {"kv_cache_memory_bytes": 2**26, "max_num_seqs": 512, "dtype": run.dtype}
    task = make_task(**TASK, seed=run.seed)
    config = TrainConfig(
        model=str(model), dtype=run.dtype, algorithm=run.algorithm, mode=run.mode,
        correction=preset("token_tis") if run.mode == "decoupled" else Correction(), steps=steps,
        groups_per_step=32, group_size=8, minibatches=2, sampling=SamplingParams(max_tokens=8), lr=5e-4, seed=run.seed,
        check="every" if run.engine == "exact" else "off",
    )  # fmt: skip
    trainer = Trainer(config, task, ENGINES[run.engine](model, **settings))
    judge = LLM(model, **settings | {"dtype": "float32"})
    judged = RolloutWorker(judge, task, config.sampling, run.seed)
    rows = []
    start = time.perf_counter()
    while trainer.steps_done < steps:
        metrics = trainer.step()
        if trainer.steps_done % 20 == 0:
            judge.update_weights(full_tensors(trainer.model.state_dict()))
            metrics["validation"] = judged.evaluate(200)
        rows.append(metrics)
    log = {**vars(run), "steps": steps, "seconds": time.perf_counter() - start, "rows": rows}
    draft = out / f".{run.name}.draft"
    draft.write_text(json.dumps(log))
    draft.replace(out / f"{run.name}.json")


def finished(run: Run, out: pathlib.Path, steps: int) -> bool:
    file = out / f"{run.name}.json"
    return file.exists() and json.loads(file.read_text())["steps"] == steps


def prepare(out: pathlib.Path) -> pathlib.Path:
    """The model that every run starts from: tiny, and right about one time in five."""
    folder = out / "model"
    if not folder.exists():
        from transformers import AutoTokenizer

        from samebits.trainer import exact_model, save_weights
        from samebits.trainer.rl import make_task
        from samebits.trainer.rl.tiny import fine_tune, make_tiny_model

        task, draft = make_task(**TASK), out / ".untrained"
        make_tiny_model(draft, task.alphabet, **SIZES)
        model = exact_model(draft)
        for chance in fine_tune(model, AutoTokenizer.from_pretrained(draft), task, 0.2):
            print(f"\rsupervised: {chance:.0%} right", end="", flush=True)
        print()
        save_weights(model, folder)
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, default=RESULTS)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="runs at a time, a thread each")
    parser.add_argument("--only", nargs="*", help="parts of the names of runs")
    parser.add_argument("--preset", choices=["paper"])
    parser.add_argument("--run", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.preset:
        print(PAPER)
        return
    out = arguments.out
    if arguments.run:
        execute(Run(**json.loads(arguments.run)), out / "model", out, arguments.steps)
        return
    out.mkdir(parents=True, exist_ok=True)
    prepare(out)
    runs = [r for r in plan(arguments.seeds) if not finished(r, out, arguments.steps)]
    runs = [r for r in runs if all(part in r.name for part in arguments.only or ())]
    if "VLLM_PYTHON" not in os.environ and any(r.engine == "vLLM" for r in runs):
        print("without vLLM: set VLLM_PYTHON to the python of an environment that has its CPU build")
        runs = [r for r in runs if r.engine != "vLLM"]
    active: list[tuple[Run, subprocess.Popen]] = []
    total, failed = len(runs), 0
    while runs or active:
        while runs and len(active) < arguments.workers:
            run = runs.pop(0)
            command = [sys.executable, __file__, "--run", json.dumps(vars(run))]
            command += ["--out", str(out), "--steps", str(arguments.steps)]
            env = {**os.environ, "OMP_NUM_THREADS": "1"}
            errors = (out / f"{run.name}.err").open("w")
            active.append((run, subprocess.Popen(command, env=env, stderr=errors)))
            errors.close()
        time.sleep(0.2)
        for run, process in [a for a in active if a[1].poll() is not None]:
            active.remove((run, process))
            errors_file = out / f"{run.name}.err"
            if process.returncode == 0:
                state = "done"
                errors_file.unlink()
            else:
                state, failed = f"FAILED ({process.returncode}, see {errors_file.name})", failed + 1
            print(f"{total - len(runs) - len(active)}/{total} {state}: {run.name}", flush=True)
    import report

    report.write(out)
    if failed:
        sys.exit(f"{failed} runs failed")


if __name__ == "__main__":
    main()
