"""Which correction, and which threshold: every candidate's expected update against that of exact rollouts.

Two sets of sequences from the same prompts and weights: `traces`, sampled by the engine under test and scored by the
trainer, and `reference`, sampled by an exact engine, whose policy-gradient estimate is unbiased. A candidate turns each
traced sequence into a gradient contribution g = sum_t e_t phi_t, with e_t its effective coefficient dL/dlog pi_t and
phi_t a sketch of grad log pi_t. Its mean against the reference's splits into a scale (a learning rate) and a direction
(a bias that no learning rate mends); its variance says how much of a training batch is noise. The expected cosine of
one batch's update with the true gradient joins direction and noise, and is what candidates are ranked by.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..actions import GEOMETRIC, TIM, Correction, opsm, preset
from ..losses import Mode
from ..statistics import LogProbs, Statistic, exp
from .alignment import Alignment, Comparison, compare
from .assess import Assessment, Traces, ascent, assess, contributions

MARGIN = 0.01  # expected cosines closer than this are the same for practice
_FEWEST_UNITS = 10  # below, a bootstrap means nothing
_WIDEST = 5  # margins: half of the widest interval of the best cosine that is still worth a choice


@dataclass(frozen=True)
class Verdict:
    """The result of a calibration. recommended: None where the data can't tell, and then perhaps how many sequences
    could.
    """

    reason: str
    recommended: str | None = None
    runner_up: str | None = None
    needed_sequences: int | None = None


@dataclass(frozen=True)
class Calibration:
    """All candidates, the verdict, and chi2 of a sequence's weights with C* = sqrt(2 (1 + chi2)) beside the optima.

    null: how well one half of the exact rollouts agrees with the other, the most that any candidate can be expected to
    reach. exact_contributions: as `Assessment.contributions`, of the reference.
    """

    assessments: list[Assessment]
    verdict: Verdict
    chi2_sequence: float
    optimal_truncation: float
    optima: dict[str, tuple[str, str, str]] | None = None  # family -> best, and the 90 % of resampled bests
    null: Alignment | None = None
    exact_contributions: tuple[list[int], list[int]] | None = None


def candidate_grid(logprobs: LogProbs, mode: Mode = "decoupled") -> dict[str, Correction]:
    """Candidates named "family@threshold": weights capped as published and at C*, and gates at the data's
    own quantiles, so that each keeps 50 to 99 % of what it looks at. In bypass, gates only.
    """
    logprobs = logprobs.on_policy()
    grid = {"none": Correction()}
    if mode == "decoupled":
        star = optimal_truncation(_sequence_chi2(logprobs))
        caps = {"token_tis": {1.5, 2.0, 3.0, 5.0}, "sequence_tis": {1.5, 2.0, 3.0, 5.0, star}}
        caps |= {"icepop": {2.0, 5.0}, "sequence_mis": {2.0, 3.0, 5.0}}
        for family, bounds in caps.items():
            for c in sorted(bounds):
                low = {"low": 1 / c} if family == "icepop" else {}
                grid[f"{family}@{c:.3g}"] = preset(family, high=c, **low)
        grid["sequence_is"] = preset("sequence_is")
    gates: dict[str, tuple[Statistic, Callable[[float], Correction]]] = {
        "geo_rs": (GEOMETRIC, lambda b: preset("geo_rs", low=math.exp(-b), high=math.exp(b))),
        "k3_mean_rs": (Statistic(TIM, "k3", "mean"), lambda b: preset("k3_mean_rs", high=b)),
        "k3_sum_rs": (Statistic(TIM, "k3", "sum"), lambda b: preset("k3_sum_rs", high=b)),
        "trm": (Statistic(TIM, "k3", "max"), lambda b: preset("trm", high=b)),
        "opsm": (Statistic("current/rollout", "k1", "mean"), lambda b: opsm(b, "current/rollout")),
    }
    for family, (statistic, build) in gates.items():
        values = statistic.of(logprobs)[logprobs.lengths > 0]
        values = (values if family == "opsm" else values.abs()).sort().values  # opsm has an upper bound only
        for q in (0.5, 0.75, 0.9, 0.99):
            bound = float(values[int(q * (len(values) - 1))]) if len(values) else 0.0
            if bound > 0:
                grid.setdefault(f"{family}@{bound:.3g}", build(bound))
    grid["veto@0.0001"] = preset("veto")
    return grid


def calibrate(
    traces: Traces,
    candidates: dict[str, Correction],
    reference: Traces | None = None,
    *,
    mode: Mode = "decoupled",
    batch_size: int = 256,
    margin: float = MARGIN,
    resamples: int = 400,
    seed: int = 0,
) -> Calibration:
    """Assess every candidate, and recommend the one that intervenes least among those whose expected cosine is the
    best up to `margin`, if the bootstrap can tell.

    candidates: name -> correction; names "family@threshold" get an optimum per family. mode: of the loss they feed.
    batch_size: sequences of a training batch, which decides what noise costs. Raises ValueError without candidates.
    """
    if not candidates:
        raise ValueError("no candidates to assess")
    traces = traces.on_policy()
    truth = None if reference is None else reference.on_policy()
    lp = traces.logprobs
    if not len(lp.segment):
        raise ValueError("no valid tokens to calibrate with")
    chi2 = _sequence_chi2(lp)
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
    ours, _ = traces.units()
    theirs, _ = truth.units()
    paired = traces.groups is not None and truth.groups is not None and torch.equal(ours, theirs)
    batch = batch_size * len(ours) / lp.num_sequences
    target = truth.gradients(exact[1])
    found = compare([traces.gradients(e) for e in coefficients], target, paired, batch, resamples, seed)
    result = replace(result, exact_contributions=contributions(truth, torch.ones_like(exact[1]))[0])
    unresolved = _unresolved(found, min(len(ours), len(theirs)), margin, lp.num_sequences)
    if found.signal <= 0:  # a reference that is all noise: cosines with it say nothing
        assert unresolved is not None
        return replace(result, verdict=unresolved)
    assessments = [replace(a, alignment=row) for a, row in zip(assessments, found.rows, strict=True)]
    null = compare([target[::2]], target[1::2], False, batch, resamples, seed) if len(target) > 1 else None
    return replace(
        result,
        assessments=assessments,
        verdict=unresolved or _choose(assessments, found, margin, lp.num_sequences),
        optima=_optima(list(candidates), found),
        null=null.rows[0] if null and null.signal > 0 else None,
    )


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


def _sequence_chi2(logprobs: LogProbs) -> float:
    weights = exp(Statistic(TIM, aggregate="sum").of(logprobs))[logprobs.lengths > 0]
    return max(0.0, float(self_normalized_chi2(weights)))


def _incomparable(traces: Traces, truth: Traces | None) -> str | None:
    """Why there are no gradients to compare; ValueError where they don't fit each other."""
    if not any(traces.logprobs.log_ratio(ratio).any() for ratio in (TIM, "current/rollout")):  # type: ignore[arg-type]
        return (
            "the trainer's log-probs are the engine's at every token: there is nothing to correct, or the trainer "
            "stored the engine's as its own (bypass mode) and the tokens must be re-scored"
        )
    if truth is None:
        return "no exact rollouts to compare with: a bias can't be measured from the engine's own samples"
    if traces.sketch is None or truth.sketch is None:
        return "no gradients to compare: give both sides a sketch of grad log pi (on the command line, a --model)"
    if traces.sketch.shape[1] != truth.sketch.shape[1]:
        raise ValueError(f"sketches differ in width: {traces.sketch.shape[1]} and {truth.sketch.shape[1]}")
    return None


