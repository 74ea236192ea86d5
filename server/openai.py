"""The OpenAI dialect with vLLM's extensions: completions, chat, tokenisation."""

from __future__ import annotations

import itertools
import time
import uuid
from collections.abc import Iterable, Iterator
from typing import Any, Literal

import orjson
from fastapi import APIRouter
from pydantic import Field

from ..engine import Completion, RequestOutput, SamplingParams, StructuredOutputsParams
from ..engine.expert_wire import npy_text
from .async_engine import GenerateRequest
from .chat import ChatAnswers, Conversation
from .protocol import (
    STREAMING,
    Body,
    DataRoute,
    Ids,
    Items,
    RequestId,
    Sampling,
    answer,
    finite,
    reply,
    usage,
    version_spans,
)
from .service import Served, Service

router = APIRouter(route_class=DataRoute, tags=["OpenAI and vLLM"])


class StreamOptions(Body):
    """OpenAI's options of a stream."""

    include_usage: bool = False
    continuous_usage_stats: Literal[False] = False


class GenerationBody(Body):
    """The fields of every call that generates."""

    model: str | None = None
    stream: bool | None = False
    cache_salt: str | None = Field(default=None, min_length=1)
    request_id: RequestId | None = None


class _Common(GenerationBody, Sampling):
    prompt_logprobs: int | None = Field(default=None, ge=0)
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = False
    return_tokens_as_token_ids: bool | None = False
    return_weight_versions: bool | None = False
    response_format: dict[str, Any] | None = Field(default=None, description="text, json_object or json_schema.")

    def structure(self, **own: Any) -> StructuredOutputsParams | None:
        """The grammar that response_format or structured_outputs asks for."""
        given = self.response_format or {}
        kind = given.get("type", "text")
        if kind == "text":
            return super().structure(**own)
        if self.structured_outputs:
            raise ValueError("give either response_format or structured_outputs")
        if kind == "json_object":
            return StructuredOutputsParams(json_object=True)
        inner = given.get("json_schema")
        if kind != "json_schema" or not isinstance(inner, dict) or not isinstance(inner.get("schema"), dict):
            raise ValueError(f"response_format {given!r}: give text, json_object, or json_schema with a schema")
        return StructuredOutputsParams(json=inner["schema"])


class CompletionRequest(_Common):
    """The body of `/v1/completions`."""

    prompt: str | Ids | Items[str] | Items[Ids]
    add_special_tokens: bool = True
    logprobs: int | None = Field(default=None, ge=0)


class ChatRequest(_Common):
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


class TokenizeRequest(Body):
    """The body of `/tokenize`: a prompt or a conversation."""

    prompt: str | None = None
    messages: Items[dict[str, Any]] | None = None
    model: str | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    return_token_strs: bool | None = False


class DetokenizeRequest(Body):
    """The body of `/detokenize`."""

    tokens: Ids
    model: str | None = None


# --- completions and chat ---------------------------------------------------------------------------------------------


class _Writer:
    """Writes one call's choices, whole or as chunks."""

    def __init__(self, server: Service, body: _Common, n: int, request_id: str, answers: ChatAnswers | None = None):
        self.server = server
        self.body = body
        self.n = n
        self.answers = answers
        self.chat = answers is not None
        self.id = f"{'chatcmpl' if self.chat else 'cmpl'}-{request_id}"
        self.created = int(time.time())
        self.offsets: dict[int, int] = {}  # choice that has begun -> characters of its logprobs' tokens so far
        self.prompt_tokens: dict[int, int] = {}  # by request
        self.cached_tokens: dict[int, int] = {}
        self.completion_tokens = 0

    def whole(self, outputs: list[RequestOutput]) -> dict:
        choices: list[dict] = []
        for index, output in enumerate(outputs):
            choices += [self.choice(index, output, c) for c in output.completions]
        of_prompt = self.of_prompt(outputs[0]) if self.chat else {}
        return self.envelope(choices) | of_prompt | {"usage": self.usage()}

    def events(self, index: int, output: RequestOutput) -> Iterable[dict]:
        for c in output.completions:
            of_prompt = self.of_prompt(output) if self.chat and not self.offsets else {}
            yield self.envelope([self.choice(index, output, c)]) | of_prompt

    def last(self) -> Iterable[dict]:
        if self.body.stream_options and self.body.stream_options.include_usage:
            yield self.envelope([]) | {"usage": self.usage()}

    def envelope(self, choices: list[dict]) -> dict:
        kind = "chat.completion" + ".chunk" * bool(self.body.stream) if self.chat else "text_completion"
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.server.model_name,
            "system_fingerprint": f"samebits-{self.server.contract_hash or 'inexact'}",
            "weight_version": self.server.updates.label,
            "choices": iter(choices),
        }

    def usage(self) -> dict:
        return usage(sum(self.prompt_tokens.values()), self.completion_tokens, sum(self.cached_tokens.values()))

    def choice(self, request: int, output: RequestOutput, c: Completion) -> dict:
        """A choice, or what is new of it. request: its index among all of the call."""
        body = self.body
        index = request * self.n + c.index
        begins = index not in self.offsets
        self.offsets.setdefault(index, 0)
        self.prompt_tokens[request] = len(output.prompt_token_ids)
        self.cached_tokens[request] = output.num_cached_tokens
        self.completion_tokens += len(c.token_ids)
        found: dict[str, Any] = {"index": index, "finish_reason": c.finish_reason, "stop_reason": c.stop_reason}
        found["logprobs"] = self.logprobs(index, c)
        found |= {"text": c.text or ""} if self.answers is None else self.answers.take(index, output, c)
        if body.return_token_ids:
            found["token_ids"] = c.token_ids
        if c.routed_experts is not None:
            found["routed_experts"] = npy_text(c.routed_experts)
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
    server: Service,
    body: _Common,
    prompts: list[str | list[int]],
    params: SamplingParams,
    answers: ChatAnswers | None = None,
):
    server.check_model(body.model)
    request_id = body.request_id or uuid.uuid4().hex
    writer = _Writer(server, body, params.n, request_id, answers)
    requests = [GenerateRequest(p, params, body.cache_salt) for p in prompts]
    return await answer(server.engine, requests, request_id, body.stream, writer.whole, writer.events, writer.last)


