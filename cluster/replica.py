"""The actors of a replica: a stage's worker and, beside the first, an `EngineCore` that steps by itself and reports."""

from __future__ import annotations

import contextlib
import pathlib
import signal
import threading
import time
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any

from ..engine.config import EngineConfig
from ..engine.core import EngineCore
from ..engine.executor import ModelInfo
from ..engine.input_processor import load_tokenizer
from ..engine.outputs import EngineStats
from ..engine.request import Request, Sample, SampledToken
from ..engine.worker import WorkerInfo
from .actors import Actor
from .pipeline import PipelineExecutor, StageWorker

STATE = ("finish_reason", "stop_reason", "text", "num_prefix_hit", "routed_experts")  # of a sample, in each report
REPORT_STEPS = 16  # most steps between reports of tokens that nobody waits for, which a death would cost


@dataclass
class Progress:
    """A sample's unreported tokens and state. serial: of its request's assignment; start: the number of the first of
    its tokens.

    state: the attributes in `STATE`. prompt_scores: the request's, with its first token.
    """

    serial: int
    index: int
    start: int
    tokens: list[SampledToken]
    versions: list[tuple[int, bool]]
    state: dict[str, Any]
    prompt_scores: list[SampledToken]

    @classmethod
    def take(cls, sample: Sample) -> Progress:
        """Return what wasn't reported of a sample, which then counts as reported."""
        request = sample.request
        start = sample.reported
        sample.reported = len(sample.sampled)
        sample.reported_end = sample.finish_reason is not None
        scores = request.prompt_scores if sample.sample_index == start == 0 else []
        state = {name: getattr(sample, name) for name in STATE}
        new = sample.sampled[start:], sample.versions[start:]
        return cls(request.serial, sample.sample_index, start, *new, state, scores)

    def apply(self, request: Request) -> bool:
        """Bring the driver's copy of the request up to date. Return True if the sample ended."""
        sample = request.samples[self.index]
        assert len(sample.sampled) == self.start, f"{request.request_id}: tokens were lost or doubled"
        running = sample.finish_reason is None
        sample.sampled += self.tokens
        sample.versions += self.versions
        sample.token_ids += [t.token_id for t in self.tokens]
        for name, value in self.state.items():
            setattr(sample, name, value)
        request.prompt_scores = request.prompt_scores or self.prompt_scores
        return running and sample.finish_reason is not None


@dataclass
class ReplicaReport:
    """A replica's report: what is new of its requests, and its stats; at least as a sign of life."""

    progress: list[Progress]
    stats: EngineStats


class Host:
    """The class of the actors: a stage's worker and, beside the first, an engine that steps by itself.

    worker: once it is loaded; engine: once it is started.
    """

    worker: StageWorker
    engine: EngineCore

    def __init__(self) -> None:
        # Here, as methods run in other threads than the main one, which may set no signal's handler.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the driver's to take, which ends its workers in time
        warnings.filterwarnings("ignore", "The given NumPy array is not writable")  # Ray's shared memory is not
        self._commands: SimpleQueue[tuple[Future, str, tuple]] = SimpleQueue()

    def make_worker(self, *args: Any) -> WorkerInfo:
        """Make the worker, a StageWorker(*args), and return its description."""
        self.worker = StageWorker(*args)
        return self.worker.info()

    def call(self, method: str, *args: Any) -> Any:
        """Call a method of the worker and return its result."""
        return getattr(self.worker, method)(*args)

    def start(
        self, path: pathlib.Path, config: EngineConfig, model: ModelInfo, stages: Sequence[Actor]
    ) -> tuple[EngineStats, int]:
        """Make the engine, whose later stages are in other actors. Return its stats, and its capacity in tokens."""
        tokenizer = None if config.skip_tokenizer_init else load_tokenizer(path)
        self.engine = EngineCore(path, config, PipelineExecutor(config, model, self.worker, stages), tokenizer)
        return self.engine.stats(), self.engine.capacity

    def post(self, method: str, *args: Any) -> None:
        """Have a method of the engine called between two steps."""
        self._post(method, *args)

    def command(self, method: str, *args: Any) -> Any:
        """Have a method of the engine called between two steps, and return its result."""
        return self._post(method, *args).result()

    def _post(self, method: str, *args: Any) -> Future:
        """Queue a command from another thread than the engine's, and return its result to come."""
        result: Future = Future()
        self._commands.put((result, method, args))
        return result

    def live(self) -> None:
        """Return never: who waits for the result learns of the process's death."""
        threading.Event().wait()

    @property
    def working(self) -> bool:
        """True if there is a step to compute."""
        return self.engine.ready and not self.engine.paused and bool(self.engine.requests)

    def run(self) -> Iterator[ReplicaReport]:
        """Step for ever, and yield a report when it is due; an error ends the replica."""
        heartbeat = min(1.0, self.engine.config.worker_timeout / 4)
        counts = (0, 0)
        steps = 0
        reported = time.monotonic()
        while True:
            self._run_commands(0.0 if self.working else heartbeat)
            working = self.working
            if working:
                self.engine.step()
                steps += 1
            stats = self.engine.stats()
            waited_for = any(request.due for request in self.engine.outbox.values())
            more_or_fewer = (stats.num_running, stats.num_waiting) != counts
            silent = time.monotonic() - reported >= heartbeat
            if waited_for or more_or_fewer or silent or not working or steps % REPORT_STEPS == 0:
                progress: list[Progress] = []
                for request in self.engine.outbox.values():
                    progress += [Progress.take(sample) for sample in request.samples if sample.unreported]
                self.engine.outbox.clear()
                yield ReplicaReport(progress, stats)
                counts = (stats.num_running, stats.num_waiting)
                reported = time.monotonic()

    def _run_commands(self, wait: float) -> None:
        """Execute the commands that have come, or wait up to `wait` seconds for the first one."""
        with contextlib.suppress(Empty):
            while True:
                self._execute(*self._commands.get(timeout=wait))
                wait = 0.0

    def _execute(self, result: Future, method: str, args: tuple) -> None:
        try:
            result.set_result(getattr(self.engine, method)(*args))
        except Exception as error:
            result.set_exception(error)
            if method == "add_request":  # nobody waits for the result
                request = args[0]
                request.finish("error", f"{type(error).__name__}: {error}")
                self.engine.outbox[request.request_id] = request
