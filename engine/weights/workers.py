"""What an update asks of the workers that hold the weights."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

from torch import Tensor

from .spec import TensorSpec


class Workers(Protocol):
    """All workers whose weights change together, as one flat list: a replica's, or those of all replicas.

    world_size: ranks that they take in a weight group, one per worker. load_timeout: seconds that all tensors of an
    update may take.
    """

    load_timeout: float

    @property
    def world_size(self) -> int:
        """The number of workers, which is that of receivers in a process group."""

    def collective_rpc(self, method: str, *args: Any, timeout: float | None = None) -> list[Any]:
        """Call a method of every worker and return the results in the workers' order.

        Raises the first error after all calls have ended, or WorkerError after `timeout` seconds (None: the usual).
        """

    def send_tensors(self, update_id: str, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Stage (name, tensor) pairs, which are read once, in every worker."""

    def receive_tensors(self, update_id: str, group: str, specs: list[TensorSpec], bucket_bytes: int | None) -> None:
        """Stage what rank 0 of a weight group broadcasts now in every worker. A failure ends the group."""

    def join_weight_group(
        self, name: str, address: str, port: int | str, rank: int, world_size: int, backend: str, timeout: float
    ) -> None:
        """Make the workers ranks `rank`, `rank` + 1, ... of a weight group; waits for all its other ranks.

        A group of that name from before is left. Raises TransferError or ValueError.
        """

    def leave_weight_group(self, name: str) -> bool:
        """Leave a group. True if there was one."""

    def has_weight_group(self, name: str) -> bool:
        """True if there is a group of that name that could receive tensors now."""
