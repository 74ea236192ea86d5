"""Several replicas behind one queue.

A request goes to one replica, with all its samples, and lives in the router, too: a replica that dies is started again,
and its requests go on elsewhere from the tokens that they have. As sampling counts positions and no schedule changes a
bit, they get the tokens that they would have got.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import pathlib
import queue
import threading
import time
from collections import OrderedDict, defaultdict
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import fields, replace
from typing import Any

from ...model.checkpoint import StoredWeights
from ..config import EngineConfig
from ..core import max_model_len
from ..interrupts import deferred_interrupt
from ..outputs import EngineStats
from ..request import Request
from ..weights import WeightUpdate, WeightUpdateError
from . import ray_backend
from .fan_out import FanOut, FanOutUpdate
from .replica import Replica, ReplicaInfo
from .worker import Peer, WorkerError, call_all, default_threads, gpus_of, launch, outcomes, results, sharers_of

logger = logging.getLogger(__name__)

MAX_MOVES = 3  # replicas that a request may see die before it is held to be the cause
MAX_STARTS = 3  # in a row that may fail
AFFINITY_TOKENS = 64  # prompts are compared by runs of so many
AFFINITY_SLACK = 8  # sequences that a replica may have more than the least loaded and still get a prompt that it knows
AFFINITY_ENTRIES = 2**16
POLL = 0.1  # seconds that a step waits for news; replicas that work have some after each of theirs
ROOM_SOON = 5.0  # seconds: room on a cluster that takes longer is not waited for by others


class _Handle:
    """A replica as the router sees it: starting (or waiting, for room on Ray) -> serving, and when it dies all over
    again; or failed."""

    def __init__(self, index: int):
        self.index, self.name = index, f"replica {index}"
        self.state = "starting"
        self.peer: Peer | None = None
        self.placement: Any = None
        self.requests: dict[int, Request] = {}  # by the serial number of their assignment
        self.received: set[int] = set()  # of these, those that the replica is known to have got
        self.stats: EngineStats | None = None
        self.failed_starts = 0
        self.lends = False  # its weights to a new replica, one at a time
        self.beat: tuple[int, float] = (-1, 0.0)

    @property
    def load(self) -> int:
        return sum(s.finish_reason is None for r in self.requests.values() for s in r.samples)


class Router:
    """The interface of an `EngineCore` over replicas. One thread at a time may use it."""

    def __init__(self, path: pathlib.Path, config: EngineConfig):
        self.path = path
        self.config = config
        self.max_model_len = max_model_len(path, config)
        self.tokenizer: Any = None
        self.threads = default_threads(config)
        self.sharers = sharers_of(config, self.threads)
        self.host = ray_backend.node_address() if config.backend == "ray" else "127.0.0.1"
        self.requests: dict[str, Request] = {}
        self.weight_version = 0
        self.has_weights = self.has_kv_cache = True
        self.failure: str | None = None
        self.paused = False
        self._stored: StoredWeights | None = StoredWeights.at(path)
        self._unassigned: dict[str, Request] = {}
        self._moves: dict[str, float] = defaultdict(float)
        self._progressed: dict[str, Request] = {}
        self._affinity: OrderedDict[int, int] = OrderedDict()  # hash of a prompt's start -> replica
        self._newcomers: list[tuple[_Handle, int | None]] = []  # who can't be admitted yet
        self._held_until = 0.0  # nobody is, while an update is under way, which would then miss one
        self._events: queue.SimpleQueue = queue.SimpleQueue()
        self._closing = threading.Event()
        self.handles = [_Handle(i) for i in range(config.replicas)]
        self._fan_out: FanOut | None = None
        self._serials = itertools.count(1)
        try:
            infos = self._start_all()
            for info in infos[1:]:
                self._check_like(infos[0], info)
        except BaseException:
            self.close()
            raise
        self.info: ReplicaInfo = infos[0]
        # one that is started again has the same room, however much memory is free then
        self.config = replace(self.config, kv_cache_memory_bytes=min(i.stage_kv_bytes for i in infos))
        self.room = min(i.capacity for i in infos)  # tokens that each replica's KV cache holds
        self.capacity = sum(i.capacity for i in infos)
        self.contract, self.eos_token_ids = self.info.contract, self.info.eos_token_ids
        self.table = self.info.table
        self.weight_bytes = sum(i.weight_bytes for i in infos)
        self.kv_cache_bytes = sum(i.kv_cache_bytes for i in infos)
        threading.Thread(target=self._watch, name="health", daemon=True).start()

    @property
    def world_size(self) -> int:
        return sum(h.state in ("starting", "serving") for h in self.handles) * self.config.pipeline_parallel_size

    @property
    def serving(self) -> list[_Handle]:
        return [h for h in self.handles if h.state == "serving"]

    @property
    def ready(self) -> bool:
        return self.has_weights and self.has_kv_cache and self.failure is None

    # --- replicas come and go ---------------------------------------------------------------------------------------

    def _start_all(self) -> list[ReplicaInfo]:
        for handle in self.handles[:1] if self.config.balance else self.handles:
            self._start(handle)
        infos: list[ReplicaInfo] = []
        while len(infos) < len(self.handles):
            handle, kind, value = self._events.get()
            if kind == "started":
                handle.state = "serving"
                infos.append(value)
                if self.config.balance:  # its split is that of all, so that a stage can copy another's weights
                    self.config = replace(self.config, stage_layers=value.stage_layers, balance=False)
                    for other in self.handles[1:]:
                        self._start(other)
            elif kind == "not started":
                raise value
        return infos

    @staticmethod
    def _check_like(first: ReplicaInfo, other: ReplicaInfo) -> None:
        """NumericsError or ValueError where replicas would differ in more than their load."""
        if first.contract is not None and other.contract is not None:
            first.contract.check(other.contract)
        if (first.table, first.eos_token_ids) != (other.table, other.eos_token_ids):
            raise ValueError("the replicas loaded different models; is the checkpoint the same on all nodes?")

    def _start(self, handle: _Handle) -> None:
        if self._closing.is_set():
            return
        if handle.state != "waiting":
            handle.state = "starting"
        threading.Thread(target=self._start_worker, args=(handle,), daemon=True).start()

    def _start_worker(self, handle: _Handle) -> None:
        """In a thread: a new process for the replica; reports "started" or "not started"."""
        config, stages, limit = self.config, self.config.pipeline_parallel_size, self.config.start_timeout
        try:
            where = None
            if config.backend == "ray":
                self._give_up_room(handle)  # its node may be gone
                handle.placement = ray_backend.reserve(stages, self.threads, config.device or "cpu")
                where = handle.placement, 0
                if not handle.placement.wait(min(ROOM_SOON, limit)):
                    self._events.put((handle, "waiting", None))
                    ray_backend.wait_for_room(handle.placement, limit)
                self._events.put((handle, "starting", None))
            gpus = gpus_of(config, handle.index * stages, stages)
            (peer,) = launch([handle.name], config, self.threads, where, None if gpus is None else [gpus])
            handle.peer = peer
            peer.on_event = lambda event: self._events.put((handle, "progress", event))
            peer.on_lost = lambda: self._events.put((handle, "lost", peer))
            results([(handle.name, peer.call("make", Replica, str(self.path), config, self.sharers))], limit)
            info = results([(handle.name, peer.call("describe"))], limit)[0]
            handle.beat = (-1, time.monotonic())
            self._events.put((handle, "started", info))
        except BaseException as error:
            if handle.peer is not None:
                handle.peer.kill()
            self._events.put((handle, "not started", error))
        if self._closing.is_set():
            self._end(handle)

    def _watch(self) -> None:
        """In a thread: ends replicas that don't answer, or have work and make no step."""
        limit = self.config.worker_timeout
        while not self._closing.wait(limit / 4):
            serving = [(h, h.peer) for h in self.serving if h.peer is not None]
            answers = outcomes(call_all([peer for _, peer in serving], "ping"), limit)
            for (handle, peer), answer in zip(serving, answers, strict=True):
                if isinstance(answer, Exception):
                    logger.error("%s: %s; it is ended", handle.name, answer)
                    peer.kill()
                    self._events.put((handle, "lost", peer))  # its own report may have come before it served
                    continue
                beat, busy = answer
                if beat != handle.beat[0] or not busy:
                    handle.beat = (beat, time.monotonic())
                elif time.monotonic() - handle.beat[1] > limit:
                    logger.error("%s made no step for %g s; it is ended", handle.name, limit)
                    peer.kill()

    def _pump(self, wait: float | None = None) -> None:
        """Takes what replicas and threads have reported."""
        with contextlib.suppress(queue.Empty):
            item = self._events.get(timeout=wait) if wait else self._events.get_nowait()
            while True:
                with deferred_interrupt():
                    self._handle_event(*item)
                item = self._events.get_nowait()
        newcomers, self._newcomers = self._newcomers, []
        for handle, version in newcomers:
            self._handle_event(handle, "in step", version)

    def _handle_event(self, handle: _Handle, kind: str, value: Any) -> None:
        try:
            self._react(handle, kind, value)
        except Exception as error:
            logger.exception("%s: %r can't be dealt with; it is ended", handle.name, kind)
            if handle.peer is not None:
                handle.peer.kill()
            if kind in ("started", "in step"):  # its death is news only of one that serves
                self._react(handle, "not started", error)

    def _react(self, handle: _Handle, kind: str, value: Any) -> None:
        if kind == "progress":
            self._take(handle, *value)
        elif kind == "refused":
            serial, error = value
            if (request := handle.requests.get(serial)) is not None:
                self.end(request, "error", f"{type(error).__name__}: {error}")
        elif kind == "lost" and value is handle.peer and handle.state == "serving":
            self._lose(handle)
        elif kind in ("starting", "waiting"):
            handle.state = kind
        elif kind == "not started":
            if not self.world_size or not isinstance(value, ray_backend.NoRoomError):  # else it waits for another node
                handle.failed_starts += 1
            logger.error("%s did not start: %s", handle.name, value)
            if handle.failed_starts < MAX_STARTS:
                self._start(handle)
            else:
                handle.state = "failed"
                self._give_up_room(handle)
                if all(h.state == "failed" for h in self.handles):
                    self.failure = f"no replica starts any more: {value}"
        elif kind == "started":
            try:
                self._check_like(self.info, value)
            except Exception as error:
                handle.peer.kill()  # type: ignore[union-attr]
                self._react(handle, "not started", error)
                return
            self._admit(handle, None)
        elif kind == "in step":
            self._admit(handle, value)
        elif kind == "has lent":
            handle.lends = False

    def _lose(self, handle: _Handle) -> None:
        logger.error("%s died; its %d requests go on elsewhere", handle.name, len(handle.requests))
        handle.peer.kill()  # type: ignore[union-attr]  # perhaps it is only its connection that ended
        self._drop_fan_out()
        handle.stats = None
        requests, received, handle.requests, handle.received = handle.requests, handle.received, {}, set()
        self._start(handle)
        for serial, request in requests.items():
            # one that was dead before it got the request counts less: all may have died together
            self._moves[request.request_id] += 1.0 if serial in received else 1 / len(self.handles)
            if self._moves[request.request_id] < MAX_MOVES:
                self._assign(request)
            else:
                self._finish(request, "error", "replicas died, one after the other, while they worked on it")

    def _admit(self, handle: _Handle, version: int | None) -> None:
        """Lets a new replica serve, once it has the weights in force. version: what it has; None: the checkpoint that
        all started with, as it is on disk now."""
        peer, serving = handle.peer, self.serving
        donor = next((h for h in serving if not h.lends), None)
        assert peer is not None
        if time.monotonic() < self._held_until:
            self._newcomers.append((handle, version))
            return
        if self.has_weights and version != self.weight_version:
            first = version is None and self.weight_version == 0
            if serving and donor is None:
                self._newcomers.append((handle, version))
                return
            if donor is None and self._stored is not None and not self._stored.unchanged:
                logger.error("the files in %s have changed since they were read", self._stored.path)
                self._stored = None
            if donor is None and self._stored is None:
                self.has_weights = False
                logger.error("no replica holds weight version %d any more: an update is needed", self.weight_version)
            elif donor is not None or not first:
                if donor is not None:
                    donor.lends = True
                arguments = handle, donor, self._stored, self.weight_version
                threading.Thread(target=self._bring_into_step, args=arguments, daemon=True).start()
                return
        handle.state, handle.failed_starts = "serving", 0
        logger.info("%s serves with weight version %d", handle.name, self.weight_version)
        self._drop_fan_out()  # it has one member more now
        with contextlib.suppress(WorkerError):  # if it has died, that is the next event
            if not self.has_weights:
                peer.call("adopt", self.weight_version, self._stored)
            if not self.has_kv_cache:
                peer.call("release_memory", ("kv_cache",))
            if self.paused:
                peer.call("pause", True)
        waiting, self._unassigned = self._unassigned, {}
        for request in waiting.values():
            self._assign(request)

    def _bring_into_step(
        self, handle: _Handle, donor: _Handle | None, stored: StoredWeights | None, version: int
    ) -> None:
        """In a thread: gives a new replica the weights in force, from another that serves, or where they were read."""
        peer, sender = handle.peer, None if donor is None else donor.peer
        limit = self.config.start_timeout
        assert peer is not None
        try:
            if donor is None:
                assert stored is not None
                results([(handle.name, peer.call("begin_update"))], limit)
                results([(handle.name, peer.call("load_update", str(stored.path)))], limit)
                if not stored.unchanged:
                    raise WeightUpdateError(f"the files in {stored.path} changed while they were read")
            else:
                assert sender is not None
                addresses = results([(donor.name, sender.call("addresses"))], limit)[0]
                calls = call_all([peer], "take_weights", addresses) + call_all([sender], "send_weights", addresses)
                version, stored = results(calls, limit)[1]
            results([(handle.name, peer.call("commit_update", version, True, stored))], limit)
            self._events.put((handle, "in step", version))
        except Exception as error:
            if sender is not None and sender.lost:
                self._events.put((handle, "in step", None))  # with what it had: it takes them from another
            else:
                peer.kill()
                self._events.put((handle, "not started", error))
        if donor is not None:
            self._events.put((donor, "has lent", None))

    # --- requests ---------------------------------------------------------------------------------------------------

    def check_fits(self, request: Request) -> None:
        request.samples[0].check_fits(self.room)

    def submit(self, request: Request) -> None:
        self._pump()
        self.requests[request.request_id] = request
        self._assign(request)

    def _assign(self, request: Request) -> None:
        handle = self._choose(request)
        if handle is None:
            self._unassigned[request.request_id] = request
            return
        request.serial = serial = next(self._serials)
        requests, received = handle.requests, handle.received
        requests[serial] = request
        try:
            assert handle.peer is not None
            future = handle.peer.call("submit", request)
        except WorkerError:  # it has died: the event takes the request elsewhere
            self._events.put((handle, "lost", handle.peer))
            return

        def check(done: Future) -> None:
            error = done.exception()
            if error is None and serial in requests:
                received.add(serial)
            elif error is not None and not isinstance(error, WorkerError):
                self._events.put((handle, "refused", (serial, error)))

        future.add_done_callback(check)

    def _choose(self, request: Request) -> _Handle | None:
        """The least loaded replica, or the one that knows the prompt's start, if it has little more to do."""
        serving = self.serving
        if not serving:
            return None
        tokens, salt = request.prompt_token_ids, request.samples[0].cache_salt
        starts = [*range(AFFINITY_TOKENS, len(tokens), AFFINITY_TOKENS), len(tokens)]
        keys, key = [], hash(salt)
        for a, b in zip([0, *starts[:-1]], starts, strict=True):
            key = hash((key, *tokens[a:b]))
            keys.append(key)
        least = min(serving, key=lambda h: (h.load, h.index))
        known = next((self._affinity[k] for k in reversed(keys) if k in self._affinity), None)
        chosen = next((h for h in serving if h.index == known and h.load <= least.load + AFFINITY_SLACK), least)
        for key in keys:
            self._affinity[key] = chosen.index
            self._affinity.move_to_end(key)
        while len(self._affinity) > AFFINITY_ENTRIES:
            self._affinity.popitem(last=False)
        return chosen

    def _take(self, handle: _Handle, progress: list, stats: EngineStats) -> None:
        handle.stats = stats
        for new in progress:
            if (request := handle.requests.get(new.serial)) is None:  # aborted meanwhile
                continue
            new.apply(request)
            self._progressed[request.request_id] = request
            if request.finished:
                self._forget(request)

    def _forget(self, request: Request) -> None:
        for handle in self.handles:
            handle.requests.pop(request.serial, None)
            handle.received.discard(request.serial)
        self._unassigned.pop(request.request_id, None)
        self._moves.pop(request.request_id, None)
        self.requests.pop(request.request_id, None)

    def _finish(self, request: Request, reason: str, detail: str | None = None) -> None:
        for sample in request.samples:
            if sample.finish_reason is None:
                sample.finish_reason, sample.stop_reason = reason, detail
        self._forget(request)
        self._progressed[request.request_id] = request

    def end(self, request: Request, reason: str, detail: str | None = None) -> None:
        """Ends all samples of a request that are still unfinished."""
        owner = next((h for h in self.handles if request.serial in h.requests), None)
        self._finish(request, reason, detail)
        if owner is not None and owner.peer is not None:
            with contextlib.suppress(WorkerError):
                owner.peer.call("end", request.request_id, reason)

    def take_progress(self) -> list[Request]:
        self._pump()
        progressed, self._progressed = self._progressed, {}
        return list(progressed.values())

    def step(self) -> None:
        """Takes what the replicas have computed, which need no call for it."""
        if self.failure is not None:
            raise WorkerError(self.failure)
        if not self.ready:
            raise RuntimeError("the engine sleeps; call wake_up first, and update_weights where they were dropped")
        self._pump(POLL)

    def wake(self) -> None:
        """Ends another thread's `step` without news."""
        self._events.put((self.handles[0], "wake", None))

    # --- weights and memory -----------------------------------------------------------------------------------------

    @property
    def settled(self) -> bool:
        """Does no replica start? What is to reach all of them waits for that; for room, only if none serves."""
        self._pump()
        coming = ("starting",) if self.serving else ("starting", "waiting")
        return all(h.state not in coming for h in self.handles)

    def members(self) -> FanOut:
        """The replicas that serve."""
        self._pump()
        return self._members()

    def _members(self) -> FanOut:
        if self._fan_out is None:
            peers = [h.peer for h in self.serving if h.peer is not None]
            if not peers:
                raise WorkerError("no replica is alive")
            self._fan_out = FanOut(peers, self.config.pipeline_parallel_size, self.host, self.config.worker_timeout,
                self.config.start_timeout)  # fmt: skip
        return self._fan_out

    def _each(self, method: str, *args, timeout: float | None = None) -> list:
        """Of all replicas that serve; who fails is ended, and comes back in the state that all are in then. What none
        of them can do is an error, and ends nobody."""
        self._pump()
        members = self.members().members if self.serving else []
        lends = any(h.lends for h in self.handles)  # such a call has to wait for the copy
        usual = self.config.start_timeout if lends else self.config.worker_timeout
        found = outcomes(call_all(members, method, *args), timeout or usual)
        errors = [x for x in found if isinstance(x, Exception)]
        if errors and len(errors) == len(found) and not any(isinstance(e, WorkerError) for e in errors):
            raise errors[0]
        for member, answer in zip(members, found, strict=True):
            if isinstance(answer, Exception):
                logger.error("%s failed to %s: %s; it is ended", member.name, method, answer)
                member.kill()
        return [x for x in found if not isinstance(x, Exception)]

    def _drop_fan_out(self) -> None:
        self._held_until = 0.0
        if self._fan_out is not None:
            self._fan_out.close()
            self._fan_out = None

    def begin_weight_update(self) -> FanOutUpdate:
        if not self.settled:
            raise WeightUpdateError("a replica is starting; send the update again when it serves")
        fan_out = self._members()
        self._held_until = time.monotonic() + self.config.start_timeout
        return FanOutUpdate(fan_out, self.table)

    def commit_weight_update(self, update: WeightUpdate | FanOutUpdate, version: int, recompute_running: bool) -> None:
        """Prepared by all, or refused. Then there is no way back: who fails is started again with the new version."""
        self._pump()
        if not isinstance(update, FanOutUpdate) or update.fan_out is not self._fan_out:
            raise WeightUpdateError("a replica died or joined during the update; send it again")
        update.check_complete()
        with deferred_interrupt():
            self._commit(update, version, recompute_running)

    def _commit(self, update: FanOutUpdate, version: int, recompute_running: bool) -> None:
        calls = update.fan_out.start("commit_update", version, recompute_running)
        self.weight_version, self.has_weights, self._stored = version, True, update.stored
        self._held_until = 0.0
        members, done = update.fan_out.members, 0
        answers = outcomes(calls, self.config.worker_timeout)
        for member, answer in zip(members, answers, strict=True):
            if isinstance(answer, Exception):
                what = "%s failed to switch to weight version %d: %s; it is restarted"
                logger.error(what, member.name, version, answer)
                member.kill()
            else:
                done += 1
        if not done and self._stored is None:
            self.has_weights = False
            raise WorkerError("every replica failed while it switched to the new weights, which are lost")

    def leave_weight_group(self, name: str) -> bool:
        return self._fan_out is not None and self._fan_out.leave(name)

    def has_weight_group(self, name: str) -> bool:
        return self._fan_out is not None and name in self._fan_out.group_names

    def weight_checksums(self) -> dict[str, str]:
        found = self.members().all("checksums", timeout=self.config.start_timeout)
        if any(f != found[0] for f in found):
            raise RuntimeError("the replicas' weights differ; update them")
        return found[0]

    def reset_prefix_cache(self, reset_running_requests: bool = False) -> None:
        self._each("reset_prefix_cache", reset_running_requests)

    def pause(self, paused: bool) -> None:
        self.paused = paused
        self._each("pause", paused)

    def release_memory(self, tags: Sequence[str]) -> int:
        self.has_kv_cache &= "kv_cache" not in tags
        self.has_weights &= "weights" not in tags
        return sum(self._each("release_memory", tuple(tags)))

    def wake_up(self, tags: Sequence[str]) -> None:
        self._each("wake_up", tuple(tags), timeout=self.config.start_timeout)
        self.has_kv_cache |= "kv_cache" in tags
        self.has_weights |= "weights" in tags and self._stored is not None

    def stats(self) -> EngineStats:
        """Summed over the replicas; a dead one's counts are lost."""
        total = {f.name: sum(getattr(h.stats, f.name) for h in self.handles if h.stats) for f in fields(EngineStats)}
        total["weight_version"] = self.weight_version
        total["num_waiting"] += len(self._unassigned)
        return EngineStats(**total)

    def close(self) -> None:
        self._closing.set()
        for handle in self.handles:
            self._end(handle)

    def _end(self, handle: _Handle) -> None:
        if handle.peer is not None:
            handle.peer.kill()
        self._give_up_room(handle)

    @staticmethod
    def _give_up_room(handle: _Handle) -> None:
        group, handle.placement = handle.placement, None
        if group is not None:
            ray_backend.release(group)
