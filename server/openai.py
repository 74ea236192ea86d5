"""The OpenAI dialect with vLLM's extensions: completions, chat, and token ids: `/inference/v1/generate`."""

from __future__ import annotations

import itertools
import time
import uuid
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any, Literal

import orjson
from pydantic import Field

from ..agents import plain
from ..engine import Completion, RequestOutput, SamplingParams, StructuredOutputsParams
from ..engine.expert_wire import npy_parts
from .async_engine import GenerateRequest
from .chat import Conversation
from .protocol import Body, CallBody, Ids, Items, Sampling, answer, data_router, finite, reply, usage, version_spans
from .service import Served, Service

router = data_router("OpenAI and vLLM")
_OWN = {"tools", "tokenize", "chat_template", "return_tensors", "return_dict", "conversation"}  # the server's to set


class StreamOptions(Body):
    """OpenAI's options of a stream."""

    include_usage: bool = False


class OpenAIRequest(CallBody, Sampling):
    """The common fields of completions' and chat's bodies."""

    prompt_logprobs: int | None = Field(default=None, ge=0)
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = False
    return_tokens_as_token_ids: bool | None = False
    return_weight_versions: bool | None = False
    response_format: dict[str, Any] | None = Field(default=None, description="text, json_object or json_schema.")

    def structure(self, **own: Any) -> StructuredOutputsParams | None:
        """The grammar that response_format or structured_outputs asks for."""
        match self.response_format or {"type": "text"}:
            case {"type": "text"}:
                return super().structure(**own)
            case _ if self.structured_outputs:
                raise ValueError("give either response_format or structured_outputs")
            case {"type": "json_object"}:
                return StructuredOutputsParams(json_object=True)
            case {"type": "json_schema", "json_schema": {"schema": dict(schema)}}:
                return StructuredOutputsParams(json=schema)
            case given:
                raise ValueError(f"response_format {given!r}: give text, json_object, or json_schema with a schema")


class CompletionRequest(OpenAIRequest):
    """The body of `/v1/completions`."""

    prompt: str | Ids | Items[str] | Items[Ids]
    add_special_tokens: bool = True
    logprobs: int | None = Field(default=None, ge=0)


class ChatRequest(OpenAIRequest):
    """The body of `/v1/chat/completions`."""

    messages: Items[dict[str, Any]]
    input_ids: Ids | None = Field(default=None, description="SGLang's: instead of the chat template's tokens.")
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = False
    top_logprobs: int | None = Field(default=None, ge=0)
    tools: Items[dict[str, Any]] | None = Field(default=None, description="For the chat template; see --tool-parser.")
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    return_prompt_token_ids: bool | None = False
    return_meta_info: bool | None = False


class TokensSampling(Sampling):
    """The sampling parameters of `/inference/v1/generate`."""

    logprobs: int | None = Field(default=None, ge=0)
    prompt_logprobs: int | None = Field(default=None, ge=0)
    detokenize: bool | None = None


class TokensRequest(CallBody):
    """The body of `/inference/v1/generate`: token ids in, token ids out."""

    token_ids: Ids
    sampling_params: TokensSampling = TokensSampling()
    output_mode: Literal["tokens"] | None = None
    return_token_ids: Literal[True] | None = None


class TokenizeRequest(Body):
    """The body of `/tokenize`: a prompt or a conversation."""

    prompt: str | None = None
    messages: Items[dict[str, Any]] | None = None
    model: str | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True


class DetokenizeRequest(Body):
    """The body of `/detokenize`."""

    tokens: Ids
    model: str | None = None


