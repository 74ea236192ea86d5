from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..engine.sampling_params import SamplingParams
from .logprobs import token_logprobs


def rescore(
    model: PreTrainedModel,
    rollouts: Iterable[tuple[Sequence[int], Sequence[int]]],
    sampling_params: SamplingParams | None = None,
    max_num_batched_tokens: int = 4096,
) -> Iterator[tuple[Tensor, Tensor]]:
    """Exact log-probs of rollouts of any origin, packed to a token budget; changes no bit of `token_logprobs`.

    rollouts: (prompt token ids, completion token ids), read as needed. Yields, in their order, the completion's
    log-probs fp32 [T] and the model's most likely tokens int64 [T]. A single longer rollout is a batch of its own.
    """
    batch: list[tuple[Sequence[int], Sequence[int]]] = []
    size = 0
    for pair in rollouts:
        length = len(pair[0]) + len(pair[1])
        if batch and size + length > max_num_batched_tokens:
            yield from _score(model, batch, sampling_params)
            batch, size = [], 0
        batch.append(pair)
        size += length
    if batch:
        yield from _score(model, batch, sampling_params)


@torch.no_grad()
def _score(model, batch, sampling_params) -> Iterator[tuple[Tensor, Tensor]]:
    lens = [len(prompt) for prompt, _ in batch]
    sequences = [[*prompt, *completion] for prompt, completion in batch]
    logprobs, best = token_logprobs(model, sequences, sampling_params, prompt_lens=lens, return_argmax=True)
    for prompt_len, values, tokens in zip(lens, logprobs, best, strict=True):
        yield values[prompt_len:], tokens[prompt_len:]
