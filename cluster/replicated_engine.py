"""Several replicas behind one queue.

A request goes to one replica, with all its samples, and lives here, too: a replica that dies is started again, and its
requests go on elsewhere from the tokens that they have. As sampling counts positions and no schedule changes a bit,
they get the tokens that they would have got.
"""

from __future__ import annotations

import contextlib
import logging
import pathlib
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import fields, replace
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, Literal, TypeVar

from ..engine.config import EngineConfig
from ..engine.engine import MEMORY_TAGS, WorkerEngine
from ..engine.executor import ModelInfo, stage_layers
from ..engine.interrupts import deferred_interrupt
from ..engine.outputs import COUNTERS, EngineStats
from ..engine.request import Request
from ..engine.weights import WeightUpdate, WeightUpdateError, WorkerError
from ..engine.worker import max_model_len
from ..model.checkpoint import StoredWeights
from .actors import RemoteWorkers, outcomes
from .dispatcher import Dispatcher
from .ray_cluster import (
    PlacementError,
    ReplicaPlacement,
    check_connected,
    connect,
    sharers_of_memory,
    threads_per_worker,
)
from .replica import ReplicaReport
from .replica_client import ReplicaClient

logger = logging.getLogger(__name__)
T = TypeVar("T")

MAX_STARTS = 3  # in a row that may fail
POLL = 0.1  # seconds that a step waits for reports


class ReplicaState:
    """A replica over all its restarts. client: its processes while it serves.

    status: waiting (for resources of the cluster), starting, serving, or failed (for good).
    """

    def __init__(self, index: int):
        self.index = index
        self.placement: ReplicaPlacement | None = None
        self.status: Literal["waiting", "starting", "serving", "failed"] = "waiting"
        self.client: ReplicaClient | None = None


