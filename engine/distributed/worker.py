"""Objects in other processes: their methods are called over a connection, and replies come back as futures.

A worker process is the same however it was started: as a child of this process ("mp") or as a Ray actor ("ray"), here
or on another node. It connects back, is told which object to make, and serves calls to it, one after the other, until
the connection ends: then it ends, too. Connections are authenticated with a key that only the two sides know; what goes
over them is pickled, so they belong, like torch.distributed's, on a network that you trust.
"""

from __future__ import annotations

import itertools
import logging
import os
import pickle
import secrets
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from multiprocessing import connection as mpc
from queue import SimpleQueue
from typing import Any, Protocol

import torch

from ..config import EngineConfig

logger = logging.getLogger(__name__)

BACKENDS = ("inproc", "mp", "ray")


class WorkerError(RuntimeError):
    """A worker process died, can't be reached, or didn't answer in time."""


class Process(Protocol):
    """A worker's process, as its launcher knows it."""

    def alive(self) -> bool: ...

    def kill(self) -> None: ...


class Peer:
    """The near end of a connection to a worker. Any thread may call.

    on_event: gets what the worker reports unasked. on_lost: called once when the worker is gone. Both run in a thread
    of the peer's own.
    """

    def __init__(
        self,
        name: str,
        connection: mpc.Connection,
        process: Process,
        on_event: Callable[[Any], None] = lambda event: None,
        on_lost: Callable[[], None] = lambda: None,
    ):
        self.name, self.process = name, process
        self.on_event, self.on_lost = on_event, on_lost
        self._connection = connection
        self._pending: dict[int, Future] = {}
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self.lost = False
        threading.Thread(target=self._read, name=f"peer {name}", daemon=True).start()

    def call(self, method: str, *args) -> Future:
        """Starts the worker's method; WorkerError, from here or the future, when the worker is gone."""
        future: Future = Future()
        with self._lock:
            if self.lost:
                raise WorkerError(f"{self.name} is gone")
            number = next(self._numbers)
            self._pending[number] = future
            try:
                self._connection.send_bytes(pickle.dumps((number, method, pickle.dumps(args, pickle.HIGHEST_PROTOCOL))))
            except OSError as error:
                del self._pending[number]
                raise WorkerError(f"{self.name} is gone: {error}") from error
        return future

    def _read(self) -> None:
        try:
            while True:
                number, ok, value = pickle.loads(self._connection.recv_bytes())
                if number is None:
                    self.on_event(value)
                    continue
                with self._lock:
                    future = self._pending.pop(number)
                (future.set_result if ok else future.set_exception)(value)
        except (EOFError, OSError):
            pass
        except Exception:
            logger.exception("what %s sent can't be read", self.name)
        with self._lock:
            self.lost = True
            pending, self._pending = self._pending, {}
        for future in pending.values():
            future.set_exception(WorkerError(f"{self.name} died"))
        self.on_lost()

    def kill(self) -> None:
        """Ends the worker at once."""
        self.process.kill()
        try:  # wakes the reader up, which a mere close would not
            with socket.socket(fileno=os.dup(self._connection.fileno())) as s:
                s.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass


class LocalPeer:
    """The interface of a `Peer` for an object in this process; methods in its BACKGROUND run in a thread each."""

    def __init__(self, name: str, target: Any):
        self.name, self.target = name, target

    def call(self, method: str, *args) -> Future:
        future: Future = Future()
        run = (future, getattr(self.target, method), args)
        if method in self.target.BACKGROUND:
            threading.Thread(target=_resolve, args=run, daemon=True).start()
        else:
            _resolve(*run)
        return future

    def kill(self) -> None:
        pass


def _resolve(future: Future, function: Callable, args: Sequence) -> None:
    try:
        future.set_result(function(*args))
    except BaseException as error:
        future.set_exception(error)


def results(calls: Sequence[tuple[str, Future]], timeout: float | None) -> list[Any]:
    """What calls, by the names of whom they were made to, came to; the first error once all have ended.

    timeout: seconds for all of them; then WorkerError.
    """
    found = outcomes(calls, timeout)
    for value in found:
        if isinstance(value, Exception):
            raise value
    return found


def outcomes(calls: Sequence[tuple[str, Future]], timeout: float | None) -> list[Any]:
    """As `results`, but with the exceptions in their places."""
    deadline = None if timeout is None else time.monotonic() + timeout
    found: list[Any] = []
    for name, future in calls:
        try:
            found.append(future.result(None if deadline is None else max(0.0, deadline - time.monotonic())))
        except Exception as error:
            late = isinstance(error, TimeoutError) and not future.done()
            found.append(WorkerError(f"{name} did not answer within {timeout:g} s") if late else error)
    return found


