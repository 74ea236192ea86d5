"""GRPO with verl, from nothing to a curve, without a GPU: on exact rollouts, and under verl's own engine as a control.

usage: python examples/verl_grpo.py [--steps 30] [--folder runs/verl] [--figure runs/verl/verl.png]
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import string
import subprocess
import sys

import matplotlib
import pandas
from transformers import AutoTokenizer

from samebits.trainer.rl.tiny import make_tiny_model

matplotlib.use("agg")
import matplotlib.pyplot as plt

TEMPLATE = "{% for m in messages %}{{ m['content'] }} {% endfor %}"
REWARD = '''
def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    """Return the share of the letters a to e in an answer."""
    return sum(letter in "abcde" for letter in solution_str) / max(1, len(solution_str))
'''
# attn_implementation is for the control: an exact model has its own
SETTINGS = """
algorithm.adv_estimator=grpo
data.train_batch_size=8
data.max_prompt_length=16
data.max_response_length=32
data.dataloader_num_workers=0
data.filter_overlong_prompts=False
actor_rollout_ref.rollout.name=samebits
actor_rollout_ref.rollout.tensor_model_parallel_size=1
actor_rollout_ref.rollout.n=8
actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=64
actor_rollout_ref.rollout.agent.num_workers=1
+actor_rollout_ref.rollout.engine_kwargs.samebits.kv_cache_memory_bytes=16777216
actor_rollout_ref.actor.strategy=fsdp2
actor_rollout_ref.actor.use_kl_loss=False
actor_rollout_ref.actor.optim.lr=1e-3
actor_rollout_ref.actor.ppo_mini_batch_size=8
actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=64
actor_rollout_ref.actor.fsdp_config.full_determinism=True
reward.num_workers=1
+actor_rollout_ref.model.override_config.attn_implementation=sdpa
trainer.v1.trainer_mode=samebits
trainer.device=cpu
trainer.n_gpus_per_node=1
trainer.total_epochs=1000
trainer.val_before_train=False
trainer.resume_mode=disable
trainer.logger=[console,file]
transfer_queue.backend.SimpleStorage.num_data_storage_units=1
ray_kwargs.ray_init.num_cpus=16
+ray_kwargs.ray_init.num_gpus=1
+ray_kwargs.ray_init.include_dashboard=False
+ray_kwargs.ray_init.object_store_memory=314572800
"""


def prepare(folder: pathlib.Path) -> None:
    """Write a model of 0.8 M parameters, prompts, and a reward function."""
    model = folder / "model"
    make_tiny_model(model, string.ascii_lowercase + string.digits + " ")
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(model)
    prompts = [[{"role": "user", "content": f"say {number}"}] for number in range(64)]
    rows = [{"data_source": "letters", "prompt": p, "reward_model": {"ground_truth": ""}} for p in prompts]
    pandas.DataFrame(rows).to_parquet(folder / "prompts.parquet")
    (folder / "reward.py").write_text(REWARD)


def train(folder: pathlib.Path, name: str, steps: int, vendor: str) -> list[dict[str, float]]:
    """Run verl, and return what it logged of each step. vendor: whose engine trains, samebits' or verl's own."""
    log = folder / f"{name}.jsonl"
    environment = {"VERL_PLATFORM": "cpu", "VERL_ENGINE_VENDOR": vendor, "VERL_FILE_LOGGER_PATH": str(log)}
    paths = {
        "actor_rollout_ref.model.path": folder / "model",
        "data.train_files": folder / "prompts.parquet",
        "data.val_files": folder / "prompts.parquet",
        "reward.custom_reward_function.path": folder / "reward.py",
        "trainer.default_local_dir": folder / "checkpoints",
        "trainer.total_training_steps": steps,
    }
    arguments = SETTINGS.split() + [f"{key}={value}" for key, value in paths.items()]
    command = [sys.executable, "-m", "verl.trainer.main_ppo", *arguments]
    subprocess.run(command, cwd=folder, env=os.environ | environment, check=True)
    return [json.loads(line)["data"] for line in log.read_text().splitlines()]


def draw(runs: dict[str, list[dict[str, float]]], figure: pathlib.Path) -> None:
    """Draw the rewards, and by how much the probability of a token differs at most between rollout and trainer."""
    _, (rewards, differences) = plt.subplots(1, 2, figsize=(9, 3.2), constrained_layout=True)
    for name, steps in runs.items():
        numbers = range(1, len(steps) + 1)
        rewards.plot(numbers, [step["critic/score/mean"] for step in steps], label=name)
        differences.plot(numbers, [step["training/rollout_probs_diff_max"] for step in steps], label=name)
    rewards.set(xlabel="step", ylabel="mean reward")
    differences.set(xlabel="step", ylabel="max. difference of a probability")
    differences.set_yscale("symlog", linthresh=1e-6)
    for axes in (rewards, differences):
        axes.legend(frameon=False)
        axes.spines[["top", "right"]].set_visible(False)
    plt.savefig(figure, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--folder", type=pathlib.Path, default=pathlib.Path("runs/verl"))
    parser.add_argument("--figure", type=pathlib.Path)
    arguments = parser.parse_args()
    folder = arguments.folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    prepare(folder)
    runs = {
        "samebits' engine trains": train(folder, "exact", arguments.steps, "samebits"),
        "verl's own engine trains": train(folder, "control", arguments.steps, "verl"),
    }
    draw(runs, arguments.figure or folder / "verl.png")


if __name__ == "__main__":
    main()
