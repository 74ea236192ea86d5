"""A replica in several stages: the first beside the engine, the others in actors of their own.

The engine decides, the stages obey. A step's plan goes to every stage as a call, hidden states go from stage to stage,
tokens are the result of the last stage's call. Several steps are under way at once, so that stages work at the same
time; each computes them in the order of their plans.
"""

from __future__ import annotations

import pathlib
import pickle
from collections import deque
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import ray
import torch
import torch.distributed as dist
from torch import Tensor

from ..engine.config import EngineConfig
from ..engine.executor import Executor, ModelInfo, StepResult
from ..engine.planner import Plan
from ..engine.request import SampledToken
from ..engine.sampler import SamplerOutput
from ..engine.weights import WorkerError
from ..engine.weights.group import listening_store, new_backend
from ..engine.weights.workers import arguments_of
from ..engine.worker import Worker
from ..model.stage import Layers
from .actors import Actor, RemoteCall, gather


class Link:
    """A stage's connection to those before and after it, over which hidden states go: gloo, or nccl on GPUs.

    timeout: seconds that they may take. Over nccl nobody here waits for them: they are ordered among the GPU's work. If
    they don't come, the tokens don't, and `PipelineStep.wait` says so; torch's watchdog ends the process later still.
    """

    def __init__(self, address: str, port: int, rank: int, stages: int, timeout: float, device: torch.device):
        self.rank = rank
        self.timeout = timeout
        backend = "nccl" if device.type == "cuda" else "gloo"
        # given a limit, nccl's wait blocks the host until the tensor is there, and no step could be prepared meanwhile
        self._limit = () if backend == "nccl" else (timedelta(seconds=timeout),)
        self._backend = new_backend(f"{address}:{port}", rank, stages, "pipeline", backend, timeout)
        self._sending: deque[tuple[dist.Work, Tensor]] = deque()

    def send(self, hidden: Tensor) -> None:
        """Send hidden states to the next stage, which may still be busy; returns at once."""
        hidden = hidden.contiguous()
        while self._sending and self._sending[0][0].is_completed():
            self._sending.popleft()
        work = self._backend.send([hidden], self.rank + 1, 0)
        self._sending.append((work, hidden))  # whose memory it needs until then

    def receive(self, hidden: Tensor) -> None:
        """Write hidden states of the stage before to `hidden`, before what is computed next.

        Raises WorkerError where none come in time over gloo.
        """
        try:
            self._backend.recv([hidden], self.rank - 1, 0).wait(*self._limit)
        except RuntimeError as error:
            what = f"hidden states of stage {self.rank - 1}"
            raise WorkerError(f"{what} did not come within {self.timeout:g} s, or its process died: {error}") from error

    def close(self) -> None:
        """Cut the connection, which the other stages notice."""
        self._backend.abort()


class StageWorker(Worker):
    """A `Worker` in a process of its own."""

    def __init__(self, path: pathlib.Path, config: EngineConfig, layers: Layers | None, rank: int, sharers: int):
        super().__init__(path, config, layers, sharers)
        self.rank = rank
        self.link: Link

    def listen(self) -> tuple[str, int]:
        """Return an address of this process, as the cluster's other nodes reach it, at which `connect` expects them."""
        host = ray.util.get_node_ip_address()
        self._store = listening_store(host)
        return host, self._store.port

    def connect(self, address: str, port: int) -> None:
        """Join the other stages of the replica."""
        stages = self.config.pipeline_parallel_size
        # a stage says what it misses before the driver gives up on it
        self.link = Link(address, port, self.rank, stages, 0.9 * self.config.worker_timeout, self.model.device)

    def run_step(self, data: bytes) -> list[SampledToken] | None:
        """Compute a stage's part of a step; the last stage returns the tokens. data: the pickled plan.

        An error cuts the link: the stages after this one would wait for hidden states that never come.
        """
        try:
            plan = pickle.loads(data)
            shape = len(plan.token_ids), self.model.config.hidden_size
            hidden = torch.empty(shape, dtype=self.model.dtype, device=self.model.device)
            self.link.receive(hidden)
            out = self.execute_model(plan, hidden)
            if isinstance(out, SamplerOutput):
                return out.wait()
            self.link.send(out)
            return None
        except BaseException:
            self.link.close()
            raise


class PipelineStep:
    """The tokens of a step under way. calls: one per stage after the first. timeout: seconds that they may take."""

    def __init__(self, calls: Sequence[RemoteCall], timeout: float):
        self._calls = calls
        self._timeout = timeout

    def wait(self) -> list[SampledToken]:
        """Return the tokens. Raises what a stage raised, or WorkerError."""
        return gather(self._calls, self._timeout)[-1]


class PipelineExecutor(Executor):
    """An `Executor` in a replica's first actor. first: its own worker; stages: the actors of the later ones."""

    def __init__(self, config: EngineConfig, info: ModelInfo, first: StageWorker, stages: Sequence[Actor]):
        super().__init__(1 + len(stages), config.start_timeout)
        self.info = info
        self.first = first
        self.stages = stages
        self.is_local = not stages
        self.timeout = config.worker_timeout

    def submit(self, plan: Plan) -> StepResult:
        """Start a step; the first stage has computed it when this returns."""
        # pickled here: arrays from Ray's own serializer are read-only, a type that kernels aren't compiled for
        data = pickle.dumps(plan, pickle.HIGHEST_PROTOCOL) if self.stages else b""
        calls = [stage.call("run_step", data) for stage in self.stages]
        out = self.first.execute_model(plan)
        if isinstance(out, SamplerOutput):
            return out
        self.first.link.send(out)
        return PipelineStep(calls, self.timeout)

    def collective_rpc(self, method: str, *args: Any, timeout: float | None = None) -> list[Any]:
        """Call a method of every stage's worker and return the results; raise an error once all have ended."""
        calls = [stage.call(method, *arguments_of(i, args)) for i, stage in enumerate(self.stages, 1)]
        try:
            own = getattr(self.first, method)(*arguments_of(0, args))
        finally:
            others = gather(calls, timeout or self.timeout)
        return [own, *others]
