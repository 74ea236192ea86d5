"""The life of a replica: it waits for room, starts, gets the weights in force, serves, dies, and starts again."""

from __future__ import annotations

import contextlib
import logging
import pathlib
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, Literal

from ..engine.config import EngineConfig
from ..engine.outputs import EngineStats
from ..engine.request import Request
from ..engine.weights import WeightUpdateError
from ..model.checkpoint import StoredWeights
from .calls import WorkerHandle, gather, start, start_all
from .ray_cluster import Placement, RayHandle, ray
from .replica import Replica, ReplicaInfo

logger = logging.getLogger(__name__)

ROOM_SOON = 5.0  # seconds: a replica that has to wait longer for room on the cluster isn't waited for


class WorkerOfReplica:
    """A `WorkerHandle` of the worker that an actor's replica runs in its own process: its first stage."""

    def __init__(self, actor: RayHandle):
        self.name = actor.name
        self._actor = actor

    def call(self, method: str, *args: Any) -> Any:
        """Start a method of the worker."""
        return self._actor.call("on_worker", method, *args)

    def kill(self) -> None:
        """End the replica."""
        self._actor.kill()


class Incarnation:
    """The processes of a replica from its start to its death. actors: one per stage, the engine in the first."""

    def __init__(self, name: str, placement: Placement, stages: int):
        self.name = name
        self.actors = []
        for rank in range(stages):
            self.actors.append(RayHandle(f"{name}, stage {rank}" if rank else name, placement, rank))
        self.info: ReplicaInfo
        self.patience = 0.0  # until when it may be silent, though it works: time.monotonic()

    @property
    def workers(self) -> list[WorkerHandle]:
        """Handles of the workers that hold its weights, by stage."""
        return [WorkerOfReplica(self.actors[0]), *self.actors[1:]]

    def start(self, path: pathlib.Path, config: EngineConfig, sharers: int, threads: int) -> None:
        """Load the model. Raises what goes wrong in the process."""
        head, *stages = self.actors
        gather([start(head, "make", Replica, path, config, stages, sharers, threads)], config.start_timeout)
        (self.info,) = gather([start(head, "info")], config.start_timeout)

    def post(self, method: str, *args: Any) -> Any:
        """Have a method of the engine called between two steps. Returns the future of its arrival."""
        return self.actors[0].call("post", method, *args)

    def command(self, method: str, *args: Any) -> tuple[str, Any]:
        """Have a method of the engine called between two steps. Returns the name and the future of its result."""
        return start(self.actors[0], "command", method, *args)

    def kill(self) -> None:
        """End its processes."""
        for actor in self.actors:
            with contextlib.suppress(Exception):  # it is dead
                actor.kill()


class ReplicaState:
    """A replica as the driver sees it, over all its incarnations. load: unfinished samples that it has."""

    def __init__(self, index: int):
        self.index = index
        self.name = f"replica {index}"
        self.status: Literal["starting", "waiting", "serving", "failed"] = "starting"
        self.placement: Placement | None = None
        self.current: Incarnation | None = None
        self.requests: dict[int, Request] = {}  # by the serial numbers of their assignments
        self.received: set[int] = set()  # of these, those that the process is known to have got
        self.load = 0
        self.stats: EngineStats | None = None
        self.failed_starts = 0


@dataclass
class Event:
    """Something that a thread tells the driving one. incarnation: that it is about, None before there is one."""

    kind: Literal["waiting", "starting", "started", "not started", "ready", "report", "lost", "refused", "wake"]
    replica: ReplicaState | None = None
    incarnation: Incarnation | None = None
    value: Any = None


class Launcher:
    """Starts replicas and follows them in threads, which put what happens into `events`."""

    def __init__(self, path: pathlib.Path, config: EngineConfig, sharers: int, threads: int):
        self.path = path
        self.config = config
        self.sharers = sharers
        self.threads = threads
        self.events: SimpleQueue[Event] = SimpleQueue()
        self.closing = threading.Event()

    def in_thread(self, function: Callable, *args: Any) -> None:
        """Run a function in a thread that doesn't keep the process alive."""
        threading.Thread(target=function, args=args, daemon=True).start()

    def launch(self, replica: ReplicaState) -> None:
        """Start a replica's processes; tells "started" with a new incarnation, or "not started" with the error."""
        incarnation = None
        try:
            placement = self._placement(replica)
            if not placement.wait(min(ROOM_SOON, self.config.start_timeout)):
                self.events.put(Event("waiting", replica))
                if not placement.wait(self.config.start_timeout):
                    raise placement.no_room(self.config.start_timeout)
            self.events.put(Event("starting", replica))
            incarnation = Incarnation(replica.name, placement, self.config.pipeline_parallel_size)
            replica.current = incarnation
            incarnation.start(self.path, self.config, self.sharers, self.threads)
            self.events.put(Event("started", replica, incarnation))
        except BaseException as error:
            if incarnation is not None:
                incarnation.kill()
            self.events.put(Event("not started", replica, incarnation, error))
        if self.closing.is_set():
            self.end(replica)

    def _placement(self, replica: ReplicaState) -> Placement:
        """The replica's room, which Ray finds anew when a node goes away."""
        if replica.placement is None:
            replica.placement = Placement(self.config, self.threads)
        return replica.placement

    def follow(self, replica: ReplicaState, incarnation: Incarnation) -> None:
        """Pass on what a replica that serves reports; tells "lost" when it is dead or says nothing for too long."""
        heard = time.monotonic()

        def left() -> float:
            return max(heard + self.config.worker_timeout, incarnation.patience) - time.monotonic()

        try:
            for report in incarnation.actors[0].stream("run", left):
                heard = time.monotonic()
                self.events.put(Event("report", replica, incarnation, report))
        except Exception as error:
            self.events.put(Event("lost", replica, incarnation, error))

    def bring_weights(
        self,
        replica: ReplicaState,
        new: Incarnation,
        donor: Incarnation | None,
        stored: StoredWeights | None,
        version: int,
    ) -> None:
        """Give a new replica the weights in force, from one that serves (donor), or where they were read (stored).

        Tells "ready" with the version that it has then, or "not started".
        """
        update_id = f"copy-{version}-{time.monotonic_ns()}"
        limit = self.config.start_timeout
        try:
            gather(start_all(new.workers, "begin_update", update_id), limit)
            if donor is not None:
                addresses = gather([(donor.name, actor.free_address()) for actor in donor.actors], limit)
                calls = []
                for sender, taker, address in zip(donor.workers, new.workers, addresses, strict=True):
                    calls.append(start(sender, "send_weights", *address))
                    calls.append(start(taker, "take_weights", update_id, *address))
                gather(calls, limit)
            else:
                assert stored is not None
                gather(start_all(new.workers, "load_directory", update_id, stored.path), limit)
                if not stored.unchanged:
                    raise WeightUpdateError(f"the files in {stored.path} changed while they were read")
            gather([new.command("switch_weights", update_id, version, True, stored)], limit)
            self.events.put(Event("ready", replica, new, version))
        except Exception as error:
            logger.warning("%s did not get the weights in force: %s", replica.name, error)
            if donor is not None:  # which may have died; the new replica takes them from another
                self.events.put(Event("ready", replica, new))
            else:
                new.kill()
                self.events.put(Event("not started", replica, new, error))

    def end(self, replica: ReplicaState) -> None:
        """End a replica's processes and give back its room."""
        if not ray().is_initialized():  # it is shut down, and all that it started with it
            return
        if replica.current is not None:
            replica.current.kill()
        if replica.placement is not None:
            replica.placement.remove()
            replica.placement = None
