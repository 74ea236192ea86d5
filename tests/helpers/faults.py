"""Makes replicas and stages die, hang or fail, from outside or at a verb of their protocol."""

import os
import signal
import time
from concurrent.futures import Future

import psutil

WRAPPERS = "on_worker", "command", "post"


def process_of(worker) -> psutil.Process:
    """The process of a replica, or of one of a pipeline's stages."""
    if hasattr(worker, "process"):  # a child of this one
        return psutil.Process(worker.process.pid)
    incarnation = getattr(worker, "current", worker)
    handle = incarnation.actors[0] if hasattr(incarnation, "actors") else incarnation
    import ray

    return psutil.Process(ray.get(handle.actor.__ray_call__.remote(lambda host: os.getpid())))


def kill(worker) -> None:
    process_of(worker).kill()


def stop(worker) -> None:
    """Make it hang."""
    process_of(worker).send_signal(signal.SIGSTOP)


def handles_of(worker) -> list:
    incarnation = getattr(worker, "current", worker)
    return getattr(incarnation, "actors", [incarnation])


def at(monkeypatch, worker, verb: str, fault) -> None:
    """From now on a verb to a worker is fault(call, method, *args) instead of call(method, *args)."""
    for handle in handles_of(worker):

        def call(method, *args, original=handle.call):
            inner = args[0] if method in WRAPPERS else method
            return fault(original, method, *args) if inner == verb else original(method, *args)

        monkeypatch.setattr(handle, "call", call)


def dies(worker):
    """A fault: the worker's process dies before the verb reaches it."""
    process = process_of(worker)

    def fault(call, method, *args):
        process.kill()
        time.sleep(0.3)
        return call(method, *args)

    return fault


def lost(call, method, *args) -> Future:
    """A fault: the verb is answered and not executed."""
    nothing: Future = Future()
    nothing.set_result(None)
    return nothing


def serve(llm, count: int = 2) -> bool:
    """True if that many replicas serve."""
    llm.engine.poll()
    return len(llm.engine.serving) == count
