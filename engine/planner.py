"""The scheduler's batch as the model sees it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch
from transformers import PretrainedConfig

from ..kernels import ops
from ..model.paged import group_size
from ..scheduler import Batch
from .request import Sample
from .sampler import LogitsRow, SamplingMetadata


@dataclass
class Plan:
    """One step: arrays, no sequences, so that it can travel to other processes.

    token_ids int64 [T], where -1 - i is the token of row i of the step before this one. block_copies: KV blocks
    (source, destination) to copy first.
    """

    token_ids: np.ndarray
    layout: ops.PagedLayout
    block_copies: list[tuple[int, int]]
    sampling: SamplingMetadata


class Planner:
    """The maker of a step's `Plan` from the scheduler's batch. It reads sequences and never changes them."""

    def __init__(self, config: PretrainedConfig, device: torch.device):
        self.kernels = ops.backend(device)
        self.group = group_size(config)
        self.vocab_size = config.vocab_size

    def plan(self, batch: Batch, block_copies: Sequence[tuple[int, int]]) -> tuple[Plan, list[LogitsRow]]:
        """Return the plan, and the rows of logits whose tokens it gives."""
        rows = _logits_rows(batch)
        token_ids = chain.from_iterable(seq.scheduled_token_ids for seq in batch.sequences)
        sampling = SamplingMetadata.of(rows)
        return Plan(np.array([*token_ids], np.int64), self._layout(batch), [*block_copies], sampling), rows

    def _layout(self, batch: Batch) -> ops.PagedLayout:
        lengths = [seq.num_scheduled_tokens for seq in batch.sequences]
        cached = [seq.num_cached_tokens for seq in batch.sequences]
        tables = [seq.block_table for seq in batch.sequences]
        where = ops.place_tokens(lengths, cached, tables, self.kernels.BLOCK)
        own = self.kernels.work_items(lengths, self.group)
        items = self.kernels.share_reads(own, lengths, self.group, *where[2:])
        return ops.PagedLayout(lengths, *where, items, shared_items=len(items) - len(own))


def _logits_rows(batch: Batch) -> list[LogitsRow]:
    """The rows that score a chunk's prompt, where that is asked for, and those that sample the next tokens."""
    rows: list[LogitsRow] = []
    first = 0
    for seq in batch.sequences:
        assert isinstance(seq, Sample)
        start = seq.num_cached_tokens
        end = start + seq.num_scheduled_tokens
        if seq.request.params.prompt_logprobs is not None and seq.sample_index == 0:
            done = seq.request.num_scores_due  # recompute after preemption scores nothing twice
            for position in range(max(start, done), min(end, seq.num_prompt_tokens - 1)):
                rows.append(LogitsRow(seq, first + position - start, position + 1, seq.token_ids[position + 1]))
        if seq.samples_now:
            last = first + seq.num_tokens - 1 - start
            for sample in (seq, *seq.siblings):
                assert isinstance(sample, Sample)
                rows.append(LogitsRow(sample, last, seq.num_tokens, stale_kv=seq.stale_kv))
            for ahead, token in enumerate(seq.draft, 1):
                rows.append(LogitsRow(seq, last + ahead, seq.num_tokens + ahead, stale_kv=seq.stale_kv, draft=token))
        first += end - start
    return rows
