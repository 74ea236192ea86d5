"""Ray: which cluster, and where on it a replica's workers are."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import ray
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from ..engine.config import EngineConfig
from ..engine.weights import WorkerError

LOCAL = "samebits_local"  # a resource that marks a local cluster which was started here
LOCAL_CPUS = 0.001  # that a worker reserves on such a cluster: all workers share its CPUs, however many they are

_STARTER = ThreadPoolExecutor(1, "ray")


class PlacementError(WorkerError):
    """The cluster doesn't have the free resources that a replica needs."""


def connect() -> None:
    """Connect to the cluster that RAY_ADDRESS or `ray start` names, or else start a local one."""
    if ray.is_initialized():
        return
    if threading.current_thread() is threading.main_thread():
        _init()
    else:  # a local cluster's processes end with the thread that started them, and the caller's may be short-lived
        _STARTER.submit(_init).result()


def _init() -> None:
    try:
        cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()  # macOS has none
        ray.init(num_cpus=cpus, resources={LOCAL: 1.0}, include_dashboard=False)
    except ValueError:  # there is a cluster, which has the CPUs that it has
        ray.init(include_dashboard=False)


def check_connected() -> None:
    """Raise WorkerError where Ray was shut down, which would start it again at the next call."""
    if not ray.is_initialized():
        raise WorkerError("Ray was shut down while an engine used it; make a new engine")


def on_local_cluster() -> bool:
    """Return True on a cluster that `connect` has started."""
    return LOCAL in ray.cluster_resources()


def nodes() -> list[tuple[int, int]]:
    """Return the CPUs and GPUs of each of the cluster's nodes."""
    found = [n["Resources"] for n in ray.nodes() if n["Alive"]]
    return [(int(r.get("CPU", 0)), int(r.get("GPU", 0))) for r in found] or [(0, 0)]


def threads_per_worker(config: EngineConfig) -> int:
    """Return what OMP_NUM_THREADS says, or as many CPU threads as each worker can have of the cluster's free CPUs."""
    asked = os.environ.get("OMP_NUM_THREADS", "")
    if asked.isdecimal() and int(asked):
        return int(asked)
    sizes = nodes()
    free = round(ray.available_resources().get("CPU", 0))
    workers = config.num_workers

    def fits(threads: int) -> bool:
        places = sum(min(cpus // threads, gpus if config.on_gpu else workers) for cpus, gpus in sizes)
        return threads * workers <= free and places >= workers

    return next(filter(fits, range(max(cpus for cpus, _ in sizes), 1, -1)), 1)


def sharers_of_memory(config: EngineConfig, threads: int) -> int:
    """Return how many workers may share a node's memory; a GPU belongs to one."""
    if config.on_gpu:
        return 1
    if on_local_cluster():
        return config.num_workers
    largest = max(cpus for cpus, _ in nodes())
    return max(1, min(config.num_workers, largest // threads))


class ReplicaPlacement:
    """A placement group, with a bundle of resources for each stage of a replica, close together."""

    def __init__(self, config: EngineConfig, threads: int):
        cpus = LOCAL_CPUS if on_local_cluster() else float(threads)
        gpus = 1.0 if config.on_gpu else 0.0
        # Ray adds 15 to the niceness of its workers, which would then wait for whatever else a node runs
        environment = {"RAY_worker_niceness": "0", "OMP_NUM_THREADS": str(threads)}
        self._options = {"num_cpus": cpus, "num_gpus": gpus, "runtime_env": {"env_vars": environment}}
        bundle = {"CPU": cpus, "GPU": gpus} if gpus else {"CPU": cpus}
        self.group = placement_group([bundle] * config.pipeline_parallel_size, strategy="PACK")

    def options(self, bundle: int) -> dict[str, Any]:
        """Return Ray's options of an actor in one of the bundles."""
        strategy = PlacementGroupSchedulingStrategy(placement_group=self.group, placement_group_bundle_index=bundle)
        return {"scheduling_strategy": strategy, **self._options}

    def wait(self, timeout: float) -> None:
        """Wait until the resources are reserved, which Ray does anew when a node goes away.

        Raises PlacementError after `timeout` seconds, and reserves nothing then.
        """
        if self.group.wait(timeout):
            return
        bundle, *others = self.group.bundle_specs
        free = {k: v for k, v in ray.available_resources().items() if k in bundle}
        self.remove()
        raise PlacementError(
            f"the Ray cluster could not place {1 + len(others)} stage(s) of {bundle} within {timeout:g} s; free are "
            f"{free}. Add nodes (`ray start --address=...`), or lower replicas, pipeline_parallel_size or "
            "OMP_NUM_THREADS"
        )

    def remove(self) -> None:
        """Free the resources, and end what runs on them."""
        if ray.is_initialized():
            remove_placement_group(self.group)
