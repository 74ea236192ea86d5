"""The common parts of the dialects: checked bodies, sampling parameters, replies, streams, errors."""

from __future__ import annotations

import asyncio
import dataclasses
import difflib
import itertools
import logging
import math
import reprlib
import time
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Iterator
from typing import Annotated, Any, Self, TypeVar

import orjson
from fastapi import APIRouter, Request
from fastapi.responses import Response, StreamingResponse
from fastapi.routing import APIRoute
from pydantic import BaseModel, ConfigDict, Field, StringConstraints, model_validator
from starlette.requests import ClientDisconnect

from ..engine import Completion, RequestOutput, SamplingParams, StructuredOutputsParams
from ..engine.outputs import LOWEST_LOGPROB
from ..engine.sampling_params import RequestOutputKind
from ..garbage import without_collections
from .async_engine import AsyncEngine, GenerateRequest, Generation

logger = logging.getLogger(__name__)

PART = 2**16  # bytes of a reply that are made and sent at a time
PLAIN = (str, int, float, list, type(None))  # what `pieces` leaves to orjson; much faster than asking for an Iterator
AT_ONCE = 0.005  # seconds that the event loop works on a reply before a thread goes on with it
RequestId = Annotated[str, StringConstraints(min_length=1, max_length=256)]
T = TypeVar("T")
# Lists are checked up to the first wrong item: errors for each of a million would take a minute.
Many = Annotated[list[T], Field(fail_fast=True)]
Ids = Many[int]
Items = Annotated[list[T], Field(fail_fast=True, max_length=2**16)]

# Parameters of other engines that change a result. What is false or NEUTRAL asks for nothing.
NEUTRAL: dict[str, Any] = {"repetition_penalty": 1, "length_penalty": 1, "best_of": 1, "modalities": ["text"]}
NEUTRAL |= {"response_format": {"type": "text"}, "parallel_tool_calls": True, "is_checkpoint_format": True}
NEUTRAL |= {"selector": "all"}  # of the models to update; there is one
_UNSUPPORTED = """
    presence_penalty frequency_penalty logit_bias bad_words allowed_token_ids logits_processors custom_logit_processor
    custom_params use_beam_search repetition_detection priority echo echo_prompt suffix documents chat_template
    structured_outputs guided_json guided_regex guided_choice guided_grammar json_schema regex ebnf structural_tag
    stop_regex truncate_prompt_tokens prompt_embeds input_embeds lora_path image_data audio_data video_data features
    content_parts vllm_xargs kv_transfer_params logprob_token_ids token_ids_logprob continuous_usage_stats
    return_hidden_states return_bytes return_entropy no_stop_trim session_params packed background
"""
# Fields of theirs that change none here: labels, hints to routers, settings of their memory and logs. Fast tokenizers
# put no spaces between special tokens, `stream` decides on the output's kind, and no KV of other weights is ever used.
_IGNORED = """
    user metadata store service_tier safety_identifier prompt_cache_key include_obfuscation session_id conversation_id
    data_parallel_rank log_metrics no_logs separate_reasoning stream_reasoning include_reasoning is_async keep_pause
    torch_empty_cache recapture_cuda_graph token_step packed_buffer_size_bytes packed_num_buffers allow_quant_error
    spaces_between_special_tokens output_kind flush_cache
"""
UNSUPPORTED = {*NEUTRAL, *_UNSUPPORTED.split()}
IGNORED = {*_IGNORED.split()}
_NAMES = {"max_tokens": "max_new_tokens", "min_tokens": "min_new_tokens", "seed": "sampling_seed"}  # vLLM's: SGLang's
OTHER_DIALECT = _NAMES | {sglang: vllm for vllm, sglang in _NAMES.items()}


class Body(BaseModel):
    """A request's JSON. Unknown fields are refused with the nearest known one, but for those that are IGNORED."""

    model_config = ConfigDict(extra="allow", strict=True, protected_namespaces=())

    @model_validator(mode="after")
    def check_extra(self) -> Self:
        """Refuse what is unknown, and what is known elsewhere and asks for something."""
        for name, value in (self.model_extra or {}).items():
            if value is None or name in IGNORED:
                continue
            if name not in UNSUPPORTED:
                raise ValueError(f"unknown field {name[:100]!r}{self._hint(name[:100])}")
            if value != NEUTRAL[name] if name in NEUTRAL else value:
                raise ValueError(f"{name}={reprlib.repr(value)} is not supported; leave it out")
        return self

    @classmethod
    def _hint(cls, name: str) -> str:
        known = [field.alias or key for key, field in cls.model_fields.items()]
        if "sampling_params" in known and (name in Sampling.model_fields or name in OTHER_DIALECT):
            return "; it belongs in sampling_params"
        near = [n for n in known if n == OTHER_DIALECT.get(name)] or difflib.get_close_matches(name, known, 1)
        return f"; did you mean {near[0]}?" if near else ""


