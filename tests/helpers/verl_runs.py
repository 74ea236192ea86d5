"""Runs of the real `python -m verl.trainer.main_ppo` on a tiny model, each on a Ray of its own."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import subprocess
import sys

import psutil

from helpers.models import make_checkpoint
from helpers.serving import add_tokenizer

REWARD = '''
def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    """Reward answers with many of the letters a to e: noisy, with a gradient."""
    return sum(c in "abcde" for c in solution_str) / max(1, len(solution_str))
'''
TESTS = str(pathlib.Path(__file__).parents[1])  # where Ray's workers find agent loops
LOG_VARIABLE = "VERL_FILE_LOGGER_PATH"
EXACT = {  # metrics of a step whose rollouts are on policy, and what they are, to the bit
    "training/rollout_probs_diff_max": 0.0,
    "training/rollout_probs_diff_mean": 0.0,
    "training/rollout_probs_diff_std": 0.0,
    "training/rollout_probs_diff_valid": 1,
    "rollout_corr/kl": 0.0,
    "rollout_corr/k3_kl": 0.0,
    "rollout_corr/chi2_token": 0.0,
    "rollout_corr/chi2_seq": 0.0,
    "rollout_corr/log_ppl_diff": 0.0,
    "rollout_corr/log_ppl_abs_diff": 0.0,
    "rollout_corr/log_ppl_diff_max": 0.0,
    "rollout_corr/log_ppl_diff_min": 0.0,
    "rollout_corr/ppl_ratio": 1.0,
}


def prepare(folder: pathlib.Path, family: str = "qwen2", rows: int = 16, **overrides) -> pathlib.Path:
    """Make a tiny model with a tokenizer, a dataset and a reward in a folder."""
    prepare_data(folder, rows)
    return prepare_model(folder / "model", family, **overrides)


def prepare_model(model: pathlib.Path, family: str, **overrides) -> pathlib.Path:
    """Make a tiny model with a tokenizer."""
    make_checkpoint(model, family, initializer_range=0.05, **overrides)
    add_tokenizer(model)
    return model


def prepare_data(folder: pathlib.Path, rows: int = 16) -> None:
    """Write a dataset of short prompts and a reward function."""
    import pandas

    records = [
        {
            "data_source": "letters",
            "prompt": [{"role": "user", "content": f"Say {chr(97 + i % 26)} {i}"}],
            "reward_model": {"style": "rule", "ground_truth": ""},
            "extra_info": {"index": i},
        }
        for i in range(rows)
    ]
    pandas.DataFrame(records).to_parquet(folder / "data.parquet")
    (folder / "reward.py").write_text(REWARD)


def options(folder: pathlib.Path, model: pathlib.Path | str, steps: int, ranks: int) -> dict[str, object]:
    """verl's settings, by name, of a short GRPO run."""
    actor, ref, rollout = (f"actor_rollout_ref.{part}" for part in ("actor", "ref", "rollout"))
    return {
        "algorithm.adv_estimator": "grpo",
        "data.train_files": folder / "data.parquet",
        "data.val_files": folder / "data.parquet",
        "data.train_batch_size": 4,
        "data.max_prompt_length": 48,
        "data.max_response_length": 24,
        "data.dataloader_num_workers": 0,
        "data.filter_overlong_prompts": False,
        "data.seed": 1,
        "actor_rollout_ref.model.path": model,
        f"{actor}.strategy": "fsdp2",
        f"{actor}.optim.lr": 1e-2,
        f"{actor}.ppo_mini_batch_size": 4,
        f"{actor}.ppo_micro_batch_size_per_gpu": 4,
        f"{actor}.use_kl_loss": False,
        f"{actor}.fsdp_config.full_determinism": True,
        f"{ref}.strategy": "fsdp2",
        f"{ref}.log_prob_micro_batch_size_per_gpu": 8,
        f"{rollout}.name": "samebits",
        f"{rollout}.n": 4,
        f"{rollout}.temperature": 0.8,
        f"{rollout}.tensor_model_parallel_size": 1,
        f"{rollout}.log_prob_micro_batch_size_per_gpu": 8,
        f"{rollout}.max_num_seqs": 16,
        f"{rollout}.agent.num_workers": 1,
        f"+{rollout}.engine_kwargs.samebits.kv_cache_memory_bytes": 2**22,
        "reward.custom_reward_function.path": folder / "reward.py",
        "reward.num_workers": 1,
        "trainer.v1.trainer_mode": "samebits",
        "transfer_queue.backend.SimpleStorage.num_data_storage_units": 1,
        "trainer.device": "cpu",
        "trainer.n_gpus_per_node": ranks,
        "trainer.nnodes": 1,
        "trainer.total_epochs": 100,
        "trainer.total_training_steps": steps,
        "trainer.val_before_train": False,
        "trainer.test_freq": -1,
        "trainer.save_freq": -1,
        "trainer.resume_mode": "disable",
        "trainer.default_local_dir": folder / "checkpoints",
        "trainer.logger": "[console,file]",
        "ray_kwargs.ray_init.num_cpus": 16,
        "+ray_kwargs.ray_init.num_gpus": ranks,
        "+ray_kwargs.ray_init.address": "local",  # also where another cluster runs
        "+ray_kwargs.ray_init.include_dashboard": False,
        "+ray_kwargs.ray_init.object_store_memory": 300 * 2**20,
    }


def start(folder: pathlib.Path, model, log: str, steps: int = 3, ranks: int = 1, **settings) -> subprocess.Popen:
    """Start a run; its metrics go to `log`.jsonl, what it prints to `log`.txt. settings: verl's, by name."""
    chosen = options(folder, model, steps, ranks)
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([TESTS, *filter(None, [os.environ.get("PYTHONPATH")])]),
        "VERL_PLATFORM": "cpu",
        "VERL_USE_EXTERNAL_MODULES": "samebits.integrations.verl",  # as the entry point does for what is installed
        LOG_VARIABLE: log_path(folder, log),
        "RAY_USAGE_STATS_ENABLED": "0",
        "OMP_NUM_THREADS": "1",
        "GOMP_SPINCOUNT": "10000",
        "HYDRA_FULL_ERROR": "1",
        "RAY_DEDUP_LOGS": "0",
        "RAY_prestart_worker_first_driver": "0",  # a process per CPU that Ray believes in
    }
    environment.pop("RAY_ADDRESS", None)
    environment.update(settings.pop("environment", {}))
    chosen.update(settings)
    arguments = [f"{name}={value}" for name, value in chosen.items()]
    command = [sys.executable, "-m", "verl.trainer.main_ppo", *arguments]
    with open(folder / f"{log}.txt", "wb") as output:
        return subprocess.Popen(command, cwd=folder, env=environment, stdout=output, stderr=subprocess.STDOUT)


def log_path(folder: pathlib.Path, log: str) -> str:
    """Where a run's metrics go."""
    return str(folder / f"{log}.jsonl")


def metrics(folder: pathlib.Path, log: str) -> list[dict[str, float]]:
    """What a run logged of each step."""
    path = pathlib.Path(log_path(folder, log))
    lines = path.read_bytes().splitlines() if path.exists() else []  # text has other ends of lines, too
    return [data for data in (json.loads(line)["data"] for line in lines) if "training/global_step" in data]


def replicas(folder: pathlib.Path, log: str) -> list[psutil.Process]:
    """The processes of a run's engines."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        with contextlib.suppress(psutil.Error):
            title = " ".join(process.info["cmdline"] or [])
            if title.startswith("ray::Server") and log_path(folder, log) == process.environ().get(LOG_VARIABLE):
                found.append(process)
    return found