class _Writer:
    """The writer of one call's choices, whole or as chunks."""

    def __init__(self, server: Service, body: OpenAIRequest, n: int, request_id: str, chat: Conversation | None = None):
        self.server = server
        self.body = body
        self.n = n
        self.chat = chat
        self.id = f"{'cmpl' if chat is None else 'chatcmpl'}-{request_id}"
        self.created = int(time.time())
        self.offsets: dict[int, int] = {}  # choice that has begun -> characters of its logprobs' tokens so far
        self.outputs: dict[int, RequestOutput] = {}  # the newest of each request
        self.completion_tokens = 0

    def whole(self, outputs: list[RequestOutput]) -> dict:
        choices = [self.choice(index, output, c) for index, output in enumerate(outputs) for c in output.completions]
        of_prompt = self.of_prompt(outputs[0]) if self.chat else {}
        return self.envelope(choices) | of_prompt | {"usage": usage(self.outputs.values(), self.completion_tokens)}

    def events(self, index: int, output: RequestOutput) -> Iterable[dict]:
        for c in output.completions:
            of_prompt = self.of_prompt(output) if self.chat and not self.offsets else {}
            yield self.envelope([self.choice(index, output, c)]) | of_prompt

    def last(self) -> Iterable[dict]:
        if self.body.stream_options and self.body.stream_options.include_usage:
            yield self.envelope([]) | {"usage": usage(self.outputs.values(), self.completion_tokens)}

    def envelope(self, choices: list[dict]) -> dict:
        kind = "chat.completion" + ".chunk" * bool(self.body.stream) if self.chat else "text_completion"
        return {
            "id": self.id, "object": kind, "created": self.created, "model": self.server.model_name,
            "system_fingerprint": f"samebits-{self.server.contract_hash or 'inexact'}",
            "weight_version": self.server.updates.label,
            "choices": iter(choices),
        }  # fmt: skip

    def choice(self, request: int, output: RequestOutput, c: Completion) -> dict:
        """A choice, or what is new of it. request: its index among all of the call."""
        body = self.body
        index = request * self.n + c.index
        begins = index not in self.offsets
        self.offsets.setdefault(index, 0)
        self.outputs[request] = output
        self.completion_tokens += len(c.token_ids)
        found: dict[str, Any] = {"index": index, "finish_reason": c.finish_reason, "stop_reason": c.stop_reason}
        found["logprobs"] = self.logprobs(index, c)
        found |= {"text": c.text or ""} if self.chat is None else self.chat.take(index, output, c)
        if body.return_token_ids:
            found["token_ids"] = c.token_ids
        if c.routed_experts is not None:
            found["routed_experts"] = lambda: npy_parts(c.routed_experts)
        if body.return_weight_versions:
            found["weight_versions"] = version_spans(c, self.server.updates.label_of)
        if begins:
            found["seed"] = output.seed
        if isinstance(body, ChatRequest):
            if body.return_prompt_token_ids and begins:
                found["prompt_token_ids"] = output.prompt_token_ids
            if body.return_token_ids:
                found["response_token_ids"] = c.token_ids
            if body.return_meta_info:
                found["meta_info"] = {"id": self.id, "weight_version": self.server.updates.label_of(c.weight_version)}
        elif begins:
            found |= self.of_prompt(output, c.index)
        return found

    def of_prompt(self, output: RequestOutput, sample: int = 0) -> dict:
        """The prompt's part of a reply: in completions a choice's, in chat the whole reply's. Log-probs come once."""
        found: dict[str, Any] = {}
        if self.body.return_token_ids:
            found["prompt_token_ids"] = output.prompt_token_ids
        if self.body.prompt_logprobs is not None and sample == 0:
            found["prompt_logprobs"] = prompt_logprobs(self.server, output)
        return found

    def name(self, token_id: int) -> str:
        return f"token_id:{token_id}" if self.body.return_tokens_as_token_ids else self.server.token(token_id)

    def logprobs(self, index: int, c: Completion) -> dict | None:
        body = self.body
        rows = zip(c.token_ids, c.logprobs, c.top_logprobs or [{}] * len(c.token_ids), strict=True)
        if isinstance(body, ChatRequest) and body.logprobs:
            return {"content": (orjson.dumps(self.entry(t, lp, top)) for t, lp, top in rows)}
        if not isinstance(body, CompletionRequest) or body.logprobs is None:
            return None
        return {
            "tokens": (orjson.dumps(self.name(t)) for t in c.token_ids),
            "token_logprobs": [finite(lp) for lp in c.logprobs],
            "top_logprobs": (orjson.dumps(self.named([*top.items(), (t, lp)])) for t, lp, top in rows),
            "text_offset": self.starts(index, c.token_ids),
        }

    def named(self, top: list[tuple[int, float]]) -> dict[str, float]:
        """Log-probs by the tokens' text; of several with one text the last one's, where the sampled one is."""
        return {self.name(t): finite(lp) for t, lp in top}

    def starts(self, index: int, token_ids: list[int]) -> Iterator[int]:
        for token in token_ids:
            yield self.offsets[index]
            self.offsets[index] += len(self.name(token))

    def entry(self, token_id: int, logprob: float, top: dict[int, float] | None = None) -> dict:
        name = self.name(token_id)
        found = {"token": name, "logprob": finite(logprob), "bytes": list(name.encode())}
        return found if top is None else found | {"top_logprobs": [self.entry(t, lp) for t, lp in top.items()]}


