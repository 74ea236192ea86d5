from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..engine.sampling_params import SamplingParams
from ..kernels import ops
from ..model.exact import LMHead
from .logprobs import _row_params, _run

Pair = tuple[Sequence[int], Sequence[int]]


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
    head = model.get_output_embeddings()
    if not isinstance(head, LMHead):
        raise TypeError("rescore needs a model from samebits.trainer.exact_model")
    group = model.config.num_attention_heads // model.config.num_key_value_heads
    block = ops.backend(head.weight.device).BLOCK if share_prefixes else None
    params = sampling_params or SamplingParams()
    for batch, shared in _batches(rollouts, max_num_batched_tokens, block):
        rows = [
            torch.tensor([*prompt[skip:], *completion])
            for (prompt, completion), skip in zip(batch, shared, strict=True)
        ]
        ids, lengths = torch.cat(rows), [len(row) for row in rows]
        if ids.min() < 0 or ids.max() >= model.config.vocab_size:
            raise ValueError(f"a token id is out of range; the vocabulary has {model.config.vocab_size} entries")
        counts = [len(completion) for _, completion in batch]
        ends = torch.tensor(lengths).cumsum(0) - 1
        index = torch.cat([torch.arange(end - count, end) for end, count in zip(ends.tolist(), counts, strict=True)])
        prompts = [length - count for length, count in zip(lengths, counts, strict=True)]
        layout = ops.PagedLayout.packed(lengths, group, ids.device, shared)
        row_params = _row_params(model, params, lengths, prompts, index)
        logprobs, _, best = _run(model, head, ids, index, layout, row_params, 256)
        yield from zip(logprobs.split(counts), best.split(counts), strict=True)


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
    (Johnson & Lindenstrauss, 1984). pi is unfiltered: top-k, top-p and min-p are left out. Logits: 256 rows at a time.
    """
    head = model.get_output_embeddings()
    generator = torch.Generator().manual_seed(seed)
    vocab, hidden_size = model.config.vocab_size, model.config.hidden_size
    left = torch.randn(vocab, width, generator=generator) / width**0.5
    right = torch.randn(hidden_size, width, generator=generator) / width**0.5
    for batch, _ in _batches(rollouts, max_num_batched_tokens):
        sequences = [[*prompt, *completion] for prompt, completion in batch]
        positions = torch.cat([torch.arange(len(s)) for s in sequences])
        ids = torch.tensor([t for s in sequences for t in s])
        hidden = model.base_model(input_ids=ids[None], position_ids=positions[None], use_cache=False)
        states = hidden.last_hidden_state[0]
        first = 0
        for (prompt, completion), sequence in zip(batch, sequences, strict=True):
            rows = states[first + len(prompt) - 1 : first + len(sequence) - 1]
            parts = []
            for start in range(0, len(completion), 256):
                chunk = rows[start : start + 256]
                error = left[torch.tensor(completion[start : start + 256])]
                error = error - (head(chunk) / temperature).softmax(-1) @ left
                parts.append((error[:, :, None] * (chunk.float() @ right)[:, None, :]).flatten(1) / temperature)
            yield torch.cat(parts) if parts else torch.zeros(0, width * width)
            first += len(sequence)


def _batches(rollouts: Iterable[Pair], budget: int, block: int | None = None) -> Iterator[tuple[list[Pair], list[int]]]:
    """Batches of at most `budget` tokens to compute, and how many of each prompt's tokens the one before it has too:
    whole blocks, and never the last one, whose logits are asked for."""
    batch: list[Pair] = []
    shared: list[int] = []
    size = 0
    for prompt, completion in rollouts:
        common = _common_prefix(batch[-1][0], prompt[:-1]) // block * block if batch and block else 0
        length = len(prompt) + len(completion)
        if batch and size + length - common > budget:
            yield batch, shared
            batch, shared, size, common = [], [], 0, 0
        batch.append((prompt, completion))
        shared.append(common)
        size += length - common
    if batch:
        yield batch, shared


def _common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
