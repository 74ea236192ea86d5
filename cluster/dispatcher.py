"""The requests of each replica, from their submission to their end."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue

from ..engine.engine import Engine
from ..engine.request import Request
from ..engine.weights import WorkerError
from .actors import RemoteCall, outcomes
from .affinity import PrefixAffinity
from .replica import Progress
from .replica_client import ReplicaClient

MAX_DEATHS = 3  # of replicas that a request may see before it is held to be the cause
AFFINITY_SLACK = 8  # samples that a replica may have more than the least loaded and still get a prompt that it knows


@dataclass
class Assignment:
    """A request that a replica has. received: its process is known to have got it."""

    client: ReplicaClient
    request: Request
    received: bool = False


class Dispatcher:
    """The assignment of an engine's requests to its replicas, and to others when one dies.

    events: what the thread that drives the engine is to call. serving: the replicas that take requests. assigned: by
    the serial numbers that the requests got with their assignments.
    """

    def __init__(self, engine: Engine, events: SimpleQueue[Callable[[], object]]):
        self.engine = engine
        self.events = events
        self.serving: list[ReplicaClient] = []
        self.assigned: dict[int, Assignment] = {}
        self._serials = itertools.count(1)
        self._affinity = PrefixAffinity()
        self._deaths: dict[str, float] = defaultdict(float)  # seen by a request

    def assign(self, request: Request) -> None:
        """Give a request to a replica, unless none serves. TypeError where it can't be pickled."""
        if not self.serving:
            return
        client = self._choose(request)
        request.serial = next(self._serials)
        call = client.post("add_request", request)
        self.assigned[request.serial] = Assignment(client, request)
        client.num_unfinished += sum(s.finish_reason is None for s in request.samples)
        arrived = partial(self._note_arrival, request.serial, call)
        call.ref.future().add_done_callback(lambda _: self.events.put(arrived))

    def assign_waiting(self) -> None:
        """Assign the requests that no replica has, as one serves now; end those that can't be pickled."""
        for request in [r for r in self.engine.requests.values() if r.serial not in self.assigned]:
            try:
                self.assign(request)
            except TypeError as error:
                self.end(request, "error", f"TypeError: {error}")

    def _choose(self, request: Request) -> ReplicaClient:
        """Return the least loaded replica, or the one that knows the prompt's start, if it has little more to do."""
        keys = self._affinity.keys(request)
        known = self._affinity.find(keys)
        chosen = min(self.serving, key=lambda client: (client.num_unfinished, client.index))
        for client in self.serving:
            if client.index == known and client.num_unfinished <= chosen.num_unfinished + AFFINITY_SLACK:
                chosen = client
        self._affinity.remember(keys, chosen.index)
        return chosen

    def _note_arrival(self, serial: int, call: RemoteCall) -> None:
        """Note that a replica has got a request; end one that it couldn't read."""
        assignment = self.assigned.get(serial)
        (outcome,) = outcomes([call], 0.0)
        if assignment is None or isinstance(outcome, WorkerError):  # it died, which its thread will tell
            return
        assignment.received = True
        if isinstance(outcome, Exception):
            self.end(assignment.request, "error", f"{type(outcome).__name__}: {outcome}")

    def take(self, client: ReplicaClient, progress: Progress) -> None:
        """Take in what a replica reports of a request, unless it was aborted, or is elsewhere by now."""
        assignment = self.assigned.get(progress.serial)
        if assignment is None:
            return
        request = assignment.request
        client.num_unfinished -= progress.apply(request)
        self.engine.outbox[request.request_id] = request
        if request.finished:
            self._forget(request)

    def reassign(self, client: ReplicaClient) -> None:
        """Give the requests of a dead replica to others; end those that have seen too many deaths."""
        for assignment in [a for a in self.assigned.values() if a.client is client]:
            request = assignment.request
            del self.assigned[request.serial]
            # one that was dead before it got the request counts less: all may have died together
            self._deaths[request.request_id] += 1.0 if assignment.received else 1 / self.engine.config.replicas
            if self._deaths[request.request_id] < MAX_DEATHS:
                self.assign(request)
            else:
                self.end(request, "error", "replicas died, one after the other, while they worked on it")

    def end(self, request: Request, reason: str, detail: str | None = None) -> ReplicaClient | None:
        """End all samples of a request that are still unfinished; return the replica that had it."""
        unfinished = request.finish(reason, detail)
        assignment = self._forget(request)
        self.engine.outbox[request.request_id] = request
        if assignment is None:
            return None
        assignment.client.num_unfinished -= len(unfinished)
        return assignment.client

    def _forget(self, request: Request) -> Assignment | None:
        self._deaths.pop(request.request_id, None)
        self.engine.requests.pop(request.request_id, None)
        return self.assigned.pop(request.serial, None)
