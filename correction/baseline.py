"""The optimal token baseline: a group's returns, weighted by how much gradient each path has gathered so far."""

from __future__ import annotations

import torch
from torch import Tensor


@torch.no_grad()
def optimal_token_baseline(
    returns: Tensor, mask: Tensor, old: Tensor, sum_pi_squared: Tensor, groups: Tensor, weights: Tensor | None = None
) -> Tensor:
    """fp64 [B, T]: B_t = sum(G_t W_t) / sum(W_t) over a group's sequences that reach position t; 0 where only one does.

    returns: reward-to-go; old: log-probs of the sampled tokens; sum_pi_squared: sum of pi^2 over the vocabulary, all
    [B, T]; groups: int64 [B]. W_t adds up 1 - 2 pi + sum pi^2, the squared length of grad log pi with respect to the
    logits, times the squared importance weights where those are given ("optimal_token_baseline" in verl).
    """
    real = mask.bool()
    energy = 1 - 2 * old.double().exp() + sum_pi_squared.double()
    if weights is not None:
        energy = energy * weights.double().square()
    energy = torch.where(real, energy, 0.0).cumsum(1) * real
    _, group = torch.unique(groups, return_inverse=True)

    def over_group(values: Tensor) -> Tensor:
        sums = values.new_zeros(int(group.max()) + 1, values.shape[1]).index_add_(0, group, values)
        return sums[group]

    baseline = over_group(torch.where(real, returns.double(), 0.0) * energy) / over_group(energy).clamp_min(1e-8)
    return torch.where(real & (over_group(real.double()) > 1), baseline, 0.0)