def call_all(peers: Sequence[Peer | LocalPeer], method: str, *args) -> list[tuple[str, Future]]:
    """Starts a method of each; what can't be sent is an error of its future."""
    calls = []
    for peer in peers:
        future: Future = Future()
        try:
            future = peer.call(method, *args)
        except Exception as error:
            future.set_exception(error)
        calls.append((peer.name, future))
    return calls


# --- starting them ----------------------------------------------------------------------------------------------------


def launch(
    names: Sequence[str], config: EngineConfig, threads: int, placement: Any = None, gpus: Sequence[str] | None = None
) -> list[Peer]:
    """Starts a worker for each name and waits until all have connected.

    threads: CPU threads of each. placement: where Ray is to put them (see `ray_backend`). gpus: each one's
    CUDA_VISIBLE_DEVICES; Ray sees to it itself. WorkerError when one ends
    before that, or after config.start_timeout seconds; the others are then ended.
    """
    backend, timeout, silence = config.backend, config.start_timeout, config.worker_timeout
    from . import ray_backend

    key = secrets.token_hex(32)
    host = ray_backend.node_address() if backend == "ray" else "127.0.0.1"
    processes: list[Process] = []
    connections: dict[int, mpc.Connection] = {}
    with socket.create_server((host, 0)) as server:
        where = server.getsockname()
        deadline = time.monotonic() + timeout
        try:
            if backend == "ray":
                processes += ray_backend.start(len(names), (*where, key), config, threads, placement)
            else:
                for index in range(len(names)):
                    processes.append(_Child(where, key, index, threads, silence, gpus[index] if gpus else None))
            while len(connections) < len(names):
                server.settimeout(0.2)
                try:
                    accepted, _ = server.accept()
                except TimeoutError:
                    _check_starting(names, processes, connections, deadline, timeout)
                    continue
                if (found := _authenticated(accepted, key, silence)) is not None:
                    connections[found[0]] = found[1]
        except BaseException:
            for process in processes:
                process.kill()
            raise
    return [Peer(name, connections[i], processes[i]) for i, name in enumerate(names)]


def _check_starting(names, processes: Sequence[Process], connections, deadline: float, timeout: float) -> None:
    for index, process in enumerate(processes):
        if index not in connections and not process.alive():
            raise WorkerError(f"{names[index]} ended while it started; its output says why")
    if time.monotonic() > deadline:
        late = [name for i, name in enumerate(names) if i not in connections]
        raise WorkerError(f"{', '.join(late)} did not start within {timeout:g} s")


def _authenticated(accepted: socket.socket, key: str, silence: float) -> tuple[int, mpc.Connection] | None:
    """The worker's index and connection; None for a stranger."""
    accepted.settimeout(None)
    _keep_alive(accepted, silence)
    limit = struct.pack("ll", max(1, int(silence)), 0)
    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):  # whoever says nothing is a stranger, too
        accepted.setsockopt(socket.SOL_SOCKET, option, limit)
    connection = mpc.Connection(os.dup(accepted.fileno()))
    try:
        mpc.deliver_challenge(connection, key.encode())  # type: ignore[attr-defined]
        mpc.answer_challenge(connection, key.encode())  # type: ignore[attr-defined]
        index = connection.recv()
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            accepted.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", 0, 0))
        return index, connection
    except (mpc.AuthenticationError, EOFError, OSError):  # type: ignore[attr-defined]
        connection.close()
        return None
    finally:
        accepted.close()


def _keep_alive(s: socket.socket, silence: float) -> None:
    """A network that drops everything for so many seconds is noticed, on both sides, also when nothing is sent."""
    s.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    s.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if hasattr(socket, "TCP_KEEPIDLE"):  # Linux
        s.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, max(1, int(silence / 2)))
        s.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, max(1, int(silence / 8)))
        s.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4)
        s.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(silence * 1000))


class _Child:
    """A worker as a child process; it ends with the pipe to it, so also when this process is killed."""

    def __init__(
        self, where: tuple[str, int], key: str, index: int, threads: int, silence: float, gpus: str | None = None
    ):
        program = f"from {__name__} import main; main()"
        command = [sys.executable, "-c", program, where[0], *map(str, (where[1], index, silence))]
        environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
        if gpus is not None:
            environment["CUDA_VISIBLE_DEVICES"] = gpus
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, env=environment)
        assert self.process.stdin is not None
        self.process.stdin.write(f"{key}\n".encode())
        self.process.stdin.flush()

    def alive(self) -> bool:
        return self.process.poll() is None

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdin is not None
        self.process.stdin.close()


