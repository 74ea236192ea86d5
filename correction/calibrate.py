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
from .diagnose import PROBABILITY_EDGES
from .losses import Mode, contribution, effective_coefficients
from .statistics import LogProbs, Statistic, exp
from .theory import effective_sample_size, optimal_truncation, self_normalized_chi2

MARGIN = 0.01  # expected cosines closer than this are the same for practice


@dataclass(frozen=True)
class Traces:
    """Scored sequences: log-probs (rollout, old, and current where it has moved since), advantages in the mask's shape
    or [sequences], and optionally sketch [valid tokens, F], anything linear in grad log pi (e.g. a random projection),
    and groups int64 [sequences], which are resampled together (samples of one prompt).

    Without a sketch, the coefficients' sums by token probability and sign of the advantage stand for the gradient.
    """

    logprobs: LogProbs
    advantages: Tensor
    sketch: Tensor | None = None
    groups: Tensor | None = None

    def on_policy(self) -> Traces:
        """With `current` set: to `old` where it was not given."""
        lp = self.logprobs
        return self if lp.current is not None else replace(self, logprobs=replace(lp, current=lp.old))

    def features(self) -> Tensor:
        """fp64 [valid tokens, F]."""
        if self.sketch is not None:
            return self.sketch.double()
        edges = torch.tensor(PROBABILITY_EDGES, dtype=torch.float64)
        bins = torch.bucketize(self.logprobs.values("old").exp(), edges, right=True)
        advantages = valid_advantages(self.logprobs, self.advantages)
        assert advantages is not None
        index = 2 * bins + (advantages < 0)
        return torch.nn.functional.one_hot(index, 2 * (len(edges) + 1)).double()

    def contributions(self, coefficients: Tensor, features: Tensor) -> Tensor:
        """fp64 [units, F]: a sequence's sum over its tokens, for a group the mean of its sequences."""
        lp = self.logprobs
        unit = lp.segment if self.groups is None else torch.unique(self.groups, return_inverse=True)[1][lp.segment]
        count = lp.num_sequences if self.groups is None else int(unit.max()) + 1
        out = torch.zeros(count, features.shape[1], dtype=torch.float64)
        return out.index_add_(0, unit, coefficients[:, None] * features) / (lp.num_sequences / count)


@dataclass(frozen=True)
class Assessment:
    """What one candidate does to an update. cosine, scale and direction are None without a reference; `interval` is the
    bootstrap's 90 % of the cosine. intervention: sum |e - e_uncorrected| / sum |e_uncorrected|, 0 for no correction."""

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
    cosine: float | None = None
    interval: tuple[float, float] | None = None
    scale: float | None = None
    direction: float | None = None
    noise: float | None = None


@dataclass(frozen=True)
class Calibration:
    """`recommended` is None where the data can't tell; `reason` says why in either case."""

    assessments: list[Assessment]
    recommended: str | None
    runner_up: str | None
    reason: str
    chi2_sequence: float
    optimal_truncation: float
    needed_sequences: int | None = None
    optima: dict[str, tuple[str, str, str]] | None = None  # family -> best, and the 90 % of resampled bests


