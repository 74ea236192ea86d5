"""Workers as Ray actors: Ray places them and knows their health; they connect back like any other worker."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import torch

from ..config import EngineConfig
from .worker import Process, WorkerError, work


def ray() -> Any:
    """The module, connected to a cluster: the one that RAY_ADDRESS or `ray start` names, or else a new local one."""
    try:
        import ray
    except ImportError as error:
        raise WorkerError("backend 'ray' needs Ray: pip install 'samebits[ray]'") from error
    if not ray.is_initialized():
        if threading.current_thread() is threading.main_thread():
            ray.init(include_dashboard=False)
        else:
            _init_for_good(ray)
    return ray


def _init_for_good(ray: Any) -> None:
    """In a thread that stays: a local cluster's processes end with the thread that started them."""
    done: Future = Future()

    def run() -> None:
        try:
            done.set_result(ray.init(include_dashboard=False))
        except BaseException as error:
            done.set_exception(error)
        else:
            threading.Event().wait()

    threading.Thread(target=run, name="ray", daemon=True).start()
    done.result()


def node_address() -> str:
    """This node's address, as the cluster's other nodes reach it."""
    return ray().util.get_node_ip_address()


def nodes() -> list[tuple[int, int]]:
    """CPUs and GPUs of each of the cluster's nodes."""
    found = [n["Resources"] for n in ray().nodes() if n["Alive"]]
    return [(int(r.get("CPU", 0)), int(r.get("GPU", 0))) for r in found] or [(0, 0)]


def fitting_threads(workers: int, on_gpus: bool) -> int:
    """As many CPU threads as each of so many workers can have, with a GPU or without, on what the cluster has free."""
    places, free = nodes(), ray().available_resources().get("CPU", 0)

    def fits(threads: int) -> bool:
        room = sum(min(cpus // threads, gpus) if on_gpus else cpus // threads for cpus, gpus in places)
        return threads * workers <= free and room >= workers

    return next(filter(fits, range(max(cpus for cpus, _ in places), 1, -1)), 1)


class NoRoomError(WorkerError):
    """The cluster has not got what a replica needs."""


def reserve(stages: int, threads: int, device: str) -> Any:
    """A placement group with a bundle for each stage of a replica, close together; it may have to wait for room."""
    ray()
    from ray.util.placement_group import placement_group

    bundle = {"CPU": float(threads)} | ({"GPU": 1.0} if device.startswith("cuda") else {})
    return placement_group([dict(bundle) for _ in range(stages)], strategy="PACK")


def wait_for_room(group: Any, timeout: float) -> None:
    """NoRoomError when the cluster has not got a group's within `timeout` seconds."""
    if not group.wait(timeout):
        bundle, *others = group.bundle_specs
        free = {k: v for k, v in ray().available_resources().items() if k in bundle}
        raise NoRoomError(
            f"the Ray cluster had no room for {1 + len(others)} stage(s) of {bundle} within {timeout:g} s; free are "
            f"{free}. Add nodes (`ray start --address=...`), or lower replicas, pipeline_parallel_size or "
            "OMP_NUM_THREADS"
        )


def release(group: Any) -> None:
    from ray.util.placement_group import remove_placement_group

    remove_placement_group(group)


def own_placement() -> Any:
    """The placement group of the actor that this runs in."""
    return ray().util.get_current_placement_group()


# Ray adds 15 to the niceness of its workers, which would then wait for whatever else a node runs.
AS_URGENT_AS_RAY = {"env_vars": {"RAY_worker_niceness": "0"}}


class Actor:
    """What runs in Ray's process."""

    def work(self, threads: int, *connection) -> None:
        torch.set_num_threads(threads)
        work(*connection)


class _Handle:
    def __init__(self, actor: Any, task: Any):
        self.actor, self.task = actor, task  # the task ends only when the worker does

    def alive(self) -> bool:
        return not ray().wait([self.task], timeout=0)[0]

    def kill(self) -> None:
        ray().kill(self.actor)


def start(
    count: int, where: tuple[str, int, str], config: EngineConfig, threads: int, placement: tuple[Any, int]
) -> Sequence[Process]:
    """where: host, port and key of the connection. placement: a group from `reserve`, and the first worker's bundle."""
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    group, first = placement
    remote = ray().remote(runtime_env=AS_URGENT_AS_RAY)(Actor)
    gpus = 1 if (config.device or "cpu").startswith("cuda") else 0
    handles = []
    for index in range(count):
        strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=first + index)
        actor = remote.options(scheduling_strategy=strategy, num_cpus=threads, num_gpus=gpus).remote()
        handles.append(_Handle(actor, actor.work.remote(threads, *where, index, config.worker_timeout)))
    return handles
