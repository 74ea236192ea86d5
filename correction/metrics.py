"""What a correction did to a batch, for a training log."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .actions import Correction, valid_advantages
from .statistics import LogProbs, exp, wide


@torch.no_grad()
def correction_metrics(
    correction: Correction, logprobs: LogProbs, advantages: Tensor | None = None
) -> dict[str, Tensor]:
    """Sums and counts over the mask before any rejection, fp64 scalars. Add them over micro-batches and ranks, then
    `summarize` them: the result is that of the whole batch. advantages as `Correction` takes them.
    """
    advantage = valid_advantages(logprobs, advantages)
    weights, keep = correction.on_tokens(logprobs, advantage)
    used = torch.where(keep, weights, 0.0)
    real = logprobs.lengths > 0
    kept_sequences = logprobs.per_sequence(keep.to(weights.dtype), "max") > 0
    sums = {
        "tokens": torch.ones_like(keep).sum(), "sequences": real.sum(),
        "kept_tokens": keep.sum(), "kept_sequences": kept_sequences.sum(),
        "weight": weights.sum(), "weight_squared": weights.square().sum(),
        "used_weight": used.sum(), "used_weight_squared": used.square().sum(),
    }  # fmt: skip
    if correction.weight is not None:
        weight = correction.weight
        raw = exp(weight.statistic.per_token_of(logprobs))
        sums["below_bound"] = (raw < (weight.low or 0.0)).sum()
        sums["above_bound"] = (raw > (math.inf if weight.high is None else weight.high)).sum()
    for i, gate in enumerate(correction.gates):
        sums[f"rejected_by_gate_{i}"] = (~gate.keep(logprobs, advantage)).sum()
    if advantage is not None:
        sums["advantage_mass"] = advantage.abs().sum()
        sums["rejected_advantage_mass"] = advantage.abs()[~keep].sum()
    return {name: wide(value) for name, value in sums.items()}


def summarize(sums: dict[str, Tensor]) -> dict[str, float]:
    """Fractions and means of `correction_metrics`: of weights before and after the gates, tokens and sequences rejected
    (by each gate too), tokens outside the weight's bounds, advantage mass rejected, and ESS / n of the weights in use.
    """
    s = {name: float(value) for name, value in sums.items()}
    tokens, sequences = max(1.0, s["tokens"]), max(1.0, s["sequences"])
    result = {
        "weight_mean": s["weight"] / tokens,
        "used_weight_mean": s["used_weight"] / tokens,
        "ess": s["used_weight"] ** 2 / max(s["used_weight_squared"], 1e-300) / tokens,
        "rejected_tokens": 1 - s["kept_tokens"] / tokens,
        "rejected_sequences": 1 - s["kept_sequences"] / sequences,
    }
    result |= {name: value / tokens for name, value in s.items() if name.endswith("_bound") or "by_gate" in name}
    if "advantage_mass" in s:
        result["rejected_advantage"] = s["rejected_advantage_mass"] / max(s["advantage_mass"], 1e-300)
    return result
