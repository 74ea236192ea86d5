"""SGLang's own dialect: /generate, its info routes, and its control routes."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any, Literal

from fastapi import APIRouter, Request
from pydantic import Field

from ..engine import Completion, RequestOutput, SamplingParams
from ..engine.transfer import DEFAULT_NAME, WHOLE, parse_manifest
from .async_engine import GenerateRequest, Generation
from .protocol import (
    STREAMING,
    Body,
    FastRoute,
    RequestId,
    Sampling,
    finite,
    new_id,
    output_kind,
    reply,
    run,
    stream,
    version_spans,
)
from .service import Service, service
from .unpickle import named_tensors

router = APIRouter(route_class=FastRoute, tags=["SGLang"])
control = APIRouter(route_class=FastRoute, tags=["SGLang: control"])


class SGLangSampling(Sampling):
    max_new_tokens: int | None = 128
    min_new_tokens: int | None = None
    sampling_seed: int | None = None
    no_stop_trim: bool | None = None

    def all_params(self, **more) -> SamplingParams:
        if self.top_k is not None and self.top_k >= 2**30:  # its "whole vocabulary"
            self.top_k = -1
        return self.params(
            max_tokens=self.max_new_tokens,
            min_tokens=self.min_new_tokens,
            seed=self.sampling_seed,
            include_stop_str_in_output=self.no_stop_trim,
            **more,
        )


class GenerateBody(Body):
    text: str | list[str] | None = None
    input_ids: list[int] | list[list[int]] | None = None
    sampling_params: SGLangSampling | list[SGLangSampling] | None = None
    return_logprob: bool | list[bool] | None = False
    logprob_start_len: int | list[int] | None = -1
    top_logprobs_num: int | list[int] | None = 0
    return_text_in_logprobs: bool | None = False
    return_prompt_token_ids: bool | None = False
    stream: bool | None = False
    rid: RequestId | list[RequestId] | None = None
    cache_salt: str | None = Field(default=None, min_length=1)
    extra_key: str | None = Field(default=None, min_length=1, description="Another name of cache_salt.")

    def prompts(self) -> tuple[list[str | list[int]], bool]:
        """The prompts, and whether they came as a batch."""
        given: Any = self.text if self.input_ids is None else self.input_ids
        if (self.text is None) == (self.input_ids is None):
            raise ValueError("give either text or input_ids")
        batch = isinstance(given, list) and (self.input_ids is None or not given or isinstance(given[0], list))
        if batch and not given:
            raise ValueError("the batch is empty")
        return (given if batch else [given]), batch

    def each(self, name: str, count: int) -> list:
        """A setting for each prompt, from one for all or a list."""
        value = getattr(self, name)
        if not isinstance(value, list):
            return [value] * count
        if len(value) != count:
            raise ValueError(f"{name} has {len(value)} entries for {count} prompts")
        return value


class _Writer:
    """Writes one prompt's samples."""

    def __init__(self, server: Service, body: GenerateBody, rid: str, start: int | None, top: int, logprobs: bool):
        self.server, self.body, self.rid, self.top, self.logprobs = server, body, rid, top, logprobs
        self.start = start  # first prompt token to report a log-prob of
        self.begin = time.perf_counter()

    def entry(self, logprob: float | None, token: int) -> list:
        text = self.server.token(token) if self.body.return_text_in_logprobs else None
        return [None if logprob is None else finite(logprob), token, text]

    def entries(self, tops: list[dict[int, float]]) -> list[list | None]:
        return [[self.entry(lp, t) for t, lp in top.items()] or None for top in tops]

    def whole(self, output: RequestOutput, c: Completion) -> dict:
        server, label_of = self.server, self.server.updates.label_of
        meta: dict[str, Any] = {
            "id": self.rid,
            "finish_reason": _finish_reason(c),
            "prompt_tokens": len(output.prompt_token_ids),
            "completion_tokens": len(c.token_ids),
            "cached_tokens": output.num_cached_tokens,
            "weight_version": label_of(c.weight_version),
            "weight_versions": version_spans(c, label_of),
            "e2e_latency": time.perf_counter() - self.begin,
            "contract": server.contract_hash,
        }
        if self.logprobs:
            meta |= self.of_logprobs(output, c)
        found = {"text": c.text, "output_ids": c.token_ids, "meta_info": meta}
        if self.body.return_prompt_token_ids:
            found["prompt_token_ids"] = output.prompt_token_ids
        return found

    def of_logprobs(self, output: RequestOutput, c: Completion) -> dict:
        own = [self.entry(lp, t) for lp, t in zip(c.logprobs, c.token_ids, strict=True)]
        found: dict[str, Any] = {
            "output_token_logprobs": own,
            "output_token_logprobs_length": len(own),
            "input_token_logprobs": [],
        }
        if self.top:
            found["output_top_logprobs"] = self.entries(c.top_logprobs or [])
        if self.start is not None and output.prompt_logprobs is not None:
            values = [None, *output.prompt_logprobs[1:]]
            pairs = list(zip(values, output.prompt_token_ids, strict=True))
            found["input_token_logprobs"] = [self.entry(lp, t) for lp, t in pairs[self.start :]]
            if self.top:
                found["input_top_logprobs"] = self.entries((output.prompt_top_logprobs or [])[self.start :])
        return found


