"""Weights from one process to others over a torch process group of their own, beside the default one.

Rank 0 sends, the others receive. Both sides know the tensors' specs before the first collective and derive the same
buckets from them, so a mistake is an error on the side that makes it, never misread bytes:

    with WeightGroup("127.0.0.1", 29500, rank=0, world_size=2) as group:      # the trainer
        group.send(model.state_dict().items(), specs_of(model.state_dict()))

    with WeightGroup("127.0.0.1", 29500, rank=1, world_size=2) as group:      # the engine
        llm.update_weights(group.receive(specs))

On the wire it is the group that SGLang, slime and AReaL make (`rendezvous`, `PrefixStore`, a broadcast from rank 0), so
their senders work with it too.
"""

from __future__ import annotations

import itertools
import logging
import socket
import sys
import time
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from .spec import TensorSpec, buckets, split_bucket

logger = logging.getLogger(__name__)

_GREETING = b"\0" + (0x3C85F7CE).to_bytes(4, sys.byteorder) + b"\x0d" + bytes(4)  # what `TCPStore` says first: a ping

T = TypeVar("T")

DEFAULT_GROUP_NAME = "weight_update_group"
DEFAULT_TIMEOUT = 300.0  # seconds
WHOLE = 2**62  # as bucket_bytes: everything in one broadcast


class TransferError(RuntimeError):
    """The group could not be made, or a broadcast failed or timed out. The group is of no more use."""


@dataclass(eq=False)
class WeightGroup:
    """A process group named `name` of `world_size` ranks. Creating it waits for all of them.

    master_address, master_port: where rank 0 listens. backend: "gloo" (tensors in CPU memory) or "nccl" (on this
    process's current CUDA device). timeout: seconds, for the rendezvous and for each broadcast; then TransferError,
    and the group is closed on this side, which the others soon see. bucket_bytes of `send` and `receive` must agree:
    None is a broadcast per tensor; a number puts consecutive tensors together, up to that many bytes.
    """

    master_address: str
    master_port: int | str
    rank: int
    world_size: int
    name: str = DEFAULT_GROUP_NAME
    backend: str = "gloo"
    timeout: float = DEFAULT_TIMEOUT

    def __post_init__(self) -> None:
        check_backend(self.backend)
        who = f"rank {self.rank} of {self.world_size}"
        if not 0 <= self.rank < self.world_size or self.world_size < 2:
            raise ValueError(f"{who}: expected at least 2 ranks, counted from 0")
        on_gpu = self.backend == "nccl"
        self.device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
        where = f"{self.master_address}:{self.master_port}"
        logger.info("joining weight group %r at %s as %s", self.name, where, who)
        try:
            self._backend: Any = new_backend(where, self.rank, self.world_size, self.name, self.backend, self.timeout)
        except (RuntimeError, ValueError) as error:  # torch's: timed out, refused
            raise TransferError(
                f"{who} could not join weight group {self.name!r} at {where} in {self.timeout:g} s: {error}"
            ) from error

    @property
    def usable(self) -> bool:
        """True until the group is closed, here or by a failure."""
        return self._backend is not None

    def send(
        self,
        tensors: Iterable[tuple[str, Tensor]],
        specs: Sequence[TensorSpec],
        bucket_bytes: int | None = None,
    ) -> None:
        """Broadcast (name, tensor) pairs, which must come as the specs say, on any device. Rank 0 alone sends."""
        if self.rank != 0:
            raise ValueError(f"rank 0 sends in a weight group; this is rank {self.rank}")
        source = iter(tensors)
        try:
            for bucket in _buckets(specs, bucket_bytes):
                parts = [self._matching(spec, next(source, None)) for spec in bucket]
                flat = parts[0] if len(parts) == 1 else torch.cat([p.reshape(-1).view(torch.uint8) for p in parts])
                self._wait(self._broadcast(flat), bucket)
            if (extra := next(source, None)) is not None:
                raise ValueError(f"tensor {extra[0]!r} is not in the specs")
        except BaseException:
            self.close()  # or the others would wait for the rest
            raise

    def _matching(self, spec: TensorSpec, pair: tuple[str, Tensor] | None) -> Tensor:
        found = pair and TensorSpec(pair[0], tuple(pair[1].shape), pair[1].dtype)
        if found != spec or pair is None:
            raise ValueError(f"the specs say {spec}, but the tensor to send is {found}")
        return pair[1].detach().to(self.device).contiguous()

    def receive(self, specs: Sequence[TensorSpec], bucket_bytes: int | None = None) -> Generator[tuple[str, Tensor]]:
        """Yield (name, tensor) in the specs' order while the next bucket is already on its way.

        Close the generator (`contextlib.closing`) when you may stop early: it then takes and drops the rest, so that
        the sender isn't left waiting and the group stays in step.
        """
        coming = _one_ahead(self._post(bucket) for bucket in _buckets(specs, bucket_bytes))
        try:
            for flat, work, bucket in coming:
                self._wait(work, bucket)
                yield from split_bucket(flat, bucket)
        finally:
            if self.usable:
                for _, work, bucket in coming:
                    self._wait(work, bucket)

    def _post(self, bucket: list[TensorSpec]) -> tuple[Tensor, dist.Work, list[TensorSpec]]:
        if len(bucket) == 1:
            flat = torch.empty(bucket[0].shape, dtype=bucket[0].dtype, device=self.device)
        else:
            flat = torch.empty(sum(s.nbytes for s in bucket), dtype=torch.uint8, device=self.device)
        return flat, self._broadcast(flat), bucket

    def _broadcast(self, tensor: Tensor) -> dist.Work:
        if self._backend is None:
            raise TransferError(f"weight group {self.name!r} is closed; make it anew on all ranks")
        options = dist.BroadcastOptions()
        options.rootRank = 0
        return self._backend.broadcast([tensor], options)

    def _wait(self, work: dist.Work, bucket: list[TensorSpec]) -> None:
        try:
            if self.backend == "nccl":  # its `wait`, given a limit, spins on the host; then it only orders streams
                deadline = time.monotonic() + self.timeout
                while not work.is_completed():
                    if time.monotonic() > deadline:
                        raise RuntimeError("timed out")
                    time.sleep(1e-3)
            work.wait(timedelta(seconds=self.timeout))
        except RuntimeError as error:
            self.close()
            raise TransferError(
                f"broadcast of {bucket[0].name!r} ({len(bucket)} tensors) in weight group {self.name!r} failed or took "
                f"more than {self.timeout:g} s on rank {self.rank} of {self.world_size}: {error}"
            ) from error

    def close(self) -> None:
        """Leave the group. Closing it again does nothing."""
        if self._backend is not None:
            self._backend.abort()  # an orderly shutdown would wait for the others
            self._backend = None

    def __enter__(self) -> WeightGroup:
        return self

    def __exit__(self, *exc) -> None:
        self.close()


