"""Workers as child processes of this one: started with `subprocess`, called over pipes of `multiprocessing`."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import threading
from collections import deque
from concurrent.futures import Future
from multiprocessing.connection import Connection
from typing import Any

import torch

from ..engine.executor import WorkerError
from .calls import GROUPS, Host, group_of, portable


class Channel:
    """The near end of a pipe to a worker, which answers calls in their order."""

    def __init__(self, name: str, connection: Connection):
        self.name = name
        self._connection = connection
        self._calls: deque[Future] = deque()
        self._lock = threading.Lock()
        self._lost = False
        threading.Thread(target=self._read, name=name, daemon=True).start()

    def call(self, method: str, args: tuple) -> Future:
        """Send a call and return its result to come."""
        message = pickle.dumps((method, args), pickle.HIGHEST_PROTOCOL)
        future: Future = Future()
        with self._lock:
            if self._lost:
                raise WorkerError(f"{self.name} is gone")
            try:
                self._connection.send_bytes(message)
            except OSError as error:
                raise WorkerError(f"{self.name} is gone: {error}") from error
            self._calls.append(future)
        return future

    def _read(self) -> None:
        with contextlib.suppress(EOFError, OSError):
            while True:
                ok, value = self._connection.recv()
                with self._lock:
                    future = self._calls.popleft()
                if ok:
                    future.set_result(value)
                else:
                    future.set_exception(value)
        with self._lock:
            self._lost = True
        for future in self._calls:
            future.set_exception(WorkerError(f"{self.name} died"))


class ProcessHandle:
    """A `WorkerHandle` of a child process, which ends with this one.

    threads: CPU threads of its steps. gpus: its CUDA_VISIBLE_DEVICES, None: as here.
    """

    def __init__(self, name: str, threads: int, gpus: str | None = None):
        self.name = name
        pipes = [multiprocessing.Pipe() for _ in GROUPS]
        far = [theirs.fileno() for _, theirs in pipes]
        program = f"from {__name__} import main; main({far})"
        environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
        if gpus is not None:
            environment["CUDA_VISIBLE_DEVICES"] = gpus
        self.process = subprocess.Popen([sys.executable, "-c", program], pass_fds=far, env=environment)
        for _, theirs in pipes:
            theirs.close()
        self._channels = {
            group: Channel(name, ours) for group, (ours, _) in zip(GROUPS, pipes, strict=True)
        }  # fmt: skip

    def call(self, method: str, *args: Any) -> Future:
        """Start a method of the process's object."""
        return self._channels[group_of(method)].call(method, args)

    def kill(self) -> None:
        """End the process."""
        self.process.kill()
        self.process.wait()


def main(descriptors: list[int]) -> None:
    """Serve calls from pipes, one thread per pipe, until the parent closes them or dies."""
    for number in (signal.SIGINT, signal.SIGTERM):  # the parent's to take, which ends its children in time
        signal.signal(number, signal.SIG_IGN)
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    host = Host()
    for descriptor in descriptors[1:]:
        threading.Thread(target=_serve, args=(host, Connection(descriptor)), daemon=True).start()
    _serve(host, Connection(descriptors[0]))


def _serve(host: Host, connection: Connection) -> None:
    try:
        while True:
            connection.send(_answer(host, connection.recv_bytes()))
    except (EOFError, OSError):
        os._exit(1)  # nobody is left to work for


def _answer(host: Host, message: bytes) -> tuple[bool, Any]:
    try:
        method, args = pickle.loads(message)
        return True, host.call(method, *args)
    except BaseException as error:
        return False, portable(error)