class CallBody(Body):
    """The fields of every call that generates in vLLM's dialect."""

    model: str | None = None
    stream: bool | None = False
    cache_salt: str | None = Field(default=None, min_length=1)
    request_id: RequestId | None = None


class Sampling(Body):
    """Sampling parameters, by vLLM's names; a dialect has other names as aliases."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    n: int | None = None
    max_tokens: int | None = 16
    min_tokens: int | None = None
    seed: int | None = None
    stop: str | Items[str] | None = None
    stop_token_ids: Ids | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    structured_outputs: dict[str, Any] | None = Field(
        default=None, description="vLLM's: one of json, json_object, regex, choice and grammar."
    )
    routed_experts: bool | None = Field(default=None, description="Report the experts of each token.")
    routed_experts_prompt_start: int | None = Field(default=None, description="vLLM's: report them from here on.")

    def structure(self, **own: Any) -> StructuredOutputsParams | None:
        """The grammar that is asked for, also by a dialect's own fields. ValueError or TypeError for a wrong one."""
        known = [field.name for field in dataclasses.fields(StructuredOutputsParams)]
        given = {name: value for name, value in own.items() if value is not None}
        for name, value in (self.structured_outputs or {}).items():
            if name not in known and value:
                raise ValueError(f"structured_outputs has {name[:100]!r}; it takes one of {', '.join(known)}")
            if name in known and value is not None:
                if name in given:
                    raise ValueError(f"{name} of structured_outputs is given by a field of its own, too")
                given[name] = value
        return StructuredOutputsParams(**given) if given and given != {"json_object": False} else None

    def params(self, streamed: bool | None, **more: Any) -> SamplingParams:
        """These and `more` as SamplingParams. Raises ValueError or TypeError where a value is out of range.

        streamed: the engine tells what is new at each step, else the end alone.
        """
        names = {field.name for field in dataclasses.fields(SamplingParams)} & type(self).model_fields.keys()
        given = {name: getattr(self, name) for name in names} | {"structured_outputs": self.structure()} | more
        given["routed_experts"] = given["routed_experts"] or given["routed_experts_prompt_start"] is not None
        given["output_kind"] = RequestOutputKind.DELTA if streamed else RequestOutputKind.FINAL_ONLY
        return SamplingParams(**{name: v for name, v in given.items() if v is not None or name == "max_tokens"})


def finite(logprob: float) -> float:
    """The log-prob, or LOWEST_LOGPROB for one below it."""
    return max(logprob, LOWEST_LOGPROB)


def usage(outputs: Collection[RequestOutput], completion_tokens: int) -> dict[str, Any]:
    """OpenAI's count of a call's tokens. Cached ones are those of the prompts whose KV was there."""
    prompt_tokens = sum(len(output.prompt_token_ids) for output in outputs)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": sum(output.num_cached_tokens for output in outputs)},
    }


def version_spans(completion: Completion, label_of: Callable[[int | None], str]) -> list[dict]:
    """A completion's spans of weight versions as JSON, by their labels."""
    return [
        {"version": label_of(s.version), "start": s.start, "end": s.end, **({"stale_kv": True} if s.stale_kv else {})}
        for s in completion.weight_versions
    ]


# --- replies ----------------------------------------------------------------------------------------------------------


class FastRoute(APIRoute):
    """A route that reads JSON with orjson. abandons: end the work, waiting or running, when the client is gone."""

    abandons = False

    def get_route_handler(self):
        """Return FastAPI's handler on requests that orjson decodes."""
        handle = super().get_route_handler()

        async def run(request: Request) -> Response:
            request = _OrjsonRequest(request.scope, request.receive)
            if not self.abandons:
                return await handle(request)
            await request.body()
            work = asyncio.ensure_future(handle(request))
            gone = asyncio.ensure_future(_disconnected(request))
            try:
                await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
                if not work.done():
                    raise ClientDisconnect
                return work.result()
            finally:
                gone.cancel()
                work.cancel()

        return run


class DataRoute(FastRoute):
    """A route of work for its client alone."""

    abandons = True