def candidate_grid(logprobs: LogProbs, mode: Mode = "decoupled") -> dict[str, Correction]:
    """Candidates named "family@threshold": weights capped as published and at C*, and gates at the data's
    own quantiles, so that each keeps 50 to 99 % of what it looks at. In bypass, gates only.
    """
    logprobs = logprobs if logprobs.current is not None else replace(logprobs, current=logprobs.old)
    grid = {"none": Correction()}
    if mode == "decoupled":
        chi2 = self_normalized_chi2(exp(Statistic(TIM, aggregate="sum").of(logprobs)))
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
        values = statistic.of(logprobs)[logprobs.lengths > 0].abs().sort().values
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
    sequence_weights = exp(lp.per_sequence(lp.log_ratio("old/rollout"), "sum"))
    chi2 = max(0.0, float(self_normalized_chi2(sequence_weights)))
    base = _coefficients(traces, mode, Correction())
    features = traces.features()
    assessments, gradients = [], []
    for name, correction in candidates.items():
        coefficients = _coefficients(traces, mode, correction)
        assessments.append(_assess(name, correction, traces, coefficients, base))
        gradients.append(traces.contributions(coefficients, features))
    if reference is None:
        reason = "no exact rollouts to compare with: a bias can't be measured from the engine's own samples"
        return Calibration(assessments, None, None, reason, chi2, optimal_truncation(chi2))
    truth = reference.on_policy()
    target = truth.contributions(_coefficients(truth, "recompute", Correction()), truth.features())
    if target.shape[1] != features.shape[1]:
        raise ValueError(f"sketches differ in width: {features.shape[1]} and {target.shape[1]}")
    ratio = lp.num_sequences / len(gradients[0])  # sequences per resampled unit
    found = _compare(gradients, target, batch_size / ratio, resamples, seed)
    assessments = [
        replace(
            a,
            cosine=_clamp(c.cosine),
            interval=(_clamp(c.interval[0]), _clamp(c.interval[1])),
            scale=c.scale,
            direction=c.direction,
            noise=c.noise,
        )
        for a, c in zip(assessments, found.rows, strict=True)
    ]
    recommended, runner_up, reason, needed = _unresolved(found, margin, lp.num_sequences) or _choose(
        assessments, found, margin, lp.num_sequences
    )
    optima = _optima([a.name for a in assessments], found.resampled)
    star = optimal_truncation(chi2)
    return Calibration(assessments, recommended, runner_up, reason, chi2, star, needed, optima)


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
    accepted = lp.per_sequence(keep.double(), "max") > 0
    real = lp.lengths > 0
    order = lp.lengths[real].argsort()
    deciles = [float(part.double().mean()) for part in accepted[real][order].chunk(10)]
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


@dataclass(frozen=True)
class _Alignment:
    cosine: float
    interval: tuple[float, float]
    scale: float
    direction: float
    noise: float


@dataclass(frozen=True)
class _Comparison:
    rows: list[_Alignment]
    resampled: Tensor  # [candidates, resamples] cosines; a column resamples all candidates alike
    signal: tuple[float, float]  # squared length of the reference gradient without its noise, and the noise


def _compare(gradients: list[Tensor], target: Tensor, batch: float, resamples: int, seed: int) -> _Comparison:
    generator = torch.Generator().manual_seed(seed)
    counts, target_counts = (_resample(len(t), resamples, generator) for t in (gradients[0], target))
    truth = _moments(target, target_counts)
    rows, resampled = [], []
    for gradient in gradients:
        cosine, scale, direction, noise = _alignment(_moments(gradient, counts), truth, batch)
        boot = cosine[1:] - cosine[1:].median() + cosine[0]  # noise is taken off twice there: the spread counts
        low, high = (float(v) for v in boot.quantile(torch.tensor([0.05, 0.95], dtype=torch.float64)))
        rows.append(_Alignment(float(cosine[0]), (low, high), float(scale[0]), float(direction[0]), float(noise[0])))
        resampled.append(boot)
    _, squared, variance = truth
    return _Comparison(rows, torch.stack(resampled), (float(squared[0]), float(variance[0]) / max(1, len(target) - 1)))


def _resample(units: int, resamples: int, generator) -> Tensor:
    """[1 + resamples, units] weights that sum to 1: the sample itself, then bootstrap resamples."""
    drawn = torch.randint(units, (resamples, units), generator=generator)
    counts = torch.zeros(resamples, units, dtype=torch.float64).scatter_add_(
        1, drawn, torch.ones(drawn.shape, dtype=torch.float64)
    )
    return torch.cat((torch.ones(1, units, dtype=torch.float64), counts)) / units


