"""The mismatch between two policies' log-probs of the same tokens, measured in one pass over any amount of data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from .statistics import LogProbs, Ratio, apply_kernel, exp, wide
from .theory import predicted_chi2

_DECADES = 8  # |d| from 1e-8 up; below counts as 1e-8, exact zeros apart
_PER_DECADE = 32
_BINS = 2 + 10 * _PER_DECADE  # zero, and 1e-8 to 1e2
_COLUMNS = ("count", "abs", "d", "k2", "k3", "exact")

PROBABILITY_EDGES = (1e-6, 1e-4, 1e-3, 1e-2, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.99, 0.999)


@dataclass
class Table:
    """Sums over tokens of |d|, d, k2, k3 and how many are exactly 0, by bin; and the largest |d|."""

    bins: int
    sums: Tensor = field(init=False)
    largest: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.sums = torch.zeros(self.bins, len(_COLUMNS), dtype=torch.float64)
        self.largest = torch.zeros(self.bins, dtype=torch.float64)

    def add(self, index: Tensor, columns: list[Tensor]) -> None:
        """index int64 [N]; columns, each fp64 [N], as _COLUMNS without the count."""
        counts = torch.bincount(index, minlength=self.bins).double()
        sums = [torch.bincount(index, weights=c, minlength=self.bins) for c in columns]
        self.sums += torch.stack([counts, *sums], 1).cpu()
        self.largest.scatter_reduce_(0, index.cpu(), columns[0].cpu(), "amax")

    def rows(self, labels: list[str]) -> list[dict]:
        """One dict a bin that holds tokens: means over its tokens, the share of exact ones, the largest |d|."""
        result = []
        for label, sums, largest in zip(labels, self.sums.tolist(), self.largest.tolist(), strict=True):
            count, absolute, d, k2, k3, exact = sums
            if count:
                result.append({
                    "bin": label, "tokens": int(count), "mean_abs": absolute / count, "max_abs": largest,
                    "k1": -d / count, "k2": k2 / count, "k3": k3 / count, "exact": exact / count,
                })  # fmt: skip
        return result


class Diagnosis:
    """Accumulates batches; all state is sums, counts and extremes, so that parts computed apart can be merged.

    With `ratio` "above/below", d = log above - log below, and expectations are over `below`, which sampled the tokens:
    mean k1, k2 and k3 estimate KL(below || above). chi2 and ESS are of the weights above / below, self-normalised.
    """

    def __init__(self, ratio: Ratio = "old/rollout"):
        self.ratio = ratio
        self.total = Table(1)
        self.by_probability = Table(len(PROBABILITY_EDGES) + 1)
        self.by_position, self.by_length = Table(24), Table(24)  # powers of two
        self.histogram = torch.zeros(_BINS, dtype=torch.float64)
        self.sums: dict[str, float] = dict.fromkeys(_SEQUENCE_SUMS, 0.0)

    @torch.no_grad()
    def add(self, logprobs: LogProbs, argmax_flips: Tensor | None = None) -> Tensor:
        """Adds a batch; returns d, fp64 [valid tokens]. argmax_flips: int [valid tokens], 1 where the two policies'
        most likely tokens differ, 0 where they don't, -1 where that isn't known."""
        above, below = (logprobs.values(p) for p in self.ratio.split("/"))
        d = above - below
        if not len(d):
            return d
        absolute = d.abs()
        columns = [absolute, d, apply_kernel("k2", d), apply_kernel("k3", d), wide(d == 0)]
        self.total.add(torch.zeros_like(logprobs.segment), columns)
        edges = torch.tensor(PROBABILITY_EDGES, dtype=d.dtype, device=d.device)
        self.by_probability.add(torch.bucketize(above.exp(), edges, right=True), columns)
        lengths = logprobs.lengths
        first = lengths.cumsum(0) - lengths
        position = torch.arange(len(d), device=d.device) - first[logprobs.segment]
        self.by_position.add(_power_of_two(position + 1), columns)
        self.by_length.add(_power_of_two(lengths)[logprobs.segment], columns)
        self.histogram += torch.bincount(_bin(absolute), minlength=_BINS).double().cpu()
        self._add_sequences(logprobs, d, above, below)
        if argmax_flips is not None:
            self.sums["flips"] += float((argmax_flips == 1).sum())
            self.sums["argmax_known"] += float((argmax_flips >= 0).sum())
        return d

    def _add_sequences(self, logprobs: LogProbs, d: Tensor, above: Tensor, below: Tensor) -> None:
        ratio, real = exp(d), logprobs.lengths > 0
        sequence = exp(logprobs.per_sequence(d, "sum"))[real]
        mean_above, mean_below = (logprobs.per_sequence(v, "mean")[real] for v in (above, below))
        values: dict[str, Any] = {
            "tokens": float(len(d)), "sequences": float(real.sum()), "w": ratio.sum(), "w2": ratio.square().sum(),
            "w_seq": sequence.sum(), "w2_seq": sequence.square().sum(),
            "ppl_above": (-mean_above).exp().sum(), "ppl_below": (-mean_below).exp().sum(),
            "ppl_ratio": (mean_below - mean_above).exp().sum(),
            "probability_gap": (above.exp() - below.exp()).abs().sum(),
        }  # fmt: skip
        for name, value in values.items():
            self.sums[name] += float(value)

    def state(self) -> tuple[Tensor, Tensor]:
        """Everything summed, and everything maximised, flat: all-reduce the two and give them to `load`."""
        tables = self.total, self.by_probability, self.by_position, self.by_length
        sums = [t.sums.flatten() for t in tables] + [
            self.histogram,
            torch.tensor(list(self.sums.values()), dtype=torch.float64),
        ]
        return torch.cat(sums), torch.cat([t.largest for t in tables])

    def load(self, sums: Tensor, largest: Tensor) -> None:
        """Takes the place of the present state."""
        tables = self.total, self.by_probability, self.by_position, self.by_length
        parts = list(sums.split([t.sums.numel() for t in tables] + [_BINS, len(self.sums)]))
        for table, part, top in zip(tables, parts, largest.split([t.bins for t in tables]), strict=False):
            table.sums, table.largest = part.view(table.bins, -1).clone(), top.clone()
        self.histogram = parts[-2].clone()
        self.sums = dict(zip(self.sums, parts[-1].tolist(), strict=True))

    def merge(self, other: Diagnosis) -> None:
        (ours, our_top), (theirs, their_top) = self.state(), other.state()
        self.load(ours + theirs, torch.maximum(our_top, their_top))

    def all_reduce(self, reduce: Callable[[Tensor, str], Tensor]) -> None:
        """reduce(tensor, "sum" | "max") over ranks."""
        sums, largest = self.state()
        self.load(reduce(sums, "sum"), reduce(largest, "max"))

    def quantile(self, q: float) -> float:
        """Of |d|, from a histogram with 32 bins a decade (within 7 %); exact where it is 0, never above the largest."""
        cumulative = self.histogram.cumsum(0)
        index = int(torch.searchsorted(cumulative, q * cumulative[-1].clamp_min(1)))
        top = float(self.total.largest)
        return 0.0 if index == 0 else min(top, 10.0 ** ((index - 0.5) / _PER_DECADE - _DECADES))

    def summary(self) -> dict:
        """The report as plain numbers. Raises ValueError without tokens."""
        if not self.sums["tokens"]:
            raise ValueError("no valid tokens to diagnose")
        total, s = self.total.rows([""])[0], self.sums
        n, m = s["tokens"], s["sequences"]
        length = n / m
        chi2_token, chi2_sequence = (k * s[w2] / s[w] ** 2 - 1 for k, w, w2 in ((n, "w", "w2"), (m, "w_seq", "w2_seq")))
        positions = [f"{2**i}-{2 ** (i + 1) - 1}" for i in range(24)]
        edges = ["0", *(f"{e:g}" for e in PROBABILITY_EDGES), "1"]
        return {
            "ratio": self.ratio, "tokens": int(n), "sequences": int(m), "mean_length": length,
            "mean_abs": total["mean_abs"], "max_abs": total["max_abs"], "exact": total["exact"],
            "quantiles": {str(q): self.quantile(q) for q in (0.5, 0.9, 0.99, 0.999, 0.9999)},
            "k1": total["k1"], "k2": total["k2"], "k3": total["k3"], "mean_probability_gap": s["probability_gap"] / n,
            "chi2_token": max(0.0, chi2_token), "chi2_sequence": max(0.0, chi2_sequence),
            "chi2_sequence_predicted": predicted_chi2(total["k3"], length),
            "ess_token": 1 / (1 + max(0.0, chi2_token)), "ess_sequence": 1 / (1 + max(0.0, chi2_sequence)),
            "perplexity_above": s["ppl_above"] / m, "perplexity_below": s["ppl_below"] / m,
            "perplexity_ratio": s["ppl_ratio"] / m,
            "argmax_flips": s["flips"] / s["argmax_known"] if s["argmax_known"] else None,
            "by_probability": self.by_probability.rows([f"{a} to {b}" for a, b in pairwise(edges)]),
            "by_position": self.by_position.rows(positions), "by_length": self.by_length.rows(positions),
        }  # fmt: skip

    def survival(self) -> tuple[list[float], list[float]]:
        """(edges, share of tokens with |d| above each), for a plot."""
        above = 1 - self.histogram.cumsum(0) / self.histogram.sum().clamp_min(1)
        return [10.0 ** (i / _PER_DECADE - _DECADES) for i in range(_BINS - 1)], above[:-1].tolist()


_SEQUENCE_SUMS = (
    "tokens", "sequences", "w", "w2", "w_seq", "w2_seq", "ppl_above", "ppl_below", "ppl_ratio", "probability_gap",
    "flips", "argmax_known",
)  # fmt: skip


def _power_of_two(n: Tensor) -> Tensor:
    return torch.log2(n.clamp_min(1).double()).floor().long().clamp_max(23)


def _bin(absolute: Tensor) -> Tensor:
    index = ((absolute.log10() + _DECADES) * _PER_DECADE).floor().clamp(0, _BINS - 2).nan_to_num(0.0).long() + 1
    return torch.where(absolute == 0, 0, index)
