"""The workers of one or many replicas as one flat list: calls to all, and the ways in which tensors reach them."""

from __future__ import annotations

import contextlib
import itertools
import os
import tempfile
import threading
from collections import deque
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import IO, Any

import torch
from torch import Tensor

from ..engine.config import EngineConfig
from ..engine.executor import WorkerError
from ..engine.weights import TensorSpec, TransferError, WeightGroup, buckets, free_port
from ..engine.worker import Worker
from .calls import Calls, WorkerHandle, gather, group_of, start, start_all

LOOPBACK = "127.0.0.1"
SHARED_MEMORY = "/dev/shm"
SHARED_FILES = 4
BUCKET_BYTES = 2**24  # of tensors on their way at a time

Pairs = list[tuple[str, Tensor]]


class LocalHandle:
    """A `WorkerHandle` of a worker in this process; what goes on beside steps runs in a thread of its own."""

    def __init__(self, name: str, worker: Worker):
        self.name = name
        self.worker = worker
        self._beside = ThreadPoolExecutor(1, name)

    def call(self, method: str, *args: Any) -> Future:
        """Call a method of the worker."""
        if group_of(method) == "weights":
            return self._beside.submit(getattr(self.worker, method), *args)
        future: Future = Future()
        try:
            future.set_result(getattr(self.worker, method)(*args))
        except Exception as error:
            future.set_exception(error)
        return future

    def kill(self) -> None:
        """Do nothing: the worker ends with this process."""


class RemoteWorkers:
    """`Workers` in other processes.

    address: of this process, where they reach it; 127.0.0.1 if all are on this machine.
    """

    def __init__(self, handles: Sequence[WorkerHandle], address: str, config: EngineConfig):
        self.handles = [*handles]
        self.address = address
        self.timeout = config.worker_timeout
        self.load_timeout = config.start_timeout
        self._groups: set[str] = set()
        self._own: WeightGroup | None = None  # from this process to all workers
        self._lock = threading.Lock()

    @property
    def world_size(self) -> int:
        """Ranks in a weight group, one per worker."""
        return len(self.handles)

    def collective_rpc(self, method: str, *args: Any, timeout: float | None = None) -> list[Any]:
        """Call a method of every worker and return the results; raise the first error once all have ended."""
        return gather(start_all(self.handles, method, *args), timeout or self.timeout)

    # --- tensors ----------------------------------------------------------------------------------------------------

    def send_tensors(self, update_id: str, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Stage tensors in every worker, through shared memory where all are on this machine, else by broadcast."""
        if self.address == LOOPBACK and _free_shared_memory() > SHARED_FILES * BUCKET_BYTES:
            self._share(update_id, tensors)
        else:
            for bucket in buckets(tensors, _nbytes, SHARED_FILES * BUCKET_BYTES):
                self._broadcast(update_id, bucket)

    def _share(self, update_id: str, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Workers read buckets while the next are written, to files in turn, whose pages are made once."""
        under_way: deque[Calls] = deque()
        with contextlib.ExitStack() as stack:
            files = [  # without a name, so that nothing is left if this process is killed
                stack.enter_context(tempfile.TemporaryFile("w+b", 0, dir=SHARED_MEMORY)) for _ in range(SHARED_FILES)
            ]
            turns = itertools.cycle(files)
            for bucket in buckets(tensors, _nbytes, BUCKET_BYTES):
                if len(under_way) == SHARED_FILES:
                    gather(under_way.popleft(), self.load_timeout)
                if sum(map(_nbytes, bucket)) > _free_shared_memory():  # a large tensor
                    self._broadcast(update_id, bucket)
                    continue
                file = next(turns)
                file.seek(0)
                for _, tensor in bucket:
                    _write(file, tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
                name = f"/proc/{os.getpid()}/fd/{file.fileno()}"
                under_way.append(start_all(self.handles, "load_file", update_id, name, _specs(bucket)))
            while under_way:
                gather(under_way.popleft(), self.load_timeout)

    def _broadcast(self, update_id: str, pairs: Pairs) -> None:
        group = self._sender()
        specs = _specs(pairs)
        calls = start_all(self.handles, "receive_tensors", update_id, group.name, specs, BUCKET_BYTES)
        try:
            group.send(pairs, specs, BUCKET_BYTES)
        except Exception:
            gather(calls, self.load_timeout)  # a worker's error says more
            raise
        gather(calls, self.load_timeout)

    def _sender(self) -> WeightGroup:
        """The group over which this process sends tensors to all workers, made when it is first needed."""
        with self._lock:
            if self._own is None or not self._own.usable:
                name = f"own-{os.getpid()}-{id(self)}"
                port = free_port(self.address)
                joining = self._start_joining(name, self.address, port, 1, self.world_size + 1, "gloo", self.timeout)
                self._own = WeightGroup(self.address, port, 0, self.world_size + 1, name, timeout=self.timeout)
                gather(joining, self.timeout)
            return self._own

    def receive_tensors(self, update_id: str, group: str, specs: list[TensorSpec], bucket_bytes: int | None) -> None:
        """Stage what rank 0 of a weight group broadcasts now in every worker. A failure ends the group."""
        try:
            self.collective_rpc("receive_tensors", update_id, group, specs, bucket_bytes, timeout=self.load_timeout)
        except (TransferError, WorkerError):
            self._groups.discard(group)
            raise

    # --- weight groups ----------------------------------------------------------------------------------------------

    def join_weight_group(
        self, name: str, address: str, port: int | str, rank: int, world_size: int, backend: str, timeout: float
    ) -> None:
        """Make the workers ranks `rank`, `rank` + 1, ... of a weight group."""
        self.leave_weight_group(name)
        try:
            gather(self._start_joining(name, address, port, rank, world_size, backend, timeout), timeout + 10)
        except BaseException:
            self.leave_weight_group(name)
            raise
        self._groups.add(name)

    def _start_joining(
        self, name: str, address: str, port: int | str, rank: int, world_size: int, backend: str, timeout: float
    ) -> Calls:
        return [
            start(handle, "join_weight_group", name, address, port, rank + i, world_size, backend, timeout)
            for i, handle in enumerate(self.handles)
        ]

    def leave_weight_group(self, name: str) -> bool:
        """Leave a group. True if there was one."""
        known = name in self._groups
        self._groups.discard(name)
        with contextlib.suppress(Exception):  # the dead have left
            self.collective_rpc("leave_weight_group", name)
        return known

    def has_weight_group(self, name: str) -> bool:
        """True if there is a group of that name that could receive tensors now."""
        return name in self._groups

    def leave_all(self) -> None:
        """Leave all groups, because the list of workers is not what it was."""
        if self._own is not None:
            self._own.close()
        self._groups.clear()


def _nbytes(pair: tuple[str, Tensor]) -> int:
    return pair[1].nbytes


def _specs(pairs: Pairs) -> list[TensorSpec]:
    return [TensorSpec.of(name, tensor) for name, tensor in pairs]


def _write(file: IO[bytes], data: memoryview) -> None:
    """Write all of it: one call may take less."""
    while data.nbytes:
        data = data[file.write(data) :]


def _free_shared_memory() -> int:
    """Bytes; containers often have little."""
    try:
        found = os.statvfs(SHARED_MEMORY)
    except OSError:  # not Linux
        return 0
    return found.f_bavail * found.f_frsize
