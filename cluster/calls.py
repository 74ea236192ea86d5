"""Calls to workers in other processes, however they were started."""

from __future__ import annotations

import pickle
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from typing import Any, Protocol

from ..engine.executor import WorkerError
from ..engine.worker import Worker

# Each group has its own thread in a worker's process, and its calls are executed in order: steps; what happens between
# steps; and what goes on beside them.
GROUPS = ("steps", "control", "weights")


def group_of(method: str) -> str:
    """The group that a method belongs to."""
    if method in Worker.CONCURRENT or method == "on_worker":
        return "weights"
    return "steps" if method in ("serve_steps", "run") else "control"


class WorkerHandle(Protocol):
    """An object in another process, as its owner sees it. Any thread may call."""

    name: str

    def call(self, method: str, *args: Any) -> Future:
        """Start a method; calls of the same group are executed in order. WorkerError when the process is gone."""

    def kill(self) -> None:
        """End the process at once."""


class Host:
    """What runs in a worker's process: it makes one object, whose methods others call."""

    target: Any = None

    def call(self, method: str, *args: Any) -> Any:
        """Call a method of the object; `make` makes it, from a class and its arguments."""
        if method == "make":
            kind, *rest = args
            self.target = kind(*rest)
            return None
        return getattr(self.target, method)(*args)

    def stream(self, method: str, *args: Any) -> Iterator[Any]:
        """Yield what a generator method of the object yields."""
        yield from getattr(self.target, method)(*args)


Calls = Sequence[tuple[str, Future]]


def start_all(handles: Sequence[WorkerHandle], method: str, *args: Any) -> Calls:
    """Start a method of every handle's object."""
    return [start(handle, method, *args) for handle in handles]


def start(handle: WorkerHandle, method: str, *args: Any) -> tuple[str, Future]:
    """Start a method; return the handle's name and the result to come, an error where it can't be sent."""
    try:
        return handle.name, handle.call(method, *args)
    except Exception as error:
        failed: Future = Future()
        failed.set_exception(error)
        return handle.name, failed


def outcomes(calls: Calls, timeout: float) -> list[Any]:
    """Wait for all calls and return their results, with exceptions in their places.

    A call that hasn't ended after `timeout` seconds for all is a WorkerError.
    """
    deadline = time.monotonic() + timeout
    found: list[Any] = []
    for name, future in calls:
        try:
            found.append(future.result(max(0.0, deadline - time.monotonic())))
        except Exception as error:
            late = isinstance(error, TimeoutError) and not future.done()
            found.append(WorkerError(f"{name} did not answer within {timeout:g} s") if late else error)
    return found


def gather(calls: Calls, timeout: float) -> list[Any]:
    """Wait for all calls and return their results; raise the first error once all have ended."""
    found = outcomes(calls, timeout)
    for value in found:
        if isinstance(value, Exception):
            raise value
    return found


def portable(error: BaseException) -> BaseException:
    """The error, if it survives pickling, or one that says the same."""
    try:
        pickle.loads(pickle.dumps(error))
        return error
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