def listening_store(address: str, timeout: float = DEFAULT_TIMEOUT) -> dist.TCPStore:
    """Return a store that listens at a free port of this process, whose rank 0 of a group will use it.

    Nobody else can take the port while the store lives. Raises TransferError where this process doesn't reach itself at
    `address` within `timeout` seconds.
    """
    dual = socket.has_dualstack_ipv6()
    # ours, since torch takes a port that comes again for the one of a store that is gone
    listener = socket.create_server(("", 0), family=socket.AF_INET6 if dual else socket.AF_INET, dualstack_ipv6=dual)
    where: Any = {"port": listener.getsockname()[1], "master_listen_fd": listener.detach()}
    limit = timedelta(seconds=timeout)
    try:
        return dist.TCPStore(address, is_master=True, timeout=limit, wait_for_workers=False, multi_tenant=True, **where)
    except (RuntimeError, ValueError) as error:
        raise TransferError(f"no weight group at {address!r}, which this process doesn't reach: {error}") from error


def check_backend(backend: str) -> None:
    """Raise ValueError for a backend that a group can't have here."""
    if backend not in ("gloo", "nccl"):
        raise ValueError(f"backend {backend!r}; choose 'gloo' or 'nccl'")
    if backend == "nccl" and not (dist.is_nccl_available() and torch.cuda.is_available()):
        raise ValueError("backend 'nccl' needs a CUDA device, and there is none here; use 'gloo'")


def new_backend(where: str, rank: int, world_size: int, name: str, backend: str, timeout: float) -> Any:
    """Return a group's backend that torch's registry of groups doesn't know, so that names may repeat in a process.

    The prefixes of the store's keys are part of the protocol: they are those that torch's own helper gives the groups
    of other frameworks' senders.
    """
    limit = timedelta(seconds=timeout)
    address, _, port = where.rpartition(":")
    if rank > 0:
        _check_answers(address, int(port), timeout)
    # what `rendezvous` makes of a tcp:// address, which under torchrun would look for the launcher's store there
    store: dist.Store = dist.TCPStore(address, int(port), world_size, rank == 0, limit, multi_tenant=True)
    device = next(iter(c10d.BackendConfig(c10d.Backend(backend)).get_device_backend_map()))
    for prefix in (name, f"{name}/", f"{device}/"):
        store = dist.PrefixStore(prefix, store)
    if backend == "gloo":
        return dist.ProcessGroupGloo(store, rank, world_size, limit)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = 2 * limit  # its watchdog may end the process: our own deadline must be first
    return dist.ProcessGroupNCCL(store, rank, world_size, options)


def _check_answers(address: str, port: int, timeout: float) -> None:
    """Raise RuntimeError where a listener says nothing to a store's greeting: `TCPStore` would wait for it without end.

    Where nobody listens yet, `TCPStore` itself asks again until its timeout.
    """
    try:
        with socket.create_connection((address, port), timeout) as peer:
            peer.sendall(_GREETING)
            try:
                peer.recv(1)
            except TimeoutError:
                raise RuntimeError("whoever listens there takes connections, and answers nothing") from None
    except OSError:
        return


def _buckets(specs: Sequence[TensorSpec], bucket_bytes: int | None) -> Iterator[list[TensorSpec]]:
    return buckets(specs, lambda spec: spec.nbytes, -1 if bucket_bytes is None else bucket_bytes)


def _one_ahead(items: Iterable[T]) -> Iterator[T]:
    """Yield the items, each when the one after it has been made."""
    return (current for current, _ in itertools.pairwise(itertools.chain(items, [None])))  # type: ignore[misc]
