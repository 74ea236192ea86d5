"""How well mean gradients agree with a reference's: sampling noise taken off, uncertainty by resampling units."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

_INTERVAL = torch.tensor([0.05, 0.95], dtype=torch.float64)
_TINY = torch.finfo(torch.float64).tiny


@dataclass(frozen=True)
class Alignment:
    """An estimated alignment. cosine: expected, of one batch's mean with the reference; interval: its 90 %. scale:
    length along the reference. direction: length across it, relative; noise: of one batch, relative to the mean: both
    None where the mean itself is not resolved from its noise. Not clamped: an estimated cosine may exceed 1.
    """

    cosine: float
    interval: tuple[float, float]
    scale: float
    direction: float | None
    noise: float | None


@dataclass(frozen=True)
class Comparison:
    """Bootstrap samples. resampled: [candidates, resamples] cosines, a column resamples all candidates alike. signal,
    noise: the squared length of the reference's mean without its noise, and the noise.
    """

    rows: list[Alignment]
    resampled: Tensor
    signal: float
    noise: float


def compare(
    gradients: list[Tensor], target: Tensor, paired: bool, batch: float, resamples: int, seed: int
) -> Comparison:
    """Measure alignment. gradients: fp64 [units, F] of each candidate; target: fp64 [units', F]; batch: units of a
    training batch.

    paired: unit i of both comes from the same prompt, so that what prompts have in common is not taken for agreement.
    """
    generator = torch.Generator().manual_seed(seed)
    counts = _resample(len(gradients[0]), resamples, generator)
    target_counts = counts if paired else _resample(len(target), resamples, generator)
    reference = _inner(target, target, target_counts, target_counts, True)
    rows = []
    cosines = []
    for gradient in gradients:
        squared = _inner(gradient, gradient, counts, counts, True)
        inner = _inner(gradient, target, counts, target_counts, paired)
        variance = _variance(gradient, counts)
        length = (reference.clamp_min(0) * (squared.clamp_min(0) + variance / batch)).sqrt()
        cosine = inner / length.clamp_min(_TINY)
        resampled = cosine[1:] - cosine[1:].median() + cosine[0]  # noise is taken off twice there: the spread counts
        low, high = resampled.quantile(_INTERVAL).tolist()
        mean = float(squared[0])
        resolved = squared[0] > 0 and reference[0] > 0
        across = math.sqrt(max(0.0, mean * float(reference[0] / inner[0] ** 2) - 1)) if resolved else None
        noise = math.sqrt(float(variance[0]) / batch / mean) if resolved else None
        scale = float(inner[0] / reference[0].clamp_min(_TINY))
        rows.append(Alignment(float(cosine[0]), (low, high), scale, across, noise))
        cosines.append(resampled)
    target_noise = _variance(target, target_counts)[0] / max(1, len(target) - 1)
    return Comparison(rows, torch.stack(cosines), float(reference[0]), float(target_noise))


def _resample(units: int, resamples: int, generator: torch.Generator) -> Tensor:
    """[1 + resamples, units] weights that sum to 1: the sample itself, then bootstrap resamples."""
    drawn = torch.randint(units, (resamples, units), generator=generator)
    counts = torch.zeros(1 + resamples, units, dtype=torch.float64)
    counts[0] = 1
    counts[1:].scatter_add_(1, drawn, torch.ones(drawn.shape, dtype=torch.float64))
    return counts / units


def _variance(gradient: Tensor, counts: Tensor) -> Tensor:
    """[R]: the trace of the units' covariance."""
    return (counts @ gradient.square().sum(1)) - (counts @ gradient).square().sum(1)


def _inner(a: Tensor, b: Tensor, a_counts: Tensor, b_counts: Tensor, same_units: bool) -> Tensor:
    """[R]: the inner product of the means; of the same units, without what their sampling noise adds."""
    product = ((a_counts @ a) * (b_counts @ b)).sum(1)
    if not same_units:
        return product
    noise = ((a_counts @ (a * b).sum(1)) - product) / max(1, len(a) - 1)
    noise[1:] *= 2  # a resampled mean carries the noise twice
    return product - noise
