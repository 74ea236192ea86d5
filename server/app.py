"""The HTTP application: all routes, who may call them, and how errors are said."""

from __future__ import annotations

import functools
import pathlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict

from fastapi import APIRouter, Depends, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, PlainTextResponse, Response
from starlette.exceptions import HTTPException as StarletteHTTPException
from starlette.requests import ClientDisconnect

from .. import __version__
from ..engine import LLM, WeightUpdateError
from ..engine.weights import TransferError, WorkerError
from ..kernels.contract import NumericsError
from . import control, openai, sglang, sglang_control, tokens
from .async_engine import AsyncEngine, GenerationError
from .auth import Guard
from .kept_ids import KeptIds
from .limits import Limits
from .metrics import Metrics
from .options import ServerOptions
from .protocol import problem, reply
from .service import ModelNotFoundError, Served, Service
from .states import ConflictError, UnavailableError
from .tools import tool_format
from .updates import WeightUpdates

PAGE = pathlib.Path(__file__).with_name("page.html")
MAX_BODY = 16 * 2**20  # bytes; the event loop reads so much JSON in less than half a second
_ERRORS = {400: "Bad request", 401: "No key", 403: "Not from here", 404: "Not found", 409: "Something is in the way"}
_ERRORS |= {413: "Too large", 500: "Failed", 503: "Not now"}

router = APIRouter(tags=["samebits"])
open_router = APIRouter(tags=["samebits"])


@open_router.get("/", include_in_schema=False)
async def page() -> Response:
    """The status page."""
    return FileResponse(PAGE, media_type="text/html")


@open_router.get("/docs", include_in_schema=False)
async def docs() -> Response:
    """The routes, from /openapi.json; works without the internet."""
    return FileResponse(PAGE.with_name("docs.html"), media_type="text/html")


@open_router.head("/health", include_in_schema=False)
@open_router.head("/ready", include_in_schema=False)
@open_router.get("/health")
@open_router.get("/ready")
async def health(server: Served) -> Response:
    """200 while the server can compute: not while it sleeps, shuts down, or has no replica that lives."""
    state = server.engine.state.name
    if state in ("stopping", "asleep"):
        return problem(503, f"the server is {state}")
    if not server.load().kv_blocks_total:
        return problem(503, "no replica serves now")
    return await liveness(server)


@open_router.get("/liveness")
async def liveness(server: Served) -> Response:
    """200 while the engine's thread lives and the engine is not broken for good, whatever the state of the server."""
    engine = server.engine
    if not engine.alive or engine.llm.failure is not None:
        return problem(503, engine.llm.failure or "the engine's thread is dead")
    return reply({"status": "ok"})


@router.get("/metrics", response_class=PlainTextResponse)
async def metrics(http: Request) -> Response:
    """Counters and gauges in Prometheus' text format."""
    return Response(http.app.state.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")


@router.get("/v1/contract")
async def contract(server: Served) -> Response:
    """The numerics contract: every choice that decides a bit, and its hash."""
    found = server.llm.contract
    if found is None:
        return problem(404, "this server runs without the exact ops, so it has no contract")
    return reply({"hash": found.hash, "contract": asdict(found)})


def create_app(llm: LLM, model_name: str, guard: Guard | None = None, **settings) -> FastAPI:
    """The application around an engine, which belongs to it from its start on. settings: see `ServerOptions`."""
    options = ServerOptions(**settings)
    template = getattr(llm.tokenizer, "chat_template", None)
    found_format = tool_format(options.tool_parser, template if isinstance(template, str) else None)
    guard = guard or Guard()
    room = llm.config.max_num_seqs * llm.config.replicas + options.max_waiting
    limits = Limits(room, options.max_logprobs, options.max_reply_logprobs)
    found = Metrics()

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        engine = AsyncEngine(llm, limits, found.observe_step)
        updates = WeightUpdates(engine, options.transfer_timeout, options.pause_keep == "recompute")
        kept = KeptIds(options.kept_tokens)
        app.state.service = found.service = Service(engine, updates, model_name, kept, guard, found_format)
        engine.start()
        yield
        await updates.close()
        await engine.stop()

    app = FastAPI(
        title="samebits",
        version=__version__,
        summary="Rollouts whose log-probs are, bit for bit, the trainer's.",
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        max_body_size=MAX_BODY,
        responses={status: {"description": text} for status, text in _ERRORS.items()},
    )
    app.state.metrics = found
    app.include_router(open_router)
    for public in (router, openai.router, tokens.router, sglang.router, control.router):
        app.include_router(public, dependencies=[Depends(guard.check_api)])
    for restricted in (sglang_control.control, control.control):
        app.include_router(restricted, dependencies=[Depends(guard.check_control)])
    app.state.contract_hash = llm.contract.hash if llm.contract else "none"
    _add_error_replies(app)
    return app


_STATUS: dict[int, tuple[type[Exception], ...]] = {
    400: (ValueError, TypeError, OSError, WeightUpdateError, NumericsError),  # OSError: files that a request names
    403: (PermissionError,),
    404: (ModelNotFoundError,),
    409: (ConflictError,),
    499: (ClientDisconnect,),
    500: (TransferError, GenerationError),
    503: (UnavailableError, WorkerError),
}


def _add_error_replies(app: FastAPI) -> None:
    async def invalid(http: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        found = [f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors()[:5]]
        if "json" not in http.headers.get("content-type", ""):
            found.append("send JSON, with the header 'Content-Type: application/json'")
        return problem(400, "; ".join(found))

    async def refused(http: Request, error: Exception) -> Response:
        assert isinstance(error, StarletteHTTPException)
        return problem(error.status_code, str(error.detail), dict(error.headers or {}))

    async def known(status: int, http: Request, error: Exception) -> Response:
        return problem(status, str(error), {"Retry-After": "1"} if status == 503 else None)

    async def unknown(http: Request, error: Exception) -> Response:
        return problem(500, f"{type(error).__name__}: {error}")

    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(StarletteHTTPException, refused)
    app.add_exception_handler(Exception, unknown)
    for status, kinds in _STATUS.items():
        for kind in kinds:
            app.add_exception_handler(kind, functools.partial(known, status))
