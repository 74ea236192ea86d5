"""A rank of a trainer: one step, its rollouts and gradients; or a run in which a rank dies or fails."""

import errno
import os
import pathlib
import signal
import sys
from dataclasses import replace

import torch
import torch.distributed as dist

from samebits import LLM, SamplingParams
from samebits.integrations import Client, RemoteEngine
from samebits.trainer import save_weights
from samebits.trainer.rl import TrainConfig, Trainer, make_task


def main(job_file: str, out_file: str) -> None:
    job = torch.load(job_file, weights_only=False)
    base = {
        "model": job["model"], "groups_per_step": 5, "group_size": 4, "lr": 1e-3,
        "sampling": SamplingParams(max_tokens=9), "max_tokens_per_pack": 60, "steps": 4, "algorithm": "dapo",
        "engine": {"kv_cache_memory_bytes": 2**21}, "output_dir": pathlib.Path(job["output_dir"]), "save_every": 1,
    }  # fmt: skip
    config = TrainConfig(**base | job["changes"])
    if job["action"] != "step":
        ACTIONS[job["action"]](config, out_file)
        dist.destroy_process_group()
        return
    llm = None
    if job["engine_url"]:
        engine = RemoteEngine(Client(job["engine_url"]), config.model, job["sync_dir"])
        llm = LLM(config.model, engine=engine)
        config = replace(config, engine={})
    trainer = Trainer(config, make_task("arithmetic"), llm)
    gradients, rollouts = [], []
    collect, norm = trainer.worker.collect, trainer._gradient_norm

    def seen(*args):
        found = collect(*args)
        rollouts.extend(found)
        return found

    def kept():
        gradients.extend(p.grad.full_tensor().clone() for p in trainer.model.parameters())
        return norm()

    trainer.worker.collect, trainer._gradient_norm = seen, kept
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


def fit_and_die(config: TrainConfig, out_file: str) -> None:
    """Rank 1 is killed in the third step."""
    trainer = Trainer(config, make_task("arithmetic"))
    backward = trainer._backward

    def dying(*args):
        if trainer.steps_done == 2 and trainer.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return backward(*args)

    trainer._backward = dying
    trainer.task.reward = lambda problem, text: float(len(text) % 2)
    trainer.fit()


def fit_in_parts(config: TrainConfig, out_file: str) -> None:
    """Four steps at once, and two and two: what was logged, and the weights."""
    found = []
    for name, stops in (("whole", (4,)), ("parts", (2, 4))):
        folder = config.output_dir / name
        log = []
        for stop in stops:
            trainer = Trainer(replace(config, output_dir=folder, steps=stop), make_task("arithmetic"))
            trainer.worker.task.reward = lambda problem, text: sum(map(ord, text)) % 7 / 7
            assert trainer.resume() == (stop != stops[0])
            trainer.fit(log.append)
        validation = trainer.evaluate(3)
        found.append((log, validation, {n: p.full_tensor().detach() for n, p in trainer.model.named_parameters()}))
    if trainer.rank == 0:
        torch.save(found, out_file)
    dist.barrier()


def fail_alone(config: TrainConfig, out_file: str) -> None:
    """What each rank sees when one alone fails, at several places; it must not wait for the other."""
    trainer = Trainer(config, make_task("arithmetic"))
    trainer.task.reward = lambda problem, text: float(len(text) % 2)
    trainer.fit()
    seen = []

    def attempt(action) -> None:
        try:
            action()
            seen.append(None)
        except Exception as error:
            seen.append(f"{type(error).__name__}: {error}")

    def full(descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    problem = trainer.task.problem
    if trainer.rank == 1:
        trainer.task.problem = lambda *args: 1 / 0
    attempt(lambda: trainer.evaluate(4))
    attempt(trainer.step)
    trainer.task.problem = problem
    fsync, os.fsync = os.fsync, (full if trainer.rank == 0 else os.fsync)
    attempt(trainer.save)
    attempt(lambda: save_weights(trainer.model, config.output_dir / "model"))
    os.fsync = fsync
    attempt(trainer.step)
    if trainer.rank == 0:
        trainer.llm.engine.begin_weight_update = lambda: 1 / 0
    attempt(trainer.sync)
    versions = [trainer.llm.weight_version]
    trainer.llm.engine.__dict__.pop("begin_weight_update", None)
    attempt(trainer.resume)
    versions.append(trainer.llm.weight_version)
    attempt(trainer.step)
    every: list = [None] * trainer.world
    dist.all_gather_object(every, (seen, versions))
    if trainer.rank == 0:
        torch.save(every, out_file)
    dist.barrier()


ACTIONS = {"fit_and_die": fit_and_die, "fit_in_parts": fit_in_parts, "fail_alone": fail_alone}


if __name__ == "__main__":
    main(*sys.argv[1:])
