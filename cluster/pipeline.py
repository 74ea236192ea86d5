"""A replica in several stages: the first in this process, the others in workers of their own.

The driver decides, the others obey. A step's plan goes to every stage as one small message, hidden states go from stage
to stage, tokens come back from the last. Several steps are under way at once, so that stages work at the same time;
each computes them in the order of their plans.
"""

from __future__ import annotations

import pathlib
import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, wait
from datetime import timedelta
from queue import SimpleQueue

import torch
from torch import Tensor

from ..engine.config import EngineConfig
from ..engine.executor import ModelInfo, WorkerError, stage_layers
from ..engine.model_runner import Drawn, Plan
from ..engine.request import SampledToken
from ..engine.weights import free_port
from ..engine.worker import Worker
from ..model.stage import Layers
from .calls import WorkerHandle, gather, start, start_all
from .link import PLANS, TOKENS, Link, Mail
from .workers import LocalHandle, RemoteWorkers

TRACED_STEPS = 10_000


class StageWorker(Worker):
    """A `Worker` that takes its steps from the first stage. threads: CPU threads of each stage."""

    def __init__(
        self, path: pathlib.Path, config: EngineConfig, layers: Layers | None, rank: int, sharers: int, threads: int
    ):
        self.threads = min(threads, torch.get_num_threads())
        torch.set_num_threads(self.threads)
        super().__init__(path, config, layers, sharers)
        self.rank = rank
        self.link: Link
        self._trace: deque[tuple[float, float]] = deque(maxlen=TRACED_STEPS)

    def connect(self, address: str, port: int) -> None:
        """Join the other stages' link."""
        stages = self.config.pipeline_parallel_size
        # a stage says what it misses before the driver gives up on it
        self.link = Link(address, port, self.rank, stages, 0.9 * self.config.worker_timeout, self.model.device)

    def execute_model(self, plan: Plan, hidden: Tensor | None = None) -> Tensor | Drawn:
        """Compute a step, and note when."""
        begin = time.time()
        out = super().execute_model(plan, hidden)
        if isinstance(out, Drawn):
            out.wait()
        self._trace.append((begin, time.time()))
        return out

    def take_trace(self) -> list[tuple[float, float]]:
        """Start and end of the last steps, in seconds since the epoch; forgets them."""
        trace = list(self._trace)
        self._trace.clear()
        return trace

    def serve_steps(self) -> None:
        """Compute the steps whose plans come, until an error, which the other stages notice."""
        torch.set_num_threads(self.threads)  # of this thread, which computes from now on
        arrivals: SimpleQueue = SimpleQueue()
        threading.Thread(target=self._take_in, args=(arrivals,), daemon=True).start()
        last = self.rank == self.config.pipeline_parallel_size - 1
        try:
            for plan, hidden, work in iter(arrivals.get, None):
                self.link.wait_hidden(work if work is not None else self.link.expect_hidden(hidden))
                out = self.execute_model(plan, hidden)
                if last:
                    assert isinstance(out, Drawn)
                    self.link.send(out.wait(), 0, TOKENS)
                else:
                    assert isinstance(out, Tensor)
                    self.link.send_hidden(out)
        finally:
            self.link.close()
        raise WorkerError("the first stage is gone")

    def _take_in(self, arrivals: SimpleQueue) -> None:
        """Receive plans while the stage computes, and let the stage before send what they need."""
        try:
            while True:
                plan = self.link.expect(0, PLANS).wait()
                shape = len(plan.token_ids), self.model.config.hidden_size
                hidden = torch.empty(shape, dtype=self.model.dtype, device=self.model.device)
                # over nccl a receive would hold a part of the GPU
                arrivals.put((plan, hidden, None if self.link.on_gpu else self.link.expect_hidden(hidden)))
        except RuntimeError:
            arrivals.put(None)


class PipelineStep:
    """The tokens of a step under way."""

    def __init__(self, executor: PipelineExecutor, mail: Mail):
        self._executor = executor
        self._mail = mail

    def wait(self) -> list[SampledToken]:
        """Return the tokens. Raises what a stage raised, or WorkerError after config.worker_timeout seconds."""
        limit = self._executor.config.worker_timeout
        try:
            return self._mail.wait(timedelta(seconds=limit))
        except RuntimeError as error:
            try:
                self._executor.check_stages()
            finally:
                self._executor.close()  # no stage waits for what will never come
            name = self._executor.remote[-1].name
            raise WorkerError(f"{name} did not answer within {limit:g} s: {error}") from error


class PipelineExecutor(RemoteWorkers):
    """An `Executor` of several stages.

    remote: handles of the stages after the first. address: of this process, where they reach it. sharers: workers that
    share the memory of a device. threads: CPU threads of each stage.
    """

    is_local = False

    def __init__(
        self,
        path: pathlib.Path,
        config: EngineConfig,
        remote: Sequence[WorkerHandle],
        address: str,
        sharers: int,
        threads: int,
    ):
        self.config = config
        self.remote = remote
        layers = stage_layers(path, config)
        made = []
        for rank, handle in enumerate(remote, 1):
            made.append(start(handle, "make", StageWorker, path, config, layers[rank], rank, sharers, threads))
        self.first = StageWorker(path, config, layers[0], 0, sharers, threads)
        gather(made, config.start_timeout)
        super().__init__([LocalHandle("stage 0", self.first), *remote], address, config)
        self.info = ModelInfo.of(self.collective_rpc("info", timeout=config.start_timeout))
        self.collective_rpc("initialize_cache", self.info.num_blocks, timeout=config.start_timeout)
        port = free_port(address)
        connected = start_all(remote, "connect", address, port)
        self.first.connect(address, port)
        gather(connected, config.worker_timeout)
        self._serving = start_all(remote, "serve_steps")  # a result is a failure

    def submit(self, plan: Plan) -> PipelineStep:
        """Start a step; the first stage has computed it when this returns."""
        link = self.first.link
        mail = link.expect(len(self.remote), TOKENS)
        for rank in range(1, len(self.remote) + 1):
            link.send(plan, rank, PLANS)
        hidden = self.first.execute_model(plan)
        assert isinstance(hidden, Tensor)
        link.send_hidden(hidden)
        return PipelineStep(self, mail)

    def check_stages(self, timeout: float = 1.0) -> None:
        """Raise the error of a stage that ended, if one does within `timeout` seconds."""
        wait([future for _, future in self._serving], timeout, FIRST_COMPLETED)
        errors = [future.exception() for _, future in self._serving if future.done()]
        for error in sorted(filter(None, errors), key=lambda e: "first stage is gone" in str(e)):
            raise error

    @property
    def broken(self) -> bool:
        """True if a stage has ended."""
        return any(future.done() for _, future in self._serving)

    def close(self) -> None:
        """End the processes of the other stages."""
        for handle in self.remote:
            handle.kill()
