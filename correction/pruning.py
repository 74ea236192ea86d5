"""Dynamic vocabulary pruning (arXiv 2512.23087): both sides drop tokens that neither can score reliably.

The rollout engine prunes with `min_p = rho`; a trainer prunes its tempered logits with `prune_logits`.
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
