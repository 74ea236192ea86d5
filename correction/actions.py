"""Corrections: at most one weight and any number of gates, each on a named statistic; presets by the papers' names."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from .statistics import LogProbs, Ratio, Statistic, exp, require_choice, wide

Denominator = Literal["original", "kept"]
Outside = Literal["clip", "zero", "keep"]
Side = Literal["any", "negative", "outward"]
AllReduce = Callable[[Tensor], Tensor]  # the sum of a tensor over data-parallel ranks


@dataclass(frozen=True)
class Weight:
    """A factor of the loss: the ratio exp(statistic). The statistic's kernel is "log_ratio".

    low, high: bounds of the ratio, each side open where None. outside: what becomes of a ratio outside them: "clip" to
    the bound (truncated importance sampling), "zero" (masked importance sampling), or "keep" as it is, so that the
    bounds only feed the metrics. normalize: divide by the weights' mean over the batch (of tokens, or of sequences).
    """

    statistic: Statistic
    low: float | None = None
    high: float | None = None
    outside: Outside = "clip"
    normalize: bool = False

    def __post_init__(self) -> None:
        if self.statistic.kernel != "log_ratio" or self.statistic.aggregate not in ("token", "sum", "mean"):
            raise ValueError("a weight is the exponential of a log ratio: of a token, or a sequence's sum or mean")
        require_choice("outside", self.outside, Outside)
        _check_bounds(self.low, self.high)
        if min(self.bounds) < 0 or self.bounds[1] == 0:
            raise ValueError(f"bounds of a ratio are positive, got [{self.low}, {self.high}]")

    @property
    def bounds(self) -> tuple[float, float]:
        """The bounds of the ratio, 0 and inf where they are open."""
        return self.low or 0.0, math.inf if self.high is None else self.high

    def bounded(self, ratio: Tensor) -> Tensor:
        """Return the ratios with the bounds applied, elementwise."""
        low, high = self.bounds
        if self.outside == "zero":
            return torch.where((ratio >= low) & (ratio <= high), ratio, 0.0)
        return ratio.clamp(low, high) if self.outside == "clip" else ratio

    def of(self, logprobs: LogProbs, all_reduce: AllReduce | None = None) -> Tensor:
        """fp64 [valid tokens] or [sequences], as the statistic."""
        raw = self.bounded(exp(self.statistic.of(logprobs)))
        if self.normalize:
            counted = raw if self.statistic.per_token else raw[logprobs.lengths > 0]
            total = torch.stack((counted.sum(), counted.new_tensor(float(len(counted)))))
            weight, count = total if all_reduce is None else all_reduce(total)
            raw = raw / (weight / count.clamp_min(1)).clamp_min(1e-8)
        return raw


@dataclass(frozen=True)
class Gate:
    """A condition on which tokens, or whole sequences for a statistic per sequence, are kept: low <= statistic <= high.

    Bounds are on the statistic as named; `Gate.on_ratio` takes them for the ratio instead. side: "negative" drops
    tokens with A < 0 only; "outward" holds A > 0 against the upper bound and the others against the lower one, so that
    only what moves further away is dropped (DPPO). average: `high` bounds the mean of what is kept in the batch at
    hand: the largest values are dropped until it holds (M2PO).
    """

    statistic: Statistic
    low: float | None = None
    high: float | None = None
    side: Side = "any"
    average: bool = False

    def __post_init__(self) -> None:
        if self.low is None and self.high is None:
            raise ValueError("a gate needs a bound")
        _check_bounds(self.low, self.high)
        require_choice("side", self.side, Side)
        if self.average and (self.low is not None or self.side != "any"):
            raise ValueError("a gate on the average of what is kept has an upper bound alone, on any side")
        if self.low is not None and self.statistic.kernel in ("k2", "k3", "abs", "binary_kl"):
            raise ValueError(f"{self.statistic.kernel} is a distance from 0: only an upper bound makes sense")

    @classmethod
    def on_ratio(cls, statistic: Statistic, low: float | None, high: float | None, **kwargs) -> Gate:
        """Bounds of exp(statistic), for the kernel "log_ratio"."""
        if statistic.kernel != "log_ratio":
            raise ValueError(f"bounds of a ratio need the kernel 'log_ratio', not {statistic.kernel!r}")
        if any(b is not None and not b > 0 for b in (low, high)):
            raise ValueError(f"bounds of a ratio are positive, got [{low}, {high}]")
        low, high = (None if b is None else math.log(b) for b in (low, high))
        return cls(statistic, low, high, **kwargs)

    def keep(self, logprobs: LogProbs, advantages: Tensor | None) -> Tensor:
        """bool [valid tokens]; advantages fp [valid tokens], needed where the side isn't "any"."""
        values = self.statistic.per_token_of(logprobs)
        above_low = torch.ones_like(values, dtype=torch.bool) if self.low is None else values >= self.low
        below_high = torch.ones_like(above_low) if self.high is None else values <= self.high
        if self.average and self.high is not None:
            order = values.argsort(stable=True)
            means = values[order].cumsum(0) / torch.arange(1, len(values) + 1, device=values.device)
            return torch.zeros_like(above_low).index_fill_(0, order[means <= self.high], True)
        if self.side == "any":
            return above_low & below_high
        if advantages is None:
            raise ValueError("this gate looks at the advantages' signs: give the advantages")
        if self.side == "outward":
            return torch.where(advantages > 0, below_high, above_low)
        return above_low & below_high | (advantages >= 0)


