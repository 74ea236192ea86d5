"""The workers of one or many replicas as one flat list: calls to all, and tensors for all."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from torch import Tensor

from ..engine.config import EngineConfig
from ..engine.weights import TensorSpec, Workers, arguments_of, buckets, join_bucket
from .actors import Actor, Call, gather, gather_rounds
from .ray_cluster import ray

BUCKET_BYTES = 2**24  # of tensors that travel as one object


class RemoteWorkers(Workers):
    """`Workers` in actors. Tensors reach them as objects of Ray's, which all workers of a node read in one place."""

    def __init__(self, actors: Sequence[Actor], config: EngineConfig):
        super().__init__()
        self.actors = [*actors]
        self.timeout = config.worker_timeout
        self.load_timeout = config.start_timeout

    @property
    def world_size(self) -> int:
        """The number of workers."""
        return len(self.actors)

    def _start(self, method: str, *args: Any) -> list[Call]:
        return [actor.call("worker", method, *arguments_of(i, args)) for i, actor in enumerate(self.actors)]

    def collective_rpc(self, method: str, *args: Any, timeout: float | None = None) -> list[Any]:
        """Call a method of every worker and return the results; raise the first error once all have ended."""
        return gather(self._start(method, *args), timeout or self.timeout)

    def send_tensors(self, update_id: str, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Stage tensors in every worker; the next are read while workers load the last."""
        gather_rounds(self._loads(update_id, tensors), self.load_timeout)

    def _loads(self, update_id: str, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[list[Call]]:
        for bucket in buckets(tensors, lambda pair: pair[1].nbytes, BUCKET_BYTES):
            specs = [TensorSpec.of(name, tensor) for name, tensor in bucket]
            flat = ray().put(join_bucket(tensor for _, tensor in bucket))
            yield self._start("load_bucket", update_id, flat, specs)


def copy_weights(update_id: str, donors: Sequence[Actor], takers: Sequence[Actor], timeout: float) -> None:
    """Stage in each taker the weights that are in force in the donor of the same stage."""

    def loads() -> Iterator[list[Call]]:
        for donor, taker in zip(donors, takers, strict=True):
            (specs,) = gather([donor.call("worker", "weight_specs")], timeout)
            for bucket in buckets(specs, lambda spec: spec.nbytes, BUCKET_BYTES):
                flat = donor.call("worker", "read_weights", bucket)
                yield [flat, taker.call("worker", "load_bucket", update_id, flat.ref, bucket)]

    gather_rounds(loads(), timeout)
