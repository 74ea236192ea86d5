"""SGLang's own dialect: /generate and its information routes."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

from fastapi import APIRouter, Request
from pydantic import Field

from ..engine import Completion, RequestOutput, SamplingParams
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

router = APIRouter(route_class=FastRoute, tags=["SGLang"])


class SGLangSampling(Sampling):
    """SGLang's sampling parameters."""

    max_new_tokens: int | None = 128
    min_new_tokens: int | None = None
    sampling_seed: int | None = None
    no_stop_trim: bool | None = None

    def all_params(self, **more) -> SamplingParams:
        """These and `more` as SamplingParams. Raises ValueError or TypeError where a value is out of range."""
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
    """The body of `/generate`."""

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
    """The model's path, its type, weight version and contract."""
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
