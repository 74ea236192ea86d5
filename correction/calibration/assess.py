"""The effects of one correction on a batch of scored sequences: what it keeps, and the update that is left."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..actions import Correction, valid_advantages
from ..diagnose import PROBABILITY_EDGES
from ..losses import Mode, contribution, effective_coefficients
from ..metrics import correction_metrics, summarize
from ..statistics import LogProbs
from .alignment import Alignment, Gradients


@dataclass(frozen=True)
class Scores:
    """Each token's grad log pi, or anything linear in it, as an outer product of two factors.

    left: fp [valid tokens, L]; right: fp [valid tokens, R], None where left is all. blocks: how many independent random
    projections left's columns are, in equal parts; their error goes into every interval. One block is exact.
    """

    left: Tensor
    right: Tensor | None = None
    blocks: int = 1

    def at(self, mask: Tensor) -> Scores:
        """The scores of some tokens: bool [valid tokens]."""
        return replace(self, left=self.left[mask], right=None if self.right is None else self.right[mask])

    def gradients(self, coefficients: Tensor, unit: Tensor, units: int) -> Gradients:
        """Sum coefficient * left * right over each unit's tokens. coefficients: fp64, unit: int64, [valid tokens]."""
        weighted = self.left * coefficients[:, None].to(self.left.dtype)
        if self.right is None:
            sums = weighted.new_zeros(units, self.left.shape[1]).index_add_(0, unit, weighted)
        else:
            order = unit.argsort(stable=True)
            parts = order.split(torch.bincount(unit, minlength=units).tolist())
            sums = torch.stack([weighted[rows].T @ self.right[rows] for rows in parts])
        return Gradients(sums.reshape(units, self.blocks, -1))


@dataclass(frozen=True)
class Traces:
    """Scored sequences: log-probs (rollout, old, and current where it has moved since), advantages in the mask's shape
    or [sequences], and optionally the tokens' scores, and groups int64 [sequences]: sequences of one prompt. They are
    resampled together, and an equal number in traces and reference means the same prompt.
    """

    logprobs: LogProbs
    advantages: Tensor
    scores: Scores | None = None
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


@dataclass(frozen=True)
class Assessment:
    """The effects of one candidate on an update.

    metrics: see `summarize`. accepted_by_length: share of sequences kept by decile of their length; accepted_by_group:
    quantiles 0, 0.1 ... 1 over groups of the share of a group's sequences kept; groups_without_positives: share of the
    groups with A > 0 that lose all of it. contribution_means: of C(current/rollout) times the weight in use, for A > 0
    and A < 0. intervention: sum |e - e_uncorrected| / sum |e_uncorrected|.

    With a reference: accepted_exact: share of exact sequences kept, which have no mismatch but may be stale;
    coefficient_error: sum |mean coefficient - the reference's| over bins of token probability and sign of the
    advantage, relative; alignment: of the gradients, where there are any; unestimable: why there is none in spite of
    them.
    """

    name: str
    metrics: dict[str, float]
    accepted_by_length: list[float]
    accepted_by_group: list[float]
    groups_without_positives: float
    contribution_means: tuple[float, float]
    intervention: float
    accepted_exact: float | None = None
    coefficient_error: float | None = None
    alignment: Alignment | None = None
    unestimable: str | None = None


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
    name: str, correction: Correction, traces: Traces, coefficients: Tensor, base: Tensor,
    exact: tuple[Traces, Tensor] | None = None,
) -> Assessment:  # fmt: skip
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
    c = contribution(lp.log_ratio("current/rollout"), advantages) * used
    up, down = (float(c[side].sum() / side.sum().clamp_min(1)) for side in (good, advantages < 0))
    return Assessment(
        name,
        metrics=summarize(correction_metrics(correction, lp, traces.advantages)),
        accepted_by_length=[float(part.mean()) for part in by_length if len(part)],
        accepted_by_group=by_group.nanquantile(torch.linspace(0, 1, 11, dtype=torch.float64)).tolist(),
        groups_without_positives=float((had & ~has).sum() / had.sum().clamp_min(1)),
        contribution_means=(up, down),
        intervention=_relative(coefficients - base, base),
        **({} if exact is None else _beside(correction, traces, coefficients, *exact)),
    )


def _beside(correction: Correction, traces: Traces, coefficients: Tensor, truth: Traces, exact: Tensor) -> dict:
    kept = summarize(correction_metrics(correction, truth.logprobs, truth.advantages))
    profile = truth.profile(exact)
    error = _relative(traces.profile(coefficients) - profile, profile)
    return {"accepted_exact": 1 - kept["rejected_sequences"], "coefficient_error": error}


def weights_of(traces: Traces, coefficients: Tensor) -> Tensor:
    """fp64 [sequences]: what each sequence's advantages are multiplied by, on average over its tokens."""
    lp = traces.logprobs
    total = lp.per_sequence(traces.token_advantages().abs(), "sum")
    used = lp.per_sequence(coefficients.abs(), "sum")
    return torch.where(total > 0, used / total.clamp_min(1e-300), 0.0)


def _relative(difference: Tensor, size: Tensor) -> float:
    return float(difference.abs().sum() / size.abs().sum().clamp_min(1e-300))