def prompt_logprobs(server: Service, output: RequestOutput) -> Iterator[bytes | None] | None:
    """vLLM's form: per prompt token {token id: {logprob, rank, decoded_token}}, itself first; None for the first."""
    if output.prompt_logprobs is None or output.prompt_ranks is None or output.prompt_top_logprobs is None:
        return None
    columns = (output.prompt_token_ids, output.prompt_logprobs, output.prompt_ranks, output.prompt_top_logprobs)

    def row(token: int, logprob: float, rank: int, top: dict[int, float]) -> bytes:
        entries = {token: (logprob, rank)} | {t: (lp, i) for i, (t, lp) in enumerate(top.items(), 1) if t != token}
        return orjson.dumps({
            str(t): {"logprob": finite(lp), "rank": place, "decoded_token": server.token(t)}
            for t, (lp, place) in entries.items()
        })  # fmt: skip

    return itertools.chain([None], itertools.islice(map(row, *columns), 1, None))


async def _answer(
    server: Service, body: OpenAIRequest, prompts: list, params: SamplingParams, chat: Conversation | None
):
    server.check_model(body.model)
    if body.stream_options is not None and body.stream_options.include_usage and not body.stream:
        raise ValueError("include_usage is a stream's; set stream, or leave it out")
    request_id = body.request_id or uuid.uuid4().hex
    writer = _Writer(server, body, params.n, request_id, chat)
    requests = [GenerateRequest(p, params, body.cache_salt, f"{request_id}-{i}") for i, p in enumerate(prompts)]
    return await answer(server.engine, requests, request_id, body.stream, writer.whole, writer.events, writer.last)


@router.post("/v1/completions")
async def completions(body: CompletionRequest, server: Served):
    """Complete prompts: text or token ids, one or several; choices come prompt by prompt."""
    params = body.params(body.stream, logprobs=body.logprobs or None)
    given: list = body.prompt if isinstance(body.prompt, list) else [body.prompt]
    prompts = [given] if given and isinstance(given[0], int) else given
    if not prompts:
        raise ValueError("prompt is an empty list; give at least one prompt")
    server.engine.limits.check_count(len(prompts))
    if not body.add_special_tokens:
        encode = server.engine.tokenization
        prompts = [partial(encode.in_thread, encode.encode, p, False) if isinstance(p, str) else p for p in prompts]
    return await _answer(server, body, prompts, params, None)


@router.post("/v1/chat/completions")
async def chat_completions(body: ChatRequest, server: Served):
    """Answer a conversation, through the model's chat template or from token ids."""
    if body.top_logprobs and not body.logprobs:
        raise ValueError("top_logprobs needs logprobs=true")
    limit = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
    given = body.chat_template_kwargs or {}
    if taken := sorted(given.keys() & _OWN):
        raise ValueError(f"chat_template_kwargs may not set {', '.join(taken)}")
    template = {
        "tools": body.tools,  # also with tool_choice "none", which leaves the prompt as it is and parses no calls
        "add_generation_prompt": body.add_generation_prompt and not body.continue_final_message,
        "continue_final_message": body.continue_final_message,
    } | given
    tools = server.tool_format if body.tools and body.tool_choice != "none" else None
    kept = body.input_ids is None and template["add_generation_prompt"]  # ids of a client's own are nobody else's
    chat = Conversation(server, body.messages, template, tools, body.cache_salt, kept, bool(body.stream))
    more: dict[str, Any] = {"max_tokens": limit, "logprobs": body.top_logprobs or None}  # no limit: all that fits
    if body.tool_choice not in (None, "none", "auto"):
        if body.structure() is not None:
            raise ValueError("a forced tool_choice leaves no room for response_format or structured_outputs")
        more["structured_outputs"] = chat.forced_call(body.tool_choice)
    if tools is not None and body.skip_special_tokens is None:
        more["skip_special_tokens"] = False  # in some templates they mark the calls
    params = body.params(body.stream, **more)
    return await _answer(server, body, [chat.prompt_ids if body.input_ids is None else body.input_ids], params, chat)


