"""One step: packs the scheduled tokens into [1, T], calls HF's forward, and draws the next tokens."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..kernels import ops
from ..model import attention
from ..model.exact import LMHead
from ..model.rollout import fuse, pack_weights
from ..scheduler import Batch
from .cuda_graphs import StepGraphs
from .request import Sample, SampledToken

LOGIT_ROWS = 256  # rows of fp32 logits in memory at a time


@dataclass
class Draw:
    """One token to sample, or (target >= 0) to score, from row `row` of the logits."""

    sample: Sample
    row: int
    target: int = -1
    stale_kv: bool = False


@dataclass
class Plan:
    """One step as the model sees it: arrays, no sequences, so that it can travel to other processes.

    token_ids int64 [T], where -1 - i is what draw i of the step before this one gives; block_copies: KV blocks (source,
    destination) to copy first; rows: of the T, those that give logits. Of each draw: index int64, its place in rows;
    targets int64, the token to score or -1; seeds uint64, sample_indices int64, positions int64: the random number's
    counters; top: how many alternatives to report (-1: not even the rank); raw: report the log-prob before temperature
    and filters, too.
    """

    token_ids: np.ndarray
    layout: ops.PagedLayout
    block_copies: list[tuple[int, int]]
    rows: list[int]
    index: np.ndarray
    targets: np.ndarray
    seeds: np.ndarray
    sample_indices: np.ndarray
    positions: np.ndarray
    params: ops.RowParams
    top: list[int]
    raw: list[bool]


class Planner:
    """Makes a step's `Plan` of the scheduler's batch. Reads sequences, never changes them."""

    def __init__(self, config, device: torch.device):
        self.kernels = ops.backend(device)
        self.group = config.num_attention_heads // config.num_key_value_heads

    def plan(self, batch: Batch, block_copies: list[tuple[int, int]]) -> tuple[Plan, list[Draw]]:
        """The plan, and whom its results belong to."""
        draws, rows = self._draws(batch)
        requests = [d.sample.request for d in draws]
        settings = [r.params for r in requests]
        params = ops.RowParams(
            np.array([p.temperature for p in settings], np.float64),
            np.array([p.top_k for p in settings], np.int64),
            np.array([p.top_p for p in settings], np.float64),
            np.array([p.min_p for p in settings], np.float64),
            [_banned(d) for d in draws],
        )
        counts = [p.logprobs if d.target < 0 else p.prompt_logprobs for p, d in zip(settings, draws, strict=True)]
        plan = Plan(
            token_ids=np.array([t for s in batch.sequences for t in s.scheduled_token_ids], np.int64),
            layout=self._layout(batch),
            block_copies=list(block_copies),
            rows=rows,
            index=np.array([d.row for d in draws], np.int64),
            targets=np.array([d.target for d in draws], np.int64),
            seeds=np.array([r.seed for r in requests], np.uint64),
            sample_indices=np.array([d.sample.sample_index for d in draws], np.int64),
            positions=np.array([d.sample.num_tokens for d in draws], np.int64),
            params=params,
            top=[-1 if c is None else c for c in counts],
            raw=[p.raw_logprobs for p in settings],
        )
        return plan, draws

    def _layout(self, batch: Batch) -> ops.PagedLayout:
        size = self.kernels.BLOCK
        lengths = [s.num_scheduled_tokens for s in batch.sequences]
        positions = np.concatenate([
            np.arange(s.num_cached_tokens, s.num_cached_tokens + n, dtype=np.int32)
            for s, n in zip(batch.sequences, lengths, strict=True)
        ])  # fmt: skip
        sizes = [len(s.block_table) for s in batch.sequences]
        tables = np.fromiter((b for s in batch.sequences for b in s.block_table), np.int32, sum(sizes))
        starts = np.concatenate(([0], np.cumsum(sizes)[:-1])).astype(np.int32)
        blocks = tables[np.repeat(starts, lengths) + positions // size]
        slot_mapping = blocks * np.int32(size) + positions % size
        items = self.kernels.work_items(lengths, self.group)
        return ops.PagedLayout(lengths, positions, slot_mapping, tables, starts, items)

    def _draws(self, batch: Batch) -> tuple[list[Draw], list[int]]:
        """What to sample and score, and the rows of the hidden states that the draws' `row` counts."""
        draws: list[Draw] = []
        rows: list[int] = []
        first = 0
        for seq in batch.sequences:
            assert isinstance(seq, Sample)
            start, count = seq.num_cached_tokens, seq.num_scheduled_tokens
            if seq.request.params.prompt_logprobs is not None and seq.sample_index == 0:
                done = seq.request.num_scores_due  # recompute after preemption scores nothing twice
                for position in range(max(start, done), min(start + count, seq.num_prompt_tokens - 1)):
                    draws.append(Draw(seq, len(rows), seq.token_ids[position + 1]))
                    rows.append(first + position - start)
            if seq.samples_now:
                draws += [Draw(s, len(rows), -1, seq.stale_kv) for s in (seq, *seq.siblings)]  # type: ignore[arg-type]
                rows.append(first + count - 1)
            first += count
        return draws, rows


