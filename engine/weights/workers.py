"""The part of an update that asks workers, which hold the weights."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Any, NamedTuple

from torch import Tensor

from .group import TransferError
from .spec import TensorSpec, from_bytes


class WorkerError(RuntimeError):
    """A worker process died, can't be reached, or didn't answer in time."""


class PerWorker(NamedTuple):
    """An argument of a call to all workers that differs: the worker of number i gets values[i]."""

    values: Sequence[Any]


def arguments_of(worker: int, args: Sequence[Any]) -> list[Any]:
    """Return the arguments that the worker of this number gets."""
    return [arg.values[worker] if isinstance(arg, PerWorker) else arg for arg in args]


class Workers(ABC):
    """All workers whose weights change together, as one flat list: a replica's, or those of all replicas.

    world_size: their number; each is a rank in a weight group. load_timeout: seconds that all tensors of an update may
    take. weight_groups: names of those that could receive tensors now.
    """

    def __init__(self, world_size: int, load_timeout: float) -> None:
        self.world_size = world_size
        self.load_timeout = load_timeout
        self.weight_groups: set[str] = set()

    @abstractmethod
    def collective_rpc(self, method: str, *args: Any, timeout: float | None = None) -> list[Any]:
        """Call a method of every worker and return the results in the workers' order.

        Raises the first error after all calls have ended, or WorkerError after `timeout` seconds (None: the usual).
        """

    def send_tensors(self, update_id: str, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Stage (name, tensor) pairs, which are read once, in every worker."""
        for pair in tensors:
            self.collective_rpc("load_tensors", update_id, [pair])

    def receive_tensors(self, update_id: str, group: str, specs: list[TensorSpec], bucket_bytes: int | None) -> None:
        """Stage what rank 0 of a weight group broadcasts now in every worker. A failed transfer ends the group."""
        try:
            self.collective_rpc("receive_tensors", update_id, group, specs, bucket_bytes, timeout=self.load_timeout)
        except (TransferError, WorkerError):
            self.weight_groups.discard(group)
            raise

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the names and tensors of the weights in force, copied to CPU memory, each name once."""
        specs = self.collective_rpc("weight_specs")
        data = self.collective_rpc("read_weights", PerWorker(specs))
        found = {spec.name: (each, spec) for spec, each in zip(chain(*specs), chain(*data), strict=True)}
        for name, (each, spec) in found.items():  # a tied tensor may be in two stages
            yield name, from_bytes(each.copy(), spec)

    def join_weight_group(
        self, name: str, address: str, port: int | str, rank: int, world_size: int, backend: str, timeout: float
    ) -> None:
        """Make the workers ranks `rank`, `rank` + 1, ... of a weight group; waits for all its other ranks.

        Leaves a group of that name from before. Raises TransferError or ValueError.
        """
        self.leave_weight_group(name)
        ranks = PerWorker(range(rank, rank + self.world_size))
        where = name, address, port, ranks, world_size, backend, timeout
        try:
            self.collective_rpc("join_weight_group", *where, timeout=timeout + 10)
        except BaseException:
            self.leave_weight_group(name)
            raise
        self.weight_groups.add(name)

    def leave_weight_group(self, name: str) -> bool:
        """Leave a group. Return True if there was one."""
        known = name in self.weight_groups
        self.weight_groups.discard(name)
        with contextlib.suppress(WorkerError):  # a dead worker has left
            self.collective_rpc("leave_weight_group", name)
        return known
