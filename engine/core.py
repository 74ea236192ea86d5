"""One replica: the scheduler, the stages, and the loop between them. Token ids in, sampled tokens out; no text."""

from __future__ import annotations

import functools
import logging
import math
import pathlib
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch

from ..kernels import ops
from ..model.checkpoint import StoredWeights
from ..model.exact import load_config
from ..scheduler import Batch, BlockManager, Scheduler
from .config import EngineConfig
from .distributed.fan_out import FanOut, FanOutUpdate
from .distributed.worker import WorkerError
from .interrupts import deferred_interrupt
from .model_runner import Draw, Planner
from .outputs import EngineStats
from .pipeline import Pipeline
from .request import Request, Sample, SampledToken
from .weights import WeightUpdate, WeightUpdateError

logger = logging.getLogger(__name__)

MEMORY_TAGS = ("weights", "kv_cache")


class EngineCore:
    """Runs requests. Everything that may fail of one request ends that request alone.

    tokenizer: for stop strings. placement: where Ray puts the stages. sharers: as `Pipeline`'s.
    """

    def __init__(self, path: pathlib.Path, config: EngineConfig, placement: Any = None, sharers: int | None = None):
        self.path, self.config = path, config
        self.tokenizer: Any = None
        self.max_model_len = max_model_len(path, config)
        device = torch.device(config.device or "cpu")
        block_size = ops.backend(device).BLOCK
        most = -(-self.max_model_len // block_size) * config.max_num_seqs
        self.pipeline = Pipeline(path, config, most, placement, sharers)
        self.contract, self.eos_token_ids = self.pipeline.contract, self.pipeline.eos_token_ids
        self.table = self.pipeline.table
        self.weight_bytes, self.kv_cache_bytes = self.pipeline.weight_bytes, self.pipeline.kv_cache_bytes
        self.planner = Planner(self.pipeline.model_config, device)
        self.weight_version = 0
        self.has_weights = self.has_kv_cache = True
        self.stored: StoredWeights | None = StoredWeights.at(path)  # where the weights in force can be read again
        blocks = BlockManager(self.pipeline.num_blocks, block_size)
        blocks.reset_prefix_cache(self._salt())
        self._depth = 2 if config.overlaps else config.num_batches
        limits = config.max_num_seqs, config.max_num_batched_tokens, config.num_batches
        self.scheduler = Scheduler(blocks, *limits, config.overlaps)
        self.requests: dict[str, Request] = {}
        self.failure: str | None = None
        self.paused = False  # heeded by who steps the engine
        for peer in self.pipeline.remote:
            peer.on_lost = functools.partial(self._lose, peer.name)
        self._progressed: dict[str, Request] = {}
        self._flights: deque[list[Draw]] = deque()
        self._next_seq_id = 0
        self._generation_tokens = 0
        self._step_seconds = 0.0

    @property
    def capacity(self) -> int:
        """Tokens that the KV cache holds."""
        return self.scheduler.blocks.num_blocks * self.scheduler.blocks.block_size

    @property
    def runner(self):
        """The model of the first stage, here."""
        return self.pipeline.first.runner

    @property
    def world_size(self) -> int:
        """Ranks that the engine takes in a weight group."""
        return self.config.pipeline_parallel_size

    def _lose(self, name: str) -> None:
        self.failure = self.failure or f"{name} died"

    def pause(self, paused: bool) -> None:
        self.paused = paused

    def wake(self) -> None:
        """Of no effect: its steps wait for no news."""

    # --- requests ---------------------------------------------------------------------------------------------------

    def check_fits(self, request: Request) -> None:
        request.samples[0].check_fits(self.capacity)

    def submit(self, request: Request) -> None:
        """Starts a request; one that has tokens already goes on from them."""
        for sample in request.samples:
            sample.seq_id, self._next_seq_id = self._next_seq_id, self._next_seq_id + 1
        request.num_scores_due = len(request.prompt_scores)
        todo = [s for s in request.samples if s.finish_reason is None]
        leader, *siblings = todo
        if not any(s.sampled for s in todo):
            leader.siblings, todo = list(siblings), [leader]
        for sample in todo:
            self.scheduler.add(sample)
        self.requests[request.request_id] = request

    def end(self, request: Request, reason: str, detail: str | None = None) -> None:
        """Ends all samples of a request that are still unfinished."""
        unstarted = {s.seq_id for sample in request.samples for s in sample.siblings}
        for sample in request.samples:
            sample.siblings = []
        for sample in request.samples:
            if sample.finish_reason is None:
                sample.finish_reason, sample.stop_reason = reason, detail
                if sample.seq_id not in unstarted:
                    self.scheduler.finish(sample)
        del self.requests[request.request_id]
        self._progressed[request.request_id] = request

    def take_progress(self) -> list[Request]:
        """The requests that got a token or ended since the last call."""
        progressed, self._progressed = self._progressed, {}
        return list(progressed.values())

    # --- steps ------------------------------------------------------------------------------------------------------

    @property
    def ready(self) -> bool:
        """Can it step: has it KV memory and weights?"""
        return self.has_weights and self.has_kv_cache and self.failure is None

    def step(self) -> None:
        """Starts as many steps as may be under way, and takes the oldest one's tokens."""
        start = time.perf_counter()
        if self.failure is not None:
            raise WorkerError(f"the pipeline is broken ({self.failure}); make a new engine")
        if not self.ready:
            raise RuntimeError("the engine sleeps; call wake_up first, and update_weights where they were dropped")
        with deferred_interrupt():  # state changes whole steps at a time
            while len(self._flights) < self._depth and self._submit_step():
                pass
            if self._flights:
                self._collect()
            self._step_seconds += time.perf_counter() - start

    def _submit_step(self) -> bool:
        batch = self.scheduler.schedule()
        if not batch.sequences:
            return False
        plan, draws = self.planner.plan(batch, self.scheduler.block_copies)
        try:
            self.pipeline.submit(plan)
        except torch.OutOfMemoryError as error:
            if self.pipeline.remote:
                self.failure = f"a stage ran out of memory: {error}"
                raise
            self._make_do(batch, error)
            return self.scheduler.has_work
        except BaseException as error:
            if self.pipeline.remote:  # other stages have the plan, and would pair it with the next one's hidden states
                self.failure = f"{type(error).__name__}: {error}"
            raise
        self.scheduler.block_copies.clear()
        self.scheduler.advance(batch)
        for seq in batch.sequences:
            if seq.num_cached_tokens == seq.num_tokens:  # its next token is in the results
                self.scheduler.fork(seq)
        for i, draw in enumerate(draws):
            if draw.target < 0:
                draw.sample.num_pending, draw.sample.pending_draw = draw.sample.num_pending + 1, i
            else:
                draw.sample.request.num_scores_due += 1
        self._flights.append(draws)
        return True

    def _make_do(self, batch: Batch, error: Exception) -> None:
        """After a step that ran out of memory: smaller ones from now on; where none can be, the request ends."""
        torch.cuda.empty_cache()
        sequences, tokens, scheduler = batch.sequences, batch.num_tokens, self.scheduler
        for seq in sequences:
            seq.num_scheduled_tokens = 0
        if tokens > len(sequences):
            scheduler.max_num_batched_tokens = max(len(sequences), tokens // 2)
        elif len(sequences) > 1:
            scheduler.max_num_seqs = len(sequences) // 2
            while len(scheduler.running) > scheduler.max_num_seqs:
                scheduler.preempt_newest()
        else:
            sample = sequences[0]
            assert isinstance(sample, Sample)
            self.end(sample.request, "error", f"out of memory: {error}")
            return
        limits = scheduler.max_num_seqs, scheduler.max_num_batched_tokens
        logger.warning("out of memory; from now on at most %d sequences and %d tokens a step", *limits)

    def _collect(self) -> None:
        draws = self._flights.popleft()
        try:
            tokens = self.pipeline.collect()
        except Exception as error:
            self.failure = f"{type(error).__name__}: {error}"
            raise
        for draw, token in zip(draws, tokens, strict=True):
            self._receive(draw, token)

    def drain(self) -> None:
        """Takes the tokens of all steps under way."""
        while self._flights:
            self._collect()

    def _receive(self, draw: Draw, token: SampledToken) -> None:
        """One result of a step. What is wrong with a request ends that request alone."""
        sample, request = draw.sample, draw.sample.request
        if draw.target < 0:
            sample.num_pending -= 1
        if sample.finish_reason is not None:  # it was aborted, or failed on an earlier result of this step
            return
        problem = "non-finite logits; check the weights" if math.isnan(token.logprob) else None
        if problem is None and draw.target >= 0:
            request.prompt_scores.append(token)
            return
        if problem is None:
            sample.append(token, self.weight_version, draw.stale_kv)
            self._generation_tokens += 1
            try:
                request.check_stop(sample, self.tokenizer)
            except Exception as error:  # e.g. the tokenizer's
                problem = f"{type(error).__name__}: {error}"
        if problem is not None:
            logger.warning("request %s ends with an error: %s", request.request_id, problem)
            self.end(request, "error", problem)
            return
        self._progressed[request.request_id] = request
        if sample.finish_reason is not None:
            self.scheduler.finish(sample)
            if request.finished:
                del self.requests[request.request_id]

    # --- weights ----------------------------------------------------------------------------------------------------

    def begin_weight_update(self) -> WeightUpdate | FanOutUpdate:
        if len(self.pipeline.stages.members) == 1:
            self.pipeline.first.begin_update()
            return self.pipeline.first.update
        return FanOutUpdate(self.pipeline.stages, self.table)

    def commit_weight_update(self, update: WeightUpdate | FanOutUpdate, version: int, recompute_running: bool) -> None:
        update.check_complete()
        with deferred_interrupt():
            self.drain()
            if isinstance(update, WeightUpdate):
                self.pipeline.first.loader.switch(update)
            else:
                try:
                    self.pipeline.stages.all("commit_update")
                except Exception as error:  # half of the stages have new weights
                    self.failure = f"{type(error).__name__}: {error}"
                    raise
            self.weight_version, self.has_weights, self.stored = version, True, update.stored
            keep = () if recompute_running else [r for r in self.requests.values() if not r.partly_scored]
            self.scheduler.preempt_all(self._salt(), {s.seq_id for r in keep for s in r.samples})
            for request in self.requests.values():
                if request.partly_scored:
                    request.prompt_scores, request.num_scores_due = [], 0

    def adopt(self, version: int, stored: StoredWeights | None) -> None:
        """Names the weights that are to come, while there are none."""
        self.weight_version, self.stored = version, stored
        self.reset_prefix_cache()

    settled = True  # nothing has to come up before an update can begin

    def members(self) -> FanOut:
        """Who takes part in a weight group."""
        return self.pipeline.stages

    def leave_weight_group(self, name: str) -> bool:
        return self.pipeline.stages.leave(name)

    def has_weight_group(self, name: str) -> bool:
        own = [s.groups.get(name) for s in self.pipeline.local]
        return name in self.pipeline.stages.group_names and all(g is not None and g.usable for g in own)

    def weight_checksums(self) -> dict[str, str]:
        found: dict[str, str] = {}
        for hashes in self.pipeline.stages.all("checksums", timeout=self.config.start_timeout):
            found |= hashes
        return found

    # --- memory -----------------------------------------------------------------------------------------------------

    def reset_prefix_cache(self, reset_running_requests: bool = False) -> None:
        if reset_running_requests:
            self.drain()
            self.scheduler.preempt_all(self._salt())
        self.scheduler.blocks.reset_prefix_cache(self._salt())

    def _salt(self) -> bytes:
        return self.weight_version.to_bytes(16, "little")

    def release_memory(self, tags: Sequence[str]) -> int:
        freed = 0
        if "kv_cache" in tags and self.has_kv_cache:
            self.reset_prefix_cache(reset_running_requests=True)
            self.pipeline.stages.all("free_kv_cache")
            self.has_kv_cache, freed = False, self.kv_cache_bytes
        if "weights" in tags and self.has_weights:
            self.drain()
            self.pipeline.stages.all("drop_weights")
            self.has_weights, freed = False, freed + self.weight_bytes
        return freed

    def _check_stored(self, stored: StoredWeights) -> None:
        if not stored.unchanged:
            raise WeightUpdateError(
                f"the files in {stored.path} have changed since weight version {self.weight_version} was read from "
                "them; update the weights to wake up"
            )

    def wake_up(self, tags: Sequence[str]) -> None:
        if "weights" in tags and not self.has_weights and self.stored is not None:
            self._check_stored(self.stored)
            stages, limit = self.pipeline.stages, self.config.start_timeout
            stages.all("begin_update")
            stages.all("load_update", str(self.stored.path), timeout=limit)
            self._check_stored(self.stored)
            stages.all("commit_update")
            self.has_weights = True
        if "kv_cache" in tags and not self.has_kv_cache:
            self.pipeline.stages.all("take_kv_cache")
            self.has_kv_cache = True

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

    def close(self) -> None:
        """Ends the processes of other stages."""
        self.pipeline.close()


def max_model_len(path: pathlib.Path, config: EngineConfig) -> int:
    """Most tokens of a sequence; ValueError where the setting exceeds the model's positions."""
    limit = load_config(path).max_position_embeddings
    if (config.max_model_len or 0) > limit:
        raise ValueError(f"max_model_len {config.max_model_len} exceeds the model's {limit} positions")
    return config.max_model_len or limit