def gpus_of(config: EngineConfig, worker: int, count: int) -> str | None:
    """CUDA_VISIBLE_DEVICES of the worker that comes after `worker` others and needs `count` GPUs; None: no GPU."""
    if not (config.device or "cpu").startswith("cuda") or config.backend == "ray":
        return None
    gpus = _visible_gpus()
    return ",".join(gpus[(worker + i) % len(gpus)] for i in range(min(count, len(gpus))))


def sharers_of(config: EngineConfig, threads: int) -> int:
    """Of so many workers, with so many threads, each takes its part of a device's memory."""
    cuda = (config.device or "cpu").startswith("cuda")
    if config.backend == "inproc" or (config.backend == "ray" and cuda):  # Ray gives each a GPU
        return 1
    if config.backend == "ray":
        from . import ray_backend

        largest = max(cpus for cpus, _ in ray_backend.nodes())
        return max(1, min(config.num_workers, largest // threads))
    if not cuda:
        return config.num_workers
    return -(-config.num_workers // max(1, len(_visible_gpus())))


def _visible_gpus() -> list[str]:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(torch.cuda.device_count())))
    return [gpu.strip() for gpu in visible.split(",")]


def default_threads(config: EngineConfig) -> int:
    """CPU threads of a worker: what OMP_NUM_THREADS says, or as many as all can have, here or on Ray's nodes."""
    if os.environ.get("OMP_NUM_THREADS", "").isdigit():
        return int(os.environ["OMP_NUM_THREADS"])
    if config.backend == "ray":
        from . import ray_backend

        return ray_backend.fitting_threads(config.num_workers, (config.device or "cpu").startswith("cuda"))
    return max(1, len(os.sched_getaffinity(0)) // config.num_workers)


# --- the worker's side ------------------------------------------------------------------------------------------------


def work(host: str, port: int, key: str, index: int, silence: float) -> None:
    """Serves calls to one object, made by the first of them: ("make", class, *arguments).

    Its methods run in this thread, those in its BACKGROUND in a thread each. An object with a `tick` method gets the
    time between calls: tick(report) works on for a little and returns whether there is more to do. One with `announce`
    is told of a call, method and arguments, when it arrives, by the thread that reads.
    """
    connection = mpc.Client((host, port), authkey=key.encode())
    with socket.socket(fileno=os.dup(connection.fileno())) as s:
        _keep_alive(s, silence)
    connection.send(index)
    sending = threading.Lock()
    calls: SimpleQueue = SimpleQueue()
    target: Any = None

    def send(message: bytes) -> None:
        with sending:
            connection.send_bytes(message)

    def answer(number: int, function: Callable, args: Sequence) -> None:
        try:
            reply = pickle.dumps((number, True, function(*args)), pickle.HIGHEST_PROTOCOL)
        except BaseException as error:
            reply = pickle.dumps((number, False, _portable(error)))
        send(reply)

    def read() -> None:
        try:
            while True:
                number, method, data = pickle.loads(connection.recv_bytes())
                try:
                    args = pickle.loads(data)
                except Exception as error:  # a class that isn't known here, say
                    send(pickle.dumps((number, False, _portable(error))))
                    continue
                if hasattr(target, "announce"):
                    target.announce(method, args)
                if target is not None and method in target.BACKGROUND:
                    run = (number, getattr(target, method), args)
                    threading.Thread(target=answer, args=run, daemon=True).start()
                else:
                    calls.put((number, method, args))
        except (EOFError, OSError):
            os._exit(1)  # nobody is left to work for

    def make(kind: Callable, *args) -> Any:
        nonlocal target
        target = kind(*args)

    threading.Thread(target=read, daemon=True).start()
    busy = False
    try:
        while True:
            while not busy or not calls.empty():
                number, method, args = calls.get()
                answer(number, make if method == "make" else getattr(target, method), args)
                busy = hasattr(target, "tick")
            busy = target.tick(lambda event: send(pickle.dumps((None, True, event), pickle.HIGHEST_PROTOCOL)))
    except BaseException as error:
        if not isinstance(error, OSError | SystemExit):  # Ray's way to end an actor
            traceback.print_exc()
        os._exit(1)  # with all its threads


def _portable(error: BaseException) -> BaseException:
    """The error, if it survives the way, or one that says the same."""
    try:
        pickle.loads(pickle.dumps(error))
        return error
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")


def _end_with_parent() -> None:
    sys.stdin.buffer.read()
    os._exit(1)


def main() -> None:
    """A child process: `work`'s arguments are its own, but for the key, which comes over standard input; the process
    ends with that."""
    for number in (signal.SIGINT, signal.SIGTERM):  # the parent's to take, which ends its children in time
        signal.signal(number, signal.SIG_IGN)
    secret = sys.stdin.buffer.readline().decode().strip()
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    work(sys.argv[1], int(sys.argv[2]), secret, int(sys.argv[3]), float(sys.argv[4]))