def _banned(draw: Draw) -> list[int]:
    request = draw.sample.request
    early = draw.target < 0 and draw.sample.num_tokens - draw.sample.num_prompt_tokens < request.params.min_tokens
    return request.terminal_ids if early else []


class Drawn:
    """The results of a step's sampling and scoring, on their way from the device: nobody waits for it but `wait`.

    numbers f64 [draws, 2 to 4]: token id, log-prob and, if a draw asks for it, the log-prob before temperature and
    filters, and the rank. best: the alternatives' ids and log-probs of a draw that asks for them.
    """

    def __init__(self, numbers: Tensor, best: dict[int, tuple[Tensor, ...]]):
        self._numbers = numbers.to("cpu", non_blocking=True)
        self._best = {i: [t.to("cpu", non_blocking=True) for t in found] for i, found in best.items()}
        self._copied = torch.cuda.Event() if numbers.device.type == "cuda" else None
        if self._copied is not None:
            self._copied.record(torch.cuda.current_stream(numbers.device))

    def wait(self) -> list[SampledToken]:
        """log-probs are NaN where the logits aren't finite."""
        if self._copied is not None:
            self._copied.synchronize()
        rows = self._numbers.tolist()
        tokens = [SampledToken(int(t), logprob, *raw[:1], *map(int, raw[1:])) for t, logprob, *raw in rows]
        for i, alternatives in self._best.items():
            tokens[i].top_logprobs = dict(zip(*(t.tolist() for t in alternatives), strict=True))
        return tokens


