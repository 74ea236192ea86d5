"""Log-probs of rollouts that another engine made."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..engine.detokenizer import Tokenizer
from ..engine.sampling_params import SamplingParams
from ..kernels import ops
from .logprobs import PackedBatch

PromptCompletion = tuple[Sequence[int], Sequence[int]]  # token ids

_LOGITS = 1 << 26  # entries in memory at a time: each chunk of rows reads lm_head anew, so few large ones


def rows_at_once(vocab_size: int) -> int:
    """Return how many rows of logits are to be in memory at a time."""
    return max(1, _LOGITS // vocab_size)


@torch.no_grad()
def rescore(
    model: PreTrainedModel,
    rollouts: Iterable[PromptCompletion],
    sampling_params: SamplingParams | None = None,
    max_num_batched_tokens: int = 4096,
    share_prefixes: bool = True,
    tokenizer: Tokenizer | None = None,
    routed_experts: Iterable[np.ndarray | Tensor | None] | None = None,
    note_experts: bool = False,
) -> Iterator[tuple[Tensor, ...]]:
    """Exact log-probs of rollouts of any origin, packed to a token budget: those of `token_logprobs`, bit for bit.

    rollouts: (prompt token ids, completion token ids), read as needed. Yields, in their order, the completion's
    log-probs fp32 [T] and the model's most likely tokens int64 [T]. A single longer rollout is a batch of its own.
    share_prefixes: what a prompt has in common with the one before it is computed once; changes no bit.
    tokenizer: the engine's, where sampling_params has structured_outputs. routed_experts: of each rollout, as
    `token_logprobs` takes them; those with some share nothing. note_experts: yield the model's own, too, int64 [tokens
    of prompt and completion, layers, k]; then nothing is shared.
    """
    params = sampling_params or SamplingParams()
    for batch in packed_batches(model, rollouts, max_num_batched_tokens, share_prefixes, routed_experts, note_experts):
        found, _ = batch.score(model, params, rows_at_once(model.config.vocab_size), None, tokenizer)
        columns = [found.logprob.cpu().split(batch.counts), found.argmax.cpu().split(batch.counts)]
        if batch.routed is not None and batch.routed.noted is not None:
            columns.append(batch.routed.noted.cpu().split(batch.layout.lengths))
        yield from zip(*columns, strict=True)


def packed_batches(
    model: PreTrainedModel,
    rollouts: Iterable[PromptCompletion],
    budget: int,
    share_prefixes: bool = True,
    routed_experts: Iterable[np.ndarray | Tensor | None] | None = None,
    note_experts: bool = False,
) -> Iterator[PackedBatch]:
    """Yield batches of at most `budget` tokens to compute; see `rescore`. note_experts: see `PackedBatch.of`."""
    block = ops.backend(model.device).BLOCK
    share_prefixes = share_prefixes and not note_experts
    before: Sequence[int] = ()
    entries: list[tuple[Tensor, int, int, Any]] = []  # tokens, scored ones, shared ones, experts
    size = 0

    def batch() -> PackedBatch:
        rows, counts, shared, given = (list(column) for column in zip(*entries, strict=True))
        experts = given if any(ids is not None for ids in given) else None
        return PackedBatch.of(model, rows, counts, shared, experts, note_experts)

    with_experts: Any = zip(rollouts, itertools.repeat(None), strict=False)
    if routed_experts is not None:
        with_experts = zip(rollouts, routed_experts, strict=True)
    for (prompt, completion), experts in with_experts:
        if not len(prompt):
            raise ValueError("a rollout needs a prompt of at least one token")
        # whole blocks, and never the prompt's last token, whose logits are asked for
        alike = entries and share_prefixes and experts is None and entries[-1][3] is None
        common = _common_prefix(before, prompt[:-1]) // block * block if alike else 0
        length = len(prompt) + len(completion)
        if entries and size + length - common > budget:
            yield batch()
            entries = []
            size = 0
            common = 0
        size += length - common
        entries.append((torch.tensor([*prompt[common:], *completion]), len(completion), common, experts))
        before = prompt
    if entries:
        yield batch()


def _common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
