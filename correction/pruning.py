"""Equal supports on both sides: dynamic vocabulary pruning (arXiv 2512.23087), and the replay of a sampling mask.

The rollout engine prunes with `min_p = rho`; a trainer prunes its tempered logits with `prune_logits`. What another
engine's top-k, top-p or min-p kept, `replay_mask` keeps.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


@torch.no_grad()
def safe_set(logits: Tensor, rho: float) -> Tensor:
    """bool, like logits [..., V] (tempered): the tokens with z >= max z + log rho, i.e. pi >= rho max pi. rho <= 0
    keeps all."""
    if rho > 1 or math.isnan(rho):
        raise ValueError(f"rho must be at most 1, got {rho}")
    if rho <= 0:
        return torch.ones_like(logits, dtype=torch.bool)
    return logits >= logits.amax(-1, keepdim=True) + math.log(rho)


def prune_logits(logits: Tensor, rho: float, gap: float = 50.0) -> Tensor:
    """Tempered logits [..., V] with those outside the safe set `gap` nats below the row's maximum.

    Relative to the maximum, so that it works wherever the logits lie. The set is fixed: no gradient through it.
    """
    fill = logits.detach().amax(-1, keepdim=True) - gap
    return torch.where(safe_set(logits, rho), logits, fill)


def replay_mask(logits: Tensor, kept: Tensor, gap: float = 50.0) -> Tensor:
    """Tempered logits [..., V] with all but the tokens that a sampler kept `gap` nats below the row's maximum.

    kept: int64 [..., k], token ids, -1 where a row kept fewer. The ids are the record of another engine's filters
    (DeepSeek-V3.2's keep-sampling-mask): the trainer then scores the distribution that was sampled from.
    """
    mask = torch.zeros_like(logits, dtype=torch.long)
    mask = mask.scatter_reduce(-1, kept.clamp_min(0), (kept >= 0).long(), "amax").bool()
    fill = torch.where(mask, logits.detach(), -torch.inf).amax(-1, keepdim=True) - gap
    return torch.where(mask, logits, fill)


def envelope(probability: Tensor, error: float) -> Tensor:
    """2 error (1 - p): the most that log-probs can differ where logits do by at most `error` (proposition 4.2). p is
    the smaller of the two probabilities: unlikely tokens take the whole bound, likely ones hardly any."""
    return 2 * error * (1 - probability)
