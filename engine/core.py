"""One replica: the scheduler, the workers, and the loop between them. Token ids in, sampled tokens out; no text."""

from __future__ import annotations

import logging
import math
import pathlib
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch

from ..kernels import ops
from ..model.checkpoint import StoredWeights
from ..model.exact import load_config
from ..scheduler import Batch, BlockManager, Scheduler, Speculator
from .config import EngineConfig
from .detokenizer import Tokenizer
from .engine import MEMORY_TAGS, WorkerEngine
from .executor import Executor, StepResult
from .expert_reader import ExpertReader
from .interrupts import deferred_interrupt
from .outputs import EngineStats
from .planner import Planner
from .request import Request, Sample, SampledToken
from .sampler import LogitsRow
from .step_times import measure_step_seconds
from .weights import WeightUpdate, WeightUpdateError, WorkerError, Workers
from .worker import max_model_len

logger = logging.getLogger(__name__)


@dataclass
class Step:
    """A step under way: what it samples and scores, and the tokens that come of it."""

    rows: list[LogitsRow]
    result: StepResult


class EngineCore(WorkerEngine):
    """An `Engine` of one replica.

    executor: its workers. tokenizer: for stop strings; None: requests have none.
    """

    def __init__(
        self, path: pathlib.Path, config: EngineConfig, executor: Executor, tokenizer: Tokenizer | None = None
    ):
        super().__init__()
        self.path = path
        self.config = config
        self.executor = executor
        self.tokenizer = tokenizer
        self.set_models([executor.info])
        self.max_model_len = max_model_len(path, config)
        self.stored: StoredWeights | None = StoredWeights.at(path)  # where the weights in force can be read again
        device = torch.device(config.device or "cpu")
        blocks = BlockManager(executor.info.num_blocks, ops.backend(device).BLOCK)
        blocks.reset_prefix_cache(self._salt())
        self.capacity = blocks.num_blocks * blocks.block_size
        model_config = load_config(path)
        self.planner = Planner(model_config, device)
        speculator = None
        if config.speculation is not None:
            most = min(blocks.num_blocks, config.max_num_seqs)
            seconds = measure_step_seconds(executor, self.planner, most, config.max_num_batched_tokens)
            speculator = Speculator(config.speculation, model_config.vocab_size, seconds, config.overlaps)
        self.scheduler = Scheduler(
            blocks, config.max_num_seqs, config.max_num_batched_tokens, config.num_batches, config.overlaps, speculator
        )
        self._steps: deque[Step] = deque()  # under way, oldest first
        self._max_steps = 2 if config.overlaps else config.num_batches
        self._next_seq_id = 0
        self._generation_tokens = 0
        self._step_seconds = 0.0
        self._model_seconds = 0.0  # of these, as `measure_step_seconds` counts them
        self.expert_reader = ExpertReader(executor, blocks.block_size)

    # --- requests ---------------------------------------------------------------------------------------------------

    def check_fits(self, request: Request) -> None:
        """Raise ValueError where the KV cache could never hold one of the request's samples."""
        request.samples[0].check_fits(self.capacity)

    def add_request(self, request: Request) -> None:
        """Queue a request. Its first sample computes the prompt; the others start from that one's KV."""
        for sample in request.samples:
            sample.seq_id = self._next_seq_id
            sample.call = request.call or request.request_id
            self._next_seq_id += 1
        request.num_scores_due = len(request.prompt_scores)
        unfinished = [s for s in request.samples if s.finish_reason is None]
        for sample in unfinished:
            sample.begin_constraint(self.tokenizer)
        if not any(s.sampled for s in unfinished):  # else it comes from another replica
            unfinished[0].siblings = [*unfinished[1:]]
            del unfinished[1:]
        for sample in unfinished:
            self.scheduler.add(sample)
        self.requests[request.request_id] = request

    def abort_request(self, request_id: str) -> bool:
        """End a request with finish_reason "abort". False if there is none of this id."""
        request = self.requests.get(request_id)
        if request is not None:
            self._end(request, "abort")
        return request is not None

    def _end(self, request: Request, reason: str, detail: str | None = None) -> None:
        """End all samples of a request that are still unfinished."""
        unstarted = {s.seq_id for sample in request.samples for s in sample.siblings}
        for sample in request.samples:
            sample.siblings = []
        for sample in request.finish(reason, detail):
            self.expert_reader.note_end(sample)
            if sample.seq_id not in unstarted:
                self.scheduler.finish(sample)
        del self.requests[request.request_id]
        self.outbox[request.request_id] = request
        if self.failure is None:  # else nobody can read them
            self.expert_reader.read(step.result for step in self._steps)

    # --- steps ------------------------------------------------------------------------------------------------------

    def step(self) -> None:
        """Submit as many steps as may be under way, then take the oldest one's tokens."""
        start = time.perf_counter()
        model_seconds = self._model_seconds
        if self.failure is not None:
            raise WorkerError(f"the engine is broken ({self.failure}); make a new one")
        if not self.ready:
            raise RuntimeError("the engine sleeps; call wake_up first, and update_weights where they were dropped")
        with deferred_interrupt():  # state changes whole steps at a time
            while len(self._steps) < self._max_steps and self._submit():
                pass
            if self._steps:
                self._collect()
            seconds = time.perf_counter() - start
            self._step_seconds += seconds
            if self.scheduler.speculator is not None and self._max_steps == 1:  # or others compute meanwhile
                self.scheduler.speculator.note_driver(seconds - (self._model_seconds - model_seconds))

    def _submit(self) -> bool:
        """Schedule and start a step. False if there is nothing to compute now."""
        batch = self.scheduler.schedule()
        if not batch.sequences:
            return False
        start = time.perf_counter()
        plan, rows = self.planner.plan(batch, self.scheduler.blocks.copies)
        try:
            result = self.executor.submit(plan)
            self._model_seconds += time.perf_counter() - start
        except BaseException as error:
            if not self.executor.is_local:  # other stages have the plan, and would pair it with the next hidden states
                self.failure = f"{type(error).__name__}: {error}"
            elif isinstance(error, torch.OutOfMemoryError):
                self._shrink(batch, error)
                return self.scheduler.has_work
            raise
        self.scheduler.postprocess(batch)
        for i, row in enumerate(rows):
            if row.target >= 0:
                row.sample.request.num_scores_due += 1
            elif row.draft is None:
                row.sample.num_pending += 1
                row.sample.pending_row = i
        self._steps.append(Step(rows, result))
        return True

    def _shrink(self, batch: Batch, error: Exception) -> None:
        """Go on with smaller steps after one that ran out of memory; where none can be, end its request."""
        torch.cuda.empty_cache()
        if self.scheduler.shrink(batch):
            logger.warning(
                "out of memory; from now on at most %d sequences and %d tokens per step",
                self.scheduler.max_num_seqs,
                self.scheduler.max_num_batched_tokens,
            )
        else:
            sample = batch.sequences[0]
            assert isinstance(sample, Sample)
            self._end(sample.request, "error", f"out of memory: {error}")

    def _collect(self) -> None:
        step = self._steps.popleft()
        start = time.perf_counter()
        try:
            tokens = step.result.wait()
            self._model_seconds += time.perf_counter() - start
        except Exception as error:
            self.failure = f"{type(error).__name__}: {error}"
            raise
        for row, token in zip(step.rows, tokens, strict=True):
            self._receive(row, token)
        self.expert_reader.read()

    def drain(self) -> None:
        """Take the tokens of all steps under way."""
        while self._steps:
            self._collect()

    def _receive(self, row: LogitsRow, token: SampledToken) -> None:
        """Give a token to its sample. What is wrong with a request ends that request alone."""
        sample = row.sample
        request = sample.request
        if row.target < 0 and row.draft is None:
            sample.num_pending -= 1
        if row.draft is not None:
            if row.position != len(sample.token_ids) or sample.token_ids[-1] != row.draft:
                return
            self.scheduler.accept(sample)
        if sample.finish_reason is not None:  # it was aborted, or ended by an earlier result of this step
            return
        if math.isnan(token.logprob):
            self._fail(request, "non-finite logits; check the weights")
            return
        if row.target >= 0:
            request.prompt_scores.append(token)
            return
        if self.expert_reader.lacks_rows(sample):  # it is sampled again, the same, when all before it is recomputed
            return
        sample.append(token, self.weight_version, row.stale_kv)
        self._generation_tokens += 1
        try:
            request.check_stop(sample, self.tokenizer)
        except Exception as error:  # e.g. the tokenizer's
            self._fail(request, f"{type(error).__name__}: {error}")
            return
        self.outbox[request.request_id] = request
        if sample.finish_reason is not None:
            self.expert_reader.note_end(sample)
            self.scheduler.finish(sample)
            if request.finished:
                del self.requests[request.request_id]

    def _fail(self, request: Request, problem: str) -> None:
        logger.warning("request %s ends with an error: %s", request.request_id, problem)
        self._end(request, "error", problem)

    # --- weights ----------------------------------------------------------------------------------------------------

    @property
    def workers(self) -> Workers:
        """The executor's workers."""
        return self.executor

    def begin_weight_update(self) -> WeightUpdate:
        """Open an update of this replica's workers and return it."""
        return WeightUpdate(self.executor, self.table, self.path)

    def commit_weight_update(self, update: WeightUpdate, version: int, recompute_running: bool = True) -> None:
        """Put a complete update in force in all workers."""
        update.prepare()
        stored = update.stored if update.brings_base else self.stored  # the adapter stays in memory
        self.switch_weights(update.id, version, recompute_running, stored)
        update.close()

    def switch_weights(
        self, update_id: str, version: int, recompute_running: bool, stored: StoredWeights | None
    ) -> None:
        """Put an update in force that all workers have prepared. stored: where its weights can be read again."""
        with deferred_interrupt():
            self.drain()
            try:
                self.executor.collective_rpc("commit_update", update_id)
            except Exception as error:
                if not self.executor.is_local:  # some stages have new weights, and others old ones
                    self.failure = f"{type(error).__name__}: {error}"
                raise
            self.weight_version = version
            self.has_weights = True
            self.stored = stored
            self._invalidate_kv(recompute_running)

    def _invalidate_kv(self, recompute_running: bool) -> None:
        """Recompute what older weights computed, but the KV of requests that keep theirs."""
        kept = []
        if not recompute_running:
            kept = [r for r in self.requests.values() if not r.partly_scored]
        self.scheduler.preempt_all(self._salt(), {s.seq_id for r in kept for s in r.samples})
        for request in self.requests.values():
            if request.partly_scored:
                request.prompt_scores = []
                request.num_scores_due = 0

    def assume_version(self, version: int, stored: StoredWeights | None) -> None:
        """Name the weights that are to come to an engine that has none."""
        self.executor.collective_rpc("forget_adapter")
        self.weight_version = version
        self.stored = stored
        self.reset_prefix_cache()

    def weight_checksums(self) -> dict[str, str]:
        """A hash of each tensor's bytes, by name."""
        found: dict[str, str] = {}
        for hashes in self.executor.collective_rpc("weight_checksums", timeout=self.config.start_timeout):
            found |= hashes
        return found

    # --- memory -----------------------------------------------------------------------------------------------------

    def reset_prefix_cache(self, reset_running_requests: bool = False) -> None:
        """Forget all cached prefixes; recompute the running requests' KV, too, where that is asked for."""
        if reset_running_requests:
            self.drain()
            self.scheduler.preempt_all(self._salt())
        self.scheduler.blocks.reset_prefix_cache(self._salt())

    def _salt(self) -> bytes:
        return self.weight_version.to_bytes(16, "little")

    def release_memory(self, tags: Sequence[str] = MEMORY_TAGS) -> int:
        """Free what the tags name and return the bytes freed."""
        freed = 0
        if "kv_cache" in tags and self.has_kv_cache:
            self.reset_prefix_cache(reset_running_requests=True)
            self.executor.collective_rpc("free_kv_cache")
            self.has_kv_cache = False
            freed += self.kv_cache_bytes
        if "weights" in tags and self.has_weights:
            self.drain()
            self.executor.collective_rpc("drop_weights")
            self.has_weights = False
            freed += self.weight_bytes
        return freed

    def wake_up(self, tags: Sequence[str] = MEMORY_TAGS) -> None:
        """Take the memory again, and read dropped weights where they were read before."""
        if "weights" in tags and not self.has_weights and self.stored is not None:
            self._reload(self.stored)
        if "kv_cache" in tags and not self.has_kv_cache:
            self.executor.collective_rpc("take_kv_cache")
            self.has_kv_cache = True

    def _reload(self, stored: StoredWeights) -> None:
        with self.begin_weight_update() as update:
            if stored.unchanged:
                update.load(stored.path)
            if update.stored != stored:
                raise WeightUpdateError(
                    f"the files in {stored.path} have changed since weight version {self.weight_version} was read from "
                    "them; update the weights to wake up"
                )
            self.commit_weight_update(update, self.weight_version)

    def stats(self) -> EngineStats:
        """Counters since the start, and the load now."""
        blocks = self.scheduler.blocks
        return EngineStats(
            num_running=len(self.scheduler.running),
            num_waiting=self.scheduler.num_waiting,
            kv_blocks_used=blocks.num_blocks - blocks.num_free,
            kv_blocks_total=blocks.num_blocks,
            kv_cache_bytes=self.kv_cache_bytes,
            generation_tokens=self._generation_tokens,
            step_seconds=self._step_seconds,
            weight_version=self.weight_version,
            **asdict(self.scheduler.stats),
        )
