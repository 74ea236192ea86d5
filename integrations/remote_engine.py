"""An engine behind HTTP: an `Engine` like those in this process, for `LLM` and for a training loop."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

import torch.distributed as dist
from torch import nn

from ..engine import Completion, Engine, EngineConfig, EngineStats, RequestOutput
from ..engine.engine import MEMORY_TAGS
from ..engine.request import Request, Sample, SampledToken
from ..engine.weights import check_contract, specs_of
from ..engine.weights.spec import full_tensors, gathering
from ..engine.weights.table import WeightSource
from ..model.adapter import updated_state
from ..model.checkpoint import resolve
from ..model.exact import eos_token_ids, load_config, load_generation_config
from ..trainer.fsdp import together
from ..trainer.weight_sync import save_weights
from .client import Client

T = TypeVar("T")


class RemoteEngine(Engine):
    """An `Engine` in a `samebits serve` elsewhere: LLM(model, engine=RemoteEngine(Client(url), model)).

    Requests run together in the next `step`, which returns when all of them are finished; the server refuses what it
    can't serve. Rollouts keep their bits: `contract` is the server's. In an FSDP trainer every rank makes one, of the
    same server; all call what changes it, rank 0 asks, and the others take part in gathering weights.

    model: the checkpoint that the server serves, for its tokens. folder: where weights go on their way, in a file
    system that the server sees too; by default they go over a process group.
    """

    def __init__(self, client: Client, model: str | os.PathLike, folder: str | os.PathLike | None = None):
        super().__init__()
        path = resolve(model)
        self.client = client
        self.folder = folder
        self.config = EngineConfig()  # what `LLM` asks of it; the server has one of its own
        self.contract = client.contract
        self.eos_token_ids = eos_token_ids(load_config(path), load_generation_config(path))
        self.max_model_len = client.context_length
        self.weight_version = _number(client.get_weight_version())

    def check_fits(self, request: Request) -> None:
        """Raise ValueError for what isn't on the wire; the server refuses what can't fit."""
        if request.samples[0].cache_salt:
            raise ValueError("cache_salt is not for a server elsewhere: its prefix cache is its own")

    def add_request(self, request: Request) -> None:
        """Queue a request for the next `step`."""
        self.requests[request.request_id] = request

    def abort_request(self, request_id: str) -> bool:
        """Drop a queued request. False if it isn't queued."""
        request = self.requests.pop(request_id, None)
        if request is not None:
            request.finish("abort")
            self.outbox[request_id] = request
        return request is not None

    def step(self) -> None:
        """Generate all that is queued, in one request to the server. Raises ServerError with the queue as it was."""
        queue = list(self.requests.values())
        params = [replace(request.params, seed=request.seed) for request in queue]
        outputs = self.client.generate([request.prompt_token_ids for request in queue], params)
        for request, output in zip(queue, outputs, strict=True):
            _receive(request, output)
            del self.requests[request.request_id]
            self.outbox[request.request_id] = request

    def pause(self, paused: bool) -> None:
        """Make the server stop between two steps and keep its requests, or go on."""
        path = "/pause?mode=keep" if paused else "/resume"
        _common(lambda first: self.client.post(path) if first else None)
        self.paused = paused

    def update_weights(self, source: WeightSource, version: int | None = None, recompute_running: bool = True) -> int:
        """Send weights from rank 0 and return the version now in force, on all ranks; see `LLM.update_weights`."""
        if not recompute_running:
            raise ValueError("recompute_running=False is the server's to do: pause it with mode=keep during the update")
        if isinstance(source, nn.Module):
            if self.contract is not None:
                check_contract(source, self.contract)
            if self.folder is not None:
                save_weights(source, self.folder)  # type: ignore[arg-type]
                source = self.folder
        if isinstance(source, str | os.PathLike):
            folder = source
            found = _common(lambda first: _number(self.client.load_weights(folder, version)) if first else 0)
        else:
            state = updated_state(source) if isinstance(source, nn.Module) else dict(source)
            found = _common(lambda first: self._send(state, version, first))
        self.weight_version = found
        self.has_weights = True
        return found

    def _send(self, state: dict, version: int | None, first: bool) -> int:
        with gathering(full_tensors(state)) as tensors:  # on all ranks
            return _number(self.client.send_weights(specs_of(state), tensors, version)) if first else 0

    def weight_checksums(self) -> dict[str, str]:
        """A hash of each tensor's bytes, by name."""
        return self.client.post("/weight_checker", {"action": "checksum"})["checksums"]

    def reset_prefix_cache(self, reset_running_requests: bool = False) -> None:
        """Make the server forget all cached prefixes."""
        query = f"reset_running_requests={str(reset_running_requests).lower()}"
        _common(lambda first: self.client.post(f"/reset_prefix_cache?{query}") if first else None)

    def release_memory(self, tags: Sequence[str] = MEMORY_TAGS) -> int:
        """Free the server's KV cache, and its weights where the tags name them. Return the bytes freed."""
        if "kv_cache" not in tags:
            raise ValueError("a server frees its weights with its KV cache only: name both tags")
        path = f"/sleep?mode=keep&level={2 if 'weights' in tags else 1}"
        freed = _common(lambda first: self.client.post(path)["freed_bytes"] if first else 0)
        self.has_kv_cache = False
        self.has_weights = self.has_weights and "weights" not in tags
        return freed

    def wake_up(self, tags: Sequence[str] = MEMORY_TAGS) -> None:
        """Take the server's memory again, and let it go on where nothing is missing."""
        path = "/wake_up?" + "&".join(f"tags={tag}" for tag in tags)
        _common(lambda first: self.client.post(path) if first else None)
        self.has_kv_cache = self.has_kv_cache or "kv_cache" in tags
        self.has_weights = self.has_weights or "weights" in tags

    def stats(self) -> EngineStats:
        """Return the server's counters and load."""
        return EngineStats(**self.client.get("/server_info")["stats"])

    def close(self) -> None:
        """Close the client's connections; the server goes on."""
        self.client.close()