class ReplicatedEngine(WorkerEngine):
    """An `Engine` of replicas on a Ray cluster. They step by themselves; `step` takes in what they report.

    Each replica has a thread that starts it, follows it until it dies, and starts it again. What that means for
    requests and weights is put into a queue of events, which the thread that drives the engine handles.
    """

    steps_by_itself = True

    def __init__(self, path: pathlib.Path, config: EngineConfig):
        super().__init__()
        self.path = path
        self.config = config
        self.max_model_len = max_model_len(path, config)
        self.stored: StoredWeights | None = StoredWeights.at(path)
        self._events: SimpleQueue[Callable[[], object]] = SimpleQueue()
        self._closed = False
        self.dispatcher = Dispatcher(self, self._events)
        self._updates: list[tuple[WeightUpdate, float]] = []  # no replica is admitted while one is open, up to a time
        self._workers: RemoteWorkers | None = None
        self._model: ModelInfo | None = None  # what all replicas must have, once all have started
        self._counters: dict[str, float] = dict.fromkeys(COUNTERS, 0)  # sums over all replicas, dead ones too
        stage_layers(path, config)  # ValueError before anything starts
        connect()
        self._threads = threads_per_worker(config)
        self._sharers = sharers_of_memory(config, self._threads)
        self.replicas = [ReplicaState(i) for i in range(config.replicas)]
        try:
            self._start_all()
        except BaseException:
            self.close()
            raise

    def _start_all(self) -> None:
        for one in self.replicas:
            threading.Thread(target=self._keep_alive, args=(one,), daemon=True).start()
        while len(self.serving) < len(self.replicas):
            self._events.get()()
        models = [client.model for client in self.serving]
        for model in models:
            check_alike(models[0], model)
        self.set_models(models)
        self.capacity = sum(client.capacity for client in self.serving)
        self.replica_capacity = min(client.capacity for client in self.serving)
        # a replica that is started again has as much KV memory, however much is free then
        self.config = replace(self.config, kv_cache_memory_bytes=min(m.stage_kv_bytes for m in models))
        self._model = models[0]

    @property
    def serving(self) -> list[ReplicaClient]:
        """The replicas that take requests."""
        return self.dispatcher.serving

    # --- a replica's thread -----------------------------------------------------------------------------------------

    def _keep_alive(self, one: ReplicaState) -> None:
        """Start a replica and follow it until it dies, again and again, until it doesn't start any more."""
        failures = 0
        while failures < MAX_STARTS and not self._closed:
            try:
                client = self._start(one)
            except Exception as error:
                others = any(other.status in ("starting", "serving") for other in self.replicas if other is not one)
                failures += not (isinstance(error, PlacementError) and others)  # else it waits for another node
                self._events.put(partial(self._note_failed_start, one, error, failures == MAX_STARTS))
                continue
            failures = 0
            try:
                for report in client.reports():
                    self._events.put(partial(self._take, client, report))
            except Exception as error:
                client.kill()
                self._events.put(partial(self._lose, client, error))

    def _start(self, one: ReplicaState) -> ReplicaClient:
        """Start a replica, bring it the weights in force, and have it admitted."""
        check_connected()
        one.status = "waiting"
        placement = ReplicaPlacement(self.config, self._threads)
        one.placement = placement
        placement.wait(self.config.start_timeout)
        one.status = "starting"
        client = ReplicaClient(one.index, placement, self.config)
        try:
            client.start(self.path, self._sharers)
            if self._model is not None:
                check_alike(self._model, client.model)
            task = self._ask(self._admit, client, None)
            while task is not None:
                task = self._ask(self._admit, client, task())
        except BaseException:
            client.kill()
            raise
        one.status = "serving"
        return client

    def _ask(self, function: Callable[..., T], *args: Any) -> T:
        """Have the driving thread call a function, and return the result.

        Raises what the function raises, or WorkerError where the engine is closed.
        """
        answer: Future[T] = Future()

        def call() -> None:
            try:
                answer.set_result(function(*args))
            except Exception as error:
                answer.set_exception(error)

        self._events.put(call)
        while not self._closed:
            wait([answer], timeout=POLL)
            if answer.done():
                return answer.result()
        raise WorkerError("the engine was closed")

    def _wait_for_update(self) -> None:
        while self._update_is_open:
            time.sleep(POLL)

    # --- events, in the driving thread ------------------------------------------------------------------------------

    def poll(self, wait: float = 0.0) -> None:
        """Handle the events that have come; wait up to `wait` seconds for the first one."""
        with contextlib.suppress(Empty):
            while True:
                event = self._events.get(timeout=wait)
                wait = 0.0
                with deferred_interrupt():
                    event()

    def _admit(self, client: ReplicaClient, version: int | None) -> Callable[[], int | None] | None:
        """Let a new replica serve if it has the weights in force.

        version: that it was given; None: it has those of its checkpoint. Otherwise return what it has to do first,
        which returns the version that it has afterwards.
        """
        if self._update_is_open:
            return self._wait_for_update
        serving = self.serving
        unchanged = self.stored is not None and self.stored.unchanged
        as_loaded = self._model is None or (self.weight_version == 0 and unchanged and not serving)
        if self.has_weights and not as_loaded and version != self.weight_version:
            if serving or unchanged:
                donor = serving[client.index % len(serving)] if serving else None
                return partial(client.bring_weights, donor, self.stored, self.weight_version)
            logger.error("no replica holds weight version %d any more: an update is needed", self.weight_version)
            self.has_weights = False
            self.stored = None
        if not self.has_weights:
            client.post("release_memory", ("weights",))
            client.post("assume_version", self.weight_version, self.stored)
        if not self.has_kv_cache:
            client.post("release_memory", ("kv_cache",))
        client.post("pause", self.paused)
        self._set_client(self.replicas[client.index], client)
        self._events.put(self.dispatcher.assign_waiting)
        logger.info("%s serves with weight version %d", client.name, self.weight_version)
        return None

    def _set_client(self, one: ReplicaState, client: ReplicaClient | None) -> None:
        """Note that a replica serves with these processes, or no more; weight groups of before are of no more use."""
        one.client = client
        clients = [each.client for each in self.replicas]
        self.dispatcher.serving = [each for each in clients if each is not None]
        actors = [actor for each in self.serving for actor in each.actors]
        self._workers = RemoteWorkers(actors, self.config) if actors else None

    def _note_failed_start(self, one: ReplicaState, error: Exception, for_good: bool) -> None:
        """Give up a replica whose start has failed too often; at the start of the engine, raise what went wrong."""
        if self._model is None:
            raise error
        logger.error("replica %d did not start: %s", one.index, error)
        if for_good:
            one.status = "failed"
        if all(other.status == "failed" for other in self.replicas):
            self.failure = f"no replica starts any more: {error}"

    def _lose(self, client: ReplicaClient, error: Exception) -> None:
        """End a replica, which its thread starts again; its requests go on elsewhere."""
        one = self.replicas[client.index]
        if client is not one.client:  # this was noticed before
            return
        logger.error("%s is lost: %s; its requests go on elsewhere", client.name, error)
        client.kill()
        self._set_client(one, None)
        self.dispatcher.reassign(client)

    def _take(self, client: ReplicaClient, report: ReplicaReport) -> None:
        """Take in a report; end a replica whose report makes no sense."""
        for name in COUNTERS:
            self._counters[name] += getattr(report.stats, name) - getattr(client.stats, name)
        client.stats = report.stats
        try:
            for progress in report.progress:
                self.dispatcher.take(client, progress)
        except Exception as error:
            logger.exception("%s made a report that makes no sense", client.name)
            self._lose(client, error)

    # --- requests ---------------------------------------------------------------------------------------------------

    def check_fits(self, request: Request) -> None:
        """Raise ValueError where a replica's KV cache could never hold one of the request's samples."""
        request.samples[0].check_fits(self.replica_capacity)

    def add_request(self, request: Request) -> None:
        """Give a request to a replica, or keep it until one serves."""
        self.poll()
        self.dispatcher.assign(request)
        self.requests[request.request_id] = request

    def abort_request(self, request_id: str) -> bool:
        """End a request with finish_reason "abort". False if there is none of this id."""
        request = self.requests.get(request_id)
        if request is None:
            return False
        client = self.dispatcher.end(request, "abort")
        if client is not None:
            client.post("abort_request", request_id)
        return True

    def step(self) -> None:
        """Take in what the replicas have computed, which need no call for it."""
        if self.failure is not None:
            raise WorkerError(self.failure)
        if not self.ready:
            raise RuntimeError("the engine sleeps; call wake_up first, and update_weights where they were dropped")
        self.poll(POLL)

    def wake(self) -> None:
        """End another thread's `step` without a report."""
        self._events.put(lambda: None)

    # --- weights ----------------------------------------------------------------------------------------------------

    @property
    def workers(self) -> RemoteWorkers:
        """The workers of all replicas that serve. Raises WorkerError where none does."""
        if self._workers is None:
            raise WorkerError("no replica is alive")
        return self._workers

    @property
    def _update_is_open(self) -> bool:
        now = time.monotonic()
        return any(update.open and now < until for update, until in self._updates)

    def _wait_until_one_serves(self) -> None:
        deadline = time.monotonic() + self.config.start_timeout
        self.poll()
        while not self.serving and self.failure is None and time.monotonic() < deadline:
            self.poll(POLL)

    def begin_weight_update(self) -> WeightUpdate:
        """Open an update of the replicas that serve and return it. Those that start meanwhile get its weights later."""
        self._wait_until_one_serves()
        update = WeightUpdate(self.workers, self.table, self.path)
        still_open = [pair for pair in self._updates if pair[0].open]
        self._updates = [*still_open, (update, time.monotonic() + self.config.start_timeout)]
        return update

    def commit_weight_update(self, update: WeightUpdate, version: int, recompute_running: bool = True) -> None:
        """Put an update in force that all replicas have. Then there is no way back: one that fails starts anew."""
        self.poll()
        if update.workers is not self._workers:
            update.abort()
            raise WeightUpdateError("a replica died or joined during the update; send it again")
        update.prepare()
        with deferred_interrupt():
            self.weight_version = version
            self.has_weights = True
            # an adapter is in memory alone: a replica that starts gets it from another
            self.stored = update.stored if self.config.adapter is None else None
            update.close()
            switch = "switch_weights", update.id, version, recompute_running, self.stored
            if not self._command_all(*switch, for_good=True) and self.stored is None:
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

    def _command_all(self, method: str, *args: Any, timeout: float | None = None, for_good: bool = False) -> list[Any]:
        """Call a method of every engine that serves, and return the results.

        A replica that fails is lost, and comes back in the state that all are in then. What none of them can do is an
        error, and ends none, unless it was called `for_good`.
        """
        clients = self.serving
        limit = timeout or self.config.worker_timeout
        found = outcomes([client.command(method, *args, timeout=limit) for client in clients], limit)
        refusals = [x for x in found if isinstance(x, Exception) and not isinstance(x, WorkerError)]
        if refusals and len(refusals) == len(found) and not for_good:
            raise refusals[0]
        for client, answer in zip(clients, found, strict=True):
            if isinstance(answer, Exception):
                logger.error("%s failed to %s", client.name, method)
                self._lose(client, answer)
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
        """Sums over the replicas. What dead ones have counted stays; their load doesn't."""
        total: dict[str, Any] = {
            f.name: sum(getattr(client.stats, f.name) for client in self.serving) for f in fields(EngineStats)
        }
        total |= self._counters
        total["weight_version"] = self.weight_version
        unassigned = len(self.requests) - len(self.dispatcher.assigned)
        total["num_waiting"] += max(0, unassigned)  # another thread may ask between changes of the two
        return EngineStats(**total)

    def close(self) -> None:
        """End all replicas."""
        self._closed = True
        for client in self.serving:
            client.kill()
        for one in self.replicas:
            if one.placement is not None:
                one.placement.remove()


def check_alike(first: ModelInfo, other: ModelInfo) -> None:
    """Raise NumericsError or ValueError where replicas differ in more than the size of their KV cache."""
    if first.contract is not None and other.contract is not None:
        first.contract.check(other.contract)
    if (first.table, first.eos_token_ids) != (other.table, other.eos_token_ids):
        raise ValueError("the replicas loaded different models; is the checkpoint the same on all nodes?")
