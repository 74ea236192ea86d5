"""The one injector of faults: into an engine's steps, weights and requests, into replicas and stages.

Replicas and stages die, hang or fail from outside or at a verb of their protocol.
"""

from __future__ import annotations

import os
import signal
import time
from typing import TYPE_CHECKING

import psutil
import torch

from samebits.engine.request import Request, Sample

if TYPE_CHECKING:
    from samebits.cluster.actors import Actor, RemoteCall


# --- an engine in this process --------------------------------------------------------------------------------------


def fail(error: BaseException):
    """A fault: raises the error."""

    def fault(*_):
        raise error

    return fault


def ctrl_c(*_) -> None:
    """A fault: Ctrl-C, which comes between two bytecodes of the main thread."""
    os.kill(os.getpid(), signal.SIGINT)


def before(monkeypatch, owner, name: str, fault, at: int | None = None) -> None:
    """From now on fault(*args) comes before owner.name(*args): at call number `at` (from 1) alone, or at each."""
    original = getattr(owner, name)
    calls = iter(range(1, 10**9))

    def call(*args, **options):
        if at is None or next(calls) == at:
            fault(*args)
        return original(*args, **options)

    monkeypatch.setattr(owner, name, call)


def before_step(monkeypatch, llm, fault, at: int | None = None) -> None:
    """fault(plan) comes before the workers get step number `at` (from now, from 1), or each step."""
    before(monkeypatch, llm.engine.executor, "submit", fault, at)


def after_step(monkeypatch, llm, fault, at: int) -> None:
    """fault(plan) comes when the workers have computed step number `at` (from now, from 1), before the engine knows."""
    submit = llm.engine.executor.submit
    calls = iter(range(1, 10**9))

    def call(plan):
        result = submit(plan)
        if next(calls) == at:
            fault(plan)
        return result

    monkeypatch.setattr(llm.engine.executor, "submit", call)


def after_queueing(monkeypatch, llm, fault, at: int) -> None:
    """fault() comes when prompt number `at` (from now, from 1) is queued, before its caller knows."""
    add = llm.engine.scheduler.add
    calls = iter(range(1, 10**9))

    def call(seq):
        add(seq)
        if next(calls) == at:
            fault()

    monkeypatch.setattr(llm.engine.scheduler, "add", call)


def before_token(monkeypatch, fault) -> None:
    """fault() comes before each token that a sample takes."""
    before(monkeypatch, Sample, "append", fault)


def before_stop_check(monkeypatch, request_id: str, fault) -> None:
    """fault() comes before a request is looked at for its end."""
    before(monkeypatch, Request, "check_stop", lambda request, *_: request.request_id == request_id and fault())


def before_output(monkeypatch, fault) -> None:
    """fault() comes before each output that is made for a caller."""
    before(monkeypatch, Request, "take_output", fault)


def model_of(llm) -> torch.nn.Module:
    """The model that an engine of one worker computes with, to be harmed."""
    (worker,) = llm.engine.executor.workers
    return worker.model


def embed_nan(llm, token: int) -> None:
    """The memory of the weights rots: a token's embedding is NaN."""
    model_of(llm).get_input_embeddings().weight.data[token] = float("nan")


def logit_nan(llm, token: int) -> None:
    """One logit of each row is NaN."""
    head = model_of(llm).get_output_embeddings()
    head.bias = torch.nn.Parameter(torch.zeros(head.out_features))
    head.bias.data[token] = float("nan")


# --- replicas and stages --------------------------------------------------------------------------------------------


def actors_of(worker) -> list[Actor]:
    """The actors of a replica, or of one of its lives, or the actor itself."""
    life = getattr(worker, "client", worker)
    return getattr(life, "actors", [life])


def process_of(worker) -> psutil.Process:
    """The process of an actor, or of a replica's first stage."""
    import ray

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


def lost(start, *args) -> RemoteCall:
    """A fault: the verb is answered and not executed."""
    import ray

    from samebits.cluster.actors import RemoteCall

    return RemoteCall("nobody", ray.put(None))


def serve(llm, count: int = 2) -> bool:
    """True if that many replicas serve."""
    llm.engine.poll()
    return len(llm.engine.serving) == count
