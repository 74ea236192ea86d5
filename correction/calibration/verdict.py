"""The verdict on a comparison of candidates: a recommendation, several that can't be told apart, or a refusal."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from .alignment import Comparison
from .assess import Assessment

MARGIN = 0.01  # expected cosines closer than this are the same for practice
MAX_BIAS = 0.05  # a direction bias of a twentieth of the gradient is none, for practice
_FEWEST_UNITS = 10  # below, a bootstrap means nothing
_WIDEST = 5  # margins: half of the widest interval of the best cosine that is still worth a choice
_PARTS = 16  # of the resamples, each asked for a verdict: a choice on the edge of a limit is chance
_CHANCE = 0.05  # of resamples: a candidate that fewer pick is not named beside another


@dataclass(frozen=True)
class Verdict:
    """The result of a calibration. recommended: None where the data can't tell, and then perhaps how many sequences
    could. any_of: candidates that the data can't tell apart, the recommended one first; empty where it stands alone.
    """

    reason: str
    recommended: str | None = None
    any_of: tuple[str, ...] = ()
    needed_sequences: int | None = None

    @property
    def headline(self) -> str:
        """The verdict in a few words."""
        if self.recommended is None:
            return "No recommendation yet"
        if self.recommended == "none":
            return "No correction needed"
        names = self.any_of[:3] or (self.recommended,)
        return f"Use {' or '.join('no correction' if name == 'none' else name for name in names)}"


class Criteria(NamedTuple):
    """The settings and counts that a verdict depends on beside the data: see `calibrate`."""

    batch_size: int
    margin: float
    max_bias: float
    sequences: int
    units: int


def decide(assessments: list[Assessment], found: Comparison, whys: list[str | None], criteria: Criteria) -> Verdict:
    """The verdict. whys: why a candidate has no figure, or None."""
    known = [i for i, why in enumerate(whys) if why is None]
    if not known:
        return Verdict("no candidate can be estimated: all have too heavy-tailed weights, or reject nearly all")
    whole, *parts = (
        _unresolved(part, known, criteria) or _choose(assessments, part, known, criteria)
        for part in (found, *(found.part(i, _PARTS) for i in range(_PARTS)))
    )
    if whole.recommended is None:
        return whole
    alike = tuple(dict.fromkeys(name for v in (whole, *parts) for name in v.any_of))
    return replace(whole, any_of=alike if len(alike) > 1 else ())


def _unresolved(found: Comparison, known: list[int], criteria: Criteria) -> Verdict | None:
    """Refuse where cosines mean nothing: few units, a reference gradient within two standard errors of 0, a best
    cosine that may be 0 or is not known to _WIDEST margins."""
    best = max((found.rows[i] for i in known), key=lambda row: row.cosine)
    half = (best.interval[1] - best.interval[0]) / 2
    widest = _WIDEST * criteria.margin
    if criteria.units < _FEWEST_UNITS:
        reason = f"only {criteria.units} independent groups or sequences"
        factor = _FEWEST_UNITS / max(1, criteria.units)
    elif found.signal <= 4 * found.noise:
        reason = "the exact gradient is not resolved from its noise"
        factor = 8 * found.noise / max(found.signal, 0.08 * found.noise, 1e-300)  # noise falls as 1 / n; 100 at most
    elif not math.isfinite(half) or half > widest or best.interval[0] <= 0:
        reason = f"the best cosine is known to +-{half:.2f} only"
        factor = (half / widest) ** 2 if math.isfinite(half) else 100.0
    else:
        return None
    needed = math.ceil(criteria.sequences * max(2.0, factor))
    return Verdict(f"{reason}; about {needed} sequences of each kind would do", needed_sequences=needed)


def _choose(assessments: list[Assessment], found: Comparison, known: list[int], criteria: Criteria) -> Verdict:
    margin = criteria.margin
    cosines = torch.tensor([found.rows[i].cosine for i in known], dtype=torch.float64)
    resampled = torch.stack([found.bootstraps[i].cosines for i in known])
    best = int(cosines.argmax())
    quantiles = torch.tensor([0.05, 0.95], dtype=torch.float64)
    low, high = torch.quantile(resampled[best] - resampled, quantiles, dim=1)
    gap = cosines[best] - cosines
    order = sorted(range(len(known)), key=lambda k: _intervention(assessments[known[k]]))
    level = [k for k in order if gap[k] <= margin and high[k] <= 2 * margin]
    biased = {k for k in order if (found.rows[known[k]].direction_interval or (0.0,))[0] > criteria.max_bias}
    if not biased.issuperset(level):  # there is another choice
        order = [k for k in order if k not in biased]
    same = [k for k in level if k in order]
    first = next(k for k in order if k in same or low[k] <= 0 or gap[k] <= margin)  # not worse, for certain
    name = [assessments[i].name for i in known]
    if first not in same:
        width = float((high[first] - low[first]) / 2)
        # to count as the same, gap + width must fall below 2 margins; to be ruled out, width below the gap
        goal = max(2 * margin - float(gap[first]), float(gap[first]))
        needed = math.ceil(criteria.sequences * max(2.0, (width / goal) ** 2))
        reason = (
            f"not separable: {name[first]} and {name[best]} differ by {float(gap[first]):.3f} "
            f"+- {width:.3f} in expected cosine; about {needed} sequences of each kind would tell"
        )
        return Verdict(reason, needed_sequences=needed)
    good = resampled[order] >= resampled[order].amax(0) - margin
    picks = torch.tensor(order)[good.int().argmax(0)]  # of each resample, as of the sample
    alike = [name[first], *(name[k] for k in same if k != first and (picks == k).double().mean() > _CHANCE)]
    reason = (
        f"in batches of {criteria.batch_size} sequences, the update of {name[first]} has an expected cosine of "
        f"{min(1.0, float(cosines[first])):.3f} with the exact gradient (1 is perfect), within {margin:g} of the best "
        f"({name[best]}), and it changes the coefficients least ({assessments[known[first]].intervention:.1%})"
    )
    if out := [name[k] for k in level if k not in order]:
        reason += f"; {', '.join(out[:3])} would do by the cosine, but turn the direction by over {criteria.max_bias:g}"
    if first in biased:
        reason += f"; it turns the direction by over {criteria.max_bias:g} for certain, as all that come as close do"
    return Verdict(reason, name[first], tuple(alike), _for_half(found, known[first], criteria))


def _intervention(a: Assessment) -> tuple[float, float, str]:
    """The order of preference: what changes least, then what drops least, then the name; digits beyond 9 are noise."""
    return round(a.intervention, 9), round(a.metrics["rejected_tokens"], 9), a.name


def _for_half(found: Comparison, i: int, criteria: Criteria) -> int | None:
    """Return how many sequences would bring the recommended cosine's interval within the margin; None if it is."""
    low, high = found.rows[i].interval
    half = (high - low) / 2
    return math.ceil(criteria.sequences * (half / criteria.margin) ** 2) if half > criteria.margin else None
