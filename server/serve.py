"""Runs the HTTP server until a signal ends it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import sys
from collections.abc import Iterator
from typing import Any

import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from ..engine import LLM
from .app import create_app
from .auth import Guard, is_loopback

logger = logging.getLogger(__name__)
KEEP_ALIVE = 75  # seconds; clients' connection pools keep theirs for less
MAX_HEAD = 2**16  # bytes of a request's line and headers
SLOWEST = 60.0  # seconds in which a request must have come, with its body
SWITCH_INTERVAL = 5e-4  # seconds that the event loop may keep the engine's thread waiting for the interpreter


class Connection(HttpToolsProtocol):
    """Ends a connection whose request has too long a head, or comes too slowly."""

    head = 0  # bytes of the head that is coming
    deadline: asyncio.TimerHandle | None = None

    def data_received(self, data: bytes) -> None:
        """Count the head's bytes until it is complete."""
        super().data_received(data)
        self.head = self.head + len(data) if "method" not in self.scope else 0
        if self.head > MAX_HEAD and not self.transport.is_closing():
            self.send_400_response(f"The request's head has more than {MAX_HEAD} bytes.")

    def connection_made(self, transport) -> None:
        """Expect a request from now on."""
        super().connection_made(transport)
        self.on_message_begin()

    def on_message_begin(self) -> None:
        """Expect the rest of a request."""
        super().on_message_begin()
        if self.deadline is None:
            self.deadline = self.loop.call_later(SLOWEST, self.transport.close)

    def on_message_complete(self) -> None:
        """Expect nothing."""
        super().on_message_complete()
        self._unset_deadline()

    def connection_lost(self, error: Exception | None) -> None:
        """Expect nothing any more."""
        super().connection_lost(error)
        self._unset_deadline()

    def _unset_deadline(self) -> None:
        if self.deadline is not None:
            self.deadline.cancel()
            self.deadline = None


class Server(uvicorn.Server):
    """Leaves signals to `serve`, which lets requests finish first."""

    def __init__(self, app: FastAPI):
        waits: Any = {"timeout_keep_alive": KEEP_ALIVE, "timeout_graceful_shutdown": 5}
        headers = [("x-samebits-contract", app.state.contract_hash)]  # every reply says which numerics made it
        quiet: Any = {"proxy_headers": False, "access_log": False, "log_config": None}
        config = uvicorn.Config(app, http=Connection, headers=headers, backlog=4096, **waits, **quiet)
        super().__init__(config)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Take none."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start, and say where it answers."""
        await super().startup(sockets)
        for listener in sockets or ():
            logger.info("listening on http://%s:%s", *listener.getsockname()[:2])


def take_address(host: str, port: int) -> socket.socket:
    """Return a socket for `serve` that is bound to this address. ValueError where it can't be had."""
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except (OSError, OverflowError) as error:
        raise ValueError(f"can't listen on {host}, port {port}: {error}; choose another --host or --port") from error
    return listener


def serve(
    llm: LLM,
    model_name: str,
    listener: socket.socket,
    guard: Guard,
    shutdown_timeout: float = 30.0,
    control: socket.socket | None = None,
    **options,
) -> None:
    """Serve until SIGTERM or SIGINT; then new requests get 503, and those that run have `shutdown_timeout` seconds to
    finish before they are aborted (a second signal aborts them at once). Returns when all is closed.

    listener, control: from `take_address`; without an admin key, control routes answer at `control` alone, if there is
    one. options: see `create_app`.
    """
    app = create_app(llm, model_name, guard, **options)
    sys.setswitchinterval(SWITCH_INTERVAL)
    config, host = llm.config, listener.getsockname()[0]
    logger.info("%s in %s, KV cache %.1f GiB, replicas %d, stages %d, contract %s", model_name, config.dtype,
                llm.kv_cache_bytes / 2**30, config.replicas, config.pipeline_parallel_size,
                app.state.contract_hash)  # fmt: skip
    logger.info("API key %s, admin key %s", *("none" if k is None else "set" for k in (guard.api_key, guard.admin_key)))
    if guard.api_key is None and not is_loopback(host):
        logger.warning("whoever reaches %s may generate: set an API key, or listen on 127.0.0.1 only", host)
    if control is not None:
        guard.control_port = control.getsockname()[1]
        logger.info("control routes answer on http://127.0.0.1:%s alone; keep proxies off it", guard.control_port)
    listeners = [s for s in (listener, control) if s is not None]
    asyncio.run(_run(Server(app), app, shutdown_timeout, listeners))  # closes them


async def _run(server: Server, app: FastAPI, shutdown_timeout: float, listeners: list[socket.socket]) -> None:
    loop = asyncio.get_running_loop()
    drains: set[asyncio.Task] = set()

    async def drain(deadline: float) -> None:
        if server.started:
            await app.state.service.engine.drain(deadline)
        server.should_exit = True

    def on_signal() -> None:
        deadline = 0.0 if drains else shutdown_timeout
        logger.info("shutting down: requests have %g s to finish", deadline)
        drains.add(loop.create_task(drain(deadline)))

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    await server.serve(listeners)
