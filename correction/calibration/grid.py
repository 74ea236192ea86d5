"""The candidates that a calibration tries, and the heuristics that thresholds are taken from."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from ..actions import GEOMETRIC, TIM, Correction, Gate, opsm, preset
from ..losses import Mode
from ..statistics import CLAMP, Aggregate, Kernel, LogProbs, Ratio, Statistic, exp


def candidate_grid(logprobs: LogProbs, mode: Mode = "decoupled") -> dict[str, Correction]:
    """Candidates named "family@threshold": weights capped as published and at C*, gates at the data's own quantiles, so
    that each keeps 50 to 99 % of what it looks at, and token weights with a sequence gate. In bypass, gates
    alone, of current/rollout: such a loss has no other ratio.
    """
    logprobs = logprobs.on_policy()
    grid = {"none": Correction()}
    if mode == "decoupled":
        star = optimal_truncation(sequence_chi2(logprobs))
        caps = {"token_tis": {1.5, 2.0, 3.0, 5.0}, "sequence_tis": {1.5, 2.0, 3.0, 5.0, star}}
        caps |= {"icepop": {2.0, 5.0}, "sequence_mis": {2.0, 3.0, 5.0}}
        for family, bounds in caps.items():
            for c in sorted(bounds):
                low = {"low": 1 / c} if family == "icepop" else {}
                grid[f"{family}@{c:.3g}"] = preset(family, high=c, **low)
        grid["sequence_is"] = preset("sequence_is")
    ratio: Ratio = "current/rollout" if mode == "bypass" else TIM

    def gate(kernel: Kernel, aggregate: Aggregate) -> tuple[Statistic, Callable[[float], Correction]]:
        of = Statistic(ratio, kernel, aggregate)
        return of, lambda b: Correction(gates=(Gate(of, -b if kernel == "log_ratio" else None, b),))

    gates = {
        "geo_rs": gate("log_ratio", "mean"),
        "k3_mean_rs": gate("k3", "mean"),
        "k3_sum_rs": gate("k3", "sum"),
        "trm": gate("k3", "max"),
        "opsm": (Statistic("current/rollout", "k1", "mean"), lambda b: opsm(b, "current/rollout")),
    }
    if mode == "decoupled":
        gates["tis_geo_rs"] = GEOMETRIC, lambda b: preset("tis_geo_rs", low=math.exp(-b), high=math.exp(b))
        gates["tis_srs_k3_corr"] = Statistic(TIM, "k3", "mean"), lambda b: preset("tis_srs_k3_corr", high=b)
    for family, (statistic, build) in gates.items():
        values = statistic.of(logprobs)[logprobs.lengths > 0]
        values = (values if family == "opsm" else values.abs()).sort().values  # opsm has an upper bound only
        for q in (0.5, 0.75, 0.9, 0.99):
            bound = float(values[int(q * (len(values) - 1))]) if len(values) else 0.0
            if 0 < bound < CLAMP or (bound > 0 and statistic.kernel == "k3"):  # exp(bound) must exist
                grid.setdefault(f"{family}@{bound:.3g}", build(bound))
    grid["veto@0.0001"] = Correction(gates=(Gate.on_ratio(Statistic(ratio, "log_ratio", "min"), 1e-4, None),))
    return grid


def optimal_truncation(chi2: float) -> float:
    """C* = sqrt(2 (1 + chi2)), the cap of a sequence's weight that minimises a bound on its error.

    The bound is that of min(rho, C) over gradients of norm K: K^2 C^2 for the second moment and 2 K (1 + chi2) / C for
    the bias (Liu & Li, "When speed kills stability", 2025, part 2). It is loose: C* is where a search starts.
    """
    return math.sqrt(2 * (1 + chi2))


def self_normalized_chi2(weights: Tensor) -> Tensor:
    """mean(w^2) / mean(w)^2 - 1: never negative, unlike the plug-in mean(w^2) - 1. inf when all weights are 0."""
    chi2 = weights.numel() * weights.square().sum() / weights.sum().square() - 1
    return chi2.nan_to_num(torch.inf, posinf=torch.inf)


def sequence_chi2(logprobs: LogProbs) -> float:
    """chi2 of the sequences' weights old/rollout, self-normalised."""
    weights = exp(Statistic(TIM, aggregate="sum").of(logprobs))[logprobs.lengths > 0]
    return max(0.0, float(self_normalized_chi2(weights)))
