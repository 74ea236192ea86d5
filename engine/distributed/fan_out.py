"""One weight update for several processes that each hold a part or a copy of the model: all of them, or none."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import pathlib
import tempfile
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from typing import IO

import torch
from torch import Tensor, nn

from ...kernels.contract import Contract
from ...model.checkpoint import StoredWeights
from ..transfer import TensorSpec, TransferError, WeightGroup, free_port, gathering, manifest_of
from ..weights import Source, WeightTable, WeightUpdate, WeightUpdateError, check_contract, check_dtype
from .worker import LocalPeer, Peer, WorkerError, call_all, results

logger = logging.getLogger(__name__)

SHARED_MEMORY = "/dev/shm"
SHARED_FILES = 4
BUCKET_BYTES = 2**24  # of tensors on their way at a time
_names = itertools.count()


class FanOut:
    """Calls to all members at once. Each member counts for `ranks` ranks in a weight group, in order.

    host: where members reach this process; 127.0.0.1 if all are on this machine. timeout: seconds for a call, a
    rendezvous, and each broadcast; load_timeout: for all of an update's tensors.
    """

    def __init__(self, members: Sequence[Peer | LocalPeer], ranks: int, host: str, timeout: float, load_timeout: float):
        self.members, self.ranks, self.host = list(members), ranks, host
        self.timeout, self.load_timeout = timeout, load_timeout
        self.group_names: set[str] = set()
        self._own: WeightGroup | None = None  # from this process to all members

    def start(self, method: str, *args) -> list[tuple[str, Future]]:
        return call_all(self.members, method, *args)

    def all(self, method: str, *args, timeout: float | None = None) -> list:
        """Calls a method of every member, and waits for all; raises the first error.

        timeout: seconds, if another than usual; then WorkerError.
        """
        return results(self.start(method, *args), timeout or self.timeout)

    def join(self, name: str, address: str, port: int | str, rank: int, world_size: int, backend: str, timeout: float):
        """Makes the members ranks `rank`, `rank` + 1, ... of a weight group that others make."""
        self.leave(name)
        try:
            results(self._joining(name, address, port, rank, world_size, backend, timeout), timeout + 10)
        except BaseException:
            self.leave(name)
            raise
        self.group_names.add(name)

    def _joining(self, name: str, address: str, port: int | str, rank: int, *rest) -> list[tuple[str, Future]]:
        places = ((m, rank + i * self.ranks) for i, m in enumerate(self.members))
        return [(m.name, m.call("join_group", name, address, port, place, *rest)) for m, place in places]

    def leave(self, name: str) -> bool:
        known = name in self.group_names
        self.group_names.discard(name)
        self._leave(name)
        return known

    def _leave(self, name: str) -> None:
        with contextlib.suppress(Exception):  # the dead have left
            results(self.start("leave_group", name), self.timeout)

    def sender(self) -> WeightGroup:
        """The group over which this process sends tensors to all members, made when it is first needed."""
        if self._own is None or not self._own.usable:
            self.close()
            name = f"fan-out-{os.getpid()}-{next(_names)}"
            port, world = free_port(self.host), 1 + len(self.members) * self.ranks
            calls = self._joining(name, self.host, port, 1, world, "gloo", self.timeout)
            self._own = WeightGroup(self.host, port, 0, world, name, timeout=self.timeout)
            results(calls, self.timeout)
        return self._own

    def close(self) -> None:
        if self._own is not None:
            self._own.close()
            self._leave(self._own.name)
            self._own = None


class UpdateMember:
    """The far side of a `FanOutUpdate`: takes part in the update that `begin_update` set."""

    BACKGROUND = frozenset({"load_update", "receive_update", "read_update", "join_group", "leave_group"})
    update: WeightUpdate | FanOutUpdate

    def load_update(self, path: str) -> None:
        self.update.load(path)

    def receive_update(self, group: str, manifest: list[TensorSpec], bucket_bytes: int | None) -> None:
        self.update.receive(group, manifest, bucket_bytes)

    def read_update(self, file: str, specs: list[TensorSpec]) -> None:
        self.update.read(file, specs)

    def prepare_update(self) -> None:
        self.update.check_complete()


class FanOutUpdate:
    """A `WeightUpdate` of all members of a FanOut. Nothing of it is in force before `prepare` succeeded on all."""

    def __init__(self, fan_out: FanOut, table: WeightTable):
        self.fan_out, self.table = fan_out, table
        self.stored: StoredWeights | None = None
        self.given: set[str] = set()
        fan_out.all("begin_update")

    @property
    def missing(self) -> list[str]:
        """Names still to come."""
        return self.table.missing(self.given)

    def check(self, manifest: Iterable[TensorSpec], complete: bool = False) -> None:
        names = self.table.check(manifest, self.given)
        if complete:
            self.table.check_complete(names)

    def load(self, source: Source, contract: Contract | None = None) -> None:
        """As `WeightUpdate.load`. Members read a directory by themselves; tensors go to all of them a bucket at a time,
        through shared memory where all are on this machine, or else by broadcast."""
        if isinstance(source, nn.Module):
            if contract is not None:
                check_contract(source, contract)
            state = self.table.state_of(source)
            specs = manifest_of(state)
            self.check(specs, complete=True)
            with gathering(state) as tensors:
                self._send(specs, tensors)
        elif isinstance(source, str | os.PathLike):
            path = pathlib.Path(source).absolute()
            stored = StoredWeights.at(path)
            self.table.check_directory(path)
            self.fan_out.all("load_update", str(path), timeout=self.fan_out.load_timeout)
            if not stored.unchanged:
                raise WeightUpdateError(f"files in {path} changed while they were read; send the update again")
            self.given, self.stored = set(self.table.shapes), stored
        else:
            for pairs in _buckets(self._checked(source), SHARED_FILES * BUCKET_BYTES):
                self._send([TensorSpec(n, tuple(t.shape), t.dtype) for n, t in pairs], pairs)

    def _checked(self, pairs: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        seen = set(self.given)
        for name, tensor in pairs:
            if not isinstance(tensor, Tensor):
                raise WeightUpdateError(f"{name!r} is a {type(tensor).__name__}, expected a tensor")
            check_dtype(name, tensor.dtype, tensor.device.type)
            seen = self.table.check([TensorSpec(name, tuple(tensor.shape), tensor.dtype)], seen)
            yield name, tensor

    def _send(self, specs: list[TensorSpec], tensors: Iterable[tuple[str, Tensor]]) -> None:
        largest = max(BUCKET_BYTES, *(s.nbytes for s in specs))
        if self.fan_out.host == "127.0.0.1" and _free_shared_memory() > SHARED_FILES * (largest + BUCKET_BYTES):
            self._share(tensors)
        else:
            self._broadcast(specs, tensors)
        self.given |= {s.name for s in specs}

    def _share(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Members read buckets while the next are written, to files in turn, whose pages are made once."""
        flights: deque[list[tuple[str, Future]]] = deque()
        with contextlib.ExitStack() as stack:
            files = [  # without a name, so that nothing is left if this process is killed
                stack.enter_context(tempfile.TemporaryFile("w+b", 0, dir=SHARED_MEMORY)) for _ in range(SHARED_FILES)
            ]
            for pairs, file in zip(_buckets(tensors, BUCKET_BYTES), itertools.cycle(files), strict=False):
                if len(flights) == SHARED_FILES:
                    results(flights.popleft(), self.fan_out.load_timeout)
                specs = [TensorSpec(n, tuple(t.shape), t.dtype) for n, t in pairs]
                file.seek(0)
                for _, tensor in pairs:
                    _write(file, tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
                flights.append(self.fan_out.start("read_update", f"/proc/{os.getpid()}/fd/{file.fileno()}", specs))
            while flights:
                results(flights.popleft(), self.fan_out.load_timeout)

    def read(self, file: str, specs: list[TensorSpec]) -> None:
        """All members load the tensors whose bytes are in a file, one after the other."""
        self.fan_out.all("read_update", file, specs, timeout=self.fan_out.load_timeout)
        self.given |= {s.name for s in specs}

    def _broadcast(self, specs: list[TensorSpec], tensors: Iterable[tuple[str, Tensor]]) -> None:
        group = self.fan_out.sender()
        calls = self.fan_out.start("receive_update", group.name, specs, BUCKET_BYTES)
        try:
            group.send(tensors, specs, BUCKET_BYTES)
        except Exception:
            results(calls, self.fan_out.load_timeout)  # a member's error says more
            raise
        results(calls, self.fan_out.load_timeout)

    def receive(self, group: str, manifest: Sequence[TensorSpec], bucket_bytes: int | None = None) -> None:
        """All members load tensors that rank 0 of a weight group broadcasts now; each keeps what it needs."""
        try:
            self.fan_out.all("receive_update", group, list(manifest), bucket_bytes, timeout=self.fan_out.load_timeout)
        except (TransferError, WorkerError):
            self.fan_out.group_names.discard(group)  # of no more use
            raise
        self.given |= {s.name for s in manifest}

    def check_complete(self) -> None:
        """Raises unless every member could put the update in force."""
        self.table.check_complete(self.given)
        self.fan_out.all("prepare_update")


def _write(file: IO[bytes], data: memoryview) -> None:
    """All of it: one call may take less."""
    while data.nbytes:
        data = data[file.write(data) :]


def _free_shared_memory() -> int:
    """Bytes; containers often have little."""
    try:
        found = os.statvfs(SHARED_MEMORY)
    except OSError:  # not Linux
        return 0
    return found.f_bavail * found.f_frsize


def _buckets(pairs: Iterable[tuple[str, Tensor]], size: int) -> Iterator[list[tuple[str, Tensor]]]:
    bucket: list[tuple[str, Tensor]] = []
    for name, tensor in pairs:
        bucket.append((name, tensor))
        if sum(t.nbytes for _, t in bucket) >= size:
            yield bucket
            bucket = []
    if bucket:
        yield bucket
