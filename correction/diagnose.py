"""The mismatch between two policies' log-probs of the same tokens, measured in one pass over any amount of data."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from .statistics import KERNELS, LogProbs, Ratio, exp, wide

_DECADES = 8  # |d| from 1e-8 up; below counts as 1e-8, exact zeros apart
_PER_DECADE = 32
_BINS = 2 + 10 * _PER_DECADE  # zero, and 1e-8 to 1e2
_COLUMNS = ("tokens", "mean_abs", "k1", "k2", "k3", "exact")  # sums over tokens, shown as means
_TOTALS = (
    "sequences", "w", "w2", "w_seq", "w2_seq", "ppl_above", "ppl_below", "ppl_ratio", "probability_gap",
    "flips", "argmax_known",
)  # fmt: skip

PROBABILITY_EDGES = (1e-6, 1e-4, 1e-3, 1e-2, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.99, 0.999)
_EDGES = ("0", *(f"{e:g}" for e in PROBABILITY_EDGES), "1")
_POWERS = [f"{2**i}-{2 ** (i + 1) - 1}" for i in range(24)]
_VIEWS = {  # view -> its bins
    "all": ["all"],
    "by_probability": [f"{a} to {b}" for a, b in pairwise(_EDGES)],
    "by_position": _POWERS,
    "by_length": _POWERS,
}


def predicted_chi2(k3: float, length: float) -> float:
    """exp(2 K3 T) - 1: a sequence's chi2 for Gaussian log ratios of K3 nats a token. inf where it overflows."""
    exponent = 2 * k3 * length
    return math.expm1(exponent) if exponent < 700 else math.inf


