"""Calls to objects in other processes, one or many at once; each process is an actor of Ray's."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import ray
from torch import Tensor

from ..engine.config import EngineConfig
from ..engine.weights import WorkerError, Workers
from ..engine.weights.spec import buckets, byte_buckets, from_bytes
from ..engine.weights.workers import arguments_of
from ..engine.worker import Worker
from .ray_cluster import ReplicaPlacement, check_connected

if TYPE_CHECKING:
    from ray import ObjectRef, ObjectRefGenerator

# Each group has its own thread in an actor, which executes its calls in order: steps; what is done between steps; what
# a worker does beside steps; and a call that lasts as long as the process.
GROUPS = ("steps", "control", "weights", "life")
BUCKET_BYTES = 2**24  # of tensors that travel as one object
BUCKETS_UNDER_WAY = 4


class RemoteCall(NamedTuple):
    """A result to come. name: of the actor that was called; ref: Ray's reference to the result."""

    name: str
    ref: ObjectRef

    def result(self, timeout: float) -> Any:
        """Wait for the result and return it.

        Raises what the method raised, or WorkerError where the actor died or takes longer than `timeout` seconds.
        """
        try:
            return ray.get(self.ref, timeout=timeout)
        except ray.exceptions.RayTaskError as error:
            raise error.cause if isinstance(error.cause, Exception) else error from None
        except ray.exceptions.GetTimeoutError:
            raise WorkerError(f"{self.name} did not answer in time") from None
        except ray.exceptions.RayActorError:
            raise WorkerError(f"{self.name} died") from None


class Actor:
    """An actor in one of a placement's bundles, as others see it; it may be sent to other actors.

    kind: its class, whose `call` calls a method of its worker.
    """

    def __init__(self, kind: type, name: str, placement: ReplicaPlacement, bundle: int):
        self.name = name
        remote: Any = ray.remote  # whose types know no concurrency groups
        remote_kind = remote(concurrency_groups=dict.fromkeys(GROUPS, 1))(kind)
        self.handle = remote_kind.options(**placement.options(bundle)).remote()

    def start(self, group: str, method: str, *args: Any) -> RemoteCall:
        """Start a method of the actor and return the call; those of a group are executed in order."""
        check_connected()
        return RemoteCall(self.name, getattr(self.handle, method).options(concurrency_group=group).remote(*args))

    def stream(self, group: str, method: str, *args: Any) -> ObjectRefGenerator:
        """Start a generator of the actor and return what yields references to its results, one by one."""
        check_connected()
        return getattr(self.handle, method).options(concurrency_group=group, num_returns="streaming").remote(*args)

    def call(self, method: str, *args: Any) -> RemoteCall:
        """Start a method of the actor's worker and return the call."""
        group = "weights" if method in Worker.CONCURRENT else "control"
        return self.start("steps" if method == "run_step" else group, "call", method, *args)

    def kill(self) -> None:
        """End the process, which Ray has ended where it was shut down."""
        if ray.is_initialized():
            ray.kill(self.handle)


def outcomes(calls: Iterable[RemoteCall], timeout: float) -> list[Any]:
    """Wait for all calls and return their results, with exceptions in their places.

    A call that hasn't ended after `timeout` seconds for all is a WorkerError.
    """
    deadline = time.monotonic() + timeout
    found: list[Any] = []
    for call in calls:
        try:
            found.append(call.result(max(0.0, deadline - time.monotonic())))
        except Exception as error:
            found.append(error)
    return found


def gather(calls: Iterable[RemoteCall], timeout: float) -> list[Any]:
    """Wait for all calls and return their results; raise the first error once all have ended."""
    found = outcomes(calls, timeout)
    for value in found:
        if isinstance(value, Exception):
            raise value
    return found


class RemoteWorkers(Workers):
    """`Workers` in actors. Tensors reach them as objects of Ray's, which all workers of a node read in one place."""

    def __init__(self, actors: Sequence[Actor], config: EngineConfig):
        super().__init__(len(actors), config.start_timeout)
        self.actors = [*actors]
        self.timeout = config.worker_timeout

    def _start(self, method: str, *args: Any) -> list[RemoteCall]:
        return [actor.call(method, *arguments_of(i, args)) for i, actor in enumerate(self.actors)]

    def collective_rpc(self, method: str, *args: Any, timeout: float | None = None) -> list[Any]:
        """Call a method of every worker and return the results; raise the first error once all have ended."""
        return gather(self._start(method, *args), timeout or self.timeout)

    def send_tensors(self, update_id: str, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Stage tensors in every worker; the next buckets are read while workers load the last."""
        under_way: deque[list[RemoteCall]] = deque()
        for data, specs in byte_buckets(tensors, BUCKET_BYTES):
            under_way.append(self._start("load_bucket", update_id, ray.put(data), specs))
            if len(under_way) == BUCKETS_UNDER_WAY:
                gather(under_way.popleft(), self.load_timeout)
        for calls in under_way:
            gather(calls, self.load_timeout)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the names and tensors of the weights in force, copied to CPU memory, each name once."""
        seen: set[str] = set()
        for actor in self.actors:
            specs = actor.call("weight_specs").result(self.timeout)
            specs = [spec for spec in specs if spec.name not in seen]  # a tied tensor may be in two stages
            seen.update(spec.name for spec in specs)
            for bucket in buckets(specs, lambda spec: spec.nbytes, BUCKET_BYTES):
                found = actor.call("read_weights", bucket).result(self.timeout)
                for spec, data in zip(bucket, found, strict=True):
                    yield spec.name, from_bytes(data.copy(), spec)
