"""Log-probs and gradient sketches of rollouts that another engine made."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..engine.sampling_params import SamplingParams
from ..kernels import ops
from ..model.exact import LMHead
from .logprobs import row_params, score_packed

Pair = tuple[Sequence[int], Sequence[int]]

_LOGITS = 1 << 26  # entries in memory at a time: each chunk of rows reads lm_head anew, so few large ones


@torch.no_grad()
def rescore(
    model: PreTrainedModel,
    rollouts: Iterable[Pair],
    sampling_params: SamplingParams | None = None,
    max_num_batched_tokens: int = 4096,
    share_prefixes: bool = True,
) -> Iterator[tuple[Tensor, Tensor]]:
    """Exact log-probs of rollouts of any origin, packed to a token budget: those of `token_logprobs`, bit for bit.

    rollouts: (prompt token ids, completion token ids), read as needed. Yields, in their order, the completion's
    log-probs fp32 [T] and the model's most likely tokens int64 [T]. A single longer rollout is a batch of its own.
    share_prefixes: what a prompt has in common with the one before it is computed once; changes no bit.
    """
    _head(model)
    params = sampling_params or SamplingParams()
    for batch in _batches(model, rollouts, max_num_batched_tokens, share_prefixes):
        prompts = [length - count for length, count in zip(batch.layout.lengths, batch.counts, strict=True)]
        rows = row_params(model, params, batch.layout.lengths, prompts, batch.index)
        chunk = max(1, _LOGITS // model.config.vocab_size)
        found = score_packed(model, batch.ids, batch.index, batch.layout, rows, chunk)
        yield from zip(found.logprob.cpu().split(batch.counts), found.argmax.cpu().split(batch.counts), strict=True)


@torch.no_grad()
def gradient_sketch(
    model: PreTrainedModel,
    rollouts: Iterable[Pair],
    temperature: float = 1.0,
    width: int = 16,
    seed: int = 0,
    max_num_batched_tokens: int = 4096,
) -> Iterator[Tensor]:
    """A random projection of each token's d log pi / d lm_head weight = (onehot - pi) h^T / T, fp32 [T, width^2].

    Both factors are projected by Gaussian matrices that `seed` fixes, so that inner products keep their expectation
    (Johnson & Lindenstrauss, 1984). pi is unfiltered: top-k, top-p and min-p are left out.
    """
    head, vocab = _head(model), model.config.vocab_size
    generator = torch.Generator().manual_seed(seed)
    left = (torch.randn(vocab, width, generator=generator) / width**0.5).to(model.device)
    right = (torch.randn(model.config.hidden_size, width, generator=generator) / width**0.5).to(model.device)
    for batch in _batches(model, rollouts, max_num_batched_tokens, True):
        positions = batch.layout.on(model.device).positions.long()[None]
        hidden = model.base_model(
            input_ids=batch.ids[None], position_ids=positions, use_cache=False, layout=batch.layout
        ).last_hidden_state[0]
        parts = []
        for index in batch.index.split(max(1, _LOGITS // vocab)):
            rows = hidden[index]
            error = left[batch.ids[index + 1]] - (head(rows) / temperature).softmax(-1) @ left
            parts.append((error[:, :, None] * (rows.float() @ right)[:, None, :]).flatten(1) / temperature)
        yield from torch.cat(parts).cpu().split(batch.counts)


def _head(model: PreTrainedModel) -> LMHead:
    head = model.get_output_embeddings()
    if not isinstance(head, LMHead):
        raise TypeError("re-scoring needs a model from samebits.trainer.exact_model")
    return head


@dataclass(frozen=True)
class _Batch:
    """ids int64 [T], without the tokens that a sequence shares with the one before it; counts: tokens of each
    completion; index int64 [sum of counts]: of the tokens that precede those."""

    ids: Tensor
    counts: list[int]
    index: Tensor
    layout: ops.PagedLayout


def _batches(model, rollouts: Iterable[Pair], budget: int, share_prefixes: bool) -> Iterator[_Batch]:
    """Of at most `budget` tokens to compute."""
    block = ops.backend(model.device).BLOCK
    pairs: list[Pair] = []
    shared: list[int] = []
    size = 0
    for prompt, completion in rollouts:
        if not len(prompt):
            raise ValueError("a rollout needs a prompt of at least one token")
        # whole blocks, and never the prompt's last token, whose logits are asked for
        common = _common_prefix(pairs[-1][0], prompt[:-1]) // block * block if pairs and share_prefixes else 0
        length = len(prompt) + len(completion)
        if pairs and size + length - common > budget:
            yield _packed(model, pairs, shared)
            pairs, shared, size, common = [], [], 0, 0
        pairs.append((prompt, completion))
        shared.append(common)
        size += length - common
    if pairs:
        yield _packed(model, pairs, shared)


def _packed(model, pairs: list[Pair], shared: list[int]) -> _Batch:
    rows = [torch.tensor([*prompt[skip:], *rest]) for (prompt, rest), skip in zip(pairs, shared, strict=True)]
    ids, lengths, counts = torch.cat(rows), [len(row) for row in rows], [len(completion) for _, completion in pairs]
    if ids.min() < 0 or ids.max() >= model.config.vocab_size:
        raise ValueError(f"a token id is out of range; the vocabulary has {model.config.vocab_size} entries")
    ends = (torch.tensor(lengths).cumsum(0) - 1).tolist()
    index = torch.cat([torch.arange(end - count, end) for end, count in zip(ends, counts, strict=True)])
    group = model.config.num_attention_heads // model.config.num_key_value_heads
    layout = ops.packed_layout(lengths, group, model.device, shared)
    return _Batch(ids.to(model.device), counts, index.to(model.device), layout)


def _common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