class Diagnosis:
    """The mismatch of two policies, over all batches that were added.

    All state is sums, counts and extremes, so that ranks can each do a part and `all_reduce`.

    With `ratio` "above/below", d = log above - log below, and expectations are over `below`, which sampled the tokens:
    mean k1, k2 and k3 estimate KL(below || above). chi2 and ESS are of the weights above / below, self-normalised.
    """

    def __init__(self, ratio: Ratio = "old/rollout"):
        self.ratio = ratio
        zeros = partial(torch.zeros, dtype=torch.float64)
        self.largest = {view: zeros(len(bins)) for view, bins in _VIEWS.items()}  # |d|
        self.sums = {view: zeros(len(bins), len(_COLUMNS)) for view, bins in _VIEWS.items()}
        self.sums |= {name: zeros(()) for name in _TOTALS}
        self.sums["histogram"] = zeros(_BINS)

    @torch.no_grad()
    def add(self, logprobs: LogProbs, argmax_flips: Tensor | None = None) -> Tensor:
        """Add a batch; return d, fp64 [valid tokens]. argmax_flips: int [valid tokens], 1 where the two policies'
        most likely tokens differ, 0 where they don't, -1 where that isn't known."""
        above, below = (logprobs.values(p) for p in self.ratio.split("/"))
        d = above - below
        if not len(d):
            return d
        absolute = d.abs()
        lengths = logprobs.lengths
        columns = [torch.ones_like(d), absolute, *(KERNELS[k](above, below) for k in ("k1", "k2", "k3")), wide(d == 0)]
        edges = torch.tensor(PROBABILITY_EDGES, dtype=d.dtype, device=d.device)
        first = lengths.cumsum(0) - lengths
        position = torch.arange(len(d), device=d.device) - first[logprobs.segment]
        index = {
            "all": torch.zeros_like(position),
            "by_probability": torch.bucketize(above.exp(), edges, right=True),
            "by_position": _power_of_two(position + 1),
            "by_length": _power_of_two(lengths)[logprobs.segment],
        }
        for view, bins in index.items():
            sums = [torch.bincount(bins, column, len(_VIEWS[view])) for column in columns]
            self.sums[view] += torch.stack(sums, 1).cpu()
            self.largest[view].scatter_reduce_(0, bins.cpu(), absolute.cpu(), "amax")
        self.sums["histogram"] += torch.bincount(_bin(absolute), minlength=_BINS).cpu()
        totals = _totals(logprobs, above, below)
        if argmax_flips is not None:
            totals |= {"flips": argmax_flips == 1, "argmax_known": argmax_flips >= 0}
        for name, values in totals.items():
            self.sums[name] += values.sum().cpu()
        return d

    def all_reduce(self, reduce: Callable[[Tensor, str], Tensor]) -> None:
        """Take the place of all ranks' diagnoses. reduce(tensor, "sum" | "max") returns the tensor over all ranks."""
        self.sums = {name: reduce(tensor, "sum") for name, tensor in self.sums.items()}
        self.largest = {view: reduce(tensor, "max") for view, tensor in self.largest.items()}

    def quantile(self, q: float) -> float:
        """The quantile of |d|, from a histogram with 32 bins per decade (within 7 %).

        Exact where it is 0, and never above the largest."""
        cumulative = self.sums["histogram"].cumsum(0)
        index = int(torch.searchsorted(cumulative, q * cumulative[-1].clamp_min(1)))
        top = float(self.largest["all"])
        return 0.0 if index == 0 else min(top, 10.0 ** ((index - 0.5) / _PER_DECADE - _DECADES))

    def rows(self, view: str) -> list[dict[str, Any]]:
        """One dict a bin that holds tokens: how many, means over them, the share of exact ones, the largest |d|."""
        rows = []
        for label, sums, top in zip(_VIEWS[view], self.sums[view], self.largest[view].tolist(), strict=True):
            if sums[0]:
                means = dict(zip(_COLUMNS, (sums / sums[0]).tolist(), strict=True))
                rows.append({"bin": label, **means, "tokens": int(sums[0]), "max_abs": top})
        return rows

    def summary(self) -> dict[str, Any]:
        """The report as plain numbers. Raises ValueError without tokens."""
        if not self.sums["all"].any():
            raise ValueError("no valid tokens to diagnose")
        (total,) = self.rows("all")
        del total["bin"]
        s = {name: float(self.sums[name]) for name in _TOTALS}
        n = total["tokens"]
        m = s["sequences"]
        chi2_token = max(0.0, n * s["w2"] / s["w"] ** 2 - 1)
        chi2_sequence = max(0.0, m * s["w2_seq"] / s["w_seq"] ** 2 - 1)
        return {
            "ratio": self.ratio, **total, "sequences": int(m), "mean_length": n / m,
            "quantiles": {str(q): self.quantile(q) for q in (0.5, 0.9, 0.99, 0.999, 0.9999)},
            "mean_probability_gap": s["probability_gap"] / n, "chi2_token": chi2_token, "chi2_sequence": chi2_sequence,
            "chi2_sequence_predicted": predicted_chi2(total["k3"], n / m),
            "ess_token": 1 / (1 + chi2_token), "ess_sequence": 1 / (1 + chi2_sequence),
            "perplexity_above": s["ppl_above"] / m, "perplexity_below": s["ppl_below"] / m,
            "perplexity_ratio": s["ppl_ratio"] / m,
            "argmax_flips": s["flips"] / s["argmax_known"] if s["argmax_known"] else None,
            **{view: self.rows(view) for view in _VIEWS if view != "all"},
        }  # fmt: skip

    def survival(self) -> tuple[list[float], list[float]]:
        """(edges, share of tokens with |d| above each), for a plot."""
        counts = self.sums["histogram"]
        above = 1 - counts.cumsum(0) / counts.sum().clamp_min(1)
        return [10.0 ** (i / _PER_DECADE - _DECADES) for i in range(_BINS - 1)], above[:-1].tolist()


def _totals(logprobs: LogProbs, above: Tensor, below: Tensor) -> dict[str, Tensor]:
    """The sums over tokens or sequences, by their names in _TOTALS."""
    real = logprobs.lengths > 0
    ratio = exp(above - below)
    sequence = exp(logprobs.per_sequence(above - below, "sum"))[real]
    mean_above, mean_below = (logprobs.per_sequence(v, "mean")[real] for v in (above, below))
    return {
        "sequences": real, "w": ratio, "w2": ratio.square(), "w_seq": sequence, "w2_seq": sequence.square(),
        "ppl_above": (-mean_above).exp(), "ppl_below": (-mean_below).exp(),
        "ppl_ratio": (mean_below - mean_above).exp(), "probability_gap": (above.exp() - below.exp()).abs(),
    }  # fmt: skip


def _power_of_two(n: Tensor) -> Tensor:
    return torch.log2(n.clamp_min(1).double()).floor().long().clamp_max(23)


def _bin(absolute: Tensor) -> Tensor:
    index = ((absolute.log10() + _DECADES) * _PER_DECADE).floor().clamp(0, _BINS - 2).nan_to_num(0.0).long() + 1
    return torch.where(absolute == 0, 0, index)
