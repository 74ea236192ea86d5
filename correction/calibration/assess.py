"""What one correction does to a batch of scored sequences: what it keeps, and the update that is left."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..actions import Correction, valid_advantages
from ..diagnose import PROBABILITY_EDGES
from ..losses import Mode, contribution, effective_coefficients
from ..metrics import correction_metrics, summarize
from ..statistics import LogProbs
from .alignment import Alignment

_SIZES = tuple(10 ** (i / 4) for i in range(-16, 5))
CONTRIBUTION_EDGES = (*(-size for size in reversed(_SIZES)), *_SIZES)  # of C(r), 0 in the bin in the middle


@dataclass(frozen=True)
class Traces:
    """Scored sequences: log-probs (rollout, old, and current where it has moved since), advantages in the mask's shape
    or [sequences], and optionally sketch [valid tokens, F], anything linear in grad log pi (e.g. a random projection),
    and groups int64 [sequences]: sequences of one prompt. They are resampled together, and an equal number in traces
    and reference means the same prompt.
    """

    logprobs: LogProbs
    advantages: Tensor
    sketch: Tensor | None = None
    groups: Tensor | None = None

    def on_policy(self) -> Traces:
        """The traces with `current` set: to `old` where it was not given."""
        return replace(self, logprobs=self.logprobs.on_policy())

    def units(self) -> tuple[Tensor, Tensor]:
        """The units that are resampled: (names int64 [units], int64 [sequences] the unit of each)."""
        names = torch.arange(self.logprobs.num_sequences) if self.groups is None else self.groups
        return torch.unique(names, return_inverse=True)

    def token_advantages(self) -> Tensor:
        """fp64 [valid tokens]."""
        advantages = valid_advantages(self.logprobs, self.advantages)
        assert advantages is not None
        return advantages

    def profile(self, coefficients: Tensor) -> Tensor:
        """fp64 [2 * probability bins]: a sequence's mean sum of coefficients, by the token's probability under `old`
        and its advantage's sign."""
        edges = torch.tensor(PROBABILITY_EDGES, dtype=torch.float64)
        bins = torch.bucketize(self.logprobs.values("old").exp(), edges, right=True)
        bins = 2 * bins + (self.token_advantages() < 0)
        width = 2 * (len(PROBABILITY_EDGES) + 1)
        return torch.bincount(bins, coefficients, width) / max(1, self.logprobs.num_sequences)

    def gradients(self, coefficients: Tensor) -> Tensor:
        """fp64 [units, F]: sum of coefficient * sketch over a sequence's tokens; for a group the sequences' mean."""
        assert self.sketch is not None
        names, unit = self.units()
        out = torch.zeros(len(names), self.sketch.shape[1], dtype=torch.float64)
        out.index_add_(0, unit[self.logprobs.segment], coefficients[:, None] * self.sketch.double())
        return out * (len(names) / self.logprobs.num_sequences)


@dataclass(frozen=True)
class Assessment:
    """The effects of one candidate on an update.

    metrics: see `summarize`. accepted_by_length: share of sequences kept by decile of their length; accepted_by_group:
    quantiles 0, 0.1 ... 1 over groups of the share of a group's sequences kept; groups_without_positives: share of the
    groups with A > 0 that lose all of it. contributions: how many tokens have a C(current/rollout), times the weight in
    use, in each bin of CONTRIBUTION_EDGES; contribution_means: the means of C; both for A > 0 and A < 0. intervention:
    sum |e - e_uncorrected| / sum |e_uncorrected|.

    With a reference: accepted_exact: share of exact sequences kept, which have no mismatch but may be stale;
    coefficient_error: sum |mean coefficient - the reference's| over bins of token probability and sign of the
    advantage, relative; alignment: of the gradients, where there are any.
    """

    name: str
    metrics: dict[str, float]
    accepted_by_length: list[float]
    accepted_by_group: list[float]
    groups_without_positives: float
    contributions: tuple[list[int], list[int]]
    contribution_means: tuple[float, float]
    intervention: float
    accepted_exact: float | None = None
    coefficient_error: float | None = None
    alignment: Alignment | None = None


def ascent(traces: Traces, mode: Mode, correction: Correction) -> Tensor:
    """fp64 [valid tokens]: minus the effective coefficients of a sum over sequences."""
    lp = traces.logprobs
    if mode == "decoupled" and lp.rollout is None:
        raise ValueError("the traces need the rollout engine's log-probs")
    e = effective_coefficients(
        lp, traces.advantages, mode, correction=correction, aggregation="seq-mean-token-sum", normalizer=1.0
    )
    return -e


def assess(
    name: str,
    correction: Correction,
    traces: Traces,
    coefficients: Tensor,
    base: Tensor,
    exact: tuple[Traces, Tensor] | None = None,
) -> Assessment:
    """coefficients, base: `ascent` with and without the correction; exact: a reference and its `ascent`. `current` must
    be set in both traces."""
    lp = traces.logprobs
    advantages = traces.token_advantages()
    weights, keep = correction.on_tokens(lp, advantages)
    used = torch.where(keep, weights, 0.0)
    real = lp.lengths > 0
    _, unit = traces.units()
    accepted = (lp.per_sequence(used, "max") > 0)[real].double()
    by_length = accepted[lp.lengths[real].argsort(stable=True)].tensor_split(10)
    by_group = torch.bincount(unit[real], accepted) / torch.bincount(unit[real])
    good = advantages > 0
    had, has = (torch.bincount(unit[lp.segment], side.double()) > 0 for side in (good, good & (used > 0)))
    counts, means = contributions(traces, used)
    return Assessment(
        name,
        metrics=summarize(correction_metrics(correction, lp, traces.advantages)),
        accepted_by_length=[float(part.mean()) for part in by_length if len(part)],
        accepted_by_group=by_group.nanquantile(torch.linspace(0, 1, 11, dtype=torch.float64)).tolist(),
        groups_without_positives=float((had & ~has).sum() / had.sum().clamp_min(1)),
        contributions=counts,
        contribution_means=means,
        intervention=_relative(coefficients - base, base),
        **({} if exact is None else _beside(correction, traces, coefficients, *exact)),
    )


def _beside(correction: Correction, traces: Traces, coefficients: Tensor, truth: Traces, exact: Tensor) -> dict:
    kept = summarize(correction_metrics(correction, truth.logprobs, truth.advantages))
    profile = truth.profile(exact)
    error = _relative(traces.profile(coefficients) - profile, profile)
    return {"accepted_exact": 1 - kept["rejected_sequences"], "coefficient_error": error}


def _relative(difference: Tensor, size: Tensor) -> float:
    return float(difference.abs().sum() / size.abs().sum().clamp_min(1e-300))


def contributions(traces: Traces, used: Tensor) -> tuple[tuple[list[int], list[int]], tuple[float, float]]:
    """Histograms of C times the weights in use [valid tokens], and its means; for A > 0 and A < 0."""
    advantages = traces.token_advantages()
    c = contribution(traces.logprobs.log_ratio("current/rollout"), advantages) * used
    bins = torch.bucketize(c, torch.tensor(CONTRIBUTION_EDGES, dtype=c.dtype))
    sides = (advantages > 0, advantages < 0)
    more, less = (torch.bincount(bins[side], minlength=len(CONTRIBUTION_EDGES) + 1).tolist() for side in sides)
    up, down = (float(c[side].sum() / side.sum().clamp_min(1)) for side in sides)
    return (more, less), (up, down)
