"""A replica: an `EngineCore` in a process of its own, which steps by itself and reports what comes of it."""

from __future__ import annotations

import pathlib
import time
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Any

import torch

from ..engine.config import EngineConfig
from ..engine.core import EngineCore
from ..engine.executor import Executor, ModelInfo
from ..engine.input_processor import load_tokenizer
from ..engine.outputs import EngineStats
from ..engine.request import Request, SampledToken

REPORT_STEPS = 16  # most steps between reports of tokens that nobody waits for, which a death would cost


@dataclass(frozen=True)
class ReplicaInfo:
    """What the driver needs to know of a replica. capacity: tokens of its KV cache."""

    model: ModelInfo
    stats: EngineStats
    capacity: int


@dataclass
class SampleProgress:
    """What is new of a sample: its tokens from number `start` on."""

    index: int
    start: int
    tokens: list[SampledToken]
    versions: list[tuple[int, bool]]
    finish_reason: str | None
    stop_reason: str | int | None
    text: str | None


@dataclass
class Progress:
    """What is new of a request. serial: of its assignment. prompt_scores: all of them, with the first token."""

    serial: int
    samples: list[SampleProgress]
    prompt_scores: list[SampledToken] = field(default_factory=list)
    num_prefix_hit: int | None = None

    @classmethod
    def take(cls, request: Request) -> Progress:
        """Collect what wasn't reported of a request, which then counts as reported."""
        samples = []
        for s in request.samples:
            if s.news:
                samples.append(
                    SampleProgress(
                        index=s.sample_index,
                        start=s.reported,
                        tokens=s.sampled[s.reported :],
                        versions=s.versions[s.reported :],
                        finish_reason=s.finish_reason,
                        stop_reason=s.stop_reason,
                        text=s.text,
                    )
                )
                s.reported = len(s.sampled)
                s.reported_end = s.finish_reason is not None
        starts = any(s.index == s.start == 0 for s in samples)
        scores = request.prompt_scores if starts else []
        return cls(request.serial, samples, scores, request.samples[0].num_prefix_hit)

    def apply(self, request: Request) -> int:
        """Bring the driver's copy of the request up to date. Return how many samples ended."""
        ended = 0
        for new in self.samples:
            sample = request.samples[new.index]
            assert len(sample.sampled) == new.start, f"{request.request_id}: tokens were lost or doubled"
            sample.sampled += new.tokens
            sample.versions += new.versions
            sample.token_ids += [t.token_id for t in new.tokens]
            ended += sample.finish_reason is None and new.finish_reason is not None
            sample.finish_reason = new.finish_reason
            sample.stop_reason = new.stop_reason
            sample.text = new.text
        request.prompt_scores = request.prompt_scores or self.prompt_scores
        first = request.samples[0]
        if first.num_prefix_hit is None:
            first.num_prefix_hit = self.num_prefix_hit
        return ended


@dataclass
class Report:
    """What a replica says now and then, at least as a sign of life."""

    progress: list[Progress]
    stats: EngineStats


@dataclass
class Command:
    """A method of the engine, to be called between two steps."""

    method: str
    args: tuple
    result: Future = field(default_factory=Future)


class Replica:
    """Runs in an actor, beside the worker of the first stage."""

    def __init__(self, path: pathlib.Path, config: EngineConfig, executor: Executor, threads: int):
        self.config = config
        self.threads = threads
        tokenizer = None if config.skip_tokenizer_init else load_tokenizer(path)
        self.engine = EngineCore(path, config, executor, tokenizer)
        self._commands: SimpleQueue[Command] = SimpleQueue()

    # --- from other threads -----------------------------------------------------------------------------------------

    def post(self, method: str, *args: Any) -> None:
        """Have a method of the engine called between two steps."""
        self._commands.put(Command(method, args))

    def command(self, method: str, *args: Any) -> Any:
        """Have a method of the engine called between two steps, and return its result."""
        command = Command(method, args)
        self._commands.put(command)
        return command.result.result()

    # --- the engine's thread ----------------------------------------------------------------------------------------

    @property
    def working(self) -> bool:
        """True if there is a step to compute."""
        return self.engine.ready and not self.engine.paused and bool(self.engine.requests)

    def run(self) -> Iterator[Report]:
        """Step for ever, and yield a report when it is due; an error ends the replica."""
        torch.set_num_threads(self.threads)  # of this thread, which computes from now on
        heartbeat = min(1.0, self.config.worker_timeout / 4)
        news: dict[str, Request] = {}
        load = (0, 0)
        steps = 0
        reported = time.monotonic()
        while True:
            self._run_commands(0.0 if self.working else heartbeat)
            working = self.working
            if working:
                self.engine.step()
                steps += 1
            news |= self.engine.outbox
            self.engine.outbox.clear()
            stats = self.engine.stats()
            waited_for = any(r.due for r in news.values())
            changed = (stats.num_running, stats.num_waiting) != load
            silent = time.monotonic() - reported >= heartbeat
            if waited_for or changed or silent or (working and steps % REPORT_STEPS == 0) or (news and not working):
                yield Report([Progress.take(r) for r in news.values()], stats)
                news = {}
                load = (stats.num_running, stats.num_waiting)
                reported = time.monotonic()

    def _run_commands(self, wait: float) -> None:
        """Execute the commands that have come, or wait up to `wait` seconds for the first one."""
        try:
            self._execute(self._commands.get(timeout=wait) if wait else self._commands.get_nowait())
            while True:
                self._execute(self._commands.get_nowait())
        except Empty:
            return

    def _execute(self, command: Command) -> None:
        try:
            if command.method == "add_request":
                self._add_request(*command.args)
            else:
                command.result.set_result(getattr(self.engine, command.method)(*command.args))
        except Exception as error:
            command.result.set_exception(error)

    def _add_request(self, request: Request) -> None:
        """Add a request, or report it as failed."""
        for sample in request.samples:
            sample.reported = len(sample.sampled)
            sample.reported_end = sample.finish_reason is not None
        try:
            self.engine.add_request(request)
        except Exception as error:
            request.finish("error", f"{type(error).__name__}: {error}")
            self.engine.outbox[request.request_id] = request
