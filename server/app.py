"""The HTTP application: all routes, who may call them, and how errors are said."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import Depends, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from starlette.exceptions import HTTPException as StarletteHTTPException
from starlette.requests import ClientDisconnect

from .. import __version__
from ..engine import LLM, WeightUpdateError
from ..engine.weights import TransferError, WorkerError
from ..kernels.contract import NumericsError
from . import control, information, openai, sglang
from .async_engine import GenerationError
from .auth import Guard
from .options import ServerOptions
from .protocol import problem
from .service import Service
from .states import ConflictError, UnavailableError

MAX_BODY = 16 * 2**20  # bytes; the event loop reads so much JSON in less than half a second
_STATUSES = (400, 401, 403, 404, 409, 413, 500, 503)  # of errors that any route may answer with
_KNOWN: dict[int, tuple[type[Exception], ...]] = {
    # OSError: files that a request names. RecursionError: what it nests too deeply.
    400: (ValueError, TypeError, OSError, WeightUpdateError, NumericsError, RecursionError, NotImplementedError),
    409: (ConflictError,),
    499: (ClientDisconnect,),
    500: (TransferError, GenerationError),
    503: (UnavailableError, WorkerError),
}


def create_app(llm: LLM, model_name: str, guard: Guard | None = None, **settings) -> FastAPI:
    """The application around an engine, which belongs to it from its start on. settings: see `ServerOptions`."""
    guard = guard or Guard()
    service = Service(llm, model_name, guard, ServerOptions(**settings))
    known = itertools.chain.from_iterable(_KNOWN.values())

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        service.engine.start()
        yield
        await service.updates.close()
        await service.engine.stop()

    app = FastAPI(
        title="samebits", version=__version__, summary="Rollouts whose log-probs are, bit for bit, the trainer's.",
        lifespan=lifespan, docs_url=None, redoc_url=None, max_body_size=MAX_BODY,
        responses={status: {} for status in _STATUSES},
        exception_handlers=dict.fromkeys((RequestValidationError, StarletteHTTPException, Exception, *known), _say),
    )  # fmt: skip
    app.state.service = service
    app.state.metrics = information.Metrics(service)
    app.include_router(information.everybody)
    for public in (information.router, openai.router, sglang.router):
        app.include_router(public, dependencies=[Depends(guard.check_api)])
    for restricted in (control.vllm, control.sglang):
        app.include_router(restricted, dependencies=[Depends(guard.check_control), Depends(control.check_read)])
    return app


async def _say(http: Request, error: Exception) -> Response:
    """An error as a reply; what is raised nowhere on purpose is said with its kind."""
    if isinstance(error, RequestValidationError):
        errors = error.errors()[:5]
        found = [f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in errors]
        if any(e["loc"][:1] == ("body",) for e in errors) and "json" not in http.headers.get("content-type", ""):
            found.append("send JSON, with the header 'Content-Type: application/json'")
        return problem(400, "; ".join(found))
    if isinstance(error, StarletteHTTPException):
        return problem(error.status_code, str(error.detail), dict(error.headers or {}))
    status = next((status for status, kinds in _KNOWN.items() if isinstance(error, kinds)), None)
    if status is None:
        return problem(500, f"{type(error).__name__}: {error}")
    return problem(status, str(error), {"Retry-After": "1"} if status == 503 else None)
