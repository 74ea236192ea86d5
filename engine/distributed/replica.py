"""The far side of a router's replica: an `EngineCore` in a worker process."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from ...kernels.contract import Contract
from ...model.checkpoint import StoredWeights
from ..config import EngineConfig
from ..core import EngineCore
from ..input_processor import load_tokenizer
from ..outputs import EngineStats
from ..request import Request, SampledToken
from ..weights import WeightTable
from . import ray_backend
from .fan_out import UpdateMember

REPORT_STEPS = 16  # after so many at the latest is told what nobody waits for: the tokens that an abort may lose


@dataclass
class ReplicaInfo:
    """What the router needs to know of a replica; capacity in tokens. stage_layers: how many each stage has."""

    contract: Contract | None
    eos_token_ids: tuple[int, ...]
    capacity: int
    table: WeightTable
    weight_bytes: int
    kv_cache_bytes: int
    stage_kv_bytes: int
    stage_layers: tuple[int, ...] | None


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
    """What is new of a request. serial: of its assignment. prompt_scores: with the first token, all of them."""

    serial: int
    samples: list[SampleProgress]
    prompt_scores: list[SampledToken] = field(default_factory=list)
    num_prefix_hit: int | None = None

    @classmethod
    def take(cls, request: Request) -> Progress:
        samples = []
        for s in request.samples:
            if s.news:
                start = s.reported
                ends = s.finish_reason, s.stop_reason, s.text
                samples.append(SampleProgress(s.sample_index, start, s.sampled[start:], s.versions[start:], *ends))
                s.reported, s.reported_end = len(s.sampled), s.finish_reason is not None
        scores = request.prompt_scores if any(s.index == s.start == 0 for s in samples) else []
        return cls(request.serial, samples, scores, request.samples[0].num_prefix_hit)

    def apply(self, request: Request) -> None:
        """To the router's copy of the request."""
        for new in self.samples:
            sample = request.samples[new.index]
            assert len(sample.sampled) == new.start, f"{request.request_id}: tokens were lost or doubled"
            sample.sampled += new.tokens
            sample.versions += new.versions
            sample.token_ids += [t.token_id for t in new.tokens]
            sample.finish_reason, sample.stop_reason, sample.text = new.finish_reason, new.stop_reason, new.text
        request.prompt_scores = request.prompt_scores or self.prompt_scores
        first = request.samples[0]
        first.num_prefix_hit = self.num_prefix_hit if first.num_prefix_hit is None else first.num_prefix_hit


class Replica(UpdateMember):
    """Served by a worker: between calls, `tick` runs the engine's steps and reports what is new."""

    BACKGROUND = UpdateMember.BACKGROUND | {"ping"}

    def __init__(self, path: str, config: EngineConfig, sharers: int):
        placement = ray_backend.own_placement() if config.backend == "ray" else None
        self.core = EngineCore(pathlib.Path(path), config, placement, sharers)
        if not config.skip_tokenizer_init:
            self.core.tokenizer = load_tokenizer(self.core.path)
        for peer in self.core.pipeline.remote:
            peer.on_lost = lambda: os._exit(1)  # a replica is of no use without a stage
        self.update = self.core.begin_weight_update()
        self.news: dict[str, Request] = {}
        self.load = 0, 0
        self.beats = 0
        self.occupied = False

    def describe(self) -> ReplicaInfo:
        core = self.core
        sizes = core.weight_bytes, core.kv_cache_bytes, core.pipeline.stage_kv_bytes
        layers = tuple(span[1] - span[0] for span in core.pipeline.layers if span is not None) or None
        return ReplicaInfo(core.contract, core.eos_token_ids, core.capacity, core.table, *sizes, layers)

    @property
    def working(self) -> bool:
        return self.core.ready and not self.core.paused and bool(self.core.requests)

    def tick(self, report: Callable[[tuple[list[Progress], EngineStats]], None]) -> bool:
        working = self.working
        if working:
            self.core.step()
        self.beats += 1
        self.news |= {r.request_id: r for r in self.core.take_progress()}
        stats, due = self.core.stats(), any(r.due for r in self.news.values())
        load = stats.num_running, stats.num_waiting
        if due or load != self.load or self.beats % REPORT_STEPS == 0 or not working:
            report(([Progress.take(r) for r in self.news.values()], stats))
            self.news, self.load = {}, load
        return working

    def ping(self) -> tuple[int, bool]:
        """(steps so far, is it to make some): a replica that is to and doesn't hangs."""
        return self.beats, self.working and not self.occupied

    @contextmanager
    def _occupied(self) -> Iterator[None]:
        """For work that takes its time, between steps."""
        self.occupied = True
        try:
            yield
        finally:
            self.occupied = False

    def submit(self, request: Request) -> None:
        for sample in request.samples:
            sample.reported, sample.reported_end = len(sample.sampled), sample.finish_reason is not None
        self.core.submit(request)

    def end(self, request_id: str, reason: str) -> None:
        if (request := self.core.requests.get(request_id)) is not None:
            self.core.end(request, reason)

    # --- weights and memory -----------------------------------------------------------------------------------------

    def begin_update(self) -> None:
        self.update = self.core.begin_weight_update()

    def commit_update(self, version: int, recompute_running: bool, stored: StoredWeights | None = None) -> None:
        self.update.stored = stored or self.update.stored
        self.core.commit_weight_update(self.update, version, recompute_running)
        self.begin_update()

    def addresses(self) -> list[tuple[str, int]]:
        return self.core.pipeline.stages.all("free_address")

    def send_weights(self, addresses: list[tuple[str, int]]) -> tuple[int, StoredWeights | None]:
        """To the stages of another replica; returns the version, and where it is stored."""
        with self._occupied():
            self.core.pipeline.each("send_weights", addresses)
        return self.core.weight_version, self.core.stored

    def adopt(self, version: int, stored: StoredWeights | None) -> None:
        """Becomes a replica that sleeps without the weights of this version, which are stored there, if anywhere."""
        self.core.release_memory(("weights",))
        self.core.adopt(version, stored)

    def take_weights(self, addresses: list[tuple[str, int]]) -> None:
        """From the stages of another replica, to be committed."""
        self.begin_update()
        self.core.pipeline.each("take_weights", addresses)
        if not self.update.given:
            self.update.given = set(self.update.table.shapes)  # type: ignore[union-attr]

    def join_group(self, *where) -> None:
        self.core.members().join(*where)

    def leave_group(self, name: str) -> bool:
        return self.core.leave_weight_group(name)

    def pause(self, paused: bool) -> None:
        self.core.pause(paused)

    def checksums(self) -> dict[str, str]:
        with self._occupied():
            return self.core.weight_checksums()

    def reset_prefix_cache(self, reset_running_requests: bool) -> None:
        self.core.reset_prefix_cache(reset_running_requests)

    def release_memory(self, tags: tuple[str, ...]) -> int:
        return self.core.release_memory(tags)

    def wake_up(self, tags: tuple[str, ...]) -> None:
        self.core.wake_up(tags)