def _finish_reason(c: Completion) -> dict | None:
    if c.finish_reason == "stop":
        matched = c.stop_reason if c.stop_reason is not None else c.token_ids[-1]  # EOS
        return {"type": "stop", "matched": matched}
    if c.finish_reason == "length":
        return {"type": "length", "length": len(c.token_ids)}
    if c.finish_reason == "abort":
        return {"type": "abort", "message": "aborted", "status_code": None, "err_type": None}
    return None if c.finish_reason is None else {"type": "abort", "message": str(c.stop_reason), "status_code": 500}


class _SoFar:
    """This dialect's streams repeat everything so far; the engine tells only what is new."""

    def __init__(self) -> None:
        self.outputs: dict[tuple[int, int], Completion] = {}
        self.prompts: dict[int, RequestOutput] = {}

    def add(self, index: int, output: RequestOutput, c: Completion) -> tuple[RequestOutput, Completion]:
        first = self.prompts.setdefault(index, output)
        old = self.outputs.get((index, c.index))
        if old is not None:
            tops = None if c.top_logprobs is None else [*(old.top_logprobs or []), *c.top_logprobs]
            spans = [*old.weight_versions, *c.weight_versions]
            c = Completion(
                c.index, old.token_ids + c.token_ids, old.logprobs + c.logprobs, c.finish_reason, c.stop_reason,
                _joined(spans), (old.text or "") + (c.text or ""), tops,
            )  # fmt: skip
        self.outputs[index, c.index] = c
        return first, c


def _joined(spans: list) -> list:
    """Spans in order, those that continue each other made one."""
    joined: list = []
    for span in spans:
        if joined and (joined[-1].version, joined[-1].stale_kv) == (span.version, span.stale_kv):
            span = type(span)(span.version, joined.pop().start, span.end, span.stale_kv)
        joined.append(span)
    return joined


@router.post("/generate", responses=STREAMING)
async def generate(body: GenerateBody, http: Request):
    """Generates from text or token ids, one prompt or a batch."""
    server = service(http)
    prompts, batch = body.prompts()
    count = len(prompts)
    rids = body.rid if isinstance(body.rid, list) else None
    rid = new_id(None if rids else body.rid)  # type: ignore[arg-type]
    if rids is not None:
        rids, rid = body.each("rid", count), rids[0]
    requests, writers = [], []
    columns = ("sampling_params", "return_logprob", "logprob_start_len", "top_logprobs_num")
    for i, prompt in enumerate(prompts):
        sampling, logprobs, start, top = (body.each(name, count)[i] for name in columns)
        wanted = start if logprobs and start is not None and start >= 0 else None
        alternatives = (top or None) if logprobs else None
        params = (sampling or SGLangSampling()).all_params(
            output_kind=output_kind(body.stream),
            logprobs=alternatives,
            prompt_logprobs=None if wanted is None else (alternatives or 0),
        )
        requests.append(GenerateRequest(prompt, params, body.cache_salt or body.extra_key))
        name = rids[i] if rids else (f"{rid}-{i}" if batch else rid)
        writers.append(_Writer(server, body, name, wanted, top or 0, bool(logprobs)))
    if body.stream:
        so_far, several = _SoFar(), batch or requests[0].params.n > 1

        def events(generation: Generation, index: int, output: RequestOutput) -> Iterable[dict]:
            for delta in output.completions:
                content = writers[index].whole(*so_far.add(index, output, delta))
                first = sum(r.params.n for r in requests[:index])
                yield content | ({"index": first + delta.index} if several else {})

        return await stream(server.engine, requests, rid, events)
    _, outputs = await run(http, server.engine, requests, rid)
    found = [w.whole(o, c) for w, o in zip(writers, outputs, strict=True) for c in o.completions]
    return reply(found if batch or len(found) > 1 else found[0])


