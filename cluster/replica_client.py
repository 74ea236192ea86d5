"""The processes of a replica, from their start to their death, as the driver sees them."""

from __future__ import annotations

import pathlib
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import ray

from ..engine.config import EngineConfig
from ..engine.executor import ModelInfo, stage_layers
from ..engine.outputs import EngineStats
from ..engine.weights import WeightUpdate, WeightUpdateError, WorkerError
from ..model.checkpoint import StoredWeights
from .actors import Actor, RemoteCall, RemoteWorkers, gather
from .ray_cluster import ReplicaPlacement, check_connected
from .replica import Host, ReplicaReport

POLL = 0.5  # seconds between looks at the time


class ReplicaClient(RemoteWorkers):
    """A replica's workers, one per stage, with the engine beside the first. index: the replica's number.

    model, capacity (in tokens): of the replica; stats: as it reported last. num_unfinished: of its samples.
    """

    path: pathlib.Path
    model: ModelInfo
    stats: EngineStats
    capacity: int

    def __init__(self, index: int, placement: ReplicaPlacement, config: EngineConfig):
        self.index = index
        self.placement = placement
        self.name = f"replica {index}"
        self.config = config
        names = [f"{self.name}, stage {rank}" for rank in range(config.pipeline_parallel_size)]
        super().__init__([Actor(Host, name, placement, rank) for rank, name in enumerate(names)], config)
        self.num_unfinished = 0
        self._patience = 0.0  # until when it may be silent, though it works: time.monotonic()

    def start(self, path: pathlib.Path, sharers: int) -> None:
        """Load the model and let the engine run. Raises what goes wrong in a process.

        sharers: workers that share the memory of a device.
        """
        config = self.config
        self.path = path
        limit = config.start_timeout
        own = replace(config, speculative_config=None)  # the engine drafts, and a drafter may be a model
        calls = [
            self.actors[rank].start("control", "make_worker", path, own, layers, rank, sharers)
            for rank, layers in enumerate(stage_layers(path, config))
        ]
        self.model = ModelInfo.of(gather(calls, limit))
        self.collective_rpc("initialize_cache", self.model.num_blocks, timeout=limit)
        head, *stages = self.actors
        if stages:
            self.collective_rpc("connect", *head.call("listen").result(limit))
        self.stats, self.capacity = head.start("control", "start", path, config, self.model, stages).result(limit)
        self._reports = head.stream("steps", "run")
        self._lives = [stage.start("life", "live").ref for stage in stages]

    def command(self, method: str, *args: Any, timeout: float = 0.0) -> RemoteCall:
        """Return a call of an engine's method between two steps. timeout: seconds for which it may report nothing."""
        self._patience = max(self._patience, time.monotonic() + timeout)
        return self.actors[0].start("control", "command", method, *args)

    def post(self, method: str, *args: Any) -> RemoteCall:
        """Return a call of an engine's method between two steps, which ends as soon as that is noted."""
        return self.actors[0].start("control", "post", method, *args)

    def reports(self) -> Iterator[ReplicaReport]:
        """Yield what the replica reports. WorkerError when one of its processes dies, or when it is silent too long."""
        heard = time.monotonic()
        while True:
            check_connected()
            ready, _ = ray.wait([self._reports, *self._lives], timeout=POLL)
            if ready:
                ref = ready[0] if ready[0] in self._lives else next(self._reports)
                yield RemoteCall(self.name, ref).result(self.config.worker_timeout)
                heard = time.monotonic()
            elif time.monotonic() > max(heard + self.config.worker_timeout, self._patience):
                raise WorkerError(f"{self.name} did not answer in time")

    def bring_weights(self, donor: ReplicaClient | None, stored: StoredWeights | None, version: int) -> int | None:
        """Put weights in force: those of a replica that serves (donor), or where they were read (stored).

        Return their version, or None where the donor failed, which may have died. Raises what goes wrong here.
        """
        update = WeightUpdate(self, self.model.table, self.path)
        if donor is not None:
            try:
                update.load(donor.weights())
            except WorkerError:
                self.collective_rpc("abort_update", update.id)  # another one, where it was this replica that died
                return None
        else:
            assert stored is not None
            update.load(stored.path)
            if update.stored != stored:
                raise WeightUpdateError(f"the files in {stored.path} have changed since they were read")
        update.prepare()
        self.command("switch_weights", update.id, version, True, stored).result(self.load_timeout)
        return version

    def kill(self) -> None:
        """End the processes. That their placement goes ends those, too, which no call reaches any more."""
        for actor in self.actors:
            actor.kill()
        self.placement.remove()