def data_router(tag: str) -> APIRouter:
    """Return a router for calls that end with their client, and reply whole or as a stream."""
    replies: dict[int | str, dict[str, Any]] = {200: {"content": {"application/json": {}, "text/event-stream": {}}}}
    return APIRouter(route_class=DataRoute, tags=[tag], responses=replies)


class _OrjsonRequest(Request):
    async def json(self) -> Any:
        body = await self.body()
        with without_collections():  # of millions of small lists, again and again while they are made: ten times slower
            return orjson.loads(body)


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def reply(content: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """Return a JSON response."""
    return Response(orjson.dumps(content), status, headers, "application/json")


def problem(status: int, message: str, headers: dict[str, str] | None = None) -> Response:
    """An error as both dialects' clients read it."""
    error = _error(status, message)
    return reply({"error": error, "success": False, "message": message, "object": "error"}, status, headers)


def _error(status: int, message: str) -> dict[str, Any]:
    kinds = {404: "NotFoundError", 503: "ServiceUnavailableError"}
    kind = kinds.get(status, "BadRequestError" if status < 500 else "InternalServerError")
    return {"message": message, "type": kind, "param": None, "code": status}


Events = Callable[[int, RequestOutput], Iterable[dict]]
Last = Callable[[], Iterable[dict]]


async def answer(
    engine: AsyncEngine, requests: list[GenerateRequest], name: str, streamed: bool | None,
    whole: Callable[[list[RequestOutput]], Any], events: Events, last: Last = tuple,
) -> Response:  # fmt: skip
    """Generate under a name, and return the reply in a dialect's form, whole or as server-sent events.

    whole: the reply from the finished outputs. events: what a stream says of one output of the request with this index;
    last: what it says before [DONE]. All of them are JSON as `pieces` takes it.
    """
    generation = await engine.submit(requests, name)
    if streamed:
        return _Stream(_event_stream(generation, events, last), generation)
    content = pieces(whole(await generation.final()))
    first, more = _part(content, AT_ONCE)
    if not more:
        return Response(first, media_type="application/json")
    return StreamingResponse(_rest(first, more, content), media_type="application/json")


def pieces(value: Any) -> Iterator[bytes]:
    """The JSON of a value, piece by piece: iterators are lists, bytes are JSON, functions yield a string's ASCII."""
    if isinstance(value, dict):
        mark = b"{"
        for name, inner in value.items():
            yield mark + orjson.dumps(name) + b":"
            yield from pieces(inner)
            mark = b","
        yield b"}" if value else b"{}"
    elif isinstance(value, PLAIN):
        yield orjson.dumps(value)
    elif isinstance(value, bytes):
        yield value
    elif callable(value):
        yield from itertools.chain((b'"',), value(), (b'"',))
    else:
        mark = b"["
        for item in value:
            yield mark
            yield from pieces(item)
            mark = b","
        yield b"]" if mark == b"," else b"[]"


def _part(content: Iterator[bytes], seconds: float) -> tuple[bytes, bool]:
    """About PART bytes of the content, or what these seconds make; and whether there may be more."""
    part = bytearray()
    end = time.perf_counter() + seconds
    for piece in content:
        part += piece
        if len(part) >= PART or time.perf_counter() > end:
            return bytes(part), True
    return bytes(part), False


async def _rest(part: bytes, more: bool, content: Iterator[bytes]) -> AsyncIterator[bytes]:
    """The part, and what follows it, which a thread makes: the event loop is free for others."""
    while more:
        yield part
        part, more = await asyncio.to_thread(_part, content, math.inf)
    if part:
        yield part


async def _event_stream(generation: Generation, events: Events, last: Last) -> AsyncIterator[bytes]:
    try:
        async for index, output in generation.outputs():
            content = itertools.chain.from_iterable(map(_event, list(events(index, output))))
            async for part in _rest(*_part(content, AT_ONCE), content):
                yield part
        end = last()
    except Exception as error:  # too late for another status
        logger.exception("stream %s failed", generation.request_id)
        end = [{"error": _error(500, f"{type(error).__name__}: {error}")}]
    yield b"".join(itertools.chain.from_iterable(map(_event, end))) + b"data: [DONE]\n\n"


class _Stream(StreamingResponse):
    """A stream that closes its generation even if the client is gone before the first byte."""

    def __init__(self, body: AsyncIterator[bytes], generation: Generation):
        super().__init__(body, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        self.generation = generation

    async def __call__(self, scope, receive, send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self.generation.close()


def _event(content: dict) -> Iterator[bytes]:
    yield b"data: "
    yield from pieces(content)
    yield b"\n\n"