@router.get("/health_generate")
async def health_generate(http: Request):
    """Answers when the engine's thread does, and could generate."""
    server = service(http)
    await server.engine.call(lambda llm: None)
    ready = server.llm.ready
    return reply({"status": "ok" if ready else "the engine sleeps or has no weights"}, 200 if ready else 503)


@router.get("/get_model_info")
@router.get("/model_info")
async def model_info(http: Request):
    server = service(http)
    path = str(server.llm.path)
    return reply({
        "model_path": path,
        "tokenizer_path": path,
        "is_generation": True,
        "weight_version": server.updates.label,
        "model_type": server.llm.model_config.model_type,
        "contract": server.contract_hash,
    })  # fmt: skip


@router.get("/v1/loads")
@router.get("/get_load")
async def loads(http: Request):
    """The load now; `include` is taken as "all"."""
    load = service(http).load()
    running, waiting = load["num_running"], load["num_waiting"]
    block = load["kv_cache_bytes"] // load["kv_blocks_total"]
    core = {
        "dp_rank": 0,
        "num_running_reqs": running,
        "num_waiting_reqs": waiting,
        "num_total_reqs": running + waiting,
        "token_usage": load["kv_blocks_used"] / load["kv_blocks_total"],
        "kv_cache_bytes_used": load["kv_blocks_used"] * block,
    }
    return reply({"timestamp": time.time(), "loads": [core], **core, "engine": load})


# --- control ----------------------------------------------------------------------------------------------------------


class AbortBody(Body):
    rid: str | None = None
    abort_all: bool = False


class PauseBody(Body):
    mode: Literal["abort", "retract", "in_place"] = "abort"


class _UpdateBody(Body):
    flush_cache: bool | None = Field(default=True, description="No KV of other weights is ever used, flushed or not.")
    abort_all_requests: bool | None = False
    weight_version: str | int | None = None

    @property
    def label(self) -> str | None:
        return None if self.weight_version is None else str(self.weight_version)


class FromDiskBody(_UpdateBody):
    model_path: str
    load_format: Literal["auto", "safetensors"] | None = None


class InitGroupBody(Body):
    master_address: str
    master_port: int | str
    rank_offset: int
    world_size: int
    group_name: str = DEFAULT_NAME
    backend: str = "nccl"


class GroupBody(Body):
    group_name: str = DEFAULT_NAME


class FromDistributedBody(_UpdateBody):
    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]
    group_name: str = DEFAULT_NAME
    load_format: Literal["flattened_bucket"] | None = None
    bucket_bytes: int | None = Field(
        default=None, ge=1, description="samebits' own: broadcasts of at most so many bytes."
    )
    selector: Literal["all"] | None = "all"


class FromTensorBody(_UpdateBody):
    serialized_named_tensors: list[str]
    load_format: Literal["flattened_bucket"] | None = None


class SelectorBody(Body):
    selector: Literal["all"] | None = "all"


class MemoryBody(Body):
    tags: list[Literal["weights", "kv_cache", "cuda_graph"]] | None = None

    @property
    def ours(self) -> list[str]:
        return ["weights", "kv_cache"] if self.tags is None else [t for t in self.tags if t != "cuda_graph"]


def done(message: str, **more) -> Any:
    return reply({"success": True, "message": message, "status": "ok", **more})


@control.get("/flush_cache")
@control.post("/flush_cache")
async def flush_cache(http: Request):
    """Forgets cached prefixes. 400 while requests run; while they are paused they are retracted and recomputed."""
    server = service(http)
    paused = server.engine.paused.is_set()
    if server.engine.num_sequences and not paused:
        raise ValueError("requests are running; pause or finish them first")
    await server.engine.call(lambda llm: llm.reset_prefix_cache(reset_running_requests=paused))
    return done("cache flushed")


@control.post("/abort_request")
async def abort_request(http: Request, body: AbortBody | None = None):
    body = body or AbortBody()
    if not body.abort_all and not body.rid:
        raise ValueError("give rid, or abort_all=true")
    count = await service(http).engine.abort(None if body.abort_all else [body.rid])  # type: ignore[list-item]
    return done(f"{count} requests aborted", aborted=count)


