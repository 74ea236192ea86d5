from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..engine.sampling_params import SamplingParams
from .logprobs import token_logprobs

Pair = tuple[Sequence[int], Sequence[int]]


def rescore(
    model: PreTrainedModel,
    rollouts: Iterable[Pair],
    sampling_params: SamplingParams | None = None,
    max_num_batched_tokens: int = 4096,
) -> Iterator[tuple[Tensor, Tensor]]:
    """Exact log-probs of rollouts of any origin, packed to a token budget; changes no bit of `token_logprobs`.

    rollouts: (prompt token ids, completion token ids), read as needed. Yields, in their order, the completion's
    log-probs fp32 [T] and the model's most likely tokens int64 [T]. A single longer rollout is a batch of its own.
    """
    for batch in _batches(rollouts, max_num_batched_tokens):
        lens = [len(prompt) for prompt, _ in batch]
        sequences = [[*prompt, *completion] for prompt, completion in batch]
        with torch.no_grad():
            logprobs, best = token_logprobs(model, sequences, sampling_params, prompt_lens=lens, return_argmax=True)
        for prompt_len, values, tokens in zip(lens, logprobs, best, strict=True):
            yield values[prompt_len:], tokens[prompt_len:]


@torch.no_grad()
def gradient_sketch(
    model: PreTrainedModel,
    rollouts: Iterable[Pair],
    temperature: float = 1.0,
    width: int = 8,
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
    for batch in _batches(rollouts, max_num_batched_tokens):
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


def _batches(rollouts: Iterable[Pair], budget: int) -> Iterator[list[Pair]]:
    batch: list[Pair] = []
    size = 0
    for pair in rollouts:
        length = len(pair[0]) + len(pair[1])
        if batch and size + length > budget:
            yield batch
            batch, size = [], 0
        batch.append(pair)
        size += length
    if batch:
        yield batch
