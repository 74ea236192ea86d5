"""Makes replicas and stages die, hang or fail, from outside or at a verb of their protocol."""

import os
import signal
import time

import psutil
import ray

from samebits.cluster.actors import Actor, Call


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
    """From now on a verb to a worker or engine is fault(start, group, method, verb, *args) instead of a start of it."""
    for actor in actors_of(worker):

        def start(group, method, *args, original=actor.start):
            found = args and args[0] == verb
            return fault(original, group, method, *args) if found else original(group, method, *args)

        monkeypatch.setattr(actor, "start", start)


def dies(worker):
    """A fault: the worker's process dies before the verb reaches it."""
    process = process_of(worker)

    def fault(start, *args):
        process.kill()
        time.sleep(0.3)
        return start(*args)

    return fault


def lost(start, *args) -> Call:
    """A fault: the verb is answered and not executed."""
    return Call("nobody", ray.put(None))


def serve(llm, count: int = 2) -> bool:
    """True if that many replicas serve."""
    llm.engine.poll()
    return len(llm.engine.serving) == count
