"""One life of a replica, from its start to its death, as the driver sees it."""

from __future__ import annotations

import pathlib
import time
from collections.abc import Iterator, Sequence
from typing import Any

from ..engine.config import EngineConfig
from ..engine.executor import ModelInfo, stage_layers
from ..engine.weights import WeightUpdateError, WorkerError
from ..engine.worker import WorkerInfo
from ..model.checkpoint import StoredWeights
from ..model.stage import Layers
from .actors import Actor, Call, Host, gather
from .pipeline import PipelineExecutor, StageWorker
from .ray_cluster import Placement, check_connected, free_address, ray
from .replica import Replica, ReplicaInfo, Report
from .workers import RemoteWorkers, copy_weights

POLL = 0.5  # seconds between looks for deaths


class ReplicaClient:
    """The processes of a replica. actors: one per stage, the engine in the first. info: once it has started."""

    info: ReplicaInfo

    def __init__(self, name: str, placement: Placement, config: EngineConfig):
        self.config = config
        self.actors = []
        for rank in range(config.pipeline_parallel_size):
            self.actors.append(Actor(f"{name}, stage {rank}" if rank else name, placement, rank))
        self._lives = [actor.live() for actor in self.actors]
        self._patience = 0.0  # until when it may be silent, though it works: time.monotonic()

    def start(self, path: pathlib.Path, sharers: int, threads: int) -> None:
        """Load the model. Raises what goes wrong in a process.

        sharers: workers that share the memory of a device. threads: CPU threads of each.
        """
        config = self.config
        limit = config.start_timeout
        calls = []
        for rank, layers in enumerate(stage_layers(path, config)):
            calls.append(self.actors[rank].run(_make_worker, path, config, layers, rank, sharers, threads))
        model = ModelInfo.of(gather(calls, limit))
        workers = RemoteWorkers(self.actors, config)
        workers.collective_rpc("initialize_cache", model.num_blocks, timeout=limit)
        head, *stages = self.actors
        if stages:
            (address,) = gather([head.run(_address)], limit)
            workers.collective_rpc("connect", *address)
        (self.info,) = gather([head.run(_make_engine, path, config, model, stages, threads)], limit)

    def command(self, method: str, *args: Any, timeout: float = 0.0) -> Call:
        """Have a method of the engine called between two steps. timeout: seconds for which it may report nothing."""
        self._patience = max(self._patience, time.monotonic() + timeout)
        return self.actors[0].call("engine", "command", method, *args)

    def post(self, method: str, *args: Any) -> Call:
        """Have a method of the engine called between two steps; the call ends as soon as that is noted."""
        return self.actors[0].call("engine", "post", method, *args)

    def reports(self) -> Iterator[Report]:
        """Let the replica run, and yield what it reports. WorkerError when it dies or is silent for too long."""
        items = self.actors[0].stream("engine", "run")
        heard = time.monotonic()
        try:
            while True:
                check_connected()
                ready, _ = ray().wait([items], timeout=POLL)
                if ready:
                    yield ray().get(next(items))
                    heard = time.monotonic()
                    continue
                self._check_alive()
                if time.monotonic() > max(heard + self.config.worker_timeout, self._patience):
                    raise WorkerError(f"{self.actors[0].name} did not answer in time")
        except ray().exceptions.RayError as error:
            raise Call(self.actors[0].name, None).meaning_of(error) from None

    def _check_alive(self) -> None:
        """Raise WorkerError where one of the processes has ended."""
        for call in self._lives:
            if ray().wait([call.ref], timeout=0)[0]:
                call.result(0)

    def bring_weights(self, donor: ReplicaClient | None, stored: StoredWeights | None, version: int) -> None:
        """Put the weights in force: those of a replica that serves (donor), or where they were read (stored)."""
        update_id = f"copy-{version}-{time.monotonic_ns()}"
        limit = self.config.start_timeout
        workers = RemoteWorkers(self.actors, self.config)
        workers.collective_rpc("begin_update", update_id)
        if donor is not None:
            copy_weights(update_id, donor.actors, self.actors, limit)
        else:
            assert stored is not None
            workers.collective_rpc("load_directory", update_id, stored.path, timeout=limit)
            if not stored.unchanged:
                raise WeightUpdateError(f"the files in {stored.path} changed while they were read")
        workers.collective_rpc("prepare_update", update_id)
        gather([self.command("switch_weights", update_id, version, True, stored)], limit)

    def kill(self) -> None:
        """End the processes."""
        for actor in self.actors:
            actor.kill()


def _make_worker(
    host: Host, path: pathlib.Path, config: EngineConfig, layers: Layers | None, rank: int, sharers: int, threads: int
) -> WorkerInfo:
    host.worker = StageWorker(path, config, layers, rank, sharers, threads)
    return host.worker.info()


def _address(host: Host) -> tuple[str, int]:
    return free_address()


def _make_engine(
    host: Host, path: pathlib.Path, config: EngineConfig, model: ModelInfo, stages: Sequence[Actor], threads: int
) -> ReplicaInfo:
    executor = PipelineExecutor(config, model, host.worker, stages)
    host.engine = Replica(path, config, executor, threads)
    engine = host.engine.engine
    return ReplicaInfo(model, engine.stats(), engine.capacity)
