"""Agreement of mean gradients with a reference's: U-statistics of Gram matrices, studentised bootstrap intervals.

All inner products are means over pairs of different units, so that no unit's noise counts as signal. Everything is a
smooth function of three of them and a variance, whose influence functions give a standard error for the sample and for
each resample: the bootstrap-t of Efron (1981), which covers where percentiles of skewed data don't.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

_INTERVAL = torch.tensor([0.025, 0.975], dtype=torch.float64)
_TINY = torch.finfo(torch.float64).tiny


class Bootstrap(NamedTuple):
    """An alignment's resamples, fp64 [resamples] each. cosines; and what the sample's cosine and direction bias would
    truly be if its error were a resample's: the quantiles of these two are intervals.
    """

    cosines: Tensor
    true_cosines: Tensor
    true_directions: Tensor


@dataclass(frozen=True)
class Alignment:
    """An estimated alignment. cosine: expected, of one batch's mean with the reference; interval: its 95 %. scale:
    length along the reference. direction: length across it, relative, and direction_interval, its 95 %; noise: of one
    batch, relative to the mean: all three None where the mean itself is not resolved from its noise. share: of the sum
    of the gradients' squared lengths, what the largest unit has. Not clamped: an estimated cosine may exceed 1.
    """

    cosine: float
    interval: tuple[float, float]
    scale: float
    direction: float | None
    direction_interval: tuple[float, float] | None
    noise: float | None
    share: float


@dataclass(frozen=True)
class Comparison:
    """Candidates against a reference. bootstraps: a resample draws the same units for all candidates. signal, noise:
    the squared length of the reference's mean without its noise, and the noise. null: the reference against itself,
    over all ways to split its units in halves.
    """

    rows: list[Alignment]
    bootstraps: list[Bootstrap]
    signal: float
    noise: float
    null: Alignment

    def part(self, i: int, parts: int) -> Comparison:
        """The same estimates with the intervals of a share of the resamples."""
        bootstraps = [Bootstrap(*(values[i::parts] for values in b)) for b in self.bootstraps]
        rows = [
            replace(
                row,
                interval=_interval(b.true_cosines),
                direction_interval=row.direction_interval and _interval(b.true_directions),
            )
            for row, b in zip(self.rows, bootstraps, strict=True)
        ]
        return replace(self, rows=rows, bootstraps=bootstraps)


class Gradients(NamedTuple):
    """Units' gradients. values: fp [units, blocks, features]: each block is an independent estimate of the same inner
    products (a random projection), and one block is exact.
    """

    values: Tensor

    def gram(self, other: Gradients) -> Tensor:
        """fp64 [units, other's units]: inner products, averaged over the blocks."""
        return (self.values.flatten(1) @ other.values.flatten(1).T).double() / self.values.shape[1]

    def moments(self, other: Gradients, same_units: bool) -> Tensor:
        """fp64 [blocks]: the mean inner product of pairs, of different units where they are the same."""
        total = (self.values.double().sum(0) * other.values.double().sum(0)).sum(-1)
        n = len(self.values)
        if not same_units:
            return total / (n * len(other.values))
        return (total - self.squares(other)) / max(1, n * (n - 1))

    def squares(self, other: Gradients) -> Tensor:
        """fp64 [blocks]: the sum over units of their inner products with themselves."""
        return (self.values.double() * other.values.double()).sum((0, 2))


def compare(
    candidates: Iterable[Gradients], target: Gradients, units: int, paired: bool, batch: float,
    resamples: int, seed: int,
) -> Comparison:  # fmt: skip
    """Measure alignment with `target`. candidates: read one at a time, each of `units` units. batch: units of a batch.

    paired: unit i of both comes from the same prompt, so that what prompts have in common is not taken for agreement.
    """
    generator = torch.Generator().manual_seed(seed)
    counts = _resample(units, resamples, generator)
    target_counts = counts if paired else _resample(len(target.values), resamples, generator)
    shake = torch.randn(target.values.shape[1], resamples, generator=generator, dtype=torch.float64)
    gram = target.gram(target)
    reference = _Pairs.of(gram, target_counts)
    found = [_align(c, target, reference, (counts, target_counts), paired, batch, shake) for c in candidates]
    null, _ = _align(target, target, reference, (target_counts, target_counts), True, batch, shake)
    signal = float(reference.mean[0])
    noise = (float(gram.diag().mean()) - signal) / len(gram)
    rows, bootstraps = map(list, zip(*found, strict=True))
    return Comparison(rows, bootstraps, signal, noise, null)


class _Pairs(NamedTuple):
    """A U-statistic of a square matrix of inner products, in each resample. mean: [R], over pairs of different units;
    linear: [R, units], of each unit's pairs.
    """

    mean: Tensor
    linear: Tensor

    @classmethod
    def of(cls, matrix: Tensor, counts: Tensor) -> _Pairs:
        others = counts @ matrix.T - counts * matrix.diag()
        pairs = (1 - counts.square().sum(1)).clamp_min(_TINY)
        return cls((others * counts).sum(1) / pairs, others / (1 - counts).clamp_min(_TINY))

    @property
    def influence(self) -> Tensor:
        """[R, units]: of a symmetric matrix's mean."""
        return 2 * (self.linear - self.mean[:, None])


def _align(
    candidate: Gradients, target: Gradients, reference: _Pairs, counts: tuple[Tensor, Tensor], paired: bool,
    batch: float, shake: Tensor,
) -> tuple[Alignment, Bootstrap]:  # fmt: skip
    """The alignment, and its bootstrap with the projection's error."""
    gram = candidate.gram(candidate)
    own = _Pairs.of(gram, counts[0])
    square = counts[0] @ gram.diag()
    inner, toward, back = _inner(candidate.gram(target), counts, paired)
    variance = square - own.mean
    power = own.mean + variance / batch
    drift = gram.diag() - square[:, None] - own.influence  # the variance's influence
    cosine, direction = _shape(inner, own.mean, power, reference.mean)

    relative = torch.where(inner.abs() < _TINY, _TINY, inner)[:, None]
    here = toward / relative - (own.influence + drift / batch) / (2 * power.abs().clamp_min(_TINY)[:, None])
    there = back / relative - reference.influence / (2 * reference.mean.abs().clamp_min(_TINY)[:, None])
    error = _error(here, there, counts, paired) * cosine.abs()
    across = own.influence / own.mean.abs().clamp_min(_TINY)[:, None] - 2 * toward / relative
    beside = reference.influence / reference.mean.abs().clamp_min(_TINY)[:, None] - 2 * back / relative
    direction_error = _error(across, beside, counts, paired) * (1 + direction).abs()

    cosines, directions = _without_each_block(candidate, target, paired, batch)
    bootstrap = Bootstrap(
        cosine[1:] - cosine[1:].median() + cosine[0] + cosines @ shake,
        _studentized(cosine, error, cosines),
        _studentized(direction, direction_error, directions).clamp_min(0).sqrt(),
    )
    mean = float(own.mean[0])
    resolved = mean > 0 and reference.mean[0] > 0 and inner[0] > 0
    return Alignment(
        cosine=float(cosine[0]),
        interval=_interval(bootstrap.true_cosines),
        scale=float(inner[0] / reference.mean[0].clamp_min(_TINY)),
        direction=math.sqrt(max(0.0, float(direction[0]))) if resolved else None,
        direction_interval=_interval(bootstrap.true_directions) if resolved else None,
        noise=math.sqrt(float(variance[0].clamp_min(0)) / batch / mean) if resolved else None,
        share=float(gram.diag().max() / gram.diag().sum().clamp_min(_TINY)),
    ), bootstrap


def _shape(inner: Tensor, own: Tensor, power: Tensor, reference: Tensor) -> tuple[Tensor, Tensor]:
    """The expected cosine, and the squared tangent of the angle between the means."""
    cosine = inner / (power.clamp_min(0) * reference.clamp_min(0)).sqrt().clamp_min(_TINY)
    return cosine, own * reference / inner.square().clamp_min(_TINY) - 1


def _inner(matrix: Tensor, counts: tuple[Tensor, Tensor], paired: bool) -> tuple[Tensor, Tensor, Tensor]:
    """The mean inner product [R], and its influences [R, units]: of the candidate's units, of the target's."""
    if paired:
        ours = _Pairs.of(matrix, counts[0])
        theirs = _Pairs.of(matrix.T, counts[0])
        return ours.mean, ours.linear - ours.mean[:, None], theirs.linear - ours.mean[:, None]
    toward = counts[1] @ matrix.T
    mean = (toward * counts[0]).sum(1)
    return mean, toward - mean[:, None], counts[0] @ matrix - mean[:, None]


def _error(ours: Tensor, theirs: Tensor, counts: tuple[Tensor, Tensor], paired: bool) -> Tensor:
    """Return the standard error [R] of a mean with these influences."""
    if paired:
        return _variance(ours + theirs, counts[0]).sqrt()
    return (_variance(ours, counts[0]) + _variance(theirs, counts[1])).sqrt()


def _variance(influence: Tensor, counts: Tensor) -> Tensor:
    mean = (counts * influence).sum(1)
    return ((counts * influence.square()).sum(1) - mean.square()).clamp_min(0) / max(1, counts.shape[1] - 1)


def _studentized(estimates: Tensor, errors: Tensor, jackknife: Tensor) -> Tensor:
    """[resamples]: the sample's estimate less its error times each resample's t-value. estimates, errors: [1 +
    resamples], the sample first."""
    t = (estimates[1:] - estimates[0]) / errors[1:].clamp_min(_TINY)
    error = math.sqrt(float(errors[0].square() + jackknife.square().sum()))
    return estimates[0] - t.nan_to_num(0.0) * error


def _interval(values: Tensor) -> tuple[float, float]:
    low, high = values.quantile(_INTERVAL).tolist()
    return low, high


def _without_each_block(candidate: Gradients, target: Gradients, paired: bool, batch: float) -> tuple[Tensor, Tensor]:
    """[blocks] each: what leaving one random projection out does to cosine and direction. Their squares add up to the
    jackknife's variance (Efron & Stein, 1981); zero where there is one block, which is exact."""
    blocks = target.values.shape[1]
    if blocks == 1:
        nothing = torch.zeros(1, dtype=torch.float64)
        return nothing, nothing
    own = candidate.moments(candidate, True)
    reference = target.moments(target, True)
    inner = candidate.moments(target, paired)
    square = candidate.squares(candidate) / len(candidate.values)
    left = [(v.sum() - v) / (blocks - 1) for v in (inner, own, own + (square - own) / batch, reference)]
    scale = math.sqrt((blocks - 1) / blocks)
    cosine, direction = ((v - v.mean()) * scale for v in _shape(*left))
    return cosine, direction


def _resample(units: int, resamples: int, generator: torch.Generator) -> Tensor:
    """[1 + resamples, units] weights that sum to 1: the sample itself, then bootstrap resamples."""
    drawn = torch.randint(units, (resamples, units), generator=generator)
    counts = torch.zeros(1 + resamples, units, dtype=torch.float64)
    counts[0] = 1
    counts[1:].scatter_add_(1, drawn, torch.ones(drawn.shape, dtype=torch.float64))
    return counts / units
