"""How biased and how noisy a correction is: divergences, effective sample size, and bounds.

The bounds are those of the stochastic-gradient-ascent analysis of off-policy estimators (Liu & Li, "When speed kills
stability", 2025, parts 1-3), with the constants derived here; each docstring says how. Notation: pi the target, mu the
sampler, rho = pi / mu of a whole sequence, f = R grad log pi the target's integrand, bounded in norm by K; chi2 =
E_mu[rho^2] - 1; T tokens; delta the largest total variation of one token's distribution. Bounds are per sample.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


def total_variation(p: Tensor, q: Tensor) -> Tensor:
    """sum |p - q| / 2 over the last dimension."""
    return (p - q).abs().sum(-1) / 2


def chi2(p: Tensor, q: Tensor) -> Tensor:
    """chi2(p || q) = sum p^2 / q - 1 over the last dimension; what importance weights p / q cost in variance."""
    return torch.where(p > 0, p.square() / q, 0.0).sum(-1) - 1


def self_normalized_chi2(weights: Tensor) -> Tensor:
    """mean(w^2) / mean(w)^2 - 1: never negative, unlike the plug-in mean(w^2) - 1. inf when all weights are 0."""
    chi2 = weights.numel() * weights.square().sum() / weights.sum().square() - 1
    return chi2.nan_to_num(torch.inf, posinf=torch.inf)


def effective_sample_size(weights: Tensor) -> Tensor:
    """(sum w)^2 / sum w^2 (Kish, 1965), in samples: n / (1 + self_normalized_chi2). 0 when all weights are 0."""
    squares = weights.square().sum()
    return torch.where(squares > 0, weights.sum().square() / squares.clamp_min(torch.finfo(weights.dtype).tiny), 0.0)


def optimal_truncation(chi2: float) -> float:
    """C* = sqrt(2 (1 + chi2)) minimises the bound of `sequence_tis`. A start for a search: the bound is loose."""
    return math.sqrt(2 * (1 + chi2))


@dataclass(frozen=True)
class Bound:
    """bias: of the norm of the expected estimate. variance: of its second moment."""

    bias: float
    variance: float

    @property
    def mse(self) -> float:
        return self.bias**2 + self.variance


def uncorrected(k: float, tv: float) -> Bound:
    """No weight: |E_mu f - E_pi f| <= K sum |mu - pi| = 2 K TV, with TV of whole sequences."""
    return Bound(2 * k * tv, k**2)


def token_is(k_token: float, length: int, delta: float, chi2_token: float = 0.0) -> Bound:
    """Each token's own ratio leaves the T - 1 others sampled from mu, whose TV is at most (T - 1) delta, so the bias is
    at most sum_t 2 (T - 1) delta K_t. k_token bounds one token's integrand, K_t; chi2_token is the largest of a token.
    """
    return Bound(2 * length * (length - 1) * delta * k_token, (length * k_token) ** 2 * (1 + chi2_token))


def token_tis(k_token: float, length: int, delta: float, chi2_token: float, c: float) -> Bound:
    """`token_is` plus what the cap cuts: E_mu (rho - C)+ <= E_mu rho^2 / (4 C) per token."""
    base = token_is(k_token, length, delta, chi2_token)
    cut = length * k_token * (1 + chi2_token) / (4 * c)
    return Bound(base.bias + cut, (length * k_token) ** 2 * min(c**2, 1 + chi2_token))


def sequence_is(k: float, chi2: float) -> Bound:
    """Unbiased; E_mu |rho f|^2 <= K^2 E_mu rho^2."""
    return Bound(0.0, k**2 * (1 + chi2))


def sequence_tis(k: float, chi2: float, c: float) -> Bound:
    """Weight min(rho, C): bias <= 2 K (1 + chi2) / C, second moment <= K^2 C^2 (as published; at C* the MSE's bound is
    4 K^2 (1 + chi2) when bias and variance are weighed as in `truncation_objective`)."""
    return Bound(2 * k * (1 + chi2) / c, k**2 * c**2)


def truncation_objective(k: float, chi2: float, c: float) -> float:
    """K^2 (C^2 + 4 (1 + chi2)^2 / C^2), the MSE's bound, least at C* with 4 K^2 (1 + chi2)."""
    return sequence_tis(k, chi2, c).mse


def sequence_mis(k: float, chi2: float, c: float) -> Bound:
    """Weight rho where rho <= C, else 0: the bias is K pi(rho > C) <= K (1 + chi2) / C by Markov's inequality under pi;
    E_mu[rho^2; rho <= C] <= min(C, 1 + chi2)."""
    return Bound(k * min(1.0, (1 + chi2) / c), k**2 * min(c, 1 + chi2))


def rejection(k: float, tv: float, rejected: float) -> Bound:
    """A gate without a weight (Geo-RS, K3-RS ...): E_mu |1_kept - rho| <= 2 TV + pi(rejected)."""
    return Bound(k * (2 * tv + rejected), k**2)
