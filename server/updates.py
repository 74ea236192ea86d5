"""Weight updates over HTTP: checked before anything moves, received beside the serving weights, switched all at once.

While tensors come, in a thread of their own, the engine serves on. An update that fails is forgotten whole.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from typing import TypeVar

from ..engine import LLM, WeightUpdate, WeightUpdateError
from ..engine.weights import TensorSpec, TransferError
from ..engine.weights.group import check_backend
from ..engine.weights.spec import DEFAULT_LABEL
from .async_engine import AsyncEngine, fulfil
from .states import ConflictError

logger = logging.getLogger(__name__)
T = TypeVar("T")
CLOSE_TIMEOUT = 5.0  # seconds
POLL = 0.05  # seconds
MAX_LABELS = 1024  # more versions than the tokens of running requests can be of


class WeightUpdates:
    """The one update in progress, the process groups that tensors come over, and what clients call the versions.

    An update that nobody has begun takes its tensors from one group, under one label, each once; what doesn't fit those
    that have come begins another.
    """

    def __init__(self, engine: AsyncEngine, timeout: float, recompute_kept: bool = False):
        self.engine = engine
        self.state = engine.state
        self.timeout = timeout
        self.recompute_kept = recompute_kept  # also the KV of requests that a pause keeps
        self._labels = {0: DEFAULT_LABEL}  # the clients' names of the newest versions
        self.groups: set[str] = set()  # names of those that were joined
        self._explicit = False  # begun by the client, who will also say when it ends
        self._label: str | None = None
        self._group: str | None = None  # that tensors of the pending update came over

    @property
    def label(self) -> str:
        """The label of the version in force."""
        return self.label_of(self.engine.llm.weight_version)

    def label_of(self, version: int | None) -> str:
        """The label of a version, None: of the one in force; its number, unless a client named it otherwise."""
        version = self.engine.llm.weight_version if version is None else version
        return self._labels.get(version, str(version))

    def relabel(self, label: str, version: int) -> None:
        """Name a version. Only the newest `MAX_LABELS` names are kept."""
        self._labels[version] = label
        if len(self._labels) > MAX_LABELS:
            del self._labels[min(self._labels)]

    async def begin(self, label: str | None = None) -> None:
        """Start an update that `finish` ends; one that was left unfinished is forgotten. label: the version's name."""
        with self.state.updating("the start of one"):
            self._forget()
            self.state.pending = await self.engine.call(LLM.begin_weight_update)
            self._explicit = True
            self._label = label

    async def finish(self, label: str | None = None) -> None:
        """Commit the update that was begun. Raises ConflictError where none was."""
        with self.state.updating("the end of one"):
            if self.state.pending is None or not self._explicit:
                raise ConflictError("no weight update was begun")
            await self._commit(self.state.pending, label)

    async def resume(self) -> None:
        """Resume after a pause. Raises ConflictError during an update, and once where one came in part meanwhile."""
        self.state.check_no_update()
        pending = self.state.pending
        if pending is not None and pending.given and self.state.paused:
            missing = pending.missing
            self._forget()
            raise ConflictError(
                f"the weight update is incomplete: {len(missing)} tensors never came, first {missing[:1]}. It is "
                f"forgotten now; send all of it, or resume again to go on with version {self.label!r}"
            )
        await self.engine.resume()

    async def load(self, source: str, label: str | None = None, abort_all: bool = False) -> str:
        """Load a checkpoint directory, which is a whole update. Return what was done.

        abort_all: end all requests once the directory was read, and found to be good.
        """
        with self.state.updating(f"from {source}"):
            if not self._explicit:
                self._forget()
            return await self._load(lambda update: update.load(source), label, abort_all)

    async def receive(
        self, group_name: str, specs: list[TensorSpec], bucket_bytes: int | None, label: str | None = None,
        abort_all: bool = False,
    ) -> str:  # fmt: skip
        """Receive tensors of these specs over a group: all, or a part of an update. Return what was done.

        abort_all: end all requests once the tensors have come.
        """
        with self.state.updating(f"over group {group_name!r}"):
            if group_name not in self.engine.llm.worker_engine.workers.weight_groups:
                raise ConflictError(
                    f"there is no weight group {group_name!r} here; init it first (again, after a failure)"
                )
            if not self._explicit and not self._continues(group_name, specs, label):
                self._forget()
            self._group = group_name

            def receive(update: WeightUpdate) -> None:
                try:
                    update.check(specs)
                except WeightUpdateError:
                    self._leave(group_name)  # or the sender might wait for us in its broadcast
                    raise
                update.receive(group_name, specs, bucket_bytes)

            return await self._load(receive, label, abort_all)

    def _continues(self, group_name: str, specs: list[TensorSpec], label: str | None) -> bool:
        """True unless the tensors must be of another update than those that have come."""
        pending = self.state.pending
        names = [spec.name for spec in specs]
        same_label = label is None or self._label in (None, label)
        return pending is not None and same_label and self._group == group_name and pending.given.isdisjoint(names)

    async def _load(self, load: Callable[[WeightUpdate], None], label: str | None, abort_all: bool) -> str:
        if self.state.pending is None:
            self.state.pending = await self.engine.call(LLM.begin_weight_update)
        update = self.state.pending
        self._label = label or self._label
        try:
            await in_daemon_thread(load, update)
        except BaseException:
            self._forget()
            raise
        if abort_all:
            await self.engine.abort()
        missing = update.missing  # looks at all names
        if self._explicit or missing:
            return f"{len(update.given)} tensors staged, {len(missing)} to come; version {self.label!r} serves on"
        await self._commit(update, label)
        return f"version {self.label!r} is in force"

    async def _commit(self, update: WeightUpdate, label: str | None) -> None:
        label = label or self._label
        self.state.pending = None
        self._forget()
        keep_kv = self.state.pause_mode == "keep" and not self.recompute_kept

        def commit(llm: LLM) -> int:
            number = int(label) if label and label.isdecimal() and len(label) < 18 else 0
            version = max(number, llm.weight_version + 1)
            self.relabel(label or str(version), version)  # before any token can bear the number
            return llm.commit_weight_update(update, version, recompute_running=not keep_kv)

        try:
            version = await self.engine.call(commit)
        except BaseException:
            in_daemon_thread(update.abort)
            raise
        logger.info("weight version %s (%r) is in force", version, self.label_of(version))

    def _forget(self) -> None:
        if self.state.pending is not None:
            in_daemon_thread(self.state.pending.abort)
        self.state.pending = None
        self._explicit = False
        self._label = None
        self._group = None

    async def join(self, name: str, address: str, port: int, rank: int, world_size: int, backend: str) -> None:
        """Join a weight group; one of that name from before is left. Until its trainer listens, updates may come."""
        check_backend(backend)
        last = rank + self.engine.llm.world_size - 1
        if last >= world_size:
            raise ValueError(f"ranks {rank} to {last} don't fit in a group of {world_size}: see /get_world_size")
        self.state.check_no_update()
        await self._reach(address, port)
        with self.state.updating(f"the making of group {name!r}"):
            self._forget()
            workers = await self.engine.call(lambda llm: llm.worker_engine.workers)
            where = (address, port, rank, world_size, backend, self.timeout)
            await in_daemon_thread(workers.join_weight_group, name, *where)
            self.groups.add(name)

    async def _reach(self, address: str, port: int) -> None:
        """Wait until somebody listens there. Raises TransferError, at once where nobody ever could."""
        try:
            async with asyncio.timeout(self.timeout):
                while True:
                    with contextlib.suppress(ConnectionRefusedError):
                        _, writer = await asyncio.open_connection(address, port)
                        writer.close()
                        return
                    await asyncio.sleep(POLL)
        except OSError as error:
            why = str(error) or f"for {self.timeout:g} s"
            raise TransferError(f"nobody listens at {address}, port {port}: {why}") from error

    async def leave(self, name: str) -> bool:
        """Leave a group; True if there was one."""
        with self.state.updating(f"the end of group {name!r}"):
            self._forget()
            return await in_daemon_thread(self._leave, name)

    def _leave(self, name: str) -> bool:
        self.groups.discard(name)
        return self.engine.llm.worker_engine.workers.leave_weight_group(name)

    async def close(self) -> None:
        """Leave all groups. One whose peers keep it for longer than a few seconds goes with the process."""
        leaving = [asyncio.ensure_future(in_daemon_thread(self._leave, name)) for name in list(self.groups)]
        if leaving:
            await asyncio.wait(leaving, timeout=CLOSE_TIMEOUT)


def in_daemon_thread(function: Callable[..., T], *args) -> Awaitable[T]:
    """A thread that doesn't keep the process alive: what it waits for may never come."""
    future: Future[T] = Future()
    threading.Thread(target=fulfil, args=(future, function, *args), daemon=True).start()
    return asyncio.wrap_future(future)
