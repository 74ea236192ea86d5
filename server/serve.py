"""The HTTP server, from its start to the signal that ends it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import sys
import time
from types import FrameType
from typing import Any

import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from ..engine import LLM
from .app import create_app
from .auth import Guard, is_loopback
from .service import Service

logger = logging.getLogger(__name__)
KEEP_ALIVE = 75  # seconds; clients' connection pools keep theirs for less
MAX_HEAD = 2**16  # bytes of a request's line and headers
SLOWEST = 60.0  # seconds in which a request must have come, with its body, and a client must read on in its reply
SWITCH_INTERVAL = 5e-4  # seconds that the event loop may keep the engine's thread waiting for the interpreter


class Connection(HttpToolsProtocol):
    """A connection that ends where a request has too long a head or comes too slowly, or a reply is not taken."""

    head = 0  # bytes that came since there was news of a body: of a head, of trailers, of what stands beside chunks

    def data_received(self, data: bytes) -> None:
        """Count the bytes that are of no body."""
        self.head += len(data)
        super().data_received(data)
        if self.head > MAX_HEAD and not self.transport.is_closing():
            self.send_400_response(f"The request's head has more than {MAX_HEAD} bytes.")
        if self.head and "read" not in self.deadlines:  # what begins no request, such as an empty line
            self._expect("read")

    def on_body(self, body: bytes) -> None:
        """Count anew."""
        super().on_body(body)
        self.head = 0

    def connection_made(self, transport) -> None:
        """Expect a request from now on."""
        super().connection_made(transport)
        self.deadlines: dict[str, asyncio.TimerHandle] = {}
        self._expect("read")

    def on_message_begin(self) -> None:
        """Expect the rest of a request."""
        super().on_message_begin()
        self._expect("read")

    def on_message_complete(self) -> None:
        """Expect no more of it."""
        super().on_message_complete()
        self.head = 0
        self._end("read")

    def pause_writing(self) -> None:
        """Expect the client to read on."""
        super().pause_writing()
        self._expect("write")

    def resume_writing(self) -> None:
        """Expect nothing of it."""
        super().resume_writing()
        self._end("write")

    def connection_lost(self, error: Exception | None) -> None:
        """Expect nothing any more."""
        super().connection_lost(error)
        self._end("read", "write")

    def _expect(self, what: str) -> None:
        self._end(what)
        self.deadlines[what] = self.loop.call_later(SLOWEST, self.transport.abort)

    def _end(self, *kinds: str) -> None:
        for timer in [self.deadlines.pop(kind) for kind in kinds if kind in self.deadlines]:
            timer.cancel()


class Server(uvicorn.Server):
    """A server that lets requests finish for `shutdown_timeout` seconds after a signal; a second one aborts them."""

    def __init__(self, app: FastAPI, shutdown_timeout: float = 0.0):
        self.service: Service = app.state.service
        self.shutdown_timeout = shutdown_timeout
        headers = [("x-samebits-contract", self.service.contract_hash or "none")]  # every reply says whose bits it has
        more: Any = {"timeout_keep_alive": KEEP_ALIVE, "proxy_headers": False, "access_log": False, "log_config": None}
        config = uvicorn.Config(app, loop="asyncio", http=Connection, headers=headers, backlog=4096, **more)
        super().__init__(config)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start, and say where it answers."""
        for listener in sockets or ():
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # for the next server, once this one is gone
        await super().startup(sockets)
        for listener in sockets or ():
            logger.info("listening on http://%s:%s", *listener.getsockname()[:2])

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin to end. uvicorn calls it in the loop's thread, wherever that is."""
        asyncio.run_coroutine_threadsafe(self._end(self.shutdown_timeout), asyncio.get_running_loop())
        self.shutdown_timeout = 0.0

    async def _end(self, deadline: float) -> None:
        logger.info("shutting down: requests have %g s to finish", deadline)
        for connection in [*self.server_state.connections] if self.should_exit else ():  # a signal while replies go out
            connection.transport.abort()
        end = time.monotonic() + deadline
        try:
            if self.started:
                await self.service.engine.drain(deadline)
        finally:
            # Replies go out in what is left, those of aborted requests in five seconds.
            self.config.timeout_graceful_shutdown = max(5, int(end - time.monotonic()))
            self.should_exit = True


def take_address(host: str, port: int) -> socket.socket:
    """Return a socket for `serve` that has this address to itself. ValueError where it can't be had."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)  # named, or asyncio sets no TCP_NODELAY
    try:
        with contextlib.suppress(OSError):
            listener.bind((host, port))
            return listener
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections of an earlier server may be left
        listener.bind((host, port))
    except (OSError, OverflowError) as error:
        raise ValueError(f"can't listen on {host}, port {port}: {error}; choose another --host or --port") from error
    return listener


def serve(llm: LLM, model_name: str, listeners: list[socket.socket], guard: Guard, timeout: float, **options) -> None:
    """Serve until SIGTERM or SIGINT; then new requests get 503, and those that run have `timeout` seconds to finish
    before they are aborted (a second signal aborts them at once). Returns when all is closed.

    listeners: one or two, from `take_address`; without an admin key, control routes answer at the second alone, if
    there is one. options: see `create_app`.
    """
    app = create_app(llm, model_name, guard, **options)
    sys.setswitchinterval(SWITCH_INTERVAL)
    config = llm.config
    host = listeners[0].getsockname()[0]
    logger.info("%s in %s, KV cache %.1f GiB, replicas %d, stages %d, contract %s", model_name, config.dtype,
                llm.kv_cache_bytes / 2**30, config.replicas, config.pipeline_parallel_size,
                app.state.service.contract_hash)  # fmt: skip
    logger.info("API key %s, admin key %s", *("none" if k is None else "set" for k in (guard.api_key, guard.admin_key)))
    if guard.api_key is None and not is_loopback(host):
        logger.warning("whoever reaches %s may generate: set an API key, or listen on 127.0.0.1 only", host)
    for control in listeners[1:]:
        guard.control_port = control.getsockname()[1]
        logger.info("control routes answer on http://127.0.0.1:%s alone; keep proxies off it", guard.control_port)
    Server(app, timeout).run(listeners)  # closes them
