"""Token ids: vLLM's `/inference/v1/generate`, and texts made of them and to them."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Iterator
from typing import Any, Literal

import orjson
from pydantic import Field

from ..engine import Completion, RequestOutput
from ..engine.expert_wire import npy_text
from .async_engine import GenerateRequest
from .openai import prompt_logprobs
from .protocol import Body, CallBody, Ids, Items, Sampling, answer, data_router, finite, reply, usage, version_spans
from .service import Served
from .tokenization import plain

router = data_router("OpenAI and vLLM")


class TokensSampling(Sampling):
    """The sampling parameters of `/inference/v1/generate`."""

    logprobs: int | None = Field(default=None, ge=0)
    prompt_logprobs: int | None = Field(default=None, ge=0)
    output_kind: int | None = Field(default=None, description="vLLM's own; `stream` decides.")
    detokenize: bool | None = None


class TokensRequest(CallBody):
    """The body of `/inference/v1/generate`: token ids in, token ids out."""

    token_ids: Ids
    sampling_params: TokensSampling = TokensSampling()
    output_mode: Literal["tokens"] | None = None
    return_token_ids: bool | None = None


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


@router.post("/inference/v1/generate")
async def inference_generate(body: TokensRequest, server: Served):
    """Token ids in, token ids out."""
    server.check_model(body.model)
    sampling = body.sampling_params
    params = sampling.params(body.stream, detokenize=bool(sampling.stop))
    request_id = body.request_id or uuid.uuid4().hex
    begun = False

    def choice(c: Completion) -> dict:
        return {
            "index": c.index,
            "token_ids": c.token_ids,
            "finish_reason": c.finish_reason,
            "stop_reason": c.stop_reason,
            "logprobs": None if params.logprobs is None else {"content": _token_entries(c)},
            "weight_versions": version_spans(c, server.updates.label_of),
            "routed_experts": None if c.routed_experts is None else npy_text(c.routed_experts),
            "sampling_mask": None,
        }

    def envelope(output: RequestOutput) -> dict:
        return {
            "request_id": request_id,
            "model": server.model_name,
            "choices": map(choice, output.completions),
            "prompt_token_ids": None if begun else output.prompt_token_ids,
            "prompt_logprobs": None if begun else prompt_logprobs(server, output),
            "seed": output.seed,
            "weight_version": server.updates.label,
        }

    def whole(outputs: list[RequestOutput]) -> dict:
        (output,) = outputs
        count = sum(len(c.token_ids) for c in output.completions)
        return envelope(output) | {"usage": usage(outputs, count)}

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
    name = f"token_id:{token}"
    return {"token": name, "token_id": token, "logprob": finite(logprob), "rank": rank, "bytes": None}


@router.post("/tokenize")
async def tokenize(body: TokenizeRequest, server: Served):
    """The token ids of a text, or of a conversation through the chat template."""
    tokenization = server.engine.tokenization
    if (body.prompt is None) == (body.messages is None):
        raise ValueError("give either prompt or messages")
    if body.messages is not None:
        messages = [plain(message) for message in body.messages]
        template = {"add_generation_prompt": body.add_generation_prompt}
        ids = await tokenization.in_thread(tokenization.chat, messages, **template)
    else:
        ids = await tokenization.in_thread(tokenization.encode, body.prompt, body.add_special_tokens)
    return reply({"count": len(ids), "max_model_len": server.llm.max_model_len, "tokens": ids})


@router.post("/detokenize")
async def detokenize(body: DetokenizeRequest, server: Served):
    """The text of token ids."""
    tokenization = server.engine.tokenization
    return reply({"prompt": await tokenization.in_thread(tokenization.decode, body.tokens)})
