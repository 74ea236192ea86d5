"""Many processes: pipeline stages in child processes or Ray actors, and replicas as Ray actors behind one queue."""

from __future__ import annotations

import pathlib
from typing import Any

from ..engine.config import EngineConfig
from ..engine.core import EngineCore
from ..engine.engine import WorkerEngine
from .pipeline import PipelineExecutor
from .processes import ProcessHandle
from .sizing import default_threads, on_gpus, visible_gpus
from .workers import LOOPBACK


def make_engine(path: pathlib.Path, config: EngineConfig, tokenizer: Any) -> WorkerEngine:
    """The engine that a configuration of several processes asks for."""
    if config.backend == "ray":
        from .replicated_engine import ReplicatedEngine

        return ReplicatedEngine(path, config)
    return EngineCore(path, config, _child_processes(path, config), tokenizer)


def _child_processes(path: pathlib.Path, config: EngineConfig) -> PipelineExecutor:
    """A pipeline whose later stages are children of this process."""
    stages = config.pipeline_parallel_size
    threads = default_threads(stages)
    gpus = visible_gpus() if on_gpus(config) else []
    sharers = -(-stages // len(gpus)) if gpus else stages
    handles: list[ProcessHandle] = []
    try:
        for rank in range(1, stages):
            gpu = gpus[rank % len(gpus)] if gpus else None
            handles.append(ProcessHandle(f"stage {rank}", threads, gpu))
        return PipelineExecutor(path, config, handles, LOOPBACK, sharers, threads)
    except BaseException:
        for handle in handles:
            handle.kill()
        raise
