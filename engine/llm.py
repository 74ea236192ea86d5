from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import replace

from torch import nn
from tqdm import tqdm

from ..model.checkpoint import resolve
from ..model.exact import load_config
from ..scheduler import Scheduler
from .config import EngineConfig
from .core import MEMORY_TAGS, EngineCore
from .distributed.fan_out import FanOutUpdate
from .distributed.router import Router
from .input_processor import InputProcessor, Prompt, load_tokenizer
from .interrupts import deferred_interrupt
from .outputs import EngineStats, RequestOutput
from .request import Request
from .sampling_params import RequestOutputKind, SamplingParams
from .transfer import DEFAULT_TIMEOUT, gathering
from .weights import Source, WeightUpdate


class LLM:
    """The rollout engine. Its log-probs are, bit for bit, those of `samebits.trainer.token_logprobs`.

    model: a checkpoint directory, a hub id or "smollm2". Keywords: see `EngineConfig`; an unknown one is a TypeError.
    Raises CheckpointError, UnsupportedModelError or NumericsError at once where the promise can't be kept.
    """

    def __init__(self, model: str | os.PathLike, **settings):
        self.config = EngineConfig(**settings)
        self.path = resolve(model)
        self.model_config = load_config(self.path)
        self.tokenizer = None if self.config.skip_tokenizer_init else load_tokenizer(self.path)
        # Ray has to place all stages: with the first one in this process, it would give its GPU away again
        core = Router if self.config.replicas > 1 or self.config.backend == "ray" else EngineCore
        self.core: EngineCore | Router = core(self.path, self.config)
        self.contract = self.core.contract
        self.eos_token_ids = self.core.eos_token_ids
        self.max_model_len = self.core.max_model_len
        self._undelivered: dict[str, Request] = {}  # progressed since `step` last reported them
        self._next_request_id = 0
        self.core.tokenizer = self.tokenizer
        self.processor = self.input_processor(self.tokenizer)

    # --- generation -------------------------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Runs the prompts to their end; outputs in their order.

        prompts: one or several of: a string, a list of token ids, {"prompt": str} or {"prompt_token_ids": [...]}.
        sampling_params: one for all, or one per prompt. All are checked before the first starts. A request that fails
        on its way has samples with finish_reason "error" and the reason in `stop_reason`; the others go on. When the
        call ends early (Ctrl-C), its own requests are aborted, others stay, and the engine stays usable.
        """
        if hasattr(prompts, "tolist"):  # a tensor or array: one prompt, or a row each
            prompts = prompts.tolist()
        if isinstance(prompts, str | dict) or (len(prompts) > 0 and isinstance(prompts[0], int)):
            prompts = [prompts]  # type: ignore[list-item,assignment]
        params = sampling_params if sampling_params is not None else SamplingParams()
        each = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
        if len(each) != len(prompts):
            raise ValueError(f"{len(prompts)} prompts but {len(each)} sampling_params; give one, or one per prompt")
        pairs = zip(prompts, each, strict=True)
        requests = [self.process(p, s, self._new_request_id()) for p, s in pairs]  # type: ignore[arg-type]
        for request in requests:
            request.params = replace(request.params, output_kind=RequestOutputKind.FINAL_ONLY)
        try:
            with deferred_interrupt():
                for request in requests:
                    self._submit(request)
            total = sum(len(r.samples) for r in requests)
            with tqdm(total=total, desc="Generating", unit="sample", delay=2, disable=not use_tqdm) as bar:
                while any(not r.finished for r in requests):
                    self._step()
                    done = sum(s.finish_reason is not None for r in requests for s in r.samples)
                    bar.update(done - bar.n)
        except BaseException:
            for request in requests:
                self.abort(request.request_id)
            raise
        finally:
            for request in requests:
                self._undelivered.pop(request.request_id, None)
        return [r.output(self.tokenizer) for r in requests]

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
        """The token ids that the model's chat template makes of a conversation."""
        tokenizer = self.processor.need_tokenizer("chat")
        text = tokenizer.apply_chat_template(conversation, add_generation_prompt=True, tokenize=False)
        return tokenizer.encode(text, add_special_tokens=False)

    def add_request(
        self, prompt: Prompt | Request, sampling_params: SamplingParams | None = None, request_id: str | None = None
    ) -> str:
        """Queues one request (or one from `process`); drive it with `step`. Returns its id.

        ValueError at once if it can't be served.
        """
        if not isinstance(prompt, Request):
            params = sampling_params if sampling_params is not None else SamplingParams()
            prompt = self.process(prompt, params, self._new_request_id() if request_id is None else request_id)
        self._submit(prompt)
        return prompt.request_id

    def step(self) -> list[RequestOutput]:
        """Computes one batch. Returns a snapshot of every request that got a token or ended: streaming."""
        self._step()
        return self.take_outputs()

    def take_outputs(self) -> list[RequestOutput]:
        """What `step` would report, without a step: requests aborted since."""
        self._note_progress()
        outputs = [r.output(self.tokenizer) for r in self._undelivered.values() if r.due]
        self._undelivered.clear()
        return outputs

    def has_unfinished_requests(self) -> bool:
        """Has `step` anything left to compute or to report?"""
        self._note_progress()
        return bool(self.core.requests or self._undelivered)

    @property
    def unfinished_request_ids(self) -> list[str]:
        return list(self.core.requests)

    def abort(self, request_id: str) -> bool:
        """Ends a request; its samples so far get finish_reason "abort", and `step` reports it once more. False if it
        isn't running (any more)."""
        request = self.core.requests.get(request_id)
        if request is not None:
            self.core.end(request, "abort")
        self._note_progress()
        return request is not None

    def _step(self) -> None:
        self.core.step()
        self._note_progress()

    def _note_progress(self) -> None:
        self._undelivered |= {r.request_id: r for r in self.core.take_progress()}

    # --- requests ---------------------------------------------------------------------------------------------------

    def process(
        self, prompt: Prompt, params: SamplingParams, request_id: str, processor: InputProcessor | None = None
    ) -> Request:
        """A checked request for `add_request`. Changes nothing: other threads may call it with their own processor."""
        cache = self.config.enable_prefix_caching
        return (processor or self.processor).process(prompt, params, request_id, self.core.check_fits, cache)

    def input_processor(self, tokenizer) -> InputProcessor:
        vocab = self.model_config.vocab_size
        return InputProcessor(tokenizer, str(self.path), vocab, self.max_model_len, self.eos_token_ids)

    def _new_request_id(self) -> str:
        while True:
            request_id, self._next_request_id = f"request-{self._next_request_id}", self._next_request_id + 1
            if not self._in_use(request_id):
                return request_id

    def _submit(self, request: Request) -> None:
        if self._in_use(request.request_id):
            raise ValueError(f"request_id {request.request_id!r} is in use")
        self.core.submit(request)

    def _in_use(self, request_id: str) -> bool:
        return request_id in self.core.requests or request_id in self._undelivered

    # --- weights ----------------------------------------------------------------------------------------------------

    def update_weights(self, source: Source, version: int | None = None, recompute_running: bool = True) -> int:
        """Replaces all weights, all or nothing, and returns the new version (by default the old one + 1).

        source: a module from `exact_model` (also under FSDP2; every rank must then iterate its state dict) of the same
        numerics contract, (name, tensor) pairs of any origin, or a checkpoint directory. Tensors are converted to the
        engine's dtype. Running requests go on: their KV is recomputed under the new weights, so each token stays exact
        for the version that sampled it. recompute_running=False lets them keep the old weights' KV, which saves the
        work and gives up their exactness; their version spans say so.
        Raises WeightUpdateError or NumericsError and serves the old weights on when anything is wrong with the source.
        """
        self._check_version(version)
        deadline = time.monotonic() + self.config.start_timeout
        while not self.core.settled and time.monotonic() < deadline:
            time.sleep(0.05)
        try:
            update = self.begin_weight_update()
        except BaseException:
            if isinstance(source, nn.Module):  # other ranks gather, and none may wait for this one
                with gathering(self.core.table.state_of(source)):
                    pass
            raise
        update.load(source, self.contract)
        return self.commit_weight_update(update, version, recompute_running)

    def begin_weight_update(self) -> WeightUpdate | FanOutUpdate:
        """An update to be loaded in parts, from any thread, while the engine goes on."""
        return self.core.begin_weight_update()

    def commit_weight_update(
        self, update: WeightUpdate | FanOutUpdate, version: int | None = None, recompute_running: bool = True
    ) -> int:
        """Puts a complete update in force, in all stages and replicas or in none; otherwise as `update_weights`."""
        version = self._check_version(version)
        self.core.commit_weight_update(update, version, recompute_running)
        return version

    @property
    def weight_version(self) -> int:
        return self.core.weight_version

    @property
    def weight_bytes(self) -> int:
        """Of all stages and replicas."""
        return self.core.weight_bytes

    @property
    def kv_cache_bytes(self) -> int:
        """Of all stages and replicas."""
        return self.core.kv_cache_bytes

    @property
    def world_size(self) -> int:
        """The ranks that this engine takes in a weight group: one a stage of each replica."""
        return self.core.world_size

    def join_weight_group(
        self,
        name: str,
        master_address: str,
        master_port: int | str,
        rank: int,
        world_size: int,
        backend: str = "gloo",
        timeout: float = DEFAULT_TIMEOUT,
    ) -> None:
        """Makes this engine ranks `rank` to `rank + self.world_size - 1` of a `WeightGroup`, for `update.receive`.

        Waits for all other ranks. A group of that name from before is left.
        """
        where = name, master_address, master_port, rank, world_size, backend, timeout
        self.core.members().join(*where)

    def leave_weight_group(self, name: str) -> bool:
        """True if there was one."""
        return self.core.leave_weight_group(name)

    def has_weight_group(self, name: str) -> bool:
        """Is there a group of that name, and is it of use?"""
        return self.core.has_weight_group(name)

    def _check_version(self, version: int | None) -> int:
        if version is None:
            return self.weight_version + 1
        if not (isinstance(version, int) and not isinstance(version, bool) and self.weight_version < version < 2**63):
            raise ValueError(f"version must be an integer above {self.weight_version} and below 2^63, got {version!r}")
        return version

    def reset_prefix_cache(self, reset_running_requests: bool = False) -> None:
        """Forgets all cached prefixes. Running requests keep their KV, unless they are to be reset, too: recomputed."""
        self.core.reset_prefix_cache(reset_running_requests)

    # --- memory -----------------------------------------------------------------------------------------------------

    @property
    def ready(self) -> bool:
        """Can it step: has it KV memory and weights?"""
        return self.core.ready

    @property
    def failure(self) -> str | None:
        """Why the engine can't ever step again, if so."""
        return self.core.failure

    @property
    def has_kv_cache(self) -> bool:
        return self.core.has_kv_cache

    @property
    def has_weights(self) -> bool:
        return self.core.has_weights

    def sleep(self, level: int = 1) -> int:
        """Frees the KV memory, at level 2 the weights too, and returns the bytes freed.

        Requests stay and are recomputed after `wake_up`; until then `step` is a RuntimeError.
        """
        if level not in (1, 2):
            raise ValueError(f"sleep level must be 1 (KV cache) or 2 (weights too), got {level!r}")
        return self.release_memory(MEMORY_TAGS[-level:])

    def release_memory(self, tags: Sequence[str] = MEMORY_TAGS) -> int:
        """`sleep`, by the names of what is to be freed."""
        _check_tags(tags)
        return self.core.release_memory(tags)

    def wake_up(self, tags: Sequence[str] = MEMORY_TAGS) -> None:
        """Takes the memory again. Dropped weights come back from the checkpoint if that is what they were; otherwise
        the engine needs an update before it can `step`."""
        _check_tags(tags)
        self.core.wake_up(tags)

    def weight_checksums(self) -> dict[str, str]:
        """A hash of each tensor's bytes, as the engine holds it; tied tensors under their first name."""
        return self.core.weight_checksums()

    # --- the rest ---------------------------------------------------------------------------------------------------

    @property
    def scheduler(self) -> Scheduler:
        """Of an engine in this process: neither of replicas, nor on Ray."""
        return self.core.scheduler  # type: ignore[union-attr]

    def stats(self) -> EngineStats:
        return self.core.stats()

    def close(self) -> None:
        """Ends the processes of stages and replicas, which would otherwise end with this one."""
        self.core.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *exc) -> None:
        self.close()


def _check_tags(tags: Sequence[str]) -> None:
    if unknown := sorted(set(tags) - set(MEMORY_TAGS)):
        raise ValueError(f"unknown memory tags {unknown}; choose from {', '.join(MEMORY_TAGS)}")