def _moments(gradient: Tensor, counts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Per resample: the mean [R, F], its squared norm without the sampling noise's share [R], the variance [R]."""
    units = len(gradient)
    mean = counts @ gradient
    variance = (counts @ gradient.square()).sum(1) - mean.square().sum(1)
    noise = variance / max(1, units - 1)
    noise = torch.cat((noise[:1], 2 * noise[1:]))  # a resampled mean carries the noise twice
    return mean, mean.square().sum(1) - noise, variance


def _alignment(ours, truth, batch: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    (mean, squared, variance), (target, target_squared, _) = ours, truth
    inner = (mean * target).sum(1)
    tiny = torch.finfo(torch.float64).tiny
    length = target_squared.clamp_min(0).sqrt()
    cosine = inner / (length * (squared.clamp_min(0) + variance / batch).sqrt()).clamp_min(tiny)
    scale = inner / target_squared.clamp_min(tiny)
    direction = (squared * target_squared / inner.square().clamp_min(tiny) - 1).clamp_min(0).sqrt()
    noise = (variance / batch / squared.clamp_min(tiny)).sqrt()
    return cosine, scale, direction, noise


def _clamp(cosine: float) -> float:
    return min(1.0, max(-1.0, cosine))


def _unresolved(found: _Comparison, margin: float, sequences: int):
    """Refuses where the reference gradient drowns in its noise, or the best cosine is known to 5 margins only."""
    squared, noise = found.signal
    if squared < 4 * noise:
        needed = math.ceil(sequences * min(100.0, 8 * noise / max(squared, 0.08 * noise)))
        reason = f"the exact gradient is not resolved from its noise; about {needed} sequences of each kind would do"
        return None, None, reason, needed
    low, high = max(found.rows, key=lambda row: row.cosine).interval
    excess = (high - low) / 2 / (5 * margin)
    if excess > 1:
        needed = math.ceil(sequences * max(2.0, excess**2))
        reason = (
            f"the best cosine is known to +-{(high - low) / 2:.2f} only; about {needed} sequences of each kind would do"
        )
        return None, None, reason, needed
    return None


def _choose(assessments: list[Assessment], found: _Comparison, margin: float, sequences: int):
    """(recommended, runner-up, reason, sequences needed)."""
    resampled = found.resampled
    cosines = torch.tensor([row.cosine for row in found.rows], dtype=torch.float64)
    best = int(cosines.argmax())
    low, high = torch.quantile(resampled[best] - resampled, torch.tensor([0.05, 0.95], dtype=torch.float64), dim=1)
    gap = cosines[best] - cosines
    order = sorted(
        range(len(assessments)), key=lambda i: (assessments[i].intervention, -assessments[i].accepted_tokens)
    )
    same = [i for i in order if gap[i] <= margin and high[i] <= 2 * margin]
    for i in order:
        if i in same:
            others = [j for j in same if j != i] or [j for j in cosines.argsort(descending=True).tolist() if j != i]
            runner = assessments[others[0]].name if others else None
            a = assessments[i]
            reason = (
                f"expected cosine {a.cosine:.3f} with the exact gradient at this batch size, within {margin:g} of the "
                f"best ({assessments[best].name}), with the least intervention ({a.intervention:.3f})"
            )
            return a.name, runner, reason, None
        if low[i] <= 0 or gap[i] <= margin:  # neither as good as the best nor worse, for certain
            width = float((high[i] - low[i]) / 2)
            needed = math.ceil(sequences * max(2.0, (width / margin) ** 2))
            name, top = assessments[i].name, assessments[best].name
            reason = (
                f"not separable: {name} and {top} differ by {float(gap[i]):.3f} +- {width:.3f} in expected cosine; "
                f"about {needed} sequences of each kind would tell"
            )
            return None, None, reason, needed
    raise AssertionError("the best candidate is as good as itself")


def _optima(names: list[str], resampled: Tensor) -> dict[str, tuple[str, str, str]]:
    families: dict[str, list[int]] = {}
    for i, name in enumerate(names):
        if "@" in name:
            families.setdefault(name.partition("@")[0], []).append(i)
    optima = {}
    for family, members in families.items():
        wins = resampled[members].argmax(0).sort().values
        picks = [wins[int(q * (len(wins) - 1))] for q in (0.5, 0.05, 0.95)]
        optima[family] = tuple(names[members[int(p)]].partition("@")[2] for p in picks)
    return optima  # type: ignore[return-value]
