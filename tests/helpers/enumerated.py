"""A policy so small that every sequence can be listed: exact gradients, variances and cosines of any correction."""

from __future__ import annotations

import itertools

import torch

from samebits.correction import Correction, LogProbs
from samebits.correction.calibration import Scores, Traces
from samebits.correction.calibration.assess import ascent

VOCAB, LENGTH = 5, 6  # 15,625 sequences


class Enumerated:
    """Token t depends on token t - 1. mu is pi with noise on its logits, other at each position; the reward adds up.

    prompt: so many tokens are given, by pi; advantages are the reward's less its mean after them.
    """

    def __init__(self, spread: float, seed: int = 0, prompt: int = 0):
        g = torch.Generator().manual_seed(seed)
        theta = torch.randn(VOCAB + 1, VOCAB, generator=g, dtype=torch.float64)
        noise = torch.randn(LENGTH, VOCAB + 1, VOCAB, generator=g, dtype=torch.float64)
        log_pi, log_mu = theta.log_softmax(-1), (theta + spread * noise).log_softmax(-1)
        tokens = torch.tensor(list(itertools.product(range(VOCAB), repeat=LENGTH)))
        before = torch.cat((torch.full((len(tokens), 1), VOCAB), tokens[:, :-1]), 1)
        self.old = log_pi[before, tokens]
        self.rollout = log_mu[torch.arange(LENGTH).expand_as(tokens), before, tokens]
        self.prompt = prompt
        self.pi = self.old.sum(1).exp()
        self.mu = (self.old[:, :prompt].sum(1) + self.rollout[:, prompt:].sum(1)).exp()
        self.prompts = self.pi.view(VOCAB**prompt, -1).sum(1)
        reward = torch.randn(VOCAB, generator=g, dtype=torch.float64)[tokens].sum(1).view(VOCAB**prompt, -1)
        value = (self.pi.view_as(reward) * reward).sum(1) / self.prompts
        self.advantages = (reward - value[:, None]).flatten()
        one_hot = torch.nn.functional.one_hot
        step = one_hot(tokens, VOCAB).double() - log_pi.exp()[before]
        scores = (one_hot(before, VOCAB + 1).double()[..., None] * step[..., None, :]).flatten(2)
        self.scores = scores[:, prompt:]

    def draw(self, count: int, generator: torch.Generator, exact: bool = False) -> torch.Tensor:
        """The numbers of sequences sampled from mu, or from pi."""
        return torch.multinomial(self.pi if exact else self.mu, count, True, generator=generator)

    def draw_groups(self, count: int, samples: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        """The numbers of sequences after `count` prompts, `samples` of each: from mu, and from pi."""
        prompt = torch.multinomial(self.prompts, count, True, generator=generator)
        sides = []
        for policy in (self.mu, self.pi):
            after = policy.view(len(self.prompts), -1)
            drawn = torch.multinomial(after[prompt], samples, True, generator=generator)
            sides.append((drawn + prompt[:, None] * after.shape[1]).flatten())
        return sides[0], sides[1]

    def traces(self, chosen: torch.Tensor, exact: bool = False, groups: torch.Tensor | None = None) -> Traces:
        count = len(chosen)
        rollout = (self.old if exact else self.rollout)[chosen].flatten()
        offsets = torch.arange(0, count * LENGTH + 1, LENGTH)
        mask = (torch.arange(LENGTH) >= self.prompt).repeat(count)
        lp = LogProbs(mask, rollout, self.old[chosen].flatten(), offsets=offsets)
        return Traces(lp, self.advantages[chosen], Scores(self.scores[chosen].flatten(0, 1)), groups)

    def gradients(self, correction: Correction, exact: bool = False) -> torch.Tensor:
        """fp64 [sequences, F]: the contribution of each of them."""
        every = self.traces(torch.arange(len(self.pi)), exact).on_policy()
        e = ascent(every, "recompute" if exact else "decoupled", correction)
        return (self.scores * e.view(len(self.pi), -1, 1)).sum(1)

    def truth(self, correction: Correction, batch: int, samples: int = 1) -> tuple[float, float]:
        """The expected cosine of a batch's update with the exact gradient, and the direction bias. samples: of each
        prompt in a batch."""
        target = self.pi @ self.gradients(Correction(), True)
        g = self.gradients(correction)
        mean = self.mu @ g
        shares = (self.mu[:, None] * g).view(len(self.prompts), -1, g.shape[1]).sum(1)  # of the mean, by prompt
        explained = (shares.square().sum(1) / self.prompts).sum()
        within = self.mu @ g.square().sum(1) - explained
        variance = within + samples * (explained - mean @ mean)
        cosine = mean @ target / (target.norm() * (mean @ mean + variance / batch).sqrt())
        tangent = (mean @ mean) * (target @ target) / (mean @ target) ** 2 - 1
        return float(cosine), max(0.0, float(tangent)) ** 0.5
