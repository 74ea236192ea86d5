"""Weight updates over HTTP: checked before anything moves, received beside the serving weights, switched all at once.

While tensors come, in a thread of their own, the engine serves on. An update that fails is forgotten whole.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import Future
from typing import TypeVar

from ..engine import LLM, WeightUpdate, WeightUpdateError
from ..engine.weights import TensorSpec
from ..engine.weights.spec import DEFAULT_LABEL
from .async_engine import AsyncEngine, fulfil

logger = logging.getLogger(__name__)
T = TypeVar("T")
MAX_LABELS = 1024  # more versions than the tokens of running requests can be of


class ConflictError(RuntimeError):
    """Something else is in the way of what was asked."""


class VersionLabels:
    """The clients' names for weight versions. Only the newest `MAX_LABELS` names are kept: others are the number."""

    def __init__(self) -> None:
        self._names = {0: DEFAULT_LABEL}

    def of(self, version: int) -> str:
        """The name of a version: its number, unless a client named it otherwise."""
        return self._names.get(version, str(version))

    def name(self, version: int, label: str) -> None:
        """Name a version."""
        self._names.pop(version, None)
        if label != str(version):
            self._names[version] = label
        if len(self._names) > MAX_LABELS:
            del self._names[min(self._names)]


class WeightUpdates:
    """The one update in progress, the process groups that tensors come over, and what clients call the versions."""

    def __init__(self, engine: AsyncEngine, timeout: float, recompute_kept: bool = False):
        self.engine = engine
        self.timeout = timeout
        self.recompute_kept = recompute_kept  # also the KV of requests that a pause keeps
        self.labels = VersionLabels()
        self.groups: set[str] = set()  # names of those that were joined
        self.pending: WeightUpdate | None = None
        self._explicit = False  # begun by the client, who will also say when it ends
        self._label: str | None = None
        self._busy = asyncio.Lock()

    @property
    def label(self) -> str:
        """The label of the version in force."""
        return self.label_of(self.engine.llm.weight_version)

    def label_of(self, version: int | None) -> str:
        """The label of a version; None: of the one in force."""
        return self.labels.of(self.engine.llm.weight_version if version is None else version)

    def relabel(self, label: str) -> None:
        """Give the version in force another label."""
        self.labels.name(self.engine.llm.weight_version, label)

    async def begin(self) -> None:
        """Start an update that `finish` ends; one that was left unfinished is forgotten."""
        async with self._exclusively():
            self._forget()
            self.pending = await self.engine.call(LLM.begin_weight_update)
            self._explicit = True

    async def finish(self, label: str | None = None) -> None:
        """Commit the update that was begun. Raises ConflictError where none was."""
        async with self._exclusively():
            if self.pending is None:
                raise ConflictError("no weight update was begun")
            await self._commit(label)

    def check_resumable(self) -> None:
        """Raise ConflictError, once, where part of an update came and the rest didn't."""
        if self.pending is not None and self.pending.given:
            missing = self.pending.missing
            self._forget()
            raise ConflictError(
                f"the weight update is incomplete: {len(missing)} tensors never came, first {missing[:1]}. It is "
                f"forgotten now; send all of it, or resume again to go on with version {self.label!r}"
            )

    async def load(self, source: str, label: str | None = None) -> str:
        """Load a checkpoint directory, which is a whole update. Return what was done."""
        async with self._exclusively():
            return await self._load(lambda update: update.load(source), label)

    async def receive(
        self, group_name: str, manifest: list[TensorSpec], bucket_bytes: int | None, label: str | None = None
    ) -> str:
        """Receive a manifest's tensors over a group: all, or a part of an update. Return what was done."""
        async with self._exclusively():
            if not self.engine.llm.worker_engine.workers.has_weight_group(group_name):
                raise ConflictError(
                    f"there is no weight group {group_name!r} here; init it first (again, after a failure)"
                )

            def receive(update: WeightUpdate) -> None:
                try:
                    update.check(manifest)
                except WeightUpdateError:
                    self._leave(group_name)  # or the sender might wait for us in its broadcast
                    raise
                update.receive(group_name, manifest, bucket_bytes)

            return await self._load(receive, label)

    async def _load(self, load: Callable[[WeightUpdate], None], label: str | None) -> str:
        if self.pending is None:
            self.pending = await self.engine.call(LLM.begin_weight_update)
        update = self.pending
        self._label = label or self._label
        try:
            await in_daemon_thread(load, update)
        except BaseException:
            self._forget()
            raise
        if self._explicit or update.missing:
            return (
                f"{len(update.given)} tensors staged, {len(update.missing)} to come; version {self.label!r} serves on"
            )
        await self._commit(label)
        return f"version {self.label!r} is in force"

    async def _commit(self, label: str | None) -> None:
        update = self.pending
        assert update is not None
        label = label or self._label
        self.pending = None
        self._forget()
        keep_kv = self.engine.pause_mode == "keep" and not self.recompute_kept

        def commit(llm: LLM) -> int:
            number = int(label) if label and label.isdecimal() and len(label) < 18 else 0
            version = max(number, llm.weight_version + 1)
            self.labels.name(version, label or str(version))  # before any token can bear the number
            return llm.commit_weight_update(update, version, recompute_running=not keep_kv)

        try:
            version = await self.engine.call(commit)
        except BaseException:
            in_daemon_thread(update.abort)
            raise
        logger.info("weight version %s (%r) is in force", version, self.label_of(version))

    def _forget(self) -> None:
        if self.pending is not None:
            in_daemon_thread(self.pending.abort)
        self.pending = None
        self._explicit = False
        self._label = None

    async def join(self, name: str, address: str, port: int | str, rank: int, world_size: int, backend: str) -> None:
        """Join a weight group; one of that name from before is left."""
        async with self._exclusively():
            self._forget()
            await in_daemon_thread(self._leave, name)
            workers = await self.engine.call(lambda llm: llm.worker_engine.workers)
            where = (address, port, rank, world_size, backend, self.timeout)
            await in_daemon_thread(workers.join_weight_group, name, *where)
            self.groups.add(name)

    async def leave(self, name: str) -> bool:
        """Leave a group; True if there was one."""
        async with self._exclusively():
            self._forget()
            return await in_daemon_thread(self._leave, name)

    def _leave(self, name: str) -> bool:
        self.groups.discard(name)
        return self.engine.llm.worker_engine.workers.leave_weight_group(name)

    def close(self) -> None:
        """Leave all groups, if that takes no time."""
        for name in list(self.groups):
            in_daemon_thread(self._leave, name)

    @contextlib.asynccontextmanager
    async def _exclusively(self) -> AsyncIterator[None]:
        if self._busy.locked():
            raise ConflictError("another weight update is in progress")
        async with self._busy:
            yield


def in_daemon_thread(function: Callable[..., T], *args) -> Awaitable[T]:
    """A thread that doesn't keep the process alive: what it waits for may never come."""
    future: Future[T] = Future()
    threading.Thread(target=fulfil, args=(future, function, *args), daemon=True).start()
    return asyncio.wrap_future(future)
