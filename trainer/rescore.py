"""Log-probs of rollouts that another engine made."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..engine.sampling_params import SamplingParams
from ..kernels import ops
from .logprobs import PackedBatch

Pair = tuple[Sequence[int], Sequence[int]]

_LOGITS = 1 << 26  # entries in memory at a time: each chunk of rows reads lm_head anew, so few large ones


@torch.no_grad()
def rescore(
    model: PreTrainedModel,
    rollouts: Iterable[Pair],
    sampling_params: SamplingParams | None = None,
    max_num_batched_tokens: int = 4096,
    share_prefixes: bool = True,
    tokenizer: Any = None,
) -> Iterator[tuple[Tensor, Tensor]]:
    """Exact log-probs of rollouts of any origin, packed to a token budget: those of `token_logprobs`, bit for bit.

    rollouts: (prompt token ids, completion token ids), read as needed. Yields, in their order, the completion's
    log-probs fp32 [T] and the model's most likely tokens int64 [T]. A single longer rollout is a batch of its own.
    share_prefixes: what a prompt has in common with the one before it is computed once; changes no bit.
    tokenizer: the engine's, where sampling_params has structured_outputs.
    """
    params = sampling_params or SamplingParams()
    for batch in packed_batches(model, rollouts, max_num_batched_tokens, share_prefixes):
        found = batch.score(model, params, max(1, _LOGITS // model.config.vocab_size), None, tokenizer)
        yield from zip(found.logprob.cpu().split(batch.counts), found.argmax.cpu().split(batch.counts), strict=True)


def packed_batches(
    model: PreTrainedModel, rollouts: Iterable[Pair], budget: int, share_prefixes: bool = True
) -> Iterator[PackedBatch]:
    """Yield batches of at most `budget` tokens to compute; see `rescore`."""
    block = ops.backend(model.device).BLOCK
    before: Sequence[int] = ()
    rows: list[Tensor] = []
    counts: list[int] = []
    shared: list[int] = []
    size = 0
    for prompt, completion in rollouts:
        if not len(prompt):
            raise ValueError("a rollout needs a prompt of at least one token")
        # whole blocks, and never the prompt's last token, whose logits are asked for
        common = _common_prefix(before, prompt[:-1]) // block * block if rows and share_prefixes else 0
        length = len(prompt) + len(completion)
        if rows and size + length - common > budget:
            yield PackedBatch.of(model, rows, counts, shared)
            rows = []
            counts = []
            shared = []
            size = 0
            common = 0
        size += length - common
        rows.append(torch.tensor([*prompt[common:], *completion]))
        counts.append(len(completion))
        shared.append(common)
        before = prompt
    if rows:
        yield PackedBatch.of(model, rows, counts, shared)


def _common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