def _check_bounds(low: float | None, high: float | None) -> None:
    if any(b is not None and math.isnan(b) for b in (low, high)) or (None not in (low, high) and not low < high):  # type: ignore[operator]
        raise ValueError(f"bounds must satisfy low < high, got [{low}, {high}]")


@dataclass(frozen=True)
class Corrected:
    """A correction's effect on a batch; both in the mask's shape, constants to autograd.

    weights: fp32, 1 without a weight, 0 outside the mask; never changed by gates. keep: bool, False outside the mask.
    """

    weights: Tensor
    keep: Tensor


@dataclass(frozen=True)
class Correction:
    """A correction: at most one weight, and gates that must all let a token pass.

    denominator: what a mean loss divides by: "original", the tokens sampled, so that rejection never raises the step
    size; or "kept", those that passed.
    """

    weight: Weight | None = None
    gates: tuple[Gate, ...] = ()
    denominator: Denominator = "original"

    def __post_init__(self) -> None:
        object.__setattr__(self, "gates", tuple(self.gates))
        require_choice("denominator", self.denominator, Denominator)

    @property
    def ratios(self) -> set[Ratio]:
        """The ratios it looks at."""
        return {a.statistic.ratio for a in (self.weight, *self.gates) if a is not None}

    @torch.no_grad()
    def __call__(
        self, logprobs: LogProbs, advantages: Tensor | None = None, all_reduce: AllReduce | None = None
    ) -> Corrected:
        """Apply the action. advantages: in the mask's shape, or one per sequence [sequences]; gates of one side
        need them.

        all_reduce: with it, `normalize` divides by the mean over all ranks.
        """
        weights, keep = self.on_tokens(logprobs, valid_advantages(logprobs, advantages), all_reduce)
        return Corrected(logprobs.spread(weights.float()), logprobs.spread(keep))

    def on_tokens(
        self, logprobs: LogProbs, advantages: Tensor | None, all_reduce: AllReduce | None = None
    ) -> tuple[Tensor, Tensor]:
        """(weights fp64, keep bool), each [valid tokens]."""
        keep = torch.ones(len(logprobs.segment), dtype=torch.bool, device=logprobs.mask.device)
        weights = torch.ones_like(logprobs.segment, dtype=wide(logprobs.mask).dtype)
        if self.weight is not None:
            weights = self.weight.of(logprobs, all_reduce)
            weights = weights if self.weight.statistic.per_token else weights[logprobs.segment]
        for gate in self.gates:
            keep &= gate.keep(logprobs, advantages)
        return weights, keep


def valid_advantages(logprobs: LogProbs, advantages: Tensor | None) -> Tensor | None:
    """Advantages in the mask's shape, [sequences] or [sequences, 1] -> fp64 [valid tokens]."""
    if advantages is None:
        return None
    if advantages.shape == logprobs.mask.shape:
        if advantages.dim() == 1 and len(advantages) == logprobs.num_sequences and (logprobs.lengths != 1).any():
            raise ValueError(
                "as many advantages as tokens and as sequences; give [sequences, 1], or drop empty sequences"
            )
        return wide(advantages.detach()[logprobs.mask])
    if advantages.numel() != logprobs.num_sequences or advantages.dim() > 2:
        raise ValueError(
            f"advantages have shape {list(advantages.shape)}; give {list(logprobs.mask.shape)} or one per sequence"
        )
    return wide(advantages.detach().flatten()[logprobs.segment])


# --- presets --------------------------------------------------------------------------------------------------------

TIM: Ratio = "old/rollout"  # training-inference mismatch alone: 1 for exact rollouts
TOKEN, SEQUENCE, GEOMETRIC = (Statistic(TIM, "log_ratio", how) for how in ("token", "sum", "mean"))  # type: ignore[arg-type]


def _rejection(kernel, aggregate, high, low=None, ratio: Ratio = TIM, weight: Weight | None = None) -> Correction:
    return Correction(weight, (Gate(Statistic(ratio, kernel, aggregate), low, high),))


