"""Run by torchrun: one step of a trainer, its rollouts and gradients; or a run in which one rank dies."""

import os
import pathlib
import signal
import sys

import torch
import torch.distributed as dist

from samebits import SamplingParams
from samebits.server import Client, RemoteEngine
from samebits.trainer import TrainConfig, Trainer, make_task, save_weights


def main(job_file: str, out_file: str) -> None:
    job = torch.load(job_file)
    config = TrainConfig(
        model=job["model"], groups_per_step=5, group_size=4, lr=1e-3, sampling=SamplingParams(max_tokens=9),
        max_tokens_per_pack=60, engine={"kv_cache_memory_bytes": 2**21}, steps=4, algorithm="dapo",
        output_dir=pathlib.Path(job["output_dir"]), save_every=1,
    )  # fmt: skip
    llm = RemoteEngine(Client(job["engine_url"]), config.model) if job["engine_url"] else None
    trainer = Trainer(config, make_task("arithmetic"), llm)
    if job["kill_at"] is not None:
        fit_and_die(trainer, job["kill_at"])
    gradients, rollouts = [], []
    collect, update = trainer.worker.collect, trainer._update

    def seen(*args):
        rollouts.extend(collect(*args))
        return rollouts

    def kept():
        gradients.extend(p.grad.full_tensor().clone() for p in trainer.model.parameters())
        return update()

    trainer.worker.collect, trainer._update = seen, kept
    trainer.task.reward = lambda problem, text: sum(map(ord, text)) % 7 / 7
    metrics = trainer.step()
    second = trainer.step() if llm is not None else {}
    trainer.save()
    save_weights(trainer.model, pathlib.Path(job["output_dir"]) / "model", max_file_bytes=20_000)
    result = {
        "rollouts": [(r.group, r.token_ids, r.logprobs) for r in rollouts],
        "gradients": gradients,
        "metrics": metrics,
        "second": second,
        "weights": {n: p.full_tensor().detach() for n, p in trainer.model.named_parameters()},
    }
    if trainer.rank == 0:
        torch.save(result, out_file)
    dist.barrier()
    dist.destroy_process_group()


def fit_and_die(trainer: Trainer, step: int) -> None:
    backward = trainer._backward

    def dying(*args):
        if trainer.steps_done == step and trainer.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return backward(*args)

    trainer._backward = dying
    trainer.task.reward = lambda problem, text: float(len(text) % 2)
    trainer.fit()


if __name__ == "__main__":
    main(*sys.argv[1:])
