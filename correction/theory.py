"""What the noise of importance weights is, and what it will be.

chi2 = E[rho^2] - 1 of a sample's weights rho = pi / mu, where pi is the target and mu the sampler; T: tokens. See Liu &
Li, "When speed kills stability" (2025), parts 1 to 3.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def self_normalized_chi2(weights: Tensor) -> Tensor:
    """mean(w^2) / mean(w)^2 - 1: never negative, unlike the plug-in mean(w^2) - 1. inf when all weights are 0."""
    chi2 = weights.numel() * weights.square().sum() / weights.sum().square() - 1
    return chi2.nan_to_num(torch.inf, posinf=torch.inf)


def predicted_chi2(k3: float, length: float) -> float:
    """exp(2 K3 T) - 1: a sequence's chi2 for Gaussian log ratios of K3 nats a token. inf where it overflows."""
    exponent = 2 * k3 * length
    return math.expm1(exponent) if exponent < 700 else math.inf


def optimal_truncation(chi2: float) -> float:
    """C* = sqrt(2 (1 + chi2)) minimises an error bound of truncated sequence weights: a start for a search."""
    return math.sqrt(2 * (1 + chi2))