def _tis_srs(kernel, cap=2.0, high=0.001, aggregate="mean") -> Correction:
    return _rejection(kernel, aggregate, high, weight=Weight(TOKEN, high=cap))


def opsm(delta: float = 1e-4, ratio: Ratio | None = None) -> Correction:
    """Off-policy sequence masking (DeepSeek-V3.2): drops A < 0 where mean(log below - log above) > delta.

    The ratio must be named: "current/rollout" sees mismatch and staleness (the paper, TRL), "current/old" staleness
    alone (Miles).
    """
    if ratio is None:
        raise ValueError("opsm needs its ratio named: 'current/rollout' (mismatch and staleness) or 'current/old'")
    return Correction(gates=(Gate(Statistic(ratio, "k1", "mean"), high=delta, side="negative"),))


def _outward(kernel, low, high, ratio: Ratio) -> Correction:
    return Correction(gates=(Gate(Statistic(ratio, kernel), -low, high, side="outward"),))


# The printed gate of the VeXact paper is a sum with threshold 0.001, which only makes sense as a mean: K3 of dense
# models is 1e-5 to 1e-3 per token. `aggregate="sum"` gives the printed reading.
PRESETS: dict[str, Callable[..., Correction]] = {
    "none": lambda: Correction(),
    "token_tis": lambda high=2.0, low=None: Correction(Weight(TOKEN, low, high)),
    "sequence_tis": lambda high=2.0: Correction(Weight(SEQUENCE, high=high)),
    "geometric_is": lambda low=0.9999, high=1.0001: Correction(Weight(GEOMETRIC, low, high)),
    "sequence_is": lambda: Correction(Weight(SEQUENCE)),
    "icepop": lambda low=0.5, high=5.0: Correction(Weight(TOKEN, low, high, "zero")),
    "token_mis": lambda high=3.0, low=None: Correction(Weight(TOKEN, low, high, "zero")),
    "sequence_mis": lambda high=3.0, low=None: Correction(Weight(SEQUENCE, low, high, "zero")),
    "geo_rs": lambda low=0.999, high=1.001: Correction(gates=(Gate.on_ratio(GEOMETRIC, low, high),)),
    "k1_sum_rs": lambda bound=0.7: _rejection("k1", "sum", bound, -bound),
    "k1_mean_rs": lambda bound=0.001: _rejection("k1", "mean", bound, -bound),
    "k2_sum_rs": lambda high=0.5: _rejection("k2", "sum", high),
    "k2_mean_rs": lambda high=0.001: _rejection("k2", "mean", high),
    "k3_sum_rs": lambda high=0.5: _rejection("k3", "sum", high),
    "k3_mean_rs": lambda high=0.001: _rejection("k3", "mean", high),
    "trm": lambda high=0.05, kernel="k3": _rejection(kernel, "max", high),
    "veto": lambda low=1e-4: Correction(gates=(Gate.on_ratio(Statistic(TIM, "log_ratio", "min"), low, None),)),
    "veto_probability": lambda low=1e-6: Correction(gates=(Gate(Statistic(TIM, "log_prob", "min"), math.log(low)),)),
    "opsm": opsm,
    "kpop": lambda high=0.1: _rejection("binary_kl", "token", high),
    "dppo_tv": lambda low=0.2, high=0.2, ratio="current/rollout": _outward("tv", low, high, ratio),
    "dppo_kl": lambda low=0.05, high=0.05, ratio="current/rollout": _outward("directed_kl", low, high, ratio),
    "ipo": lambda high=0.1: _rejection("tv", "token", high, -high, "current/rollout"),
    "m2po": lambda high=0.04, ratio=TIM: Correction(gates=(Gate(Statistic(ratio, "k2"), high=high / 2, average=True),)),
    "srs_k3_corr": lambda high=0.001, aggregate="mean": _rejection("k3", aggregate, high),
    "srs_k3_ppo": lambda high=0.001, aggregate="mean": _rejection("k3", aggregate, high, ratio="current/rollout"),
    "tis_geo_rs": lambda low=0.999, high=1.001, cap=2.0: Correction(
        Weight(TOKEN, high=cap), (Gate.on_ratio(GEOMETRIC, low, high),)
    ),
    "tis_srs_k1_corr": lambda **thresholds: _tis_srs("k1", **thresholds),
    "tis_srs_k3_corr": lambda **thresholds: _tis_srs("k3", **thresholds),
}


def preset(name: str, **thresholds) -> Correction:
    """A published correction by name, with its paper's or framework's default thresholds unless given."""
    require_choice("correction", name, PRESETS)
    return PRESETS[name](**thresholds)