def _number(label: int | str) -> int:
    if not isinstance(label, int):
        raise ValueError(f"the server calls its weights {label!r}; an engine counts versions: give them a number first")
    return label


def _receive(request: Request, output: RequestOutput) -> None:
    """Give a request what the server says of it."""
    for sample, completion in zip(request.samples, output.completions, strict=True):
        _fill(sample, completion)
    request.samples[0].num_prefix_hit = output.num_cached_tokens
    if output.prompt_logprobs is not None:
        scores = _tokens(request.prompt_token_ids, output.prompt_logprobs, output.prompt_top_logprobs)
        request.prompt_scores = scores[1:]


def _fill(sample: Sample, completion: Completion) -> None:
    sample.sampled = _tokens(completion.token_ids, completion.logprobs, completion.top_logprobs)
    sample.token_ids += completion.token_ids
    for span in completion.weight_versions:
        sample.versions += [(span.version, span.stale_kv)] * (span.end - span.start)
    sample.finish_reason = completion.finish_reason
    sample.stop_reason = completion.stop_reason
    sample.text = completion.text
    sample.routed_experts = completion.routed_experts


def _tokens(
    token_ids: list[int], logprobs: list[float], top_logprobs: list[dict[int, float]] | None
) -> list[SampledToken]:
    tops = top_logprobs or [None] * len(token_ids)  # type: ignore[list-item]
    return [SampledToken(t, lp, top_logprobs=top) for t, lp, top in zip(token_ids, logprobs, tops, strict=True)]


def _common(call: Callable[[bool], T]) -> T:
    """Return rank 0's result of a call that all ranks make, told whether it is rank 0. Where one fails, all raise."""
    if not dist.is_initialized():
        return call(True)
    with together():
        found = [call(dist.get_rank() == 0)]
    dist.broadcast_object_list(found, 0)
    return found[0]
