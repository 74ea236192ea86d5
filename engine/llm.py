from __future__ import annotations

import logging
import math
import os
import secrets
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
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
from .model_runner import Draw, ModelRunner
from .outputs import RequestOutput
from .request import Request, Sample, SampledToken
from .sampling_params import SamplingParams
from .weights import Source, WeightLoader

logger = logging.getLogger(__name__)

Prompt = str | Sequence[int] | dict[str, Any]


@dataclass(frozen=True)
class EngineStats:
    """Counters since the start, and the load now. Memory in bytes."""

    num_running: int
    num_waiting: int
    kv_blocks_used: int
    kv_blocks_total: int
    kv_cache_bytes: int
    steps: int
    prompt_tokens_computed: int
    prefix_hit_tokens: int
    generation_tokens: int
    preemptions: int
    step_seconds: float
    weight_version: int


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
        requests = [self._request(p, s, None) for p, s in zip(prompts, each, strict=True)]  # type: ignore[arg-type]
        try:
            with _deferred_interrupt():
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
        tokenizer = self._need_tokenizer("chat")
        text = tokenizer.apply_chat_template(conversation, add_generation_prompt=True, tokenize=False)
        return tokenizer.encode(text, add_special_tokens=False)

    def add_request(self, prompt: Prompt, sampling_params: SamplingParams, request_id: str | None = None) -> str:
        """Queues one request; drive it with `step`. Returns its id. ValueError at once if it can't be served."""
        request = self._request(prompt, sampling_params, request_id)
        self._submit(request)
        return request.request_id

    def step(self) -> list[RequestOutput]:
        """Computes one batch. Returns a snapshot of every request that got a token or ended: streaming."""
        self._step()
        outputs = [r.output(self.tokenizer) for r in self._undelivered.values()]
        self._undelivered.clear()
        return outputs

    def has_unfinished_requests(self) -> bool:
        """Has `step` anything left to compute or to report?"""
        return bool(self._requests or self._undelivered)

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
        with _deferred_interrupt():  # state changes whole steps at a time
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
            request.prompt_logprobs.append(token.logprob)
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

    def _request(self, prompt: Prompt, params: SamplingParams, request_id: str | None) -> Request:
        if not isinstance(params, SamplingParams):
            raise TypeError(f"sampling_params must be SamplingParams, got {type(params).__name__}")
        text, ids = self._token_ids(prompt)
        if not ids:
            raise ValueError("empty prompt: at least one token is needed")
        vocab = self.model_config.vocab_size
        for token in ids:
            if isinstance(token, bool) or not isinstance(token, int):
                raise TypeError(f"prompt token ids must be integers, got {token!r}")
            if not 0 <= token < vocab:
                raise ValueError(f"token id {token} is out of range; the vocabulary has {vocab} entries")
        room = self.max_model_len - len(ids)
        if room < 1:
            raise ValueError(f"prompt of {len(ids)} tokens leaves no room in max_model_len {self.max_model_len}")
        eos = () if params.ignore_eos else self.eos_token_ids
        bad = [t for t in params.stop_token_ids if t >= vocab]
        if bad:
            raise ValueError(f"stop_token_ids {bad} are out of range; the vocabulary has {vocab} entries")
        if params.stop:
            self._need_tokenizer("stop strings")
        if params.min_tokens and len({*eos, *params.stop_token_ids}) == vocab:
            raise ValueError("every token is EOS or a stop token: min_tokens leaves nothing to sample")
        if request_id is None:
            request_id = self._new_request_id()
        elif request_id in self._requests or request_id in self._undelivered:
            raise ValueError(f"request_id {request_id!r} is in use")
        seed = secrets.randbits(64) if params.seed is None else params.seed % 2**64
        request = Request(request_id, text, ids, params, seed, eos)
        max_tokens = min(params.max_tokens or room, room)
        if params.min_tokens > max_tokens:
            raise ValueError(f"min_tokens {params.min_tokens} exceeds the {max_tokens} tokens that there is room for")
        cache = self.config.enable_prefix_caching and not params.prompt_logprobs
        for index in range(params.n):
            request.samples.append(Sample(self._next_seq_id, request, index, max_tokens, cache))
            self._next_seq_id += 1
        self.scheduler.check_fits(request.samples[0])
        return request

    def _new_request_id(self) -> str:
        while True:
            request_id, self._next_request_id = f"request-{self._next_request_id}", self._next_request_id + 1
            if request_id not in self._requests and request_id not in self._undelivered:
                return request_id

    def _submit(self, request: Request) -> None:
        leader, *siblings = request.samples
        leader.siblings = list(siblings)
        self.scheduler.add(leader)
        self._requests[request.request_id] = request

    def _token_ids(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        if isinstance(prompt, dict):
            if set(prompt) not in ({"prompt"}, {"prompt_token_ids"}):
                raise ValueError(f"a prompt dict has the key 'prompt' or 'prompt_token_ids', got {sorted(prompt)}")
            (prompt,) = prompt.values()
        if isinstance(prompt, str):
            return prompt, self._need_tokenizer("string prompts").encode(prompt)
        if hasattr(prompt, "tolist"):
            prompt = prompt.tolist()
        if not isinstance(prompt, list | tuple):
            raise TypeError(f"a prompt is a string, token ids, or a dict of one of them; got {type(prompt).__name__}")
        return None, list(prompt)

    # --- weights ----------------------------------------------------------------------------------------------------

    def update_weights(self, source: Source, version: int | None = None) -> int:
        """Replaces all weights, all or nothing, and returns the new version (by default the old one + 1).

        source: a module from `exact_model` (also under FSDP2; every rank must then iterate its state dict) of the same
        numerics contract, (name, tensor) pairs of any origin, or a checkpoint directory. Tensors are converted to the
        engine's dtype. Running requests go on:
        their KV is recomputed under the new weights, so each token stays exact for the version that sampled it.
        Raises WeightUpdateError or NumericsError and serves the old weights on when anything is wrong with the source.
        """
        if version is None:
            version = self.weight_version + 1
        valid = isinstance(version, int) and not isinstance(version, bool) and self.weight_version < version < 2**63
        if not valid:
            raise ValueError(f"version must be an integer above {self.weight_version} and below 2^63, got {version!r}")
        staged = self._weights.stage(source, self.contract)
        with _deferred_interrupt():
            self._weights.switch(staged)
            self.weight_version = version
            self.scheduler.preempt_all(self._salt())
            for request in self._requests.values():
                request.forget_partial_scores()
        return version

    def reset_prefix_cache(self) -> None:
        """Forgets all cached prefixes; running requests keep their KV."""
        self.scheduler.blocks.reset_prefix_cache(self._salt())

    def _salt(self) -> bytes:
        return self.weight_version.to_bytes(16, "little")

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

    def _need_tokenizer(self, what: str):
        if self.tokenizer is None:
            raise ValueError(f"{what} need a tokenizer, and {self.path} has none; give token ids")
        return self.tokenizer

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


@contextmanager
def _deferred_interrupt() -> Iterator[None]:
    """Holds Ctrl-C back until the block has ended, so that it can't leave half a step behind."""
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield
        return
    pending: list[tuple] = []
    signal.signal(signal.SIGINT, lambda *args: pending.append(args))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if pending:
            before(*pending[0])
