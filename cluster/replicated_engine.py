"""Several replicas behind one queue.

A request goes to one replica, with all its samples, and lives here, too: a replica that dies is started again, and its
requests go on elsewhere from the tokens that they have. As sampling counts positions and no schedule changes a bit,
they get the tokens that they would have got.
"""

from __future__ import annotations

import itertools
import logging
import pathlib
import time
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import fields, replace
from queue import Empty
from typing import Any

from ..engine.config import EngineConfig
from ..engine.engine import MEMORY_TAGS, WorkerEngine
from ..engine.executor import WorkerError
from ..engine.interrupts import deferred_interrupt
from ..engine.outputs import EngineStats
from ..engine.request import Request
from ..engine.weights import WeightUpdate, WeightUpdateError
from ..engine.worker import max_model_len
from ..model.checkpoint import StoredWeights
from .affinity import PrefixAffinity
from .calls import outcomes
from .lifecycle import Event, Launcher, ReplicaState
from .ray_cluster import NoRoomError, connect, node_address, node_id, sharers_of_memory, threads_per_worker
from .replica import ReplicaInfo, Report
from .workers import LOOPBACK, RemoteWorkers

logger = logging.getLogger(__name__)

MAX_DEATHS = 3  # of replicas that a request may see before it is held to be the cause
MAX_STARTS = 3  # in a row that may fail
AFFINITY_SLACK = 8  # samples that a replica may have more than the least loaded and still get a prompt that it knows
POLL = 0.1  # seconds that a step waits for reports


