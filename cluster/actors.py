"""Objects in other processes: an actor of Ray's per worker, and calls to many of them at once."""

from __future__ import annotations

import signal
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ..engine.weights import WorkerError
from ..engine.worker import Worker
from .ray_cluster import Placement, check_connected, ray

# Each group has its own thread in an actor, and its calls are executed in order: steps; what an engine is told; a
# worker's methods between steps; those beside steps; and one that lasts as long as the process.
GROUPS = ("steps", "engine", "control", "weights", "life")
ROUNDS_IN_FLIGHT = 4

# Ray adds 15 to the niceness of its workers, which would then wait for whatever else a node runs.
AS_URGENT_AS_RAY = {"env_vars": {"RAY_worker_niceness": "0"}}


class Host:
    """What runs in an actor's process. worker, engine: the objects whose methods others call, once they are made."""

    worker: Any
    engine: Any

    def __init__(self) -> None:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the driver's to take, which ends its workers in time
        warnings.filterwarnings("ignore", "The given NumPy array is not writable")  # Ray's shared memory is not

    def run(self, function: Callable, *args: Any) -> Any:
        """Return function(host, *args)."""
        return function(self, *args)

    def call(self, target: str, method: str, *args: Any) -> Any:
        """Call a method of one of the objects and return its result."""
        return getattr(getattr(self, target), method)(*args)

    def stream(self, target: str, method: str) -> Iterator[Any]:
        """Yield what a generator method of one of the objects yields."""
        yield from getattr(getattr(self, target), method)()

    def live(self) -> None:
        """Return never: who waits for the result learns of the process's death."""
        threading.Event().wait()


@dataclass(frozen=True)
class Call:
    """A result to come. name: of the actor that was called; ref: Ray's reference to the result."""

    name: str
    ref: Any

    def result(self, timeout: float) -> Any:
        """Wait for the result and return it.

        Raises what the method raised, or WorkerError where the actor died or takes longer than `timeout` seconds.
        """
        try:
            return ray().get(self.ref, timeout=timeout)
        except Exception as error:
            raise self.meaning_of(error) from None

    def meaning_of(self, error: BaseException) -> BaseException:
        """Return an error of Ray's as what it means here."""
        exceptions = ray().exceptions
        if isinstance(error, exceptions.RayTaskError):
            return error.cause if isinstance(error.cause, Exception) else error
        if isinstance(error, exceptions.GetTimeoutError):
            return WorkerError(f"{self.name} did not answer in time")
        if isinstance(error, exceptions.RayActorError):
            return WorkerError(f"{self.name} died")
        return error


class Actor:
    """An actor in one of a placement's bundles, as others see it; it may be sent to other actors."""

    def __init__(self, name: str, placement: Placement, bundle: int):
        self.name = name
        kind = ray().remote(concurrency_groups=dict.fromkeys(GROUPS, 1), runtime_env=AS_URGENT_AS_RAY)(Host)
        self.handle = kind.options(**placement.options(bundle)).remote()

    def _call(self, group: str, method: str, *args: Any) -> Call:
        check_connected()
        return Call(self.name, getattr(self.handle, method).options(concurrency_group=group).remote(*args))

    def run(self, function: Callable, *args: Any) -> Call:
        """Start function(host, *args) in the actor."""
        return self._call("control", "run", function, *args)

    def call(self, target: str, method: str, *args: Any) -> Call:
        """Start a method of the actor's worker or engine; those of a group are executed in order."""
        if target == "engine":
            group = "engine"
        elif method == "run_step":
            group = "steps"
        else:
            group = "weights" if method in Worker.CONCURRENT else "control"
        return self._call(group, "call", target, method, *args)

    def stream(self, target: str, method: str) -> Any:
        """Start a generator method; return Ray's generator of references to what it yields."""
        options = {"num_returns": "streaming", "concurrency_group": "steps"}
        return self.handle.stream.options(**options).remote(target, method)

    def live(self) -> Call:
        """Return a call that ends with the process."""
        return self._call("life", "live")

    def kill(self) -> None:
        """End the process, which Ray has ended where it was shut down."""
        if ray().is_initialized():
            ray().kill(self.handle)


def outcomes(calls: Iterable[Call], timeout: float) -> list[Any]:
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


def gather(calls: Iterable[Call], timeout: float) -> list[Any]:
    """Wait for all calls and return their results; raise the first error once all have ended."""
    found = outcomes(calls, timeout)
    for value in found:
        if isinstance(value, Exception):
            raise value
    return found


def gather_rounds(rounds: Iterable[Sequence[Call]], timeout: float) -> None:
    """Gather the calls of each round while the next few are on their way."""
    under_way: deque[Sequence[Call]] = deque()
    for calls in rounds:
        under_way.append(calls)
        if len(under_way) == ROUNDS_IN_FLIGHT:
            gather(under_way.popleft(), timeout)
    while under_way:
        gather(under_way.popleft(), timeout)
