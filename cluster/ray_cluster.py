"""Ray: which cluster, and where on it a replica's workers are."""

from __future__ import annotations

import os
import threading
import time
from concurrent.futures import Future
from types import ModuleType
from typing import Any

from ..engine.config import EngineConfig
from ..engine.weights import WorkerError, free_port

SETTLE = 5.0  # seconds in which an engine that was closed has given its room back


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
        if not _is_outgrown(config):
            return
        ray().shutdown()
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


def check_connected() -> None:
    """Raise WorkerError where Ray was shut down, which would start it again at the next call."""
    if not ray().is_initialized():
        raise WorkerError("Ray was shut down while an engine used it; make a new engine")


_local_address: str | None = None  # of the cluster that this process started


def _init(config: EngineConfig) -> None:
    global _local_address
    try:
        context = ray().init(num_cpus=max(_needed(config), len(os.sched_getaffinity(0))), include_dashboard=False)
        _local_address = context.address_info["gcs_address"]
    except ValueError:  # there is a cluster, which has the CPUs that it has
        ray().init(include_dashboard=False)


def _needed(config: EngineConfig) -> int:
    return config.num_workers * (threads_of_environment() or 1)


def _is_outgrown(config: EngineConfig) -> bool:
    """Return True if a cluster that this process started for a smaller engine, which has ended, is too small."""
    cpus = ray().cluster_resources()["CPU"]
    if cpus >= _needed(config) or ray().get_runtime_context().gcs_address != _local_address:
        return False
    deadline = time.monotonic() + SETTLE
    while ray().available_resources().get("CPU") != cpus:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


def free_address() -> tuple[str, int]:
    """Return an address of this node, as the cluster's other nodes reach it, at which nobody listens."""
    host = ray().util.get_node_ip_address()
    return host, free_port(host)


def on_gpus(config: EngineConfig) -> bool:
    """Return True if workers compute on CUDA devices."""
    return (config.device or "cpu").startswith("cuda")


def threads_of_environment() -> int | None:
    """Return what OMP_NUM_THREADS says, if it is a number."""
    asked = os.environ.get("OMP_NUM_THREADS", "")
    return int(asked) if asked.isdigit() else None


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

        self._share = {"num_cpus": threads, "num_gpus": 1 if on_gpus(config) else 0}
        bundle = {"CPU": float(threads)} | ({"GPU": 1.0} if on_gpus(config) else {})
        self.group = placement_group([dict(bundle) for _ in range(config.pipeline_parallel_size)], strategy="PACK")

    def options(self, bundle: int) -> dict[str, Any]:
        """Return Ray's options of an actor in one of the bundles."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        strategy = PlacementGroupSchedulingStrategy(placement_group=self.group, placement_group_bundle_index=bundle)
        return {"scheduling_strategy": strategy, **self._share}

    def wait(self, timeout: float) -> bool:
        """Wait until the room is there. Return False if it isn't after `timeout` seconds."""
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

        if ray().is_initialized():
            remove_placement_group(self.group)