class ReplicatedEngine(WorkerEngine):
    """An `Engine` of replicas on a Ray cluster. They step by themselves; `step` takes in what they report."""

    def __init__(self, path: pathlib.Path, config: EngineConfig):
        super().__init__()
        self.max_model_len = max_model_len(path, config)
        self.stored: StoredWeights | None = StoredWeights.at(path)
        connect(config)
        threads = threads_per_worker(config)
        self._launcher = Launcher(path, config, sharers_of_memory(config, threads), threads)
        self._events = self._launcher.events
        self._affinity = PrefixAffinity()
        self._serials = itertools.count(1)
        self._unassigned: dict[str, Request] = {}
        self._deaths: dict[str, float] = defaultdict(float)  # seen by a request
        self._newcomers: list[Event] = []  # replicas that can't be admitted yet
        self._update: WeightUpdate | None = None  # the last one begun: nobody is admitted while it is open
        self._update_until = 0.0
        self._workers: RemoteWorkers | None = None
        self.replicas = [ReplicaState(i) for i in range(config.replicas)]
        try:
            infos = self._start_all()
        except BaseException:
            self.close()
            raise
        self._describe(config, infos)
        for one in self.replicas:
            self._follow(one)
            self._serve(one)

    def _start_all(self) -> list[ReplicaInfo]:
        for one in self.replicas:
            self._launcher.in_thread(self._launcher.launch, one)
        infos: list[ReplicaInfo] = []
        while len(infos) < len(self.replicas):
            event = self._events.get()
            if event.kind == "not started":
                raise event.value
            if event.kind == "started":
                assert event.incarnation is not None
                infos.append(event.incarnation.info)
                check_alike(infos[0], infos[-1])
        return infos

    def _describe(self, config: EngineConfig, infos: list[ReplicaInfo]) -> None:
        models = [info.model for info in infos]
        self.contract = models[0].contract
        self.eos_token_ids = models[0].eos_token_ids
        self.table = models[0].table
        self.weight_bytes = sum(m.weight_bytes for m in models)
        self.kv_cache_bytes = sum(m.kv_cache_bytes for m in models)
        self.capacity = sum(info.capacity for info in infos)
        self.replica_capacity = min(info.capacity for info in infos)
        self._like = infos[0]
        # a replica that is started again has the same room, however much memory is free then
        self.config = replace(config, kv_cache_memory_bytes=min(m.stage_kv_bytes for m in models))
        self._launcher.config = self.config

    @property
    def serving(self) -> list[ReplicaState]:
        """The replicas that take requests."""
        return [one for one in self.replicas if one.status == "serving"]

    # --- what threads tell ------------------------------------------------------------------------------------------

    def poll(self) -> None:
        """Take in what replicas and threads have told, without waiting."""
        self._take_events(0.0)

    def _take_events(self, wait: float) -> None:
        try:
            event = self._events.get(timeout=wait) if wait else self._events.get_nowait()
            while True:
                with deferred_interrupt():
                    self._handle(event)
                event = self._events.get_nowait()
        except Empty:
            pass
        if self._newcomers and not self._update_is_open:
            newcomers = self._newcomers
            self._newcomers = []
            for newcomer in newcomers:
                self._handle(newcomer)

    def _handle(self, event: Event) -> None:
        """React to an event. A replica about which that fails is ended."""
        one = event.replica
        if one is None:  # somebody wanted to wake `step` up
            return
        if event.incarnation is not None and event.incarnation is not one.current:  # it is of one that has ended
            return
        try:
            self._react(event, one)
        except Exception as error:
            logger.exception("%s: %r can't be dealt with; it is ended", one.name, event.kind)
            self._lose(one, error)

    def _react(self, event: Event, one: ReplicaState) -> None:
        match event.kind:
            case "report":
                self._take(one, event.value)
            case "refused":
                serial, error = event.value
                if serial in one.requests:
                    self._end(one.requests[serial], "error", f"{type(error).__name__}: {error}")
            case "waiting" | "starting":
                one.status = event.kind
            case "started":
                check_alike(self._like, one.current.info)  # type: ignore[union-attr]
                self._follow(one)
                self._admit(event, one)
            case "ready":
                self._admit(event, one)
            case "not started":
                self._not_started(one, event.value)
            case "lost":
                self._lose(one, event.value)

    # --- replicas come and go ---------------------------------------------------------------------------------------

    def _admit(self, event: Event, one: ReplicaState) -> None:
        """Let a new replica serve once it has the weights in force; until then see to it that it gets them."""
        new = one.current
        assert new is not None
        if self._update_is_open:
            self._newcomers.append(event)
            return
        version = event.value if event.kind == "ready" else None
        untouched = self.weight_version == 0 and self.stored is not None and self.stored.unchanged
        serving = self.serving
        if not self.has_weights or version == self.weight_version or (untouched and not serving):
            self._serve(one)
            return
        if not serving and (self.stored is None or not self.stored.unchanged):
            logger.error("no replica holds weight version %d any more: an update is needed", self.weight_version)
            self.has_weights = False
            self.stored = None
            self._serve(one)
            return
        donor = serving[one.index % len(serving)].current if serving else None
        arguments = one, new, donor, self.stored, self.weight_version
        self._launcher.in_thread(self._launcher.bring_weights, *arguments)

    def _follow(self, one: ReplicaState) -> None:
        """Let a replica run, and hear what it reports."""
        self._launcher.in_thread(self._launcher.follow, one, one.current)

    def _serve(self, one: ReplicaState) -> None:
        """Bring a replica that has the right weights into the state that all are in, and give it requests."""
        new = one.current
        assert new is not None
        one.status = "serving"
        one.stats = new.info.stats
        one.failed_starts = 0
        self._change_workers()
        if not self.has_weights:
            new.post("release_memory", ("weights",))
            new.post("assume_version", self.weight_version, self.stored)
        if not self.has_kv_cache:
            new.post("release_memory", ("kv_cache",))
        if self.paused:
            new.post("pause", True)
        logger.info("%s serves with weight version %d", one.name, self.weight_version)
        waiting = self._unassigned
        self._unassigned = {}
        for request in waiting.values():
            self._assign(request)

    def _not_started(self, one: ReplicaState, error: Exception) -> None:
        """Start a replica again that didn't come up, unless it has failed too often."""
        logger.error("%s did not start: %s", one.name, error)
        one.current = None  # whatever else is told of these processes comes too late
        others = any(other.status in ("starting", "serving") for other in self.replicas if other is not one)
        if not isinstance(error, NoRoomError) or not others:  # else it waits for another node
            one.failed_starts += 1
        if one.failed_starts < MAX_STARTS:
            self._launcher.in_thread(self._launcher.launch, one)
            return
        one.status = "failed"
        self._launcher.end(one)
        if all(other.status == "failed" for other in self.replicas):
            self.failure = f"no replica starts any more: {error}"

    def _lose(self, one: ReplicaState, error: Exception) -> None:
        """Start a replica again; its requests go on elsewhere."""
        if one.current is not None:
            one.current.kill()
            one.current = None
        if one.status != "serving":
            self._not_started(one, error)
            return
        logger.error("%s is lost (%s); its %d requests go on elsewhere", one.name, error, len(one.requests))
        one.status = "starting"
        one.stats = None
        requests = one.requests
        received = one.received
        one.requests = {}
        one.received = set()
        one.load = 0
        self._change_workers()
        if not self._launcher.closing.is_set():
            self._launcher.in_thread(self._launcher.launch, one)
        for serial, request in requests.items():
            # one that was dead before it got the request counts less: all may have died together
            self._deaths[request.request_id] += 1.0 if serial in received else 1 / len(self.replicas)
            if self._deaths[request.request_id] < MAX_DEATHS:
                self._assign(request)
            else:
                self._end(request, "error", "replicas died, one after the other, while they worked on it")

    # --- requests ---------------------------------------------------------------------------------------------------

    def check_fits(self, request: Request) -> None:
        """Raise ValueError where a replica's KV cache could never hold one of the request's samples."""
        request.samples[0].check_fits(self.replica_capacity)

    def add_request(self, request: Request) -> None:
        """Give a request to a replica, or keep it until one serves."""
        self.poll()
        self.requests[request.request_id] = request
        self._assign(request)

    def _assign(self, request: Request) -> None:
        one = self._choose(request)
        if one is None:
            self._unassigned[request.request_id] = request
            return
        incarnation = one.current
        assert incarnation is not None
        serial = next(self._serials)
        request.serial = serial
        one.requests[serial] = request
        one.load += sum(s.finish_reason is None for s in request.samples)
        received = one.received

        def arrived(done: Future) -> None:
            error = done.exception()
            if error is None:
                received.add(serial)
            elif not isinstance(error, WorkerError):  # whose death is another event
                self._events.put(Event("refused", one, incarnation, (serial, error)))

        incarnation.post("add_request", request).add_done_callback(arrived)

    def _choose(self, request: Request) -> ReplicaState | None:
        """The least loaded replica, or the one that knows the prompt's start, if it has little more to do."""
        serving = self.serving
        if not serving:
            return None
        keys = self._affinity.keys(request)
        known = self._affinity.find(keys)
        chosen = min(serving, key=lambda one: (one.load, one.index))
        for one in serving:
            if one.index == known and one.load <= chosen.load + AFFINITY_SLACK:
                chosen = one
        self._affinity.remember(keys, chosen.index)
        return chosen

    def _take(self, one: ReplicaState, report: Report) -> None:
        one.stats = report.stats
        for progress in report.progress:
            request = one.requests.get(progress.serial)
            if request is None:  # it was aborted meanwhile
                continue
            one.load -= progress.apply(request)
            self.outbox[request.request_id] = request
            if request.finished:
                self._forget(request)

    def _forget(self, request: Request) -> None:
        for one in self.replicas:
            one.requests.pop(request.serial, None)
            one.received.discard(request.serial)
        self._unassigned.pop(request.request_id, None)
        self._deaths.pop(request.request_id, None)
        self.requests.pop(request.request_id, None)

    def _end(self, request: Request, reason: str, detail: str | None = None) -> None:
        """End all samples of a request that are still unfinished."""
        unfinished = request.finish(reason, detail)
        for one in self.replicas:
            if request.serial in one.requests:
                one.load -= len(unfinished)
        self._forget(request)
        self.outbox[request.request_id] = request

    def abort_request(self, request_id: str) -> bool:
        """End a request with finish_reason "abort". False if there is none of this id."""
        request = self.requests.get(request_id)
        if request is None:
            return False
        owner = next((one for one in self.serving if request.serial in one.requests), None)
        self._end(request, "abort")
        if owner is not None and owner.current is not None:
            owner.current.post("abort_request", request_id)
        return True

    def step(self) -> None:
        """Take in what the replicas have computed, which need no call for it."""
        if self.failure is not None:
            raise WorkerError(self.failure)
        if not self.ready:
            raise RuntimeError("the engine sleeps; call wake_up first, and update_weights where they were dropped")
        self._take_events(POLL)

    def wake(self) -> None:
        """End another thread's `step` without a report."""
        self._events.put(Event("wake"))

    # --- weights ----------------------------------------------------------------------------------------------------

    @property
    def workers(self) -> RemoteWorkers:
        """The workers of all replicas that serve. Raises WorkerError where none does."""
        if self._workers is None:
            raise WorkerError("no replica is alive")
        return self._workers

    def _change_workers(self) -> None:
        """Make the list of workers anew; groups of those of before are of no more use."""
        if self._workers is not None:
            self._workers.leave_all()
        self._workers = None
        incarnations = [one.current for one in self.serving if one.current is not None]
        if incarnations:
            together = {node_id(), *(i.info.node for i in incarnations)}
            address = LOOPBACK if len(together) == 1 else node_address()
            workers = []
            for incarnation in incarnations:
                workers += incarnation.workers
            self._workers = RemoteWorkers(workers, address, self.config)

    @property
    def _update_is_open(self) -> bool:
        update = self._update
        return update is not None and update.open and time.monotonic() < self._update_until

    def begin_weight_update(self) -> WeightUpdate:
        """Open an update of the replicas that serve. Those that start meanwhile get its weights afterwards."""
        deadline = time.monotonic() + self.config.start_timeout
        self.poll()
        while not self.serving and self.failure is None and time.monotonic() < deadline:
            self._take_events(POLL)
        self._update = WeightUpdate(self.workers, self.table)
        self._update_until = time.monotonic() + self.config.start_timeout
        return self._update

    def commit_weight_update(self, update: WeightUpdate, version: int, recompute_running: bool = True) -> None:
        """Put an update in force that all replicas have. Then there is no way back: one that fails starts anew."""
        self.poll()
        if update.workers is not self._workers:
            raise WeightUpdateError("a replica died or joined during the update; send it again")
        update.prepare()
        with deferred_interrupt():
            replicas = self.serving
            calls = [
                one.current.command("switch_weights", update.id, version, recompute_running, update.stored)
                for one in replicas
                if one.current is not None
            ]
            self.weight_version = version
            self.has_weights = True
            self.stored = update.stored
            update.close()
            done = 0
            for one, answer in zip(replicas, outcomes(calls, self.config.worker_timeout), strict=True):
                if isinstance(answer, Exception):
                    logger.error("%s failed to switch to weight version %d", one.name, version)
                    self._lose(one, answer)
                else:
                    done += 1
            if not done and self.stored is None:
                self.has_weights = False
                raise WorkerError("every replica failed while it switched to the new weights, which are lost")

    def weight_checksums(self) -> dict[str, str]:
        """A hash of each tensor's bytes, by name. RuntimeError where replicas differ."""
        found = self._command_all("weight_checksums", timeout=self.config.start_timeout)
        if any(hashes != found[0] for hashes in found):
            raise RuntimeError("the replicas' weights differ; update them")
        return found[0]

    # --- all replicas -----------------------------------------------------------------------------------------------

    def _command_all(self, method: str, *args: Any, timeout: float | None = None) -> list[Any]:
        """Call a method of every engine that serves, and return the results.

        A replica that fails is lost, and comes back in the state that all are in then. What none of them can do is an
        error, and ends none.
        """
        self.poll()
        replicas = [one for one in self.serving if one.current is not None]
        limit = timeout or self.config.worker_timeout
        for one in replicas:
            one.current.patience = time.monotonic() + limit  # type: ignore[union-attr]
        calls = [one.current.command(method, *args) for one in replicas]  # type: ignore[union-attr]
        found = outcomes(calls, limit)
        errors = [x for x in found if isinstance(x, Exception)]
        if errors and len(errors) == len(found) and not any(isinstance(e, WorkerError) for e in errors):
            raise errors[0]
        for one, answer in zip(replicas, found, strict=True):
            if isinstance(answer, Exception):
                logger.error("%s failed to %s", one.name, method)
                self._lose(one, answer)
        return [x for x in found if not isinstance(x, Exception)]

    def pause(self, paused: bool) -> None:
        """Make all replicas stop between two steps, or go on."""
        self.paused = paused
        self._command_all("pause", paused)

    def reset_prefix_cache(self, reset_running_requests: bool = False) -> None:
        """Forget the cached prefixes of all replicas."""
        self._command_all("reset_prefix_cache", reset_running_requests)

    def release_memory(self, tags: Sequence[str] = MEMORY_TAGS) -> int:
        """Free what the tags name in all replicas, and return the bytes freed."""
        if "kv_cache" in tags:
            self.has_kv_cache = False
        if "weights" in tags:
            self.has_weights = False
        return sum(self._command_all("release_memory", tuple(tags)))

    def wake_up(self, tags: Sequence[str] = MEMORY_TAGS) -> None:
        """Take the memory again in all replicas."""
        self._command_all("wake_up", tuple(tags), timeout=self.config.start_timeout)
        if "kv_cache" in tags:
            self.has_kv_cache = True
        if "weights" in tags and self.stored is not None:
            self.has_weights = True

    def stats(self) -> EngineStats:
        """Sums over the replicas; a dead one's counts are lost."""
        known = [one.stats for one in self.replicas if one.stats is not None]
        total = {f.name: sum(getattr(stats, f.name) for stats in known) for f in fields(EngineStats)}
        total["weight_version"] = self.weight_version
        total["num_waiting"] += len(self._unassigned)
        return EngineStats(**total)

    def close(self) -> None:
        """End all replicas."""
        self._launcher.closing.set()
        for one in self.replicas:
            self._launcher.end(one)


def check_alike(first: ReplicaInfo, other: ReplicaInfo) -> None:
    """Raise NumericsError or ValueError where replicas differ in more than their load."""
    if first.model.contract is not None and other.model.contract is not None:
        first.model.contract.check(other.model.contract)
    if (first.model.table, first.model.eos_token_ids) != (other.model.table, other.model.eos_token_ids):
        raise ValueError("the replicas loaded different models; is the checkpoint the same on all nodes?")