@router.post("/v1/completions", responses=STREAMING)
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
        prompts = [await encode.in_thread(encode.encode, p, False) if isinstance(p, str) else p for p in prompts]
    return await _answer(server, body, prompts, params)


@router.post("/v1/chat/completions", responses=STREAMING)
async def chat_completions(body: ChatRequest, server: Served):
    """Answers a conversation, through the model's chat template or from token ids."""
    if body.top_logprobs and not body.logprobs:
        raise ValueError("top_logprobs needs logprobs=true")
    limit = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
    template = {
        "tools": body.tools,  # also with tool_choice "none", which leaves the prompt as it is and parses no calls
        "add_generation_prompt": body.add_generation_prompt and not body.continue_final_message,
        "continue_final_message": body.continue_final_message,
    } | _template_kwargs(body.chat_template_kwargs)
    kept = body.input_ids is None and template["add_generation_prompt"]  # ids of a client's own are nobody else's
    conversation = Conversation(server, body.messages, template, body.cache_salt, kept)
    tools = server.tool_format if body.tools and body.tool_choice != "none" else None
    more: dict[str, Any] = {"max_tokens": limit, "logprobs": body.top_logprobs or None}  # no limit: all that fits
    if body.tool_choice not in (None, "none", "auto"):
        if body.structure() is not None:
            raise ValueError("a forced tool_choice leaves no room for response_format or structured_outputs")
        more["structured_outputs"] = conversation.forced_call(tools, body.tool_choice)
    if tools is not None and body.skip_special_tokens is None:
        more["skip_special_tokens"] = False  # in some templates they mark the calls
    params = body.params(body.stream, **more)
    ids = await conversation.prompt_ids() if body.input_ids is None else body.input_ids
    answers = ChatAnswers(conversation, tools, bool(body.stream))
    return await _answer(server, body, [ids], params, answers)


def _template_kwargs(given: dict[str, Any] | None) -> dict[str, Any]:
    given = given or {}
    if taken := sorted(given.keys() & {"tokenize", "chat_template", "return_tensors", "return_dict", "conversation"}):
        raise ValueError(f"chat_template_kwargs may not set {', '.join(taken)}")
    return given


# --- the rest ---------------------------------------------------------------------------------------------------------


@router.get("/v1/models")
async def models(server: Served):
    """The one model that is served, with its length limit and its contract's hash."""
    card = {
        "id": server.model_name,
        "object": "model",
        "created": server.started,
        "owned_by": "samebits",
        "root": str(server.llm.path),
        "parent": None,
        "max_model_len": server.llm.max_model_len,
        "contract": server.contract_hash,
    }
    return reply({"object": "list", "data": [card]})


@router.post("/tokenize")
async def tokenize(body: TokenizeRequest, server: Served):
    """The token ids of a text, or of a conversation through the chat template."""
    tokenization = server.engine.tokenization
    if (body.prompt is None) == (body.messages is None):
        raise ValueError("give either prompt or messages")
    if body.messages is not None:
        ids = await tokenization.chat(body.messages, add_generation_prompt=body.add_generation_prompt)
    else:
        ids = await tokenization.in_thread(tokenization.encode, body.prompt, body.add_special_tokens)
    name = tokenization.need("text").convert_ids_to_tokens
    names = await tokenization.in_thread(name, ids) if body.return_token_strs else None
    limit = server.llm.max_model_len
    return reply({"count": len(ids), "max_model_len": limit, "tokens": ids, "token_strs": names})


@router.post("/detokenize")
async def detokenize(body: DetokenizeRequest, server: Served):
    """The text of token ids."""
    tokenization = server.engine.tokenization
    return reply({"prompt": await tokenization.in_thread(tokenization.decode, body.tokens)})
