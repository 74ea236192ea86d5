"""A policy so small that every sequence can be listed: exact gradients, variances and cosines of any correction."""

from __future__ import annotations

import itertools

import torch

from samebits.correction import Correction, LogProbs
from samebits.correction.calibration import Scores, Traces
from samebits.correction.calibration.assess import ascent

VOCAB, LENGTH = 5, 6  # 15,625 sequences


class Enumerated:
    """Token t depends on token t - 1. mu is pi with noise on its logits, other at each position; the reward adds up."""

    def __init__(self, spread: float, seed: int = 0):
        g = torch.Generator().manual_seed(seed)
        theta = torch.randn(VOCAB + 1, VOCAB, generator=g, dtype=torch.float64)
        noise = torch.randn(LENGTH, VOCAB + 1, VOCAB, generator=g, dtype=torch.float64)
        log_pi, log_mu = theta.log_softmax(-1), (theta + spread * noise).log_softmax(-1)
        tokens = torch.tensor(list(itertools.product(range(VOCAB), repeat=LENGTH)))
        before = torch.cat((torch.full((len(tokens), 1), VOCAB), tokens[:, :-1]), 1)
        self.old = log_pi[before, tokens]
        self.rollout = log_mu[torch.arange(LENGTH).expand_as(tokens), before, tokens]
        self.pi, self.mu = self.old.sum(1).exp(), self.rollout.sum(1).exp()
        reward = torch.randn(VOCAB, generator=g, dtype=torch.float64)[tokens].sum(1)
        self.advantages = reward - self.pi @ reward
        one_hot = torch.nn.functional.one_hot
        step = one_hot(tokens, VOCAB).double() - log_pi.exp()[before]
        self.scores = (one_hot(before, VOCAB + 1).double()[..., None] * step[..., None, :]).flatten(2)

    def draw(self, count: int, generator: torch.Generator, exact: bool = False) -> torch.Tensor:
        """The numbers of sequences sampled from mu, or from pi."""
        return torch.multinomial(self.pi if exact else self.mu, count, True, generator=generator)

    def traces(self, chosen: torch.Tensor, exact: bool = False, groups: torch.Tensor | None = None) -> Traces:
        count = len(chosen)
        rollout = (self.old if exact else self.rollout)[chosen].flatten()
        offsets = torch.arange(0, count * LENGTH + 1, LENGTH)
        lp = LogProbs(torch.ones(count * LENGTH), rollout, self.old[chosen].flatten(), offsets=offsets)
        return Traces(lp, self.advantages[chosen], Scores(self.scores[chosen].flatten(0, 1)), groups)

    def gradients(self, correction: Correction, exact: bool = False) -> torch.Tensor:
        """fp64 [sequences, F]: the contribution of each of them."""
        every = self.traces(torch.arange(len(self.pi)), exact).on_policy()
        e = ascent(every, "recompute" if exact else "decoupled", correction)
        return (self.scores * e.view(-1, LENGTH, 1)).sum(1)

    def truth(self, correction: Correction, batch: int) -> tuple[float, float]:
        """The expected cosine of a batch's update with the exact gradient, and the direction bias."""
        target = self.pi @ self.gradients(Correction(), True)
        g = self.gradients(correction)
        mean = self.mu @ g
        variance = self.mu @ g.square().sum(1) - mean @ mean
        cosine = mean @ target / (target.norm() * (mean @ mean + variance / batch).sqrt())
        tangent = (mean @ mean) * (target @ target) / (mean @ target) ** 2 - 1
        return float(cosine), max(0.0, float(tangent)) ** 0.5
