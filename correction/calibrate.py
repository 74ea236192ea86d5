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

from .actions import GEOMETRIC, TIM, Correction, preset, valid_advantages
from .alignment import Comparison, compare
from .diagnose import PROBABILITY_EDGES
from .losses import Mode, contribution, effective_coefficients
from .statistics import LogProbs, Statistic, exp
from .theory import effective_sample_size, optimal_truncation, self_normalized_chi2

MARGIN = 0.01  # expected cosines closer than this are the same for practice
_FEWEST_UNITS = 10  # below, a bootstrap means nothing
_WIDEST = 5  # margins: half of the widest interval of the best cosine that is still worth a choice


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
        """With `current` set: to `old` where it was not given."""
        lp = self.logprobs
        return self if lp.current is not None else replace(self, logprobs=replace(lp, current=lp.old))

    def units(self) -> tuple[Tensor, Tensor]:
        """What is resampled: (names int64 [units], int64 [sequences] the unit of each)."""
        names = torch.arange(self.logprobs.num_sequences) if self.groups is None else self.groups
        return torch.unique(names, return_inverse=True)

    def bins(self) -> Tensor:
        """int64 [valid tokens]: the token's probability under `old` and its advantage's sign."""
        edges = torch.tensor(PROBABILITY_EDGES, dtype=torch.float64)
        bins = torch.bucketize(self.logprobs.values("old").exp(), edges, right=True)
        advantages = valid_advantages(self.logprobs, self.advantages)
        assert advantages is not None
        return 2 * bins + (advantages < 0)

    def profile(self, coefficients: Tensor, bins: Tensor) -> Tensor:
        """fp64 [2 * probability bins]: a sequence's mean sum of coefficients."""
        width = 2 * (len(PROBABILITY_EDGES) + 1)
        return torch.bincount(bins, weights=coefficients, minlength=width) / max(1, self.logprobs.num_sequences)

    def gradients(self, coefficients: Tensor) -> Tensor:
        """fp64 [units, F]: sum of coefficient * sketch over a sequence's tokens; for a group the sequences' mean."""
        assert self.sketch is not None
        names, unit = self.units()
        out = torch.zeros(len(names), self.sketch.shape[1], dtype=torch.float64)
        out.index_add_(0, unit[self.logprobs.segment], coefficients[:, None] * self.sketch.double())
        return out * (len(names) / self.logprobs.num_sequences)


@dataclass(frozen=True)
class Assessment:
    """What one candidate does to an update. intervention: sum |e - e_uncorrected| / sum |e_uncorrected|.

    With a reference: coefficient_error: sum |mean coefficient - its own| over bins of token probability and sign of the
    advantage, relative; cosine, scale, direction, noise as above; interval: the bootstrap's 90 % of the cosine.
    """

    name: str
    accepted_tokens: float
    accepted_sequences: float
    accepted_by_length: list[float]
    accepted_positive: float
    accepted_negative: float
    rejected_advantage: float
    ess_token: float
    ess_sequence: float
    intervention: float
    contribution_positive: float
    contribution_negative: float
    coefficient_error: float | None = None
    cosine: float | None = None
    interval: tuple[float, float] | None = None
    scale: float | None = None
    direction: float | None = None
    noise: float | None = None


@dataclass(frozen=True)
class Verdict:
    """recommended: None where the data can't tell, and then perhaps how many sequences could."""

    reason: str
    recommended: str | None = None
    runner_up: str | None = None
    needed_sequences: int | None = None


@dataclass(frozen=True)
class Calibration:
    """All candidates, the verdict, and chi2 of a sequence's weights with C* = sqrt(2 (1 + chi2)) beside the optima."""

    assessments: list[Assessment]
    verdict: Verdict
    chi2_sequence: float
    optimal_truncation: float
    optima: dict[str, tuple[str, str, str]] | None = None  # family -> best, and the 90 % of resampled bests


