"""Metrics of a correction's effect on a batch, for a training log."""

from __future__ import annotations

from collections.abc import Mapping

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
    weights, passed = correction.on_tokens(logprobs, advantage)
    used = torch.where(passed, weights, 0.0)
    kept = used > 0
    of_sequences = logprobs.per_sequence(used, "mean")
    sums = {
        "tokens": torch.ones_like(kept).sum(), "kept_tokens": kept.sum(),
        "sequences": (logprobs.lengths > 0).sum(), "kept_sequences": (of_sequences > 0).sum(),
        "weight": weights.sum(), "used_weight": used.sum(), "used_weight_squared": used.square().sum(),
        "sequence_weight": of_sequences.sum(), "sequence_weight_squared": of_sequences.square().sum(),
    }  # fmt: skip
    if weight := correction.weight:
        raw = exp(weight.statistic.per_token_of(logprobs))
        low, high = weight.bounds
        sums |= {"below_bound": (raw < low).sum(), "above_bound": (raw > high).sum()}
    for i, gate in enumerate(correction.gates):
        sums[f"rejected_by_gate_{i}"] = (~gate.keep(logprobs, advantage)).sum()
    if advantage is not None:
        for sign, among in (("positive", advantage > 0), ("negative", advantage < 0)):
            sums |= {f"{sign}_tokens": among.sum(), f"kept_{sign}_tokens": (among & kept).sum()}
        sums |= {"advantage": advantage.abs().sum(), "kept_advantage": advantage.abs()[kept].sum()}
    return {name: wide(value) for name, value in sums.items()}


def summarize(sums: Mapping[str, Tensor | float]) -> dict[str, float]:
    """Fractions and means of `correction_metrics`: of weights before and after the gates; tokens (by the advantage's
    sign too), sequences and advantage mass |A| rejected, by a gate or by a weight of 0; tokens outside the weight's
    bounds and those that each gate rejects; ESS / n of the weights in use, by token and by sequence (its mean weight).
    """
    s = {name: float(value) for name, value in sums.items()}
    tokens = max(1.0, s["tokens"])
    sequences = max(1.0, s["sequences"])
    result = {
        "weight_mean": s["weight"] / tokens, "used_weight_mean": s["used_weight"] / tokens,
        "ess_token": s["used_weight"] ** 2 / max(s["used_weight_squared"], 1e-300) / tokens,
        "ess_sequence": s["sequence_weight"] ** 2 / max(s["sequence_weight_squared"], 1e-300) / sequences,
    }  # fmt: skip
    for what in ("tokens", "sequences", "positive_tokens", "negative_tokens", "advantage"):
        if what in s:
            result[f"rejected_{what}"] = 1 - s[f"kept_{what}"] / s[what] if s[what] else 0.0
    return result | {name: value / tokens for name, value in s.items() if name.endswith("_bound") or "by_gate" in name}
