"""SGLang's own dialect: /generate."""

from __future__ import annotations

import itertools
import sys
import time
import uuid
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import orjson
from pydantic import Field

from ..engine import Completion, RequestOutput, StructuredOutputsParams, VersionSpan
from ..engine.expert_wire import int32_parts
from .async_engine import GenerateRequest
from .protocol import Body, Ids, Items, RequestId, Sampling, answer, data_router, finite, version_spans
from .service import Served, Service

router = data_router("SGLang")
REPEATED = 1024  # values (token ids, log-probs) that each event of a stream may repeat
GROWTH = 1 / 32
_EACH = """sampling_params return_logprob logprob_start_len top_logprobs_num return_routed_experts
           routed_experts_start_len"""  # what a prompt may have of its own


class SGLangSampling(Sampling):
    """SGLang's sampling parameters."""

    max_tokens: int | None = Field(default=128, alias="max_new_tokens")
    min_tokens: int | None = Field(default=None, alias="min_new_tokens")
    seed: int | None = Field(default=None, alias="sampling_seed")
    include_stop_str_in_output: bool | None = Field(default=None, alias="no_stop_trim")
    json_schema: str | None = None
    regex: str | None = None
    ebnf: str | None = None

    def structure(self, **own: Any) -> StructuredOutputsParams | None:
        """The grammar that is asked for, by SGLang's names or vLLM's."""
        return super().structure(json=self.json_schema, regex=self.regex, grammar=self.ebnf, **own)


class GenerateBody(Body):
    """The body of `/generate`."""

    model: str | None = None
    text: str | Items[str] | None = None
    input_ids: Ids | Items[Ids] | None = None
    sampling_params: SGLangSampling | Items[SGLangSampling] | None = None
    return_logprob: bool | Items[bool] | None = False
    logprob_start_len: int | Ids | None = -1
    top_logprobs_num: int | Ids | None = 0
    return_text_in_logprobs: bool | None = False
    return_prompt_token_ids: bool | None = False
    return_routed_experts: bool | Items[bool] | None = False
    routed_experts_start_len: int | Ids | None = None
    stream: bool | None = False
    rid: RequestId | Items[RequestId] | None = None
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

    def rids(self, count: int, batch: bool) -> tuple[list[str], str]:
        """The names of the prompts, and that of the whole call."""
        if isinstance(self.rid, list):
            return self.each("rid", count), uuid.uuid4().hex
        rid = self.rid or uuid.uuid4().hex
        return ([f"{rid}-{i}" for i in range(count)] if batch else [rid]), rid

    def each(self, name: str, count: int) -> list:
        """A setting for each prompt, from one for all or a list."""
        value = getattr(self, name)
        if not isinstance(value, list):
            return [value] * count
        if len(value) != count:
            raise ValueError(f"{name} has {len(value)} entries for {count} prompts")
        return value