@router.post("/inference/v1/generate")
async def inference_generate(body: TokensRequest, server: Served):
    """Token ids in, token ids out."""
    server.check_model(body.model)
    params = body.sampling_params.params(body.stream, detokenize=bool(body.sampling_params.stop))
    request_id = body.request_id or uuid.uuid4().hex
    begun = False

    def choice(c: Completion) -> dict:
        return {
            "index": c.index, "token_ids": c.token_ids,
            "finish_reason": c.finish_reason, "stop_reason": c.stop_reason,
            "logprobs": None if params.logprobs is None else {"content": _token_entries(c)},
            "weight_versions": version_spans(c, server.updates.label_of),
            "routed_experts": None if c.routed_experts is None else lambda: npy_parts(c.routed_experts),
            "sampling_mask": None,
        }  # fmt: skip

    def envelope(output: RequestOutput) -> dict:
        return {
            "request_id": request_id, "model": server.model_name, "choices": map(choice, output.completions),
            "prompt_token_ids": None if begun else output.prompt_token_ids,
            "prompt_logprobs": None if begun else prompt_logprobs(server, output),
            "seed": output.seed, "weight_version": server.updates.label,
        }  # fmt: skip

    def whole(outputs: list[RequestOutput]) -> dict:
        return envelope(outputs[0]) | {"usage": usage(outputs, sum(len(c.token_ids) for c in outputs[0].completions))}

    def events(index: int, output: RequestOutput) -> Iterable[dict]:
        nonlocal begun
        yield envelope(output)
        begun = True

    requests = [GenerateRequest(body.token_ids, params, body.cache_salt)]
    return await answer(server.engine, requests, request_id, body.stream, whole, events)


def _token_entries(c: Completion) -> Iterator[bytes]:
    for token, logprob, top, rank in zip(c.token_ids, c.logprobs, c.top_logprobs or [], c.ranks or [], strict=True):
        others = [_token_entry(t, lp, place) for place, (t, lp) in enumerate(top.items(), 1)]
        yield orjson.dumps(_token_entry(token, logprob, rank) | {"top_logprobs": others})


def _token_entry(token: int, logprob: float, rank: int) -> dict:
    """Both spellings of a token: vLLM's integer and the string that `renderers` reads."""
    return {"token": f"token_id:{token}", "token_id": token, "logprob": finite(logprob), "rank": rank, "bytes": None}


@router.post("/tokenize")
async def tokenize(body: TokenizeRequest, server: Served):
    """The token ids of a text, or of a conversation through the chat template."""
    server.check_model(body.model)
    tokenization = server.engine.tokenization
    if (body.prompt is None) == (body.messages is None):
        raise ValueError("give either prompt or messages")
    if body.messages is not None:
        options = {"add_generation_prompt": body.add_generation_prompt}
        ids = await tokenization.in_thread(tokenization.chat, list(map(plain, body.messages)), **options)
    else:
        ids = await tokenization.in_thread(tokenization.encode, body.prompt, body.add_special_tokens)
    return reply({"count": len(ids), "max_model_len": server.llm.max_model_len, "tokens": ids})


@router.post("/detokenize")
async def detokenize(body: DetokenizeRequest, server: Served):
    """The text of token ids."""
    server.check_model(body.model)
    tokenization = server.engine.tokenization
    return reply({"prompt": await tokenization.in_thread(tokenization.decode, body.tokens)})
