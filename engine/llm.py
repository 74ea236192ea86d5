from __future__ import annotations

import logging
import math
import os
import pathlib
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import psutil
from tqdm import tqdm
from transformers import AutoTokenizer

from ..kernels import ops
from ..kernels.contract import Contract
from ..model.checkpoint import CheckpointError, resolve
from ..model.exact import contract_of, eos_token_ids, exact_model
from ..scheduler import BlockManager, Scheduler
from .config import EngineConfig
from .input_processor import InputProcessor, Prompt
from .interrupts import deferred_interrupt
from .model_runner import Draw, ModelRunner
from .outputs import EngineStats, RequestOutput
from .request import Request, SampledToken
from .sampling_params import RequestOutputKind, SamplingParams
from .weights import Source, WeightLoader, WeightUpdate

logger = logging.getLogger(__name__)

MEMORY_TAGS = ("weights", "kv_cache")


class LLM:
    """The rollout engine. Its log-probs are, bit for bit, those of `samebits.trainer.token_logprobs`.

    model: a checkpoint directory, a hub id or "smollm2". Keywords: see `EngineConfig`; an unknown one is a TypeError.
    Raises CheckpointError, UnsupportedModelError or NumericsError at once where the promise can't be kept.
    """

    def __init__(self, model: str | os.PathLike, **settings):
        self.config = EngineConfig(**settings)
        self.path = resolve(model)
        device = self.config.device or "cpu"
        hf = exact_model(self.path, self.config.dtype, device, self.config.linear_route, self.config.exact)
        self.model_config = hf.config
        self.contract: Contract | None = contract_of(hf) if self.config.exact else None
        limit = hf.config.max_position_embeddings
        if (self.config.max_model_len or 0) > limit:
            raise ValueError(f"max_model_len {self.config.max_model_len} exceeds the model's {limit} positions")
        self.max_model_len = self.config.max_model_len or limit
        self.eos_token_ids = eos_token_ids(hf)
        self.weight_version = 0
        self.has_weights = True
        self._weights_path: pathlib.Path | None = self.path  # where the weights in force can be read again
        self._weights = WeightLoader(hf)
        self.weight_bytes = sum(p.nbytes for p in hf.parameters())
        block_bytes = ModelRunner.block_bytes(hf)
        block_size = ops.backend(hf.device).BLOCK
        num_blocks = self._num_blocks(block_bytes, block_size)
        self._runner = ModelRunner(hf, num_blocks)
        blocks = BlockManager(num_blocks, block_size)
        blocks.reset_prefix_cache(self._salt())
        self.scheduler = Scheduler(blocks, self.config.max_num_seqs, self.config.max_num_batched_tokens)
        self.kv_cache_bytes = num_blocks * block_bytes
        self._requests: dict[str, Request] = {}
        self._undelivered: dict[str, Request] = {}  # progressed since `step` last reported them
        self._next_seq_id = 0
        self._next_request_id = 0
        self._generation_tokens = 0
        self._step_seconds = 0.0
        self.tokenizer = None if self.config.skip_tokenizer_init else self._load_tokenizer()
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
        late = RequestOutputKind.FINAL_ONLY
        due = [r for r in self._undelivered.values() if r.finished or r.params.output_kind is not late]
        outputs = [r.output(self.tokenizer) for r in due]
        self._undelivered.clear()
        return outputs

    def has_unfinished_requests(self) -> bool:
        """Has `step` anything left to compute or to report?"""
        return bool(self._requests or self._undelivered)

    @property
    def unfinished_request_ids(self) -> list[str]:
        return list(self._requests)

    def abort(self, request_id: str) -> bool:
        """Ends a request; its samples so far get finish_reason "abort", and `step` reports it once more. False if it
        isn't running (any more)."""
        request = self._requests.get(request_id)
        if request is not None:
            self._end(request, "abort")
        return request is not None

    def _end(self, request: Request, reason: str, detail: str | None = None) -> None:
        """Ends all samples of a request that are still unfinished."""
        leader = request.samples[0]
        unstarted = {s.seq_id for s in leader.siblings}
        leader.siblings = []
        for sample in request.samples:
            if sample.finish_reason is None:
                sample.finish_reason, sample.stop_reason = reason, detail
                if sample.seq_id not in unstarted:
                    self.scheduler.finish(sample)
        del self._requests[request.request_id]
        self._undelivered[request.request_id] = request

    def _step(self) -> None:
        start = time.perf_counter()
        if not self.ready:
            raise RuntimeError("the engine sleeps; call wake_up first, and update_weights where they were dropped")
        with deferred_interrupt():  # state changes whole steps at a time
            batch = self.scheduler.schedule()
            if not batch.sequences:
                return
            self._runner.copy_blocks(self.scheduler.block_copies)
            self.scheduler.block_copies.clear()
            results = self._runner.run(batch)
            self.scheduler.advance(batch)
            for seq in batch.sequences:
                if seq.num_cached_tokens == seq.num_tokens:  # its next token is in the results
                    self.scheduler.fork(seq)
            for draw, token in results:
                self._receive(draw, token)
            self._step_seconds += time.perf_counter() - start

    def _receive(self, draw: Draw, token: SampledToken) -> None:
        """One result of a step. What is wrong with a request ends that request alone."""
        sample, request = draw.sample, draw.sample.request
        if sample.finish_reason is not None:  # its request failed on an earlier result of this step
            return
        problem = "non-finite logits; check the weights" if math.isnan(token.logprob) else None
        if problem is None and draw.target >= 0:
            request.prompt_scores.append(token)
            return
        if problem is None:
            sample.append(token, self.weight_version)
            self._generation_tokens += 1
            try:
                request.check_stop(sample, self.tokenizer)
            except Exception as error:  # e.g. the tokenizer's
                problem = f"{type(error).__name__}: {error}"
        if problem is not None:
            logger.warning("request %s ends with an error: %s", request.request_id, problem)
            self._end(request, "error", problem)
            return
        self._undelivered[request.request_id] = request
        if sample.finish_reason is not None:
            self.scheduler.finish(sample)
            if request.finished:
                del self._requests[request.request_id]

    # --- requests ---------------------------------------------------------------------------------------------------

    def process(
        self, prompt: Prompt, params: SamplingParams, request_id: str, processor: InputProcessor | None = None
    ) -> Request:
        """A checked request for `add_request`. Changes nothing: other threads may call it with their own processor."""
        cache = self.config.enable_prefix_caching
        return (processor or self.processor).process(prompt, params, request_id, self.scheduler, cache)

    def input_processor(self, tokenizer) -> InputProcessor:
        vocab = self.model_config.vocab_size
        return InputProcessor(tokenizer, str(self.path), vocab, self.max_model_len, self.eos_token_ids)

    def _new_request_id(self) -> str:
        while True:
            request_id, self._next_request_id = f"request-{self._next_request_id}", self._next_request_id + 1
            if request_id not in self._requests and request_id not in self._undelivered:
                return request_id

    def _submit(self, request: Request) -> None:
        if request.request_id in self._requests or request.request_id in self._undelivered:
            raise ValueError(f"request_id {request.request_id!r} is in use")
        for sample in request.samples:
            sample.seq_id, self._next_seq_id = self._next_seq_id, self._next_seq_id + 1
        leader, *siblings = request.samples
        leader.siblings = list(siblings)
        self.scheduler.add(leader)
        self._requests[request.request_id] = request

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
        update = self.begin_weight_update()
        update.load(source, self.contract)
        return self.commit_weight_update(update, version, recompute_running)

    def begin_weight_update(self) -> WeightUpdate:
        """An update to be loaded in parts, from any thread, while the engine goes on."""
        return WeightUpdate(self._weights)

    def commit_weight_update(
        self, update: WeightUpdate, version: int | None = None, recompute_running: bool = True
    ) -> int:
        """Puts a complete update in force; otherwise as `update_weights`."""
        version = self._check_version(version)
        update.check_complete()
        with deferred_interrupt():
            self._weights.switch(update)
            self.weight_version, self.has_weights, self._weights_path = version, True, update.path
            keep = () if recompute_running else [r for r in self._requests.values() if not r.partly_scored]
            self.scheduler.preempt_all(self._salt(), {s.seq_id for r in keep for s in r.samples})
            for request in self._requests.values():
                if request.partly_scored:
                    request.prompt_scores = []
        return version

    def _check_version(self, version: int | None) -> int:
        if version is None:
            return self.weight_version + 1
        if not (isinstance(version, int) and not isinstance(version, bool) and self.weight_version < version < 2**63):
            raise ValueError(f"version must be an integer above {self.weight_version} and below 2^63, got {version!r}")
        return version

    def reset_prefix_cache(self, reset_running_requests: bool = False) -> None:
        """Forgets all cached prefixes. Running requests keep their KV, unless they are to be reset, too: recomputed."""
        if reset_running_requests:
            self.scheduler.preempt_all(self._salt())
        self.scheduler.blocks.reset_prefix_cache(self._salt())

    def _salt(self) -> bytes:
        return self.weight_version.to_bytes(16, "little")

    # --- memory -----------------------------------------------------------------------------------------------------

    @property
    def ready(self) -> bool:
        """Can it step: has it KV memory and weights?"""
        return self.has_weights and self.has_kv_cache

    @property
    def has_kv_cache(self) -> bool:
        return bool(self._runner.kv_caches)

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
        freed = 0
        if "kv_cache" in tags and self._runner.kv_caches:
            self.reset_prefix_cache(reset_running_requests=True)
            self._runner.kv_caches, freed = [], self.kv_cache_bytes
        if "weights" in tags and self.has_weights:
            self._weights.drop()
            self.has_weights, freed = False, freed + self.weight_bytes
        return freed

    def wake_up(self, tags: Sequence[str] = MEMORY_TAGS) -> None:
        """Takes the memory again. Dropped weights come back from the checkpoint if that is what they were; otherwise
        the engine needs an update before it can `step`."""
        _check_tags(tags)
        if "weights" in tags and not self.has_weights and self._weights_path is not None:
            update = self.begin_weight_update()
            update.load(self._weights_path)
            self._weights.switch(update)
            self.has_weights = True
        if "kv_cache" in tags and not self._runner.kv_caches:
            self._runner.kv_caches = self._runner.new_kv_caches(self._runner.model, self._runner.num_blocks)

    def weight_checksums(self) -> dict[str, str]:
        """A hash of each tensor's bytes, as the engine holds it; tied tensors under their first name."""
        return self._weights.checksums()

    # --- the rest ---------------------------------------------------------------------------------------------------

    def stats(self) -> EngineStats:
        blocks, counters = self.scheduler.blocks, asdict(self.scheduler.stats)
        return EngineStats(
            num_running=len(self.scheduler.running),
            num_waiting=len(self.scheduler.waiting),
            kv_blocks_used=blocks.num_blocks - blocks.num_free,
            kv_blocks_total=blocks.num_blocks,
            kv_cache_bytes=self.kv_cache_bytes,
            generation_tokens=self._generation_tokens,
            step_seconds=self._step_seconds,
            weight_version=self.weight_version,
            **counters,
        )

    def _load_tokenizer(self) -> Any:
        """The model's tokenizer, or None where it has none: token ids still work."""
        files = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")
        if not any((self.path / f).is_file() for f in files):
            return None
        try:
            return AutoTokenizer.from_pretrained(self.path)
        except Exception as error:  # the libraries below raise many kinds
            raise CheckpointError(
                f"the tokenizer in {self.path} does not load ({type(error).__name__}: {error}); "
                "mend it, or use token ids with skip_tokenizer_init=True"
            ) from error

    def _num_blocks(self, block_bytes: int, block_size: int) -> int:
        per_seq = -(-self.max_model_len // block_size)
        if self.config.kv_cache_memory_bytes is not None:
            count = self.config.kv_cache_memory_bytes // block_bytes
            if count < 1:
                raise ValueError(f"kv_cache_memory_bytes is less than one block of {block_bytes} bytes")
            return count
        free = psutil.virtual_memory().available // 4 // block_bytes
        if free < 1:
            raise MemoryError(f"no memory for a single KV block of {block_bytes} bytes")
        return min(free, per_seq * self.config.max_num_seqs)


def _check_tags(tags: Sequence[str]) -> None:
    if unknown := sorted(set(tags) - set(MEMORY_TAGS)):
        raise ValueError(f"unknown memory tags {unknown}; choose from {', '.join(MEMORY_TAGS)}")