@control.post("/pause_generation")
async def pause_generation(http: Request, body: PauseBody | None = None):
    """Stops between two steps. New requests wait until /continue_generation."""
    mode = (body or PauseBody()).mode
    await service(http).engine.pause("keep" if mode == "in_place" else mode, refuse=False)
    return done(f"generation paused ({mode})")


@control.post("/continue_generation")
async def continue_generation(http: Request, body: Body | None = None):
    server = service(http)
    server.updates.check_resumable()
    await server.engine.resume()
    return done("generation continues")


async def _before(server: Service, body: _UpdateBody) -> int:
    return await server.engine.abort() if body.abort_all_requests else 0


@control.post("/update_weights_from_disk")
async def update_weights_from_disk(body: FromDiskBody, http: Request):
    """Loads a checkpoint directory, checked whole before it is in force."""
    server = service(http)
    await _before(server, body)
    message = await server.updates.load(body.model_path, body.label)
    return done(message, num_paused_requests=server.engine.num_sequences if server.engine.paused.is_set() else 0)


@control.post("/init_weights_update_group")
async def init_weights_update_group(body: InitGroupBody, http: Request):
    """Joins a torch process group whose rank 0 will send weights."""
    where = body.master_address, body.master_port, body.rank_offset, body.world_size, body.backend
    await service(http).updates.join(body.group_name, *where)
    return done(f"joined weight group {body.group_name!r} as rank {body.rank_offset} of {body.world_size}")


@control.post("/destroy_weights_update_group")
async def destroy_weights_update_group(http: Request, body: GroupBody | None = None):
    name = (body or GroupBody()).group_name
    left = await service(http).updates.leave(name)
    return done(f"left weight group {name!r}" if left else f"there was no weight group {name!r}")


@control.post("/update_weights_from_distributed")
async def update_weights_from_distributed(body: FromDistributedBody, http: Request):
    """Receives tensors over a group: all, or a bucket; the version moves when none is missing."""
    server = service(http)
    manifest = parse_manifest(body.names, body.dtypes, body.shapes)
    await _before(server, body)
    bucket_bytes = WHOLE if body.load_format else body.bucket_bytes
    return done(await server.updates.receive(body.group_name, manifest, bucket_bytes, body.label))


@control.post("/update_weights_from_tensor")
async def update_weights_from_tensor(body: FromTensorBody, http: Request):
    """Reads pickled tensors, with an unpickler that makes nothing but tensors. Off without --allow-pickle."""
    server = service(http)
    if not server.allow_pickle:
        raise PermissionError("pickled tensors are off; start the server with --allow-pickle, or use another way")
    if len(body.serialized_named_tensors) != 1:
        raise ValueError(f"expected 1 entry, for one rank, got {len(body.serialized_named_tensors)}")
    await _before(server, body)
    tensors = named_tensors(body.serialized_named_tensors[0], body.load_format)
    return done(await server.updates.load(tensors, body.label))


@control.post("/begin_weight_update")
async def begin_weight_update(http: Request, body: SelectorBody | None = None):
    """Tensors that come from now on are put in force by /end_weight_update, together."""
    service(http).updates.begin()
    return done("weight update begun")


@control.post("/end_weight_update")
async def end_weight_update(http: Request, body: SelectorBody | None = None):
    server = service(http)
    await server.updates.finish()
    return done(f"version {server.updates.label!r} is in force")


@control.get("/release_memory_occupation")
@control.post("/release_memory_occupation")
async def release_memory_occupation(http: Request, body: MemoryBody | None = None):
    """Frees memory; the header x-samebits-freed-bytes says how much. Requests wait."""
    tags = (body or MemoryBody()).ours
    freed = await service(http).engine.call(lambda llm: llm.release_memory(tags))
    return reply(None, headers={"x-samebits-freed-bytes": str(freed)})


@control.get("/resume_memory_occupation")
@control.post("/resume_memory_occupation")
async def resume_memory_occupation(http: Request, body: MemoryBody | None = None):
    """Takes the memory again. Weights come back from their checkpoint, or must be updated."""
    tags = (body or MemoryBody()).ours
    await service(http).engine.call(lambda llm: llm.wake_up(tags))
    return reply(None)
