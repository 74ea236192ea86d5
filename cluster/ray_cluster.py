"""Ray: which cluster, where on it a replica's workers are, and how they are called."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from types import ModuleType
from typing import Any

from ..engine.config import EngineConfig
from ..engine.executor import WorkerError
from ..engine.weights import free_port
from .calls import GROUPS, Host, group_of
from .sizing import on_gpus, threads_of_environment

# Ray adds 15 to the niceness of its workers, which would then wait for whatever else a node runs.
AS_URGENT_AS_RAY = {"env_vars": {"RAY_worker_niceness": "0"}}


class NoRoomError(WorkerError):
    """The cluster has not got what a replica needs."""


def ray() -> ModuleType:
    """The module. WorkerError where it is not installed."""
    try:
        import ray
    except ImportError as error:
        raise WorkerError("replicas and backend 'ray' need Ray: pip install 'samebits[ray]'") from error
    return ray


def connect(config: EngineConfig) -> None:
    """Connect to the cluster that RAY_ADDRESS or `ray start` names, or else start one with room for all workers."""
    if ray().is_initialized():
        return
    if threading.current_thread() is threading.main_thread():
        _init(config)
        return
    done: Future = Future()

    def init_and_stay() -> None:  # a local cluster's processes end with the thread that started them
        try:
            _init(config)
        except BaseException as error:
            done.set_exception(error)
        else:
            done.set_result(None)
            threading.Event().wait()

    threading.Thread(target=init_and_stay, name="ray", daemon=True).start()
    done.result()


def _init(config: EngineConfig) -> None:
    needed = config.num_workers * (threads_of_environment() or 1)
    try:
        ray().init(num_cpus=max(needed, len(os.sched_getaffinity(0))), include_dashboard=False)
    except ValueError:  # there is a cluster, which has the CPUs that it has
        ray().init(include_dashboard=False)


def node_address() -> str:
    """This node's address, as the cluster's other nodes reach it."""
    return ray().util.get_node_ip_address()


def node_id() -> str:
    """The name of the node that this process is on."""
    return ray().get_runtime_context().get_node_id()


def nodes() -> list[tuple[int, int]]:
    """CPUs and GPUs of each of the cluster's nodes."""
    found = [n["Resources"] for n in ray().nodes() if n["Alive"]]
    return [(int(r.get("CPU", 0)), int(r.get("GPU", 0))) for r in found] or [(0, 0)]


def threads_per_worker(config: EngineConfig) -> int:
    """CPU threads per worker: what OMP_NUM_THREADS says, or as many as all can have on what the cluster has free."""
    asked = threads_of_environment()
    if asked is not None:
        return asked
    places = nodes()
    free = ray().available_resources().get("CPU", 0)

    def fits(threads: int) -> bool:
        room = 0
        for cpus, gpus in places:
            room += min(cpus // threads, gpus) if on_gpus(config) else cpus // threads
        return threads * config.num_workers <= free and room >= config.num_workers

    return next(filter(fits, range(max(cpus for cpus, _ in places), 1, -1)), 1)


def sharers_of_memory(config: EngineConfig, threads: int) -> int:
    """Workers that share a node's memory; a GPU belongs to one."""
    if on_gpus(config):
        return 1
    largest = max(cpus for cpus, _ in nodes())
    return max(1, min(config.num_workers, largest // threads))


class Placement:
    """Room on the cluster for the workers of one replica, close together: a bundle per stage."""

    def __init__(self, config: EngineConfig, threads: int):
        from ray.util.placement_group import placement_group

        self.threads = threads
        self.gpus = 1 if on_gpus(config) else 0
        bundle = {"CPU": float(threads)} | ({"GPU": 1.0} if self.gpus else {})
        self.group = placement_group([dict(bundle) for _ in range(config.pipeline_parallel_size)], strategy="PACK")

    def wait(self, timeout: float) -> bool:
        """Wait until the room is there. False if it isn't after `timeout` seconds."""
        return self.group.wait(timeout)

    def no_room(self, timeout: float) -> NoRoomError:
        """The error that says what is missing."""
        bundle, *others = self.group.bundle_specs
        free = {k: v for k, v in ray().available_resources().items() if k in bundle}
        return NoRoomError(
            f"the Ray cluster had no room for {1 + len(others)} stage(s) of {bundle} within {timeout:g} s; free are "
            f"{free}. Add nodes (`ray start --address=...`), or lower replicas, pipeline_parallel_size or "
            "OMP_NUM_THREADS"
        )

    def remove(self) -> None:
        """Give the room back."""
        from ray.util.placement_group import remove_placement_group

        remove_placement_group(self.group)


class RayHost(Host):
    """A `Host` on one of the cluster's nodes."""

    def __init__(self) -> None:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the driver's to take, which ends its workers in time

    def free_address(self) -> tuple[str, int]:
        """An address of this node at which nobody listens."""
        host = node_address()
        return host, free_port(host)


class RayHandle:
    """A `WorkerHandle` of an actor in one of a placement's bundles."""

    def __init__(self, name: str, placement: Placement, bundle: int):
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        self.name = name
        strategy = PlacementGroupSchedulingStrategy(placement.group, placement_group_bundle_index=bundle)
        kind = ray().remote(concurrency_groups=dict.fromkeys(GROUPS, 1), runtime_env=AS_URGENT_AS_RAY)(RayHost)
        self.actor = kind.options(
            scheduling_strategy=strategy, num_cpus=placement.threads, num_gpus=placement.gpus
        ).remote()

    def call(self, method: str, *args: Any) -> Future:
        """Start a method of the actor's object."""
        return self._future(self.actor.call.options(concurrency_group=group_of(method)).remote(method, *args))

    def free_address(self) -> Future:
        """Ask for an address of the actor's node at which nobody listens."""
        return self._future(self.actor.free_address.options(concurrency_group="weights").remote())

    def _future(self, ref: Any) -> Future:
        result: Future = Future()

        def done(source: Future) -> None:
            error = source.exception()
            if error is None:
                result.set_result(source.result())
            else:
                result.set_exception(self._translated(error))

        ref.future().add_done_callback(done)
        return result

    def stream(self, method: str, deadline: Callable[[], float]) -> Iterator[Any]:
        """Yield what a generator method yields.

        deadline: called while nothing comes, for the seconds to wait; WorkerError when none are left.
        """
        items = self.actor.stream.options(num_returns="streaming", concurrency_group=group_of(method)).remote(method)
        try:
            while True:
                while not ray().wait([items], timeout=0.5)[0]:
                    if deadline() <= 0:
                        raise WorkerError(f"{self.name} did not answer in time")
                yield ray().get(next(items))
        except StopIteration:
            return
        except ray().exceptions.RayError as error:
            raise self._translated(error) from None

    def _translated(self, error: BaseException) -> BaseException:
        """An error of Ray's as what it means."""
        exceptions = ray().exceptions
        if isinstance(error, exceptions.RayTaskError):
            return error.cause if isinstance(error.cause, Exception) else error
        if isinstance(error, exceptions.RayActorError):
            return WorkerError(f"{self.name} died")
        return error

    def kill(self) -> None:
        """End the actor's process."""
        ray().kill(self.actor)