def candidate_grid(logprobs: LogProbs, mode: Mode = "decoupled") -> dict[str, Correction]:
    """Candidates named "family@threshold": weights capped as published and at C*, and gates at the data's
    own quantiles, so that each keeps 50 to 99 % of what it looks at. In bypass, gates only.
    """
    logprobs = logprobs if logprobs.current is not None else replace(logprobs, current=logprobs.old)
    grid = {"none": Correction()}
    if mode == "decoupled":
        chi2 = self_normalized_chi2(exp(Statistic(TIM, aggregate="sum").of(logprobs))[logprobs.lengths > 0])
        star = optimal_truncation(max(0.0, float(chi2)))
        grid |= {f"token_tis@{c:g}": preset("token_tis", high=c) for c in (1.5, 2.0, 3.0, 5.0)}
        grid |= {f"sequence_tis@{c:.3g}": preset("sequence_tis", high=c) for c in sorted({1.5, 2.0, 3.0, 5.0, star})}
        grid |= {f"icepop@{c:g}": preset("icepop", low=1 / c, high=c) for c in (2.0, 5.0)}
        grid |= {f"sequence_mis@{c:g}": preset("sequence_mis", high=c) for c in (2.0, 3.0, 5.0)}
        grid["sequence_is"] = preset("sequence_is")
    gates: dict[str, tuple[Statistic, Callable[[float], Correction]]] = {
        "geo_rs": (GEOMETRIC, lambda b: preset("geo_rs", low=math.exp(-b), high=math.exp(b))),
        "k3_mean_rs": (Statistic(TIM, "k3", "mean"), lambda b: preset("k3_mean_rs", high=b)),
        "k3_sum_rs": (Statistic(TIM, "k3", "sum"), lambda b: preset("k3_sum_rs", high=b)),
        "trm": (Statistic(TIM, "k3", "max"), lambda b: preset("trm", high=b)),
        "opsm": (
            Statistic("current/rollout", "k1", "mean"),
            lambda b: preset("opsm", delta=b, ratio="current/rollout"),
        ),
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
    """Assesses every candidate, and recommends the one that intervenes least among those whose expected cosine is the
    best up to `margin`, if the bootstrap can tell.

    candidates: name -> correction; names "family@threshold" get an optimum per family. mode: of the loss they feed.
    batch_size: sequences of a training batch, which decides what noise costs. Raises ValueError without candidates.
    """
    if not candidates:
        raise ValueError("no candidates to assess")
    traces = traces.on_policy()
    lp = traces.logprobs
    if not len(lp.segment):
        raise ValueError("no valid tokens to calibrate with")
    sequence_weights = exp(lp.per_sequence(lp.log_ratio("old/rollout"), "sum"))[lp.lengths > 0]
    chi2 = max(0.0, float(self_normalized_chi2(sequence_weights)))
    star = optimal_truncation(chi2)
    coefficients = [_coefficients(traces, mode, c) for c in candidates.values()]
    base = _coefficients(traces, mode, Correction())
    assessments = [
        _assess(name, c, traces, e, base) for (name, c), e in zip(candidates.items(), coefficients, strict=True)
    ]
    if reference is None:
        reason = "no exact rollouts to compare with: a bias can't be measured from the engine's own samples"
        return Calibration(assessments, Verdict(reason), chi2, star)
    truth = reference.on_policy()
    exact, bins = _coefficients(truth, "recompute", Correction()), traces.bins()
    profile = truth.profile(exact, truth.bins())
    errors = [
        (traces.profile(e, bins) - profile).abs().sum() / profile.abs().sum().clamp_min(1e-300) for e in coefficients
    ]
    assessments = [replace(a, coefficient_error=float(e)) for a, e in zip(assessments, errors, strict=True)]
    if traces.sketch is None or truth.sketch is None:
        reason = "no gradients to compare: give both sides a sketch of grad log pi (on the command line, a --model)"
        return Calibration(assessments, Verdict(reason), chi2, star)
    if traces.sketch.shape[1] != truth.sketch.shape[1]:
        raise ValueError(f"sketches differ in width: {traces.sketch.shape[1]} and {truth.sketch.shape[1]}")
    (ours, _), (theirs, _) = traces.units(), truth.units()
    paired = traces.groups is not None and truth.groups is not None and torch.equal(ours, theirs)
    batch = batch_size * len(ours) / lp.num_sequences
    found = compare([traces.gradients(e) for e in coefficients], truth.gradients(exact), paired, batch, resamples, seed)
    assessments = [
        replace(
            a, cosine=_clamp(r.cosine), interval=(_clamp(r.interval[0]), _clamp(r.interval[1])), scale=r.scale,
            direction=r.direction, noise=r.noise,
        )
        for a, r in zip(assessments, found.rows, strict=True)
    ]  # fmt: skip
    units = min(len(ours), len(theirs))
    verdict = _unresolved(found, units, margin, lp.num_sequences) or _choose(
        assessments, found, margin, lp.num_sequences
    )
    return Calibration(assessments, verdict, chi2, star, _optima([a.name for a in assessments], found))


def _coefficients(traces: Traces, mode: Mode, correction: Correction) -> Tensor:
    lp = traces.logprobs
    if mode == "decoupled" and lp.rollout is None:
        raise ValueError("the traces need the rollout engine's log-probs")
    e = effective_coefficients(
        lp, traces.advantages, mode, correction=correction, aggregation="seq-mean-token-sum", normalizer=1.0
    )
    return -e  # the direction of ascent


def _assess(name, correction: Correction, traces: Traces, coefficients: Tensor, base: Tensor) -> Assessment:
    lp = traces.logprobs
    advantages = valid_advantages(lp, traces.advantages)
    assert advantages is not None
    weights, keep = correction.on_tokens(lp, advantages)
    used = torch.where(keep, weights, 0.0)
    keep = used > 0  # a weight that is 0 outside its bounds drops the token too
    accepted = lp.per_sequence(keep.double(), "max") > 0
    real = lp.lengths > 0
    order = lp.lengths[real].argsort(stable=True)
    deciles = [float(part.double().mean()) for part in accepted[real][order].tensor_split(10) if len(part)]
    effect = contribution(lp.log_ratio("current/rollout"), advantages) * used
    positive, negative = advantages > 0, advantages < 0
    mass = advantages.abs().sum().clamp_min(1e-300)
    return Assessment(
        name=name,
        accepted_tokens=_share(keep, torch.ones_like(keep)),
        accepted_sequences=_share(accepted, real),
        accepted_by_length=deciles,
        accepted_positive=_share(keep, positive),
        accepted_negative=_share(keep, negative),
        rejected_advantage=float(advantages.abs()[~keep].sum() / mass),
        ess_token=float(effective_sample_size(used)) / max(1, len(used)),
        ess_sequence=float(effective_sample_size(lp.per_sequence(used, "mean"))) / max(1, int(real.sum())),
        intervention=float((coefficients - base).abs().sum() / base.abs().sum().clamp_min(1e-300)),
        contribution_positive=_mean(effect, positive),
        contribution_negative=_mean(effect, negative),
    )


def _share(kept: Tensor, among: Tensor) -> float:
    return float((kept & among).sum()) / max(1, int(among.sum()))


def _mean(values: Tensor, among: Tensor) -> float:
    return float(values[among].sum()) / max(1, int(among.sum()))


def _clamp(cosine: float) -> float:
    return min(1.0, max(-1.0, cosine))


def _unresolved(found: Comparison, units: int, margin: float, sequences: int) -> Verdict | None:
    """Refuses where cosines mean nothing: few units, a reference gradient within two standard errors of 0, a best
    cosine that may be 0 or is not known to _WIDEST margins."""
    best = max(found.rows, key=lambda row: row.cosine)
    half = (best.interval[1] - best.interval[0]) / 2
    if units < _FEWEST_UNITS:
        reason, factor = f"only {units} independent groups or sequences", _FEWEST_UNITS / max(1, units)
    elif found.signal <= 4 * found.noise:
        reason = "the exact gradient is not resolved from its noise"
        factor = 8 * found.noise / max(found.signal, 0.08 * found.noise, 1e-300)  # noise falls as 1 / n; 100 at most
    elif half > _WIDEST * margin or best.interval[0] <= 0:
        reason, factor = f"the best cosine is known to +-{half:.2f} only", (half / (_WIDEST * margin)) ** 2
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
        range(len(assessments)), key=lambda i: (assessments[i].intervention, -assessments[i].accepted_tokens)
    )
    same = [i for i in order if gap[i] <= margin and high[i] <= 2 * margin]
    first = next(i for i in order if i in same or low[i] <= 0 or gap[i] <= margin)  # not worse, for certain
    if first not in same:
        width = float((high[first] - low[first]) / 2)
        needed = math.ceil(sequences * max(2.0, (width / margin) ** 2))
        reason = (
            f"not separable: {assessments[first].name} and {assessments[best].name} differ by {float(gap[first]):.3f} "
            f"+- {width:.3f} in expected cosine; about {needed} sequences of each kind would tell"
        )
        return Verdict(reason, needed_sequences=needed)
    others = [j for j in same if j != first] or [j for j in cosines.argsort(descending=True).tolist() if j != first]
    a = assessments[first]
    reason = (
        f"expected cosine {a.cosine:.3f} with the exact gradient at this batch size, within {margin:g} of the best "
        f"({assessments[best].name}), with the least intervention ({a.intervention:.3f})"
    )
    return Verdict(reason, a.name, assessments[others[0]].name if others else None)


def _optima(names: list[str], found: Comparison) -> dict[str, tuple[str, str, str]]:
    """Thresholds that can't be told apart, because none of their bounds is ever met, share an entry."""
    families: dict[str, list[tuple[str, int]]] = {}
    for i, name in enumerate(names):
        family, _, threshold = name.partition("@")
        if not threshold:
            continue
        members = families.setdefault(family, [])
        if members and torch.equal(found.resampled[members[-1][1]], found.resampled[i]):
            members[-1] = f"{members[-1][0]} = {threshold}", i
        else:
            members.append((threshold, i))
    optima = {}
    for family, members in families.items():
        cosines = [found.rows[i].cosine for _, i in members]
        wins = found.resampled[[i for _, i in members]].argmax(0).sort().values
        low, high = (members[int(wins[int(q * (len(wins) - 1))])][0] for q in (0.05, 0.95))
        optima[family] = members[cosines.index(max(cosines))][0], low, high
    return optima
