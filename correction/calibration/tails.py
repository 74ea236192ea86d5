"""Weights with a tail that the sample has not seen: no interval can be trusted there."""

from __future__ import annotations

import torch
from torch import Tensor

MAX_SHAPE = 0.4  # of the squares' tail: from 0.5 on their mean has no finite variance, and estimates err by 0.1
MAX_SHARE = 0.2  # of the sum of squares, in one unit
FEWEST = 30  # sequences that contribute
_ATOM = 5  # equal largest weights: a bound that the sample has reached


def pareto_shape(values: Tensor) -> float:
    """The shape k of a generalised Pareto distribution fitted to the largest values, fp [n] >= 0. Moments from
    order 1 / k on are infinite. -inf where several of the largest are equal, as at a bound: the tail ends there.

    The empirical Bayes estimate of Zhang & Stephens (2009), shrunk towards 1/2 as in Vehtari et al. (2024, appendix G).
    """
    ordered = values.double().sort().values
    n = len(ordered)
    count = min(n // 5, int(3 * n**0.5))
    if count < 5:
        return -torch.inf
    excess = ordered[-count:] - ordered[-count - 1]
    quartile = excess[max(0, int(count / 4 + 0.5) - 1)]
    if ordered[-_ATOM] >= (1 - 1e-6) * ordered[-1] or quartile <= 0:
        return -torch.inf
    grid = 30 + int(count**0.5)
    rank = torch.arange(1, grid + 1, dtype=torch.float64)
    theta = 1 / excess[-1] + (1 - (grid / (rank - 0.5)).sqrt()) / (3 * quartile)
    shape = torch.log1p(-theta[:, None] * excess).mean(1)
    likelihood = count * ((-theta / shape).log() - shape - 1)
    theta = (likelihood.nan_to_num(-torch.inf).softmax(0) * theta).sum()
    return (float(torch.log1p(-theta * excess).mean()) * count + 5) / (count + 10)


def unestimable(weights: Tensor, share: float) -> str | None:
    """Why no figure can be given, or None. weights: fp [sequences], a candidate's; share: of the sum of its gradients'
    squared lengths, what the largest unit has.
    """
    contributing = int((weights > 0).sum())
    if contributing < FEWEST:
        return f"only {contributing} sequences are left"
    if share > MAX_SHARE:
        return f"one unit has {share:.0%} of the sum of squares"
    shape = pareto_shape(weights.square())
    if shape > MAX_SHAPE:
        return f"the weights' tail is too heavy: Pareto k of their squares is {shape:.2f}, above {MAX_SHAPE}"
    return None
