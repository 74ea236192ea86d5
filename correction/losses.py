"""Policy-gradient losses in three modes that differ in which ratio is clipped and where a correction enters.

recompute: ratio current/old; the engine's log-probs are ignored, so that only gates of current/old make sense.
bypass:    ratio current/rollout; gates may drop tokens. Only REINFORCE takes a weight, of current/rollout.
decoupled: ratio current/old, times a weight of old/rollout (three policies; Hilton et al., 2022); gates may drop.

Untruncated token weights make decoupled and bypass the same except for where the clip acts.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from .actions import AllReduce, Corrected, Correction, Weight, valid_advantages
from .statistics import CLAMP, IMPOSSIBLE, LogProbs, require_choice

_LOG_TINY = -18.42068074395237  # log 1e-8
Mode = Literal["recompute", "bypass", "decoupled"]
Kind = Literal["ppo", "gspo", "cispo", "reinforce", "sapo", "vespo"]
Aggregation = Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"]


@dataclass(frozen=True)
class PolicyLoss:
    """A policy loss. loss: a differentiable scalar. clipped: bool [valid tokens], whose gradient a clip removed.
    corrected: what the correction did.
    """

    loss: Tensor
    clipped: Tensor
    corrected: Corrected


def policy_loss(
    logprobs: LogProbs,
    advantages: Tensor,
    mode: Mode,
    kind: Kind = "ppo",
    correction: Correction | None = None,
    *,
    clip: tuple[float, float] = (0.2, 0.2),
    dual_clip: float | None = None,
    aggregation: Aggregation = "token-mean",
    divisor: float | None = None,
    normalizer: float | None = None,
    all_reduce: AllReduce | None = None,
    centering: Tensor | None = None,
    soft: tuple[float, ...] | None = None,
) -> PolicyLoss:
    """Return the loss of one batch, to be minimised. `logprobs.current` carries the gradient.

    advantages: in the mask's shape, or [sequences]. kind: "ppo" (Schulman et al., 2017; GRPO is PPO with a group's
    advantages), "gspo" (sequence ratio; Zheng et al., 2025), "cispo" (clipped detached ratio; MiniMax, 2025),
    "reinforce". clip: (low, high), the ratio stays in [1 - low, 1 + high]; dual_clip: for A < 0 the loss stays below
    -dual_clip * A (Ye et al., 2020). aggregation: verl's names; "-norm" divides sequence sums by `divisor` (Dr. GRPO).
    normalizer: what to divide by instead of this batch's tokens or sequences, e.g. those of all ranks. centering:
    `expected_score`, in the mask's shape, whose product with A is taken off. kind "sapo": 4 / t sigmoid(t (r - 1)) in
    place of the clipped ratio (arXiv 2511.20347); "vespo": a weight exp(l + k log w - l w) of the sequence's ratio w,
    a correction's weights included. soft: their constants for A > 0 and the rest, t (1, 1.05); k, l, k, l (2, 3, 3, 2).
    Raises ValueError where mode, kind and correction don't go together, or log-probs are missing.
    """
    correction = correction or Correction()
    require_choice("aggregation", aggregation, Aggregation)
    if logprobs.current is None:
        raise ValueError("a loss needs the current policy's log-probs")
    if (aggregation == "seq-mean-token-sum-norm") != (divisor is not None):
        raise ValueError("seq-mean-token-sum-norm needs a divisor, and no other aggregation takes one")
    check_combination(mode, kind, correction)
    check_clip(clip, dual_clip)
    advantage = valid_advantages(logprobs, advantages)
    assert advantage is not None
    with torch.no_grad():
        weights, keep = correction.on_tokens(logprobs, advantage, all_reduce)
    current = logprobs.current[logprobs.mask].to(advantage.dtype)
    current = torch.where(current == -torch.inf, IMPOSSIBLE, current)
    clipped = torch.zeros_like(keep)
    applied = weights
    if kind == "reinforce":
        losses = -current * advantage
    else:
        log_ratio = current - logprobs.values("rollout" if mode == "bypass" else "old")
        if kind == "gspo":  # the sequence's ratio, with each token's own gradient
            mean = logprobs.per_sequence(log_ratio.detach(), "mean")[logprobs.segment]
            log_ratio = mean + current - current.detach()
        if kind == "sapo":
            losses = -_soft_ratio(log_ratio, advantage, soft or (1.0, 1.05)) * advantage
        elif kind == "vespo":
            shaped = _vespo(logprobs, log_ratio.detach(), weights, advantage, soft or (2.0, 3.0, 3.0, 2.0))
            losses = -shaped * current * advantage
            applied = torch.ones_like(weights)  # they are in the sequence's ratio
        else:
            losses, clipped = _clipped(kind, log_ratio, current, advantage, clip, dual_clip)
    losses = losses * applied
    if centering is not None:
        losses = losses + centering[logprobs.mask].to(losses.dtype) * advantage
    losses = torch.where(keep, losses, 0.0)
    loss = aggregate(losses, keep, logprobs, aggregation, correction.denominator, divisor, normalizer)
    return PolicyLoss(loss, clipped, Corrected(logprobs.spread(weights.float()), logprobs.spread(keep)))


def check_clip(clip: tuple[float, float], dual_clip: float | None) -> None:
    """ValueError unless the ratio's bounds 1 - low and 1 + high, and dual clipping's, make sense."""
    low, high = clip
    if not (0 <= low <= 1 and 0 <= high < float("inf")):
        raise ValueError(f"clip keeps a ratio in [1 - low, 1 + high]: expected 0 <= low <= 1 and high >= 0, got {clip}")
    if dual_clip is not None and not dual_clip > 1:
        raise ValueError(f"dual_clip bounds a ratio from above and must exceed 1, got {dual_clip}")


def check_combination(mode: Mode, kind: Kind, correction: Correction) -> None:
    """ValueError unless a correction makes sense in this mode and kind of loss."""
    require_choice("mode", mode, Mode)
    require_choice("kind", kind, Kind)
    weight = None if correction.weight is None else correction.weight.statistic.ratio
    if mode == "recompute" and (weight is not None or correction.ratios - {"current/old"}):
        raise ValueError("recompute ignores the rollout's log-probs; a correction needs bypass or decoupled")
    if mode == "bypass" and weight is not None and kind != "reinforce":
        raise ValueError(
            f"bypass puts the mismatch into the clipped ratio of {kind}: a weight would count it twice. "
            "Use gates only, mode='decoupled', or kind='reinforce'"
        )
    if kind == "vespo" and correction.weight is not None and not correction.weight.statistic.per_token:
        raise ValueError("vespo multiplies the weights of a sequence's tokens: give it a weight per token")
    expected = "current/rollout" if mode == "bypass" else "old/rollout"
    if weight is not None and weight != expected:
        raise ValueError(f"in mode {mode} the weight must be of {expected}, not {weight}")


def _clipped(kind, log_ratio, current, advantage, clip, dual_clip) -> tuple[Tensor, Tensor]:
    low, high = clip
    ratio = log_ratio.clamp(-CLAMP, CLAMP).exp()
    inside = ratio.clamp(1 - low, 1 + high)
    if kind == "cispo":
        return -inside.detach() * advantage * current, torch.zeros_like(advantage, dtype=torch.bool)
    losses = torch.maximum(-ratio * advantage, -inside * advantage)
    clipped = (-inside * advantage > -ratio * advantage).detach()
    if dual_clip is not None:
        cap = -dual_clip * advantage
        capped = (advantage < 0) & (losses.detach() > cap)
        losses = torch.where(capped, cap, losses)
        clipped |= capped
    return losses, clipped


def _soft_ratio(log_ratio: Tensor, advantage: Tensor, temperatures: tuple[float, ...]) -> Tensor:
    up, down = temperatures
    t = torch.where(advantage > 0, up, down)
    return torch.sigmoid(t * (log_ratio.clamp(-CLAMP, CLAMP).exp() - 1)) * 4 / t


def _vespo(
    logprobs: LogProbs, log_ratio: Tensor, weights: Tensor, advantage: Tensor, shape: tuple[float, ...]
) -> Tensor:
    k_up, l_up, k_down, l_down = shape
    token = log_ratio.clamp(-CLAMP, CLAMP) + weights.log().clamp(_LOG_TINY, CLAMP)
    log_w = logprobs.per_sequence(token, "sum").clamp(_LOG_TINY, CLAMP)[logprobs.segment]
    k = torch.where(advantage >= 0, k_up, k_down)
    l = torch.where(advantage >= 0, l_up, l_down)
    return (l + k * log_w - l * log_w.exp()).exp()


def expected_score(current: Tensor, rollout: Tensor, weight: Weight | None = None) -> Tensor:
    """Return a scalar per token with the gradient E_mu[w grad log pi] over the vocabulary, which centering takes off.

    current, rollout: log-probs [..., k] of the sampler's k most likely tokens under the trainer, with its gradient, and
    the engine, -inf where there are fewer; the rest of the vocabulary is taken to have the trainer's proportions.
    weight: the token weight that the loss applies. Marek & Ryabinin, "Score centering stabilizes off-policy
    reinforcement learning", arXiv 2609.20807, equations 9 and 11.
    """
    p, q = (v.detach().to(torch.float64).exp() for v in (current, rollout))
    left = (1 - q.sum(-1, keepdim=True)).clamp_min(1e-6) / (1 - p.sum(-1, keepdim=True)).clamp_min(1e-6)
    if weight is not None:
        q = q * weight.bounded(p / q.clamp_min(1e-300))
        left = left * weight.bounded(1 / left)
    return ((q - left * p) * torch.where(rollout == -torch.inf, 0.0, current)).sum(-1)


def aggregate(losses, keep, logprobs: LogProbs, aggregation, denominator, divisor=None, normalizer=None) -> Tensor:
    """Tokens' losses [valid tokens], 0 where rejected, to a scalar; finite when all are rejected."""
    counted = keep if denominator == "kept" else torch.ones_like(keep)
    tokens = logprobs.per_sequence(counted.to(losses.dtype), "sum")
    if aggregation == "token-mean":
        return losses.sum() / (tokens.sum().clamp_min(1) if normalizer is None else normalizer)
    sequences = (tokens > 0).sum().clamp_min(1) if normalizer is None else normalizer
    sums = logprobs.per_sequence(losses, "sum")
    if aggregation == "seq-mean-token-mean":
        sums = sums / tokens.clamp_min(1)
    return sums.sum() / (sequences * (divisor or 1.0))


def contribution(log_ratio: Tensor, advantages: Tensor) -> Tensor:
    """C(r) = -(r - 1) A, elementwise: the zero-centred share of a token in the loss; 0 everywhere on policy."""
    return -log_ratio.clamp(-CLAMP, CLAMP).expm1() * advantages


def effective_coefficients(logprobs: LogProbs, advantages: Tensor, mode: Mode, **kwargs) -> Tensor:
    """dL/dlog pi of every valid token, fp64, by autograd of `policy_loss`; keywords are its own.

    In closed form -w m r A 1[unclipped] / N. What a correction does to an update, without a model.
    """
    assert logprobs.current is not None
    current = logprobs.current.detach().clone().requires_grad_()
    loss = policy_loss(replace(logprobs, current=current), advantages, mode, **kwargs).loss
    (gradient,) = torch.autograd.grad(loss, current)
    return gradient[logprobs.mask].to(torch.float64)
