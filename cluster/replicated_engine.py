"""Several replicas behind one queue.

A request goes to one replica, with all its samples, and lives here, too: a replica that dies is started again, and its
requests go on elsewhere from the tokens that they have. As sampling counts positions and no schedule changes a bit,
they get the tokens that they would have got.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import pathlib
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import fields, replace
from queue import Empty, SimpleQueue
from typing import Any, Literal

from ..engine.config import EngineConfig
from ..engine.engine import MEMORY_TAGS, WorkerEngine
from ..engine.interrupts import deferred_interrupt
from ..engine.outputs import COUNTERS, EngineStats
from ..engine.request import Request
from ..engine.weights import WeightUpdate, WeightUpdateError, WorkerError
from ..engine.worker import max_model_len
from ..model.checkpoint import StoredWeights
from .actors import outcomes
from .affinity import PrefixAffinity
from .ray_cluster import NoRoomError, Placement, check_connected, connect, sharers_of_memory, threads_per_worker
from .replica import ReplicaInfo, Report
from .replica_client import ReplicaClient
from .workers import RemoteWorkers

logger = logging.getLogger(__name__)

MAX_DEATHS = 3  # of replicas that a request may see before it is held to be the cause
MAX_STARTS = 3  # in a row that may fail
AFFINITY_SLACK = 8  # samples that a replica may have more than the least loaded and still get a prompt that it knows
POLL = 0.1  # seconds that a step waits for reports


ROOM_SOON = 5.0  # seconds: a replica that has to wait longer for room on the cluster isn't waited for


class ReplicaState:
    """A replica as the driver sees it, over all its lives. load: unfinished samples that it has."""

    def __init__(self, index: int):
        self.index = index
        self.name = f"replica {index}"
        self.status: Literal["starting", "waiting", "serving", "failed"] = "starting"
        self.placement: Placement | None = None
        self.client: ReplicaClient | None = None
        self.requests: dict[int, Request] = {}  # by the serial numbers of their assignments
        self.received: set[int] = set()  # of these, those that the process is known to have got
        self.load = 0
        self.stats: EngineStats | None = None
        self.failed_starts = 0


class ReplicatedEngine(WorkerEngine):
    """An `Engine` of replicas on a Ray cluster. They step by themselves; `step` takes in what they report.

    A replica is started and followed in threads, which put what is to be done about it into a queue. The thread that
    drives the engine does it.
    """

    def __init__(self, path: pathlib.Path, config: EngineConfig):
        super().__init__()
        self.path = path
        self.config = config
        self.max_model_len = max_model_len(path, config)
        self.stored: StoredWeights | None = StoredWeights.at(path)
        connect(config)
        self._threads = threads_per_worker(config)
        self._sharers = sharers_of_memory(config, self._threads)
        self._todo: SimpleQueue[tuple[Callable, ReplicaState | None, ReplicaClient | None, tuple]] = SimpleQueue()
        self._closing = False
        self._affinity = PrefixAffinity()
        self._serials = itertools.count(1)
        self._unassigned: dict[str, Request] = {}
        self._deaths: dict[str, float] = defaultdict(float)  # seen by a request
        self._past: list[EngineStats] = []  # the last ones of replicas that died
        self._held: list[tuple[ReplicaState, ReplicaClient | None, int | None]] = []  # until an update is over
        self._update: WeightUpdate | None = None  # the last one begun: no replica is admitted while it is open
        self._update_until = 0.0
        self._workers: RemoteWorkers | None = None
        self._like: ReplicaInfo | None = None  # what all replicas must be like
        self.replicas = [ReplicaState(i) for i in range(config.replicas)]
        try:
            self._start_all()
        except BaseException:
            self.close()
            raise

    def _start_all(self) -> None:
        for one in self.replicas:
            self._in_thread(self._launch, one)
        infos: list[ReplicaInfo] = []
        while len(infos) < len(self.replicas):
            react, replica, client, args = self._todo.get()
            if react == self._not_started:
                raise args[0]
            if replica is not None and client is not None:
                replica.client = client
                infos.append(client.info)
                check_alike(infos[0], client.info)
        self._describe(infos)
        for one in self.replicas:
            self._in_thread(self._follow, one, one.client)
            self._serve(one)

    def _describe(self, infos: list[ReplicaInfo]) -> None:
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
        self.config = replace(self.config, kv_cache_memory_bytes=min(m.stage_kv_bytes for m in models))

    @property
    def serving(self) -> list[ReplicaState]:
        """The replicas that take requests."""
        return [one for one in self.replicas if one.status == "serving"]

    @property
    def clients(self) -> list[ReplicaClient]:
        """The replicas that take requests, in their present lives."""
        return [one.client for one in self.serving if one.client is not None]

    # --- threads ----------------------------------------------------------------------------------------------------

    def _in_thread(self, function: Callable, *args: Any) -> None:
        threading.Thread(target=function, args=args, daemon=True).start()

    def _tell(self, react: Callable, one: ReplicaState, client: ReplicaClient | None, *args: Any) -> None:
        """Have the driving thread call react(one, *args), unless the replica has another life by then."""
        self._todo.put((react, one, client, args))

    def _launch(self, one: ReplicaState) -> None:
        """Start a replica's processes, once the cluster has room for them."""
        client = None
        try:
            check_connected()
            placement = self._placement(one)
            limit = self.config.start_timeout
            if not placement.wait(min(ROOM_SOON, limit)):
                self._tell(self._set_status, one, None, "waiting")
                if not placement.wait(limit):
                    raise placement.no_room(limit)
                self._tell(self._set_status, one, None, "starting")
            client = ReplicaClient(one.name, placement, self.config)
            client.start(self.path, self._sharers, self._threads)
            self._tell(self._started, one, client)
        except BaseException as error:
            if client is not None:
                client.kill()
            self._tell(self._not_started, one, None, error)
        if self._closing:
            _end(one, client)

    def _placement(self, one: ReplicaState) -> Placement:
        """Return the replica's room, which Ray finds anew when a node goes away."""
        if one.placement is None:
            one.placement = Placement(self.config, self._threads)
        return one.placement

    def _follow(self, one: ReplicaState, client: ReplicaClient) -> None:
        """Pass on what a replica reports, until it dies."""
        try:
            for report in client.reports():
                self._tell(self._take, one, client, report)
        except Exception as error:
            self._tell(self._lose, one, client, error)

    def _bring_weights(
        self,
        one: ReplicaState,
        client: ReplicaClient,
        donor: ReplicaClient | None,
        stored: StoredWeights | None,
        version: int,
    ) -> None:
        """Give a new replica the weights that are in force now; it is admitted if they still are in the end."""
        try:
            client.bring_weights(donor, stored, version)
            self._tell(self._admit, one, client, version)
        except Exception as error:
            logger.warning("%s did not get the weights in force: %s", one.name, error)
            if donor is not None:  # which may have died; the new replica takes them from another
                self._tell(self._admit, one, client, None)
            else:
                self._tell(self._lose, one, client, error)

    # --- what threads tell ------------------------------------------------------------------------------------------

    def poll(self) -> None:
        """Take in what replicas and threads have told, without waiting."""
        self._work(0.0)

    def _work(self, wait: float) -> None:
        """Do what the queue says; wait up to `wait` seconds for the first thing."""
        with contextlib.suppress(Empty):
            item = self._todo.get(timeout=wait) if wait else self._todo.get_nowait()
            while True:
                with deferred_interrupt():
                    self._do(*item)
                item = self._todo.get_nowait()
        if self._held and not self._update_is_open:
            held = self._held
            self._held = []
            for one, client, version in held:
                self._do(self._admit, one, client, (version,))

    def _do(self, react: Callable, one: ReplicaState | None, client: ReplicaClient | None, args: tuple) -> None:
        """React to what a thread told of a replica. One about which that fails is ended."""
        if one is None:  # somebody wanted to wake `step` up
            return
        if react == self._started:
            one.client = client
        if client is not one.client:  # it is of a life that has ended
            return
        try:
            react(one, *args)
        except Exception as error:
            logger.exception("%s can't be dealt with; it is ended", one.name)
            self._lose(one, error)

    def _set_status(self, one: ReplicaState, status: Literal["starting", "waiting"]) -> None:
        one.status = status

    def _started(self, one: ReplicaState) -> None:
        assert one.client is not None
        assert self._like is not None
        check_alike(self._like, one.client.info)
        self._in_thread(self._follow, one, one.client)
        self._admit(one, None)

    # --- replicas come and go ---------------------------------------------------------------------------------------

    def _admit(self, one: ReplicaState, version: int | None) -> None:
        """Let a new replica serve once it has the weights in force; until then see to it that it gets them.

        version: that it was given, None: it has those of its checkpoint.
        """
        if self._update_is_open:
            self._held.append((one, one.client, version))
            return
        untouched = self.weight_version == 0 and self.stored is not None and self.stored.unchanged
        clients = self.clients
        if not self.has_weights or version == self.weight_version or (untouched and not clients):
            self._serve(one)
        elif clients or (self.stored is not None and self.stored.unchanged):
            donor = clients[one.index % len(clients)] if clients else None
            self._in_thread(self._bring_weights, one, one.client, donor, self.stored, self.weight_version)
        else:
            logger.error("no replica holds weight version %d any more: an update is needed", self.weight_version)
            self.has_weights = False
            self.stored = None
            self._serve(one)

    def _serve(self, one: ReplicaState) -> None:
        """Bring a replica that has the right weights into the state that all are in, and give it requests."""
        new = one.client
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
        one.client = None
        others = any(other.status in ("starting", "serving") for other in self.replicas if other is not one)
        if not isinstance(error, NoRoomError) or not others:  # else it waits for another node
            one.failed_starts += 1
        if one.failed_starts < MAX_STARTS:
            self._in_thread(self._launch, one)
            return
        one.status = "failed"
        _end(one)
        if all(other.status == "failed" for other in self.replicas):
            self.failure = f"no replica starts any more: {error}"

    def _lose(self, one: ReplicaState, error: Exception) -> None:
        """Start a replica again; its requests go on elsewhere."""
        if one.client is not None:
            one.client.kill()
            one.client = None
        if one.status != "serving":
            self._not_started(one, error)
            return
        logger.error("%s is lost (%s); its %d requests go on elsewhere", one.name, error, len(one.requests))
        one.status = "starting"
        if one.stats is not None:
            self._past.append(one.stats)
        one.stats = None
        requests = one.requests
        received = one.received
        one.requests = {}
        one.received = set()
        one.load = 0
        self._change_workers()
        self._in_thread(self._launch, one)
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
        self._assign(request)
        self.requests[request.request_id] = request

    def _assign(self, request: Request) -> None:
        one = self._choose(request)
        if one is None:
            self._unassigned[request.request_id] = request
            return
        client = one.client
        assert client is not None
        serial = next(self._serials)
        request.serial = serial
        call = client.post("add_request", request)  # TypeError where it can't be pickled
        one.requests[serial] = request
        one.load += sum(s.finish_reason is None for s in request.samples)

        def arrived(done: Future) -> None:
            error = done.exception()
            if error is None:
                self._tell(self._note_received, one, client, serial)
            else:
                self._tell(self._refuse, one, client, serial, call.meaning_of(error))

        call.ref.future().add_done_callback(arrived)

    def _note_received(self, one: ReplicaState, serial: int) -> None:
        if serial in one.requests:
            one.received.add(serial)

    def _refuse(self, one: ReplicaState, serial: int, error: Exception) -> None:
        """End a request that a replica couldn't read; the death of the replica is told otherwise."""
        if serial in one.requests and not isinstance(error, WorkerError):
            self._end(one.requests[serial], "error", f"{type(error).__name__}: {error}")

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
        if owner is not None and owner.client is not None:
            owner.client.post("abort_request", request_id)
        return True

    def step(self) -> None:
        """Take in what the replicas have computed, which need no call for it."""
        if self.failure is not None:
            raise WorkerError(self.failure)
        if not self.ready:
            raise RuntimeError("the engine sleeps; call wake_up first, and update_weights where they were dropped")
        self._work(POLL)

    def wake(self) -> None:
        """End another thread's `step` without a report."""
        self._todo.put((self.wake, None, None, ()))

    # --- weights ----------------------------------------------------------------------------------------------------

    @property
    def workers(self) -> RemoteWorkers:
        """The workers of all replicas that serve. Raises WorkerError where none does."""
        if self._workers is None:
            raise WorkerError("no replica is alive")
        return self._workers

    def _change_workers(self) -> None:
        """Make the list of workers anew; weight groups of those of before are of no more use."""
        actors = [actor for client in self.clients for actor in client.actors]
        self._workers = RemoteWorkers(actors, self.config) if actors else None

    @property
    def _update_is_open(self) -> bool:
        update = self._update
        return update is not None and update.open and time.monotonic() < self._update_until

    def _wait_until_one_serves(self) -> None:
        deadline = time.monotonic() + self.config.start_timeout
        self.poll()
        while not self.serving and self.failure is None and time.monotonic() < deadline:
            self._work(POLL)

    def begin_weight_update(self) -> WeightUpdate:
        """Open an update of the replicas that serve. Those that start meanwhile get its weights afterwards."""
        self._wait_until_one_serves()
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
            switch = "switch_weights", update.id, version, recompute_running, update.stored
            calls = [client.command(*switch) for client in self.clients]
            self.weight_version = version
            self.has_weights = True
            self.stored = update.stored
            update.close()
            done = self._lose_failed("switch_weights", replicas, outcomes(calls, self.config.worker_timeout))
            if not done and self.stored is None:
                self.has_weights = False
                raise WorkerError("every replica failed while it switched to the new weights, which are lost")

    def weight_checksums(self) -> dict[str, str]:
        """A hash of each tensor's bytes, by name. RuntimeError where replicas differ."""
        self._wait_until_one_serves()
        found = self._command_all("weight_checksums", timeout=self.config.start_timeout)
        if not found:
            raise WorkerError("no replica is alive")
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
        replicas = self.serving
        limit = timeout or self.config.worker_timeout
        calls = [client.command(method, *args, timeout=limit) for client in self.clients]
        found = outcomes(calls, limit)
        errors = [x for x in found if isinstance(x, Exception)]
        if errors and len(errors) == len(found) and not any(isinstance(e, WorkerError) for e in errors):
            raise errors[0]
        return self._lose_failed(method, replicas, found)

    def _lose_failed(self, method: str, replicas: Sequence[ReplicaState], found: Sequence[Any]) -> list[Any]:
        """Start the replicas again that failed in a method, and return the results of the others."""
        results = []
        for one, answer in zip(replicas, found, strict=True):
            if isinstance(answer, Exception):
                logger.error("%s failed to %s", one.name, method)
                self._lose(one, answer)
            else:
                results.append(answer)
        return results

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
        """Sums over the replicas. What dead ones have counted stays; their load doesn't."""
        known = [one.stats for one in self.replicas if one.stats is not None]
        total = {f.name: sum(getattr(stats, f.name) for stats in known) for f in fields(EngineStats)}
        for name in COUNTERS:
            total[name] += sum(getattr(stats, name) for stats in self._past)
        total["weight_version"] = self.weight_version
        total["num_waiting"] += len(self._unassigned)
        return EngineStats(**total)

    def close(self) -> None:
        """End all replicas."""
        self._closing = True
        for one in self.replicas:
            _end(one)


def _end(one: ReplicaState, client: ReplicaClient | None = None) -> None:
    """End a replica's processes and give back its room."""
    for living in (one.client, client):
        if living is not None:
            living.kill()
    if one.placement is not None:
        one.placement.remove()
        one.placement = None


def check_alike(first: ReplicaInfo, other: ReplicaInfo) -> None:
    """Raise NumericsError or ValueError where replicas differ in more than their load."""
    if first.model.contract is not None and other.model.contract is not None:
        first.model.contract.check(other.model.contract)
    if (first.model.table, first.model.eos_token_ids) != (other.model.table, other.model.eos_token_ids):
        raise ValueError("the replicas loaded different models; is the checkpoint the same on all nodes?")