@dataclass
class _Writer:
    """The writer of one prompt's samples.

    first: index of its first sample in the reply. start: the first prompt token to report a log-prob of. top: how many
    alternatives to report. output, completions: all of a stream so far, which each event repeats. told: the values that
    a sample's last event had.
    """

    server: Service
    body: GenerateBody
    rid: str
    first: int
    logprobs: bool
    start: int | None
    top: int
    begin: float = field(default_factory=time.perf_counter)
    output: RequestOutput | None = None
    completions: dict[int, Completion] = field(default_factory=dict)
    told: dict[int, int] = field(default_factory=dict)

    def entry(self, logprob: float | None, token: int) -> list:
        text = self.server.token(token) if self.body.return_text_in_logprobs else None
        return [None if logprob is None else finite(logprob), token, text]

    def entries(self, tops: Iterable[dict[int, float]] | None) -> Iterator[bytes]:
        return (orjson.dumps([self.entry(lp, t) for t, lp in top.items()] or None) for top in [*(tops or ())])

    def cumulative(self, output: RequestOutput, new: Completion) -> Iterator[dict]:
        """The sample so far, if an event is due; the engine told only what is new.

        Events repeat all that was told. Beyond REPEATED values, one comes when a part of GROWTH is new, so that a
        stream's length is in proportion to the sample's.
        """
        self.output = self.output or output  # the first one has the prompt's log-probs
        c = self.completions.get(new.index)
        if c is not None:
            lists = {name: getattr(c, name) for name in ("token_ids", "logprobs", "top_logprobs")}
            for name, values in lists.items():
                if values is not None:
                    values.extend(getattr(new, name))
            spans = _joined([*c.weight_versions, *new.weight_versions])
            new = replace(new, text=(c.text or "") + (new.text or ""), weight_versions=spans, **lists)
        self.completions[new.index] = new
        told = self.told.get(new.index, 0)
        size = len(new.token_ids) * (1 + self.logprobs + self.top)
        if not told or new.finish_reason or size <= REPEATED or size >= told * (1 + GROWTH):
            self.told[new.index] = size
            yield self.whole(self.output, new, first_or_last=not told or new.finish_reason is not None)

    def whole(self, output: RequestOutput, c: Completion, first_or_last: bool = True) -> dict:
        label_of = self.server.updates.label_of
        meta: dict[str, Any] = {
            "id": self.rid, "finish_reason": _finish_reason(c), "prompt_tokens": len(output.prompt_token_ids),
            "completion_tokens": len(c.token_ids), "cached_tokens": output.num_cached_tokens,
            "sampling_seed": output.seed, "weight_version": label_of(c.weight_version),
            "weight_versions": version_spans(c, label_of), "e2e_latency": time.perf_counter() - self.begin,
            "contract": self.server.contract_hash,
        }  # fmt: skip
        if c.routed_experts is not None:
            meta["routed_experts"] = lambda: int32_parts(c.routed_experts)
            meta["routed_experts_shape"] = c.routed_experts.shape
        if self.logprobs:
            meta |= self.of_sample(c) | self.of_prompt(output, first_or_last and c.index == 0)
        found = {"text": c.text, "output_ids": [*c.token_ids], "meta_info": meta}
        if self.body.return_prompt_token_ids and first_or_last:
            found["prompt_token_ids"] = output.prompt_token_ids
        return found

    def of_sample(self, c: Completion) -> dict:
        rows = [*zip(c.logprobs, c.token_ids, strict=True)]  # a copy, as these lists of a stream grow on
        own = (orjson.dumps(self.entry(lp, t)) for lp, t in rows)
        found = {"output_token_logprobs": own, "output_token_logprobs_length": len(c.token_ids)}
        return found | ({"output_top_logprobs": self.entries(c.top_logprobs)} if self.top else {})

    def of_prompt(self, output: RequestOutput, told: bool) -> dict:
        """The prompt's log-probs, once per prompt: in its first sample, of a stream in the first and the last event."""
        if self.start is None or output.prompt_logprobs is None or not told:
            return {"input_token_logprobs": []}
        pairs = zip([None, *output.prompt_logprobs[1:]], output.prompt_token_ids, strict=True)
        own = (orjson.dumps(self.entry(lp, t)) for lp, t in itertools.islice(pairs, self.start, None))
        tops = itertools.islice(output.prompt_top_logprobs or (), self.start, None)
        return {"input_token_logprobs": own} | ({"input_top_logprobs": self.entries(tops)} if self.top else {})


def _finish_reason(c: Completion) -> dict | None:
    if c.finish_reason == "stop":
        return {"type": "stop", "matched": c.token_ids[-1] if c.stop_reason is None else c.stop_reason}  # EOS
    if c.finish_reason == "length":
        return {"type": "length", "length": len(c.token_ids)}
    if c.finish_reason == "abort":
        return {"type": "abort", "message": "aborted", "status_code": None, "err_type": None}
    return None if c.finish_reason is None else {"type": "abort", "message": str(c.stop_reason), "status_code": 500}


def _joined(spans: list[VersionSpan]) -> list[VersionSpan]:
    """Spans in order, those that continue each other made one."""
    runs = [[*run] for _, run in itertools.groupby(spans, lambda span: (span.version, span.stale_kv))]
    return [replace(run[-1], start=run[0].start) for run in runs]


@router.post("/generate")
async def generate(body: GenerateBody, server: Served):
    """Generate from text or token ids, one prompt or a batch."""
    server.check_model(body.model)
    if body.cache_salt and body.extra_key not in (None, body.cache_salt):
        raise ValueError("extra_key is another name of cache_salt; give one of them")
    prompts, batch = body.prompts()
    server.engine.limits.check_count(len(prompts))
    rids, rid = body.rids(len(prompts), batch)
    settings = zip(*(body.each(name, len(prompts)) for name in _EACH.split()), strict=True)
    requests: list[GenerateRequest] = []
    writers: list[_Writer] = []
    samples = 0
    for prompt, name, (sampling, logprobs, start, top, experts, experts_start) in zip(
        prompts, rids, settings, strict=True
    ):
        alternatives = (top or 0) if logprobs else 0
        scored = logprobs and start is not None and start >= 0
        start = min(start, sys.maxsize) if scored else None
        writers.append(_Writer(server, body, name, samples, bool(logprobs), start, alternatives))
        params = (sampling or SGLangSampling()).params(
            body.stream, logprobs=alternatives or None, prompt_logprobs=alternatives if scored else None,
            **({"routed_experts": True, "routed_experts_prompt_start": experts_start or 0} if experts else {}),
        )  # fmt: skip
        requests.append(GenerateRequest(prompt, params, body.cache_salt or body.extra_key, name))
        samples += params.n
    several = batch or samples > 1

    def whole(outputs: list[RequestOutput]) -> Iterator[dict] | dict:
        found = (w.whole(output, c) for w, output in zip(writers, outputs, strict=True) for c in output.completions)
        return found if several else next(found)

    def events(index: int, output: RequestOutput) -> Iterable[dict]:
        writer = writers[index]
        for new in output.completions:
            place = {"index": writer.first + new.index} if several else {}
            yield from (event | place for event in writer.cumulative(output, new))

    return await answer(server.engine, requests, rid, body.stream, whole, events)