class ModelRunner:
    """A model, or a pipeline stage's slice of one, with the KV cache of its layers.

    graph_limits: max_num_seqs, max_num_batched_tokens and max_model_len, for CUDA graphs; None: no graphs.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        num_blocks: int,
        graph_limits: tuple[int, int, int] | None = None,
    ):
        self.model = model
        model.set_attn_implementation(attention.NAME)  # a paged cache has no other
        self.num_blocks = num_blocks
        self.kv_caches = self.new_kv_caches(model, num_blocks)
        pack_weights(model)
        fuse(model)
        self._drawn = torch.empty(0, 2)  # by the last step
        self.graphs: StepGraphs | None = None
        if graph_limits is not None:
            group = model.config.num_attention_heads // model.config.num_key_value_heads
            self.graphs = StepGraphs(self._forward, model.device, group, *graph_limits)

    @property
    def head(self) -> LMHead | None:
        """None on all stages but the last."""
        return self.model.get_output_embeddings()

    @staticmethod
    def new_kv_caches(model: PreTrainedModel, num_blocks: int) -> list[tuple[Tensor, Tensor]]:
        """One (k, v) pair a layer."""
        config = model.config
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        shape = num_blocks, config.num_key_value_heads, head_dim
        new = ops.backend(model.device).new_kv_cache
        return [new(*shape, model.dtype, model.device) for _ in range(config.num_hidden_layers)]

    @staticmethod
    def block_bytes(model: PreTrainedModel) -> int:
        """Bytes of one KV block over all layers."""
        return sum(cache.nbytes for pair in ModelRunner.new_kv_caches(model, 1) for cache in pair)

    def free_kv_cache(self) -> None:
        """Give the KV cache's memory back."""
        self.kv_caches = []
        self.release()

    def take_kv_cache(self) -> None:
        """Allocate the KV cache anew, empty."""
        self.kv_caches = self.new_kv_caches(self.model, self.num_blocks)

    def release(self) -> None:
        """Gives what is free back to the device; graphs go, since their KV blocks or weights did."""
        if self.graphs is not None:
            self.graphs.clear()
        if self.model.device.type == "cuda":
            torch.cuda.empty_cache()

    def copy_blocks(self, copies: list[tuple[int, int]]) -> None:
        """Copies whole KV blocks, source to destination, in every layer."""
        if copies:
            source, destination = ops.to_device(np.array(copies, np.int64), self.model.device).unbind(1)
            for caches in self.kv_caches:
                for cache in caches:
                    cache[destination] = cache[source]

    @torch.inference_mode()
    def run(self, plan: Plan, hidden: Tensor | None = None) -> Tensor | Drawn:
        """Computes the plan's KV. Returns the tokens that it samples and scores, or [T, hidden] for the next stage.

        hidden: what the stage before this one returned, if there is one.
        """
        self.copy_blocks(plan.block_copies)
        given = self._token_ids(plan) if hidden is None else hidden
        if self.graphs is not None and self.graphs.fits(plan.layout):
            hidden = self.graphs.run(plan.layout, given)
            if self.head is None:  # sent while the next step runs
                hidden = hidden.clone()
        else:
            hidden = self._forward(given, plan.layout)
        if self.head is None:
            return hidden
        numbers: list[Tensor] = []
        best: dict[int, tuple[Tensor, ...]] = {}
        for start in range(0, len(plan.index), LOGIT_ROWS):
            part = slice(start, start + LOGIT_ROWS)
            first, last = plan.index[part][[0, -1]]
            rows = ops.to_device(np.array(plan.rows[first : last + 1], np.int64), hidden.device)
            numbers.append(self._sample(self.head(hidden[rows]), plan, part, first, best))
        self._drawn = torch.cat(numbers) if numbers else hidden.new_empty((0, 2), dtype=torch.float64)
        return Drawn(self._drawn, best)

    def _token_ids(self, plan: Plan) -> Tensor:
        ids = ops.to_device(plan.token_ids, self.model.device)
        if plan.token_ids.min() < 0:  # drawn by the step before, which may still run
            ids = torch.where(ids < 0, self._drawn[(-1 - ids).clamp_(min=0), 0].long(), ids)
        return ids

    def _forward(self, given: Tensor, layout: ops.PagedLayout) -> Tensor:
        """Token ids [T], or hidden states [T, hidden], to hidden states."""
        name = "inputs_embeds" if given.is_floating_point() else "input_ids"
        positions = layout.on(self.model.device).positions.long()[None]
        return self.model.base_model(
            **{name: given[None]}, position_ids=positions, use_cache=False, layout=layout, kv_caches=self.kv_caches
        ).last_hidden_state[0]

    @staticmethod
    def peak_bytes(model: PreTrainedModel, tokens: int) -> int:
        """Memory that a step of so many tokens takes beside weights and KV, on a GPU: measured."""
        device, config = model.device, model.config
        most = config.max_position_embeddings
        lengths = [most] * (tokens // most) + [tokens % most] * (tokens % most > 0)
        layout = ops.packed_layout(lengths, config.num_attention_heads // config.num_key_value_heads, device)
        name, first = "inputs_embeds", torch.zeros(1, tokens, config.hidden_size, dtype=model.dtype, device=device)
        if model.get_input_embeddings() is not None:
            name, first = "input_ids", torch.zeros(1, tokens, dtype=torch.long, device=device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        with torch.inference_mode():
            positions = layout.on(device).positions.long()[None]
            out = model.base_model(**{name: first}, position_ids=positions, use_cache=False, layout=layout)
            head = model.get_output_embeddings()
            if head is not None:
                logits = head(out.last_hidden_state[0, :LOGIT_ROWS])
                ops.sample(logits, ops.RowParams.repeat(len(logits)), torch.full((len(logits),), -1, device=device))
        peak = torch.cuda.max_memory_allocated(device) - before
        del out, first, layout
        torch.cuda.empty_cache()
        return peak

    @staticmethod
    def _sample(logits: Tensor, plan: Plan, part: slice, first_row: int, best: dict[int, tuple[Tensor, ...]]) -> Tensor:
        """The draws of the part: numbers and, in `best`, alternatives, as `Drawn` takes them."""
        index, device = plan.index[part] - first_row, logits.device
        if not np.array_equal(index, np.arange(logits.shape[0])):
            logits = logits[ops.to_device(index, device)]
        params = plan.params[part]
        targets = ops.to_device(plan.targets[part].copy(), device)
        counters = plan.seeds[part], plan.sample_indices[part], plan.positions[part]
        tokens, scores, thresholds = ops.sample(logits, params, targets, *counters)
        columns = [tokens.double(), scores.logprob.float().double()]
        ranked = max(plan.top) >= 0
        if any(plan.raw) or ranked:
            columns.append(torch.zeros_like(columns[1]))
        if any(plan.raw[part]):
            wanted = ops.to_device(np.flatnonzero(plan.raw[part]), device)
            plain = ops.sample(logits[wanted], ops.RowParams.repeat(len(wanted)), tokens[wanted]).scores
            columns[2].index_copy_(0, wanted, plain.logprob.float().double())
        for i, count in enumerate(plan.top[part]):
            if count >= 0 and params.banned[i]:
                logits[i].index_fill_(0, ops.to_device(np.array(params.banned[i], np.int64), device), -torch.inf)
            if count > 0:
                # by a tensor: by a number, CUDA multiplies with its reciprocal
                logp = logits[i] / logits.new_full((), params.temperature[i] or 1.0)
                logp = torch.where(logp >= thresholds[i], (logp.double() - scores.logsumexp[i]).float(), -torch.inf)
                values, ids = logp.topk(min(count, logp.numel()))
                best[part.start + i] = ids, values
        if ranked:
            drawn = tokens.clamp(min=0)[:, None]  # none of logits that aren't finite
            columns.append(1.0 + (logits > logits.gather(1, drawn)).sum(1).double())
        return torch.stack(columns, 1)
