"""The rollout engine as its users see it."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Sequence
from dataclasses import replace

from torch import nn
from tqdm import tqdm

from ..model.adapter import is_folder, load_adapter_config
from ..model.checkpoint import resolve
from ..model.exact import load_config, parse_dtype
from .config import EngineConfig
from .core import EngineCore
from .detokenizer import Tokenizer
from .engine import MEMORY_TAGS, Engine, WorkerEngine
from .executor import LocalExecutor
from .input_processor import InputProcessor, Prompt, load_tokenizer, need_chat_template, render_chat
from .interrupts import deferred_interrupt
from .outputs import EngineStats, RequestOutput
from .request import Request
from .sampling_params import RequestOutputKind, SamplingParams
from .weights import WeightUpdate
from .weights.table import WeightSource


class LLM:
    """The rollout engine. Its log-probs are, bit for bit, those of `samebits.trainer.token_logprobs`.

    model: a checkpoint directory, a hub id or "smollm2". Keywords: see `EngineConfig`; an unknown one is a TypeError.
    engine: one that is there already, such as a `samebits.integrations.RemoteEngine`, instead of one of these settings.
    Raises CheckpointError, UnsupportedModelError or NumericsError at once where the promise can't be kept.
    """

    def __init__(self, model: str | os.PathLike, *, engine: Engine | None = None, **settings):
        if engine is not None and settings:
            raise TypeError(f"a given engine has its own settings; leave out {', '.join(sorted(settings))}")
        self.config = EngineConfig(**settings) if engine is None else engine.config
        adapter = self.config.adapter
        if engine is None and adapter is not None:
            self.config = replace(self.config, adapter=load_adapter_config(adapter))
        self.path = resolve(model)
        self.model_config = load_config(self.path)
        if engine is None and self.config.dtype is None:
            found = parse_dtype(None, self.config.device or "cpu", self.model_config)
            self.config = replace(self.config, dtype=str(found).removeprefix("torch."))
        self.tokenizer = None if self.config.skip_tokenizer_init else load_tokenizer(self.path)
        self.engine = make_engine(self.path, self.config, self.tokenizer) if engine is None else engine
        self.contract = self.engine.contract
        self.eos_token_ids = self.engine.eos_token_ids
        self.max_model_len = self.engine.max_model_len
        self._next_request_id = 0
        self.processor = self.input_processor(self.tokenizer)
        if engine is None and (isinstance(adapter, nn.Module) or is_folder(adapter)):
            try:
                self.update_weights(adapter)
            except BaseException:
                self.close()
                raise

    # --- generation -------------------------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Run the prompts to their end and return their outputs in the same order.

        prompts: one or several of: a string, a list of token ids, {"prompt": str} or {"prompt_token_ids": [...]}.
        sampling_params: one for all, or one per prompt. All are checked before the first starts. A request that fails
        on its way has samples with finish_reason "error" and the reason in `stop_reason`; the others go on. When the
        call ends early (Ctrl-C), its own requests are aborted, others stay, and the engine stays usable.
        """
        requests = self._requests(prompts, sampling_params)
        try:
            with deferred_interrupt():
                for request in requests:
                    self.engine.add_request(request)
            self._run(requests, use_tqdm)
        except BaseException:
            for request in requests:
                self.abort(request.request_id)
            raise
        finally:
            for request in requests:
                self.engine.outbox.pop(request.request_id, None)
        return [r.take_output(self.tokenizer) for r in requests]

    def _requests(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
    ) -> list[Request]:
        if hasattr(prompts, "tolist"):  # a tensor or array: one prompt, or a row each
            prompts = prompts.tolist()
        if isinstance(prompts, str | dict) or (len(prompts) > 0 and isinstance(prompts[0], int)):
            prompts = [prompts]  # type: ignore[list-item,assignment]
        params = sampling_params if sampling_params is not None else SamplingParams()
        each = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
        if len(each) != len(prompts):
            raise ValueError(f"{len(prompts)} prompts but {len(each)} sampling_params; give one, or one per prompt")
        requests = []
        for prompt, one in zip(prompts, each, strict=True):
            request = self.process(prompt, one, self._new_request_id())  # type: ignore[arg-type]
            request.params = replace(request.params, output_kind=RequestOutputKind.FINAL_ONLY)
            requests.append(request)
            request.call = requests[0].request_id
        return requests

    def _run(self, requests: list[Request], use_tqdm: bool) -> None:
        """Step until the requests are finished. What others get meanwhile stays in the outbox."""
        running = {r.request_id for r in requests}
        total = sum(len(r.samples) for r in requests)
        with tqdm(total=total, desc="Generating", unit="sample", delay=2, disable=not use_tqdm) as bar:
            while running:
                self.engine.step()
                for request_id in self.engine.outbox.keys() & running:
                    request = self.engine.outbox.pop(request_id)
                    if request.finished:
                        running.remove(request_id)
                        bar.update(len(request.samples))

    def chat(
        self,
        messages: list[dict[str, str]] | list[list[dict[str, str]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """`generate` on one or several conversations, through the model's chat template."""
        conversations = [messages] if messages and isinstance(messages[0], dict) else messages
        prompts = [self.chat_prompt(c) for c in conversations]  # type: ignore[arg-type]
        return self.generate(prompts, sampling_params, use_tqdm)

    def chat_prompt(self, conversation: list[dict[str, str]]) -> list[int]:
        """The token ids that the model's chat template makes of a conversation. ValueError where it has none."""
        tokenizer = need_chat_template(self.tokenizer, self.path)
        text = render_chat(tokenizer, conversation, add_generation_prompt=True)
        return tokenizer.encode(text, add_special_tokens=False)

    def add_request(
        self, prompt: Prompt | Request, sampling_params: SamplingParams | None = None, request_id: str | None = None
    ) -> str:
        """Queue one request (or one from `process`) and return its id; drive it with `step`.

        ValueError at once if it can't be served.
        """
        if not isinstance(prompt, Request):
            params = sampling_params if sampling_params is not None else SamplingParams()
            prompt = self.process(prompt, params, self._new_request_id() if request_id is None else request_id)
        if prompt.finished:
            raise ValueError(f"request {prompt.request_id!r} has ended: process its prompt again")
        if self._in_use(prompt.request_id):
            raise ValueError(f"request_id {prompt.request_id!r} is in use")
        self.engine.add_request(prompt)
        return prompt.request_id

    def step(self) -> list[RequestOutput]:
        """Compute one batch and return a snapshot of every request that got a token or ended: streaming."""
        self.engine.step()
        return self.take_outputs()

    def take_outputs(self) -> list[RequestOutput]:
        """Return what `step` would report, without a step: requests aborted since."""
        outputs = [r.take_output(self.tokenizer) for r in self.engine.outbox.values() if r.due]
        self.engine.outbox.clear()
        return outputs

    def has_unfinished_requests(self) -> bool:
        """True if `step` has anything left to compute or to report."""
        return self.engine.has_unfinished_requests()

    @property
    def unfinished_request_ids(self) -> list[str]:
        """Ids of the requests that run or wait."""
        return list(self.engine.requests)

    def abort(self, request_id: str) -> bool:
        """End a request; its samples so far get finish_reason "abort", and `step` reports it once more.

        False if it isn't running (any more).
        """
        return self.engine.abort_request(request_id)

    # --- requests ---------------------------------------------------------------------------------------------------

    def process(
        self, prompt: Prompt, params: SamplingParams, request_id: str, processor: InputProcessor | None = None
    ) -> Request:
        """A checked request for `add_request`. Changes nothing: other threads may call it with a processor."""
        request = (processor or self.processor).process(prompt, params, request_id, self.config.enable_prefix_caching)
        self.engine.check_fits(request)
        if params.routed_experts and not self.engine.has_experts:
            raise ValueError(f"routed_experts: {self.path} is no mixture of experts, or runs with exact=False")
        return request

    def input_processor(self, tokenizer: Tokenizer | None) -> InputProcessor:
        """A processor of prompts for this model with another tokenizer, for use in other threads."""
        vocab = self.model_config.vocab_size
        return InputProcessor(tokenizer, str(self.path), vocab, self.max_model_len, self.eos_token_ids)

    def _new_request_id(self) -> str:
        while True:
            request_id = f"request-{self._next_request_id}"
            self._next_request_id += 1
            if not self._in_use(request_id):
                return request_id

    def _in_use(self, request_id: str) -> bool:
        return request_id in self.engine.requests or request_id in self.engine.outbox

    # --- weights ----------------------------------------------------------------------------------------------------

    def update_weights(self, source: WeightSource, version: int | None = None, recompute_running: bool = True) -> int:
        """Replace all weights, all or nothing, and return the new version (by default the old one + 1).

        source: a module from `exact_model` (also under FSDP2; every rank must then iterate its state dict) of the same
        numerics contract, (name, tensor) pairs or a state dict of any origin, or a checkpoint directory. A module with
        an adapter, or a folder with PEFT's files, replaces the adapter alone; pairs bring all of the base, all of the
        adapter (by the names in PEFT's files), or both. Tensors are converted to the engine's dtype. Running requests
        go on: their KV is recomputed under the new weights, so each token stays exact for the version that sampled it.
        recompute_running=False lets them keep the old weights' KV, which saves the work and gives up their exactness;
        their version spans say so.
        Raises WeightUpdateError or NumericsError and serves the old weights on when anything is wrong with the source.
        """
        return self.engine.update_weights(source, version, recompute_running)

    def begin_weight_update(self) -> WeightUpdate:
        """Open an update and return it, to be loaded in parts, from any thread, while the engine goes on."""
        return self.worker_engine.begin_weight_update()

    def commit_weight_update(
        self, update: WeightUpdate, version: int | None = None, recompute_running: bool = True
    ) -> int:
        """Put a complete update in force everywhere or nowhere and return its version; else as `update_weights`."""
        version = self.worker_engine.next_version(version)
        self.worker_engine.commit_weight_update(update, version, recompute_running)
        return version

    @property
    def worker_engine(self) -> WorkerEngine:
        """The engine, where its workers can be reached from here. TypeError for a server elsewhere."""
        if not isinstance(self.engine, WorkerEngine):
            raise TypeError(
                f"the workers of a {type(self.engine).__name__} can't be reached from here: use update_weights"
            )
        return self.engine

    @property
    def weight_version(self) -> int:
        """The version of the weights in force, 0 at first."""
        return self.engine.weight_version

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights in all stages and replicas."""
        return self.worker_engine.weight_bytes

    @property
    def kv_cache_bytes(self) -> int:
        """Bytes of the KV pools of all stages and replicas."""
        return self.worker_engine.kv_cache_bytes

    @property
    def world_size(self) -> int:
        """The ranks that this engine takes in a weight group: one per stage of each replica."""
        return self.worker_engine.workers.world_size

    def weight_checksums(self) -> dict[str, str]:
        """A hash of each tensor's bytes, as the engine holds it; tied tensors under their first name.

        ValueError while the weights are dropped.
        """
        if not self.engine.has_weights:
            raise ValueError("the weights are dropped: wake the engine up, or update them")
        return self.engine.weight_checksums()

    def reset_prefix_cache(self, reset_running_requests: bool = False) -> None:
        """Forget all cached prefixes. Running requests keep their KV, unless they are to be reset, too: recomputed."""
        self.engine.reset_prefix_cache(reset_running_requests)

    # --- memory -----------------------------------------------------------------------------------------------------

    @property
    def ready(self) -> bool:
        """True if the engine can step: it has KV memory and weights, and is not broken."""
        return self.engine.ready

    @property
    def failure(self) -> str | None:
        """Why the engine can't ever step again, if so."""
        return self.engine.failure

    @property
    def has_kv_cache(self) -> bool:
        """True unless the KV memory was released."""
        return self.engine.has_kv_cache

    @property
    def has_weights(self) -> bool:
        """True unless the weights were released."""
        return self.engine.has_weights

    def sleep(self, level: int = 1) -> int:
        """Free the KV memory, at level 2 the weights too, and return the bytes freed.

        Requests stay and are recomputed after `wake_up`; until then `step` is a RuntimeError.
        """
        if level not in (1, 2):
            raise ValueError(f"sleep level must be 1 (KV cache) or 2 (weights too), got {level!r}")
        return self.release_memory(MEMORY_TAGS[-level:])

    def release_memory(self, tags: Sequence[str] = MEMORY_TAGS) -> int:
        """Free what the tags name, "weights" or "kv_cache", and return the bytes freed."""
        _check_tags(tags)
        return self.engine.release_memory(tags)

    def wake_up(self, tags: Sequence[str] = MEMORY_TAGS) -> None:
        """Take the memory again.

        Dropped weights come back from the checkpoint if that is what they were; otherwise the engine needs an update
        before it can `step`.
        """
        _check_tags(tags)
        self.engine.wake_up(tags)

    # --- the rest ---------------------------------------------------------------------------------------------------

    def stats(self) -> EngineStats:
        """Counters since the start, and the load now."""
        return self.engine.stats()

    def close(self) -> None:
        """End the processes of stages and replicas, which would otherwise end with this one."""
        self.engine.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *exc) -> None:
        self.close()


def make_engine(path: pathlib.Path, config: EngineConfig, tokenizer: Tokenizer | None) -> Engine:
    """The engine that a configuration asks for: in this process, or of several processes."""
    if config.backend == "inproc":
        return EngineCore(path, config, LocalExecutor(path, config), tokenizer)
    from .. import cluster  # the one arrow from here to there

    return cluster.make_engine(path, config)


def _check_tags(tags: Sequence[str]) -> None:
    if unknown := sorted(set(tags) - set(MEMORY_TAGS)):
        raise ValueError(f"unknown memory tags {unknown}; choose from {', '.join(MEMORY_TAGS)}")
