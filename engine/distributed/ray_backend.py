"""Workers as Ray actors: Ray places them and knows their health; they connect back like any other worker."""

from __future__ import annotations

from collections.abc import Sequence
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
        ray.init(log_to_driver=True, include_dashboard=False)
    return ray


def node_address() -> str:
    """This node's address, as the cluster's other nodes reach it."""
    ray()
    from ray.util import get_node_ip_address

    return get_node_ip_address()


def node_cpus() -> list[int]:
    """CPUs of each of the cluster's nodes."""
    return [int(n["Resources"].get("CPU", 0)) for n in ray().nodes() if n["Alive"]] or [0]


class NoRoomError(WorkerError):
    """The cluster has not got what a replica needs."""


def place(stages: int, threads: int, device: str, timeout: float) -> Any:
    """A placement group with a bundle for each stage of a replica, close together.

    NoRoomError when the cluster has not got it within `timeout` seconds.
    """
    module = ray()
    from ray.util.placement_group import placement_group, remove_placement_group

    bundle = {"CPU": float(threads)} | ({"GPU": 1.0} if device.startswith("cuda") else {})
    group = placement_group([dict(bundle) for _ in range(stages)], strategy="PACK")
    if not group.wait(timeout):
        remove_placement_group(group)
        free = {k: v for k, v in module.available_resources().items() if k in bundle}
        raise NoRoomError(
            f"the Ray cluster had no room for {stages} stage(s) of {bundle} within {timeout:g} s; free are {free}. "
            "Add nodes (`ray start --address=...`), or lower replicas, pipeline_parallel_size or OMP_NUM_THREADS"
        )
    return group


def release(group: Any) -> None:
    from ray.util.placement_group import remove_placement_group

    remove_placement_group(group)


def own_placement() -> Any:
    """The placement group of the actor that this runs in."""
    return ray().util.get_current_placement_group()


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
    """where: host, port and key of the connection. placement: a group from `place`, and the first worker's bundle."""
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    group, first = placement
    remote = ray().remote(Actor)
    gpus = 1 if (config.device or "cpu").startswith("cuda") else 0
    handles = []
    for index in range(count):
        strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=first + index)
        actor = remote.options(scheduling_strategy=strategy, num_cpus=threads, num_gpus=gpus).remote()
        handles.append(_Handle(actor, actor.work.remote(threads, *where, index, config.worker_timeout)))
    return handles
