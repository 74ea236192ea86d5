"""How the workers of one machine, or of a Ray cluster's nodes, share its CPUs, memory and GPUs."""

from __future__ import annotations

import os

import torch

from ..engine.config import EngineConfig


def on_gpus(config: EngineConfig) -> bool:
    """True if workers compute on CUDA devices."""
    return (config.device or "cpu").startswith("cuda")


def default_threads(workers: int) -> int:
    """CPU threads per worker: what OMP_NUM_THREADS says, or as many as all can have on this machine."""
    return threads_of_environment() or max(1, len(os.sched_getaffinity(0)) // workers)


def threads_of_environment() -> int | None:
    """What OMP_NUM_THREADS says, if it is a number."""
    asked = os.environ.get("OMP_NUM_THREADS", "")
    return int(asked) if asked.isdigit() else None


def visible_gpus() -> list[str]:
    """The GPUs of this machine that may be used, as CUDA_VISIBLE_DEVICES names them."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(torch.cuda.device_count())))
    return [gpu.strip() for gpu in visible.split(",")]