def _unresolved(found: Comparison, units: int, margin: float, sequences: int) -> Verdict | None:
    """Refuse where cosines mean nothing: few units, a reference gradient within two standard errors of 0, a best
    cosine that may be 0 or is not known to _WIDEST margins."""
    best = max(found.rows, key=lambda row: row.cosine)
    half = (best.interval[1] - best.interval[0]) / 2
    if units < _FEWEST_UNITS:
        reason = f"only {units} independent groups or sequences"
        factor = _FEWEST_UNITS / max(1, units)
    elif found.signal <= 4 * found.noise:
        reason = "the exact gradient is not resolved from its noise"
        factor = 8 * found.noise / max(found.signal, 0.08 * found.noise, 1e-300)  # noise falls as 1 / n; 100 at most
    elif half > _WIDEST * margin or best.interval[0] <= 0:
        reason = f"the best cosine is known to +-{half:.2f} only"
        factor = (half / (_WIDEST * margin)) ** 2
    else:
        return None
    needed = math.ceil(sequences * max(2.0, factor))
    return Verdict(f"{reason}; about {needed} sequences of each kind would do", needed_sequences=needed)


def _choose(assessments: list[Assessment], found: Comparison, margin: float, sequences: int) -> Verdict:
    cosines = torch.tensor([row.cosine for row in found.rows], dtype=torch.float64)
    best = int(cosines.argmax())
    quantiles = torch.tensor([0.05, 0.95], dtype=torch.float64)
    low, high = torch.quantile(found.resampled[best] - found.resampled, quantiles, dim=1)
    gap = cosines[best] - cosines
    order = sorted(
        range(len(assessments)), key=lambda i: (assessments[i].intervention, assessments[i].metrics["rejected_tokens"])
    )
    same = [i for i in order if gap[i] <= margin and high[i] <= 2 * margin]
    first = next(i for i in order if i in same or low[i] <= 0 or gap[i] <= margin)  # not worse, for certain
    if first not in same:
        width = float((high[first] - low[first]) / 2)
        # to count as the same, gap + width must fall below 2 margins; to be ruled out, width below the gap
        goal = max(2 * margin - float(gap[first]), float(gap[first]))
        needed = math.ceil(sequences * max(2.0, (width / goal) ** 2))
        reason = (
            f"not separable: {assessments[first].name} and {assessments[best].name} differ by {float(gap[first]):.3f} "
            f"+- {width:.3f} in expected cosine; about {needed} sequences of each kind would tell"
        )
        return Verdict(reason, needed_sequences=needed)
    others = [j for j in same if j != first] or [j for j in cosines.argsort(descending=True).tolist() if j != first]
    a = assessments[first]
    reason = (
        f"expected cosine {float(cosines[first]):.3f} with the exact gradient at this batch size, within {margin:g} "
        f"of the best ({assessments[best].name}), with the least intervention ({a.intervention:.3f})"
    )
    return Verdict(reason, a.name, assessments[others[0]].name if others else None)


def _optima(names: list[str], found: Comparison) -> dict[str, tuple[str, str, str]]:
    """Thresholds that can't be told apart, because none of their bounds is ever met, share an entry."""
    families: dict[str, dict[int, str]] = {}  # the candidates' numbers and thresholds
    for i, name in enumerate(names):
        family, _, threshold = name.partition("@")
        members = families.setdefault(family, {})
        last = max(members, default=None)
        if last is not None and torch.equal(found.resampled[last], found.resampled[i]):
            threshold = f"{members.pop(last)} = {threshold}"
        members[i] = threshold
    optima = {}
    for family, members in families.items():
        if any(members.values()):  # not one without a threshold
            best = max(members, key=lambda i: found.rows[i].cosine)
            wins = found.resampled[list(members)].argmax(0).sort().values
            low, high = (list(members.values())[int(wins[int(q * (len(wins) - 1))])] for q in (0.05, 0.95))
            optima[family] = members[best], low, high
    return optima
