"""Runs one step: packs the scheduled tokens into [1, T], calls HF's forward, and draws the next tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..kernels import ops
from ..model import attention
from ..model.exact import ExactLinear, LMHead, SharedInput
from ..scheduler import Batch
from .request import Sample, SampledToken

_SHARED_INPUTS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))  # one launch each
LOGIT_ROWS = 256  # rows of fp32 logits in memory at a time


class PackedEmbedding(nn.Embedding):
    """An embedding tied to a packed lm_head: looks its rows up there instead of keeping a second copy."""

    packed: ops.PackedWeight

    def forward(self, ids: Tensor) -> Tensor:
        return self.packed.rows(ids)


@dataclass
class Draw:
    """One token to sample, or (target >= 0) to score, from row `row` of the batch's logits."""

    sample: Sample
    row: int
    target: int = -1


class ModelRunner:
    """The model, its KV cache, and the step. Reads sequences, never changes them."""

    def __init__(self, model: PreTrainedModel, num_blocks: int):
        self.model = model
        model.set_attn_implementation(attention.NAME)  # pages have no other
        self.kernels = ops.backend(model.device)
        self.group = model.config.num_attention_heads // model.config.num_key_value_heads
        self.num_blocks = num_blocks
        self.kv_caches = self.new_kv_caches(model, num_blocks)
        self.pack_weights()

    @property
    def head(self) -> LMHead:
        return self.model.get_output_embeddings()

    @staticmethod
    def new_kv_caches(model: PreTrainedModel, num_blocks: int) -> list[tuple[Tensor, Tensor]]:
        """One (k, v) pair a layer."""
        config = model.config
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        shape = num_blocks, config.num_key_value_heads, head_dim
        new = ops.backend(model.device).new_kv_cache
        return [new(*shape, model.dtype) for _ in range(config.num_hidden_layers)]

    @staticmethod
    def block_bytes(model: PreTrainedModel) -> int:
        """Bytes of one KV block over all layers."""
        return sum(cache.nbytes for pair in ModelRunner.new_kv_caches(model, 1) for cache in pair)

    def pack_weights(self) -> None:
        """Rollout-only layout: each weight lives once, packed for the product."""
        embedding: Any = self.model.get_input_embeddings()
        tied = embedding.weight is self.head.weight
        for module in self.model.modules():
            if isinstance(module, ExactLinear) and module.route == "fma":
                module.packed = ops.PackedWeight.pack(module.weight)
                module.weight = None  # type: ignore[assignment]
        for module in self.model.modules():
            for names in _SHARED_INPUTS:
                group = [getattr(module, name, None) for name in names]
                if all(isinstance(m, ExactLinear) and m.packed is not None for m in group):
                    SharedInput(group)  # type: ignore[arg-type]
        if tied and self.head.packed is not None:
            embedding.__class__ = PackedEmbedding
            embedding.packed = self.head.packed
            embedding.weight = None

    def copy_blocks(self, copies: list[tuple[int, int]]) -> None:
        """Copies whole KV blocks, source to destination, in every layer."""
        if copies:
            source, destination = torch.tensor(copies).unbind(1)
            for caches in self.kv_caches:
                for cache in caches:
                    cache[destination] = cache[source]

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
        pages = tables[np.repeat(starts, lengths) + positions // size]
        slots = pages * np.int32(size) + positions % size
        return ops.PagedLayout(lengths, positions, slots, tables, starts, self.kernels.work_items(lengths, self.group))

    def _draws(self, batch: Batch) -> tuple[list[Draw], list[int]]:
        """What to sample and score, and the rows of the hidden states that the draws' `row` counts."""
        draws: list[Draw] = []
        rows: list[int] = []
        first = 0
        for seq in batch.sequences:
            assert isinstance(seq, Sample)
            start, count = seq.num_cached_tokens, seq.num_scheduled_tokens
            if seq.request.params.prompt_logprobs is not None and seq.sample_index == 0:
                done = 1 + len(seq.request.prompt_scores)  # recompute after preemption scores nothing twice
                for position in range(max(start, done - 1), min(start + count, seq.num_prompt_tokens - 1)):
                    draws.append(Draw(seq, len(rows), seq.token_ids[position + 1]))
                    rows.append(first + position - start)
            if seq.samples_now:
                draws += [Draw(s, len(rows)) for s in (seq, *seq.siblings)]  # type: ignore[arg-type]
                rows.append(first + count - 1)
            first += count
        return draws, rows

    @torch.inference_mode()
    def run(self, batch: Batch) -> list[tuple[Draw, SampledToken]]:
        """Computes the batch's KV; samples the tokens that are due and scores the prompt tokens that were asked for."""
        layout = self._layout(batch)
        ids = torch.tensor([t for s in batch.sequences for t in s.scheduled_token_ids])
        positions = torch.from_numpy(layout.positions).long()
        hidden = self.model.base_model(
            input_ids=ids[None], position_ids=positions[None], use_cache=False, layout=layout, kv_caches=self.kv_caches
        ).last_hidden_state[0]
        draws, rows = self._draws(batch)
        results: list[tuple[Draw, SampledToken]] = []
        for start in range(0, len(draws), LOGIT_ROWS):
            part = draws[start : start + LOGIT_ROWS]
            first, last = part[0].row, part[-1].row
            logits = self.head(hidden[rows[first : last + 1]])
            results += zip(part, self._sample(logits, part, first), strict=True)
        return results

    def _sample(self, logits: Tensor, draws: list[Draw], first_row: int) -> list[SampledToken]:
        """A token for each draw; its log-prob is NaN where the logits aren't finite."""
        index = [d.row - first_row for d in draws]
        if index != list(range(logits.shape[0])):
            logits = logits[index]
        requests = [d.sample.request for d in draws]
        settings = [r.params for r in requests]
        params = ops.RowParams(
            np.array([p.temperature for p in settings], np.float64),
            np.array([p.top_k for p in settings], np.int64),
            np.array([p.top_p for p in settings], np.float64),
            np.array([p.min_p for p in settings], np.float64),
            [_banned(d) for d in draws],
        )
        tokens = np.array([d.target for d in draws], np.int64)
        fields, thresholds = ops.distribution(
            logits,
            params,
            tokens,
            np.array([r.seed for r in requests], np.uint64),
            np.array([d.sample.sample_index for d in draws], np.int64),
            np.array([d.sample.num_tokens for d in draws], np.int64),
        )
        logprobs = fields[:, 0].float().tolist()
        result = [SampledToken(t, lp) for t, lp in zip(tokens.tolist(), logprobs, strict=True)]
        self._add_raw(logits, settings, tokens, result)
        for i, setting in enumerate(settings):
            count = setting.logprobs if draws[i].target < 0 else setting.prompt_logprobs
            if count is not None:
                logits[i, params.banned[i]] = -torch.inf
                result[i].rank = 1 + int((logits[i] > logits[i, tokens[i]]).sum())
            if count:
                logp = logits[i] / (setting.temperature or 1.0)
                logp = torch.where(logp >= thresholds[i], (logp.double() - fields[i, 2]).float(), -torch.inf)
                values, best = logp.topk(min(count, logp.numel()))
                result[i].top_logprobs = dict(zip(best.tolist(), values.tolist(), strict=True))
        return result

    @staticmethod
    def _add_raw(logits: Tensor, settings, tokens: np.ndarray, result: list[SampledToken]) -> None:
        raw = [i for i, p in enumerate(settings) if p.raw_logprobs]
        if raw:
            fields, _ = ops.distribution(logits[raw], ops.RowParams.repeat(len(raw)), tokens[raw])
            for i, value in zip(raw, fields[:, 0].float().tolist(), strict=True):
                result[i].raw_logprob = value


def _banned(draw: Draw) -> list[int]:
    request = draw.sample.request
    early = draw.target < 0 and draw.sample.num_completion_tokens < request.params.min_tokens
    return request.terminal_ids if early else []
