"""The factors of each token's gradient with respect to lm_head, for `samebits calibrate`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from tqdm import tqdm
from transformers import PreTrainedModel

from ..correction.calibration import Scores
from ..trainer.logprobs import exact_head
from ..trainer.rescore import PromptCompletion, packed_batches, rows_at_once

_EXACT_VOCAB = 2048  # larger vocabularies are projected
_BLOCKS = 16  # independent projections, whose spread is the projection's error
_FEATURES = 1 << 17  # of a unit's projected gradient: left's columns times the hidden size
_TOKENS = 4096  # to compute at a time


@torch.no_grad()
def token_scores(model: PreTrainedModel, rollouts: Sequence[PromptCompletion], temperature: float, seed: int) -> Scores:
    """d log pi / d lm_head weight = (onehot - pi) h^T / T of every completion token, as its two factors, fp32.

    h is kept whole, and so is the other factor of a small vocabulary: the gradient is exact. A larger one is projected
    by Gaussian columns that `seed` fixes, in independent blocks, so that inner products keep their expectation and
    their error is known (Johnson & Lindenstrauss, 1984). pi is unfiltered: top-k, top-p and min-p are left out.
    """
    head = exact_head(model)
    vocab = model.config.vocab_size
    hidden = model.config.hidden_size
    blocks = 1 if vocab <= _EXACT_VOCAB else _BLOCKS
    columns = max(1, min(8, _FEATURES // (hidden * blocks)))  # per block
    projection = None
    if blocks > 1:
        generator = torch.Generator().manual_seed(seed)
        projection = torch.randn(vocab, blocks * columns, generator=generator).to(model.device) / columns**0.5
    bar = tqdm(total=len(rollouts), desc="Gradients", unit="seq", delay=2)
    left: list[torch.Tensor] = []
    right: list[torch.Tensor] = []
    for batch in packed_batches(model, rollouts, _TOKENS):
        states = model.get_decoder()(**batch.inputs()).last_hidden_state[0]
        for index in batch.index.split(rows_at_once(vocab)):
            chosen = batch.ids[index + 1]
            probabilities = (head(states[index]) / temperature).softmax(-1)
            if projection is None:
                error = -probabilities
                error[torch.arange(len(index)), chosen] += 1
            else:
                error = projection[chosen] - probabilities @ projection
            left.append((error / temperature).cpu())
            right.append(states[index].float().cpu())
        bar.update(len(batch.counts))
    return Scores(torch.cat(left), torch.cat(right), blocks)
