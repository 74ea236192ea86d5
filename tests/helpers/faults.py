"""Makes replicas and stages die, hang or fail, from outside or at a verb of their protocol."""

import os
import signal
import time

import psutil
import ray

from samebits.cluster.actors import Actor, Call

ENGINE = "command", "post"


def actors_of(worker) -> list[Actor]:
    """The actors of a replica, or of one of its lives, or the actor itself."""
    life = getattr(worker, "client", worker)
    return getattr(life, "actors", [life])


def process_of(worker) -> psutil.Process:
    """The process of an actor, or of a replica's first stage."""
    return psutil.Process(ray.get(actors_of(worker)[0].handle.__ray_call__.remote(lambda host: os.getpid())))


def kill(worker) -> None:
    process_of(worker).kill()


def stop(worker) -> None:
    """Make it hang."""
    process_of(worker).send_signal(signal.SIGSTOP)


def at(monkeypatch, worker, verb: str, fault) -> None:
    """From now on a verb to a worker is fault(call, target, method, *args) instead of call(target, method, *args)."""
    for actor in actors_of(worker):

        def call(target, method, *args, original=actor.call):
            inner = args[0] if method in ENGINE else method
            return fault(original, target, method, *args) if inner == verb else original(target, method, *args)

        monkeypatch.setattr(actor, "call", call)


def dies(worker):
    """A fault: the worker's process dies before the verb reaches it."""
    process = process_of(worker)

    def fault(call, *args):
        process.kill()
        time.sleep(0.3)
        return call(*args)

    return fault


def lost(call, *args) -> Call:
    """A fault: the verb is answered and not executed."""
    return Call("nobody", ray.put(None))


def serve(llm, count: int = 2) -> bool:
    """True if that many replicas serve."""
    llm.engine.poll()
    return len(llm.engine.serving) == count
