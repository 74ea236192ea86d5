"""The times of each stage's steps in a replica: measured in the stages' processes, by wrapping their workers."""

from __future__ import annotations

from typing import Any

import ray

from samebits import LLM
from samebits.cluster.replicated_engine import ReplicatedEngine


def _in_each_stage(llm: LLM, function: Any) -> list[Any]:
    """Return function(host) of each stage of the only replica, called in its process."""
    assert isinstance(llm.engine, ReplicatedEngine)
    (client,) = llm.engine.serving
    return ray.get([actor.handle.__ray_call__.remote(function) for actor in client.actors])


def start_trace(llm: LLM) -> None:
    """Note from now on when each stage computes its steps."""

    def start(host: Any) -> None:
        import time

        compute = host.worker.execute_model
        host.trace = []

        def traced(*args: Any) -> Any:
            begin = time.time()
            out = compute(*args)
            host.trace.append((begin, time.time()))
            return out

        host.worker.execute_model = traced

    _in_each_stage(llm, start)


def take_trace(llm: LLM) -> list[list[tuple[float, float]]]:
    """Return the start and end of each step since `start_trace`, per stage, in seconds since the epoch."""
    return _in_each_stage(llm, lambda host: host.trace)
