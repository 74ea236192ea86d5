"""The choice of a correction and its threshold: each candidate's expected update against that of exact rollouts.

Two sets of sequences from the same prompts and weights: `traces`, sampled by the engine under test and scored by the
trainer, and `reference`, sampled by an exact engine, whose policy-gradient estimate is unbiased. A candidate turns each
traced sequence into a gradient contribution g = sum_t e_t phi_t, with e_t its effective coefficient dL/dlog pi_t and
phi_t = grad log pi_t, or a random projection of it. Its mean against the reference's splits into a scale (a learning
rate) and a direction (a bias that no learning rate mends); its variance says how much of a training batch is noise. The
expected cosine of one batch's update with the true gradient joins direction and noise, and ranks the candidates.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..actions import TIM, Correction
from ..losses import Mode
from .alignment import Alignment, Comparison, compare
from .assess import Assessment, Traces, ascent, assess, weights_of
from .grid import optimal_truncation, sequence_chi2
from .tails import unestimable
from .verdict import MARGIN, MAX_BIAS, Criteria, Verdict, decide

_MOST_UNITS = 256  # more are merged at random: a Gram matrix grows with their square, and intervals don't need it


@dataclass(frozen=True)
class Calibration:
    """All candidates, the verdict, and chi2 of a sequence's weights with C* = sqrt(2 (1 + chi2)) beside the optima.

    null: how well exact rollouts agree with exact rollouts, over all ways to split the prompts in halves: the most that
    any candidate can be expected to reach. units: the independent groups or sequences that were
    resampled, of the traces and of the reference.
    """

    assessments: list[Assessment]
    verdict: Verdict
    chi2_sequence: float
    optimal_truncation: float
    null: Alignment | None = None
    units: tuple[int, int] | None = None


def calibrate(
    traces: Traces,
    candidates: dict[str, Correction],
    reference: Traces | None = None,
    *,
    mode: Mode = "decoupled",
    batch_size: int = 256,
    margin: float = MARGIN,
    max_bias: float = MAX_BIAS,
    resamples: int = 2000,
    seed: int = 0,
) -> Calibration:
    """Assess every candidate, and recommend the one that intervenes least among those whose expected cosine is the
    best up to `margin` and whose direction is not biased, if the bootstrap can tell.

    candidates: name -> correction; names "family@threshold" get an optimum per family. mode: of the loss they feed.
    batch_size: sequences of a training batch, which decides what noise costs. max_bias: a direction bias that is
    certainly larger rules a candidate out where another has less: noise averages out over steps, bias doesn't.
    Raises ValueError without candidates, and for settings that make no sense.
    """
    check_settings(batch_size, margin, max_bias)
    if not candidates:
        raise ValueError("no candidates to assess")
    traces = traces.on_policy()
    truth = None if reference is None else reference.on_policy()
    lp = traces.logprobs
    if not len(lp.segment):
        raise ValueError("no valid tokens to calibrate with")
    chi2 = sequence_chi2(lp)
    coefficients = [ascent(traces, mode, c) for c in candidates.values()]
    base = ascent(traces, mode, Correction())
    exact = None if truth is None else (truth, ascent(truth, "recompute", Correction()))
    assessments = [
        assess(name, correction, traces, e, base, exact)
        for (name, correction), e in zip(candidates.items(), coefficients, strict=True)
    ]
    result = Calibration(assessments, Verdict(""), chi2, optimal_truncation(chi2))
    if reason := _incomparable(traces, truth):
        return replace(result, verdict=Verdict(reason))
    assert truth is not None and exact is not None
    found, units = _compare(traces, truth, coefficients, exact[1], batch_size, resamples, seed)
    whys = [unestimable(weights_of(traces, e), row.share) for e, row in zip(coefficients, found.rows, strict=True)]
    criteria = Criteria(batch_size, margin, max_bias, lp.num_sequences, min(units))
    verdict = decide(assessments, found, whys, criteria)
    if found.signal <= 0:  # a reference that is all noise: cosines with it say nothing
        return replace(result, verdict=verdict, units=units)
    assessments = [
        replace(a, alignment=None if why else row, unestimable=why)
        for a, row, why in zip(assessments, found.rows, whys, strict=True)
    ]
    return replace(result, assessments=assessments, verdict=verdict, null=found.null, units=units)


def check_settings(batch_size: int, margin: float, max_bias: float) -> None:
    """Raise ValueError for settings of `calibrate` that make no sense."""
    if batch_size < 1:
        raise ValueError(f"batch_size={batch_size}; a training batch has at least 1 sequence")
    if not 0 < margin < 1:
        raise ValueError(f"margin={margin}; it is a difference of cosines, between 0 and 1")
    if not max_bias > 0:
        raise ValueError(f"max_bias={max_bias}; it is a positive share of the gradient's length")


def _compare(
    traces: Traces, truth: Traces, coefficients: list[Tensor], exact: Tensor, batch_size: int, resamples: int, seed: int
) -> tuple[Comparison, tuple[int, int]]:
    """The comparison, and how many units there are, of traces and reference."""
    assert traces.scores is not None and truth.scores is not None
    ours, unit = traces.units()
    theirs, true_unit = truth.units()
    paired = traces.groups is not None and truth.groups is not None and torch.equal(ours, theirs)
    merged = _merged(len(ours), 0)
    place, count = merged
    true_place, true_count = merged if paired else _merged(len(theirs), 1)
    sequences = traces.logprobs.num_sequences
    size = exact.abs().max().clamp_min(1e-300)  # rewards of any size: only relations between gradients count

    def gradients(of: Traces, e: Tensor, where: Tensor, units: int):
        assert of.scores is not None
        scale = units / of.logprobs.num_sequences / size
        return of.scores.gradients(e * scale, where[of.logprobs.segment], units)

    target = gradients(truth, exact, true_place[true_unit], true_count)
    each = (gradients(traces, e, place[unit], count) for e in coefficients)
    found = compare(each, target, count, paired, batch_size * count / sequences, resamples, seed)
    return found, (len(ours), len(theirs))


def _merged(units: int, seed: int) -> tuple[Tensor, int]:
    """(int64 [units], the merged unit of each; how many of these there are). The seed is no user's: the estimates are
    the data's."""
    count = min(units, _MOST_UNITS)
    order = torch.randperm(units, generator=torch.Generator().manual_seed(seed))
    return torch.arange(units) if units == count else order % count, count


def _incomparable(traces: Traces, truth: Traces | None) -> str | None:
    """Why there are no gradients to compare; ValueError where they don't fit each other."""
    if not any(traces.logprobs.log_ratio(ratio).any() for ratio in (TIM, "current/rollout")):  # type: ignore[arg-type]
        return (
            "the trainer's log-probs are the engine's at every token: there is nothing to correct, or the trainer "
            "stored the engine's as its own (bypass mode) and the tokens must be re-scored"
        )
    if truth is None:
        return "no exact rollouts to compare with: a bias can't be measured from the engine's own samples"
    if traces.scores is None or truth.scores is None:
        return "no gradients to compare: give both sides the tokens' scores (on the command line, a --model)"
    ours, theirs = (
        (s.left.shape[1], s.right is not None and s.right.shape[1], s.blocks) for s in (traces.scores, truth.scores)
    )
    if ours != theirs:
        raise ValueError(f"scores differ in shape: {ours} and {theirs}")
    return None
