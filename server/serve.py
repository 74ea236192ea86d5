"""Runs the HTTP server until a signal ends it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import sys
from collections.abc import Iterator

import uvicorn
from fastapi import FastAPI

from ..engine import LLM
from .app import create_app
from .auth import Guard

logger = logging.getLogger(__name__)
KEEP_ALIVE = 75  # seconds; clients' connection pools keep theirs for less
SWITCH_INTERVAL = 5e-4  # seconds that the event loop may keep the engine's thread waiting for the interpreter


class _Server(uvicorn.Server):
    """Leaves signals to `serve`, which lets requests finish first."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def serve(
    llm: LLM,
    model_name: str,
    host: str = "127.0.0.1",
    port: int = 8000,
    guard: Guard | None = None,
    shutdown_timeout: float = 30.0,
    control_port: int = 0,
    **options,
) -> None:
    """Serve until SIGTERM or SIGINT; then new requests get 503, and those that run have `shutdown_timeout` seconds to
    finish before they are aborted (a second signal aborts them at once). Returns when all is closed.

    control_port: on 127.0.0.1, where all routes answer, and without an admin key control routes alone there; 0: a free
    one; `port`: no other. options: see `create_app`.
    """
    guard = guard or Guard()
    app = create_app(llm, model_name, guard, **options)
    config = uvicorn.Config(app, host, port, timeout_keep_alive=KEEP_ALIVE, proxy_headers=False, access_log=False,
                            log_config=None, timeout_graceful_shutdown=5, backlog=4096)  # fmt: skip
    sys.setswitchinterval(SWITCH_INTERVAL)
    listeners = [socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)]
    logger.info("listening on http://%s:%s", host, listeners[0].getsockname()[1])
    if guard.admin_key is None and control_port != port:
        listeners.append(socket.create_server(("127.0.0.1", control_port)))
        guard.control_port = listeners[1].getsockname()[1]
        logger.info("control routes answer on http://127.0.0.1:%s alone; keep proxies off it", guard.control_port)
    asyncio.run(_run(_Server(config), app, shutdown_timeout, listeners))  # closes them


async def _run(server: _Server, app: FastAPI, shutdown_timeout: float, listeners: list[socket.socket]) -> None:
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
