"""What a comparison of candidates allows to say: a recommendation, several that can't be told apart, or a refusal."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from .alignment import Comparison
from .assess import Assessment

MARGIN = 0.01  # expected cosines closer than this are the same for practice
MAX_BIAS = 0.05  # a direction bias of a twentieth of the gradient is none, for practice
_FEWEST_UNITS = 10  # below, a bootstrap means nothing
_WIDEST = 5  # margins: half of the widest interval of the best cosine that is still worth a choice
_PARTS = 8  # of the resamples that must agree, each by itself
_SURE = 0.95  # of resamples that must pick the same candidate for it to be named alone


@dataclass(frozen=True)
class Verdict:
    """The result of a calibration. recommended: None where the data can't tell, and then perhaps how many sequences
    could. any_of: candidates that the data can't tell apart, the recommended one first; empty where it stands alone.
    """

    reason: str
    recommended: str | None = None
    runner_up: str | None = None
    any_of: tuple[str, ...] = ()
    needed_sequences: int | None = None

    @property
    def headline(self) -> str:
        """The verdict in a few words."""
        if self.recommended is None:
            return "No recommendation yet"
        if "none" in (self.recommended, *self.any_of):
            return "No correction needed"
        return f"Use {' or '.join(self.any_of[:3])}" if self.any_of else f"Use {self.recommended}"


class Limits(NamedTuple):
    """What a verdict depends on beside the data: see `calibrate`. sequences, units: how many there are."""

    batch_size: int
    margin: float
    max_bias: float
    sequences: int
    units: int


def decide(assessments: list[Assessment], found: Comparison, whys: list[str | None], limits: Limits) -> Verdict:
    """The verdict. whys: why a candidate has no figure, or None."""
    known = [i for i, why in enumerate(whys) if why is None]
    if not known:
        return Verdict(
            "no candidate can be estimated: each one's weights are too heavy-tailed, or nearly all is rejected"
        )
    verdicts = [
        _unresolved(part, known, limits) or _choose(assessments, part, known, limits)
        for part in (found, *(found.part(i, _PARTS) for i in range(_PARTS)))
    ]
    return _agreed(verdicts[0], verdicts[1:])


def _agreed(verdict: Verdict, parts: list[Verdict]) -> Verdict:
    """The verdict of all resamples, with what shares of them would have named beside it: a choice at the edge of a
    limit is chance."""
    if verdict.recommended is None:
        return verdict
    named = [name for v in (verdict, *parts) for name in (v.recommended, *v.any_of) if name is not None]
    alike = tuple(dict.fromkeys(named))
    return replace(verdict, any_of=alike if len(alike) > 1 else ())


def _unresolved(found: Comparison, known: list[int], limits: Limits) -> Verdict | None:
    """Refuse where cosines mean nothing: few units, a reference gradient within two standard errors of 0, a best
    cosine that may be 0 or is not known to _WIDEST margins."""
    best = max((found.rows[i] for i in known), key=lambda row: row.cosine)
    half = (best.interval[1] - best.interval[0]) / 2
    widest = _WIDEST * limits.margin
    if limits.units < _FEWEST_UNITS:
        reason = f"only {limits.units} independent groups or sequences"
        factor = _FEWEST_UNITS / max(1, limits.units)
    elif found.signal <= 4 * found.noise:
        reason = "the exact gradient is not resolved from its noise"
        factor = 8 * found.noise / max(found.signal, 0.08 * found.noise, 1e-300)  # noise falls as 1 / n; 100 at most
    elif not math.isfinite(half) or half > widest or best.interval[0] <= 0:
        reason = f"the best cosine is known to +-{half:.2f} only"
        factor = (half / widest) ** 2 if math.isfinite(half) else 100.0
    else:
        return None
    needed = math.ceil(limits.sequences * max(2.0, factor))
    return Verdict(f"{reason}; about {needed} sequences of each kind would do", needed_sequences=needed)


def _choose(assessments: list[Assessment], found: Comparison, known: list[int], limits: Limits) -> Verdict:
    margin = limits.margin
    cosines = torch.tensor([found.rows[i].cosine for i in known], dtype=torch.float64)
    resampled = torch.stack([found.bootstraps[i].cosines for i in known])
    best = int(cosines.argmax())
    quantiles = torch.tensor([0.05, 0.95], dtype=torch.float64)
    low, high = torch.quantile(resampled[best] - resampled, quantiles, dim=1)
    gap = cosines[best] - cosines
    order = sorted(range(len(known)), key=lambda k: _intervention(assessments[known[k]]))
    level = [k for k in order if gap[k] <= margin and high[k] <= 2 * margin]
    biased = [k for k in level if _biased(found, known[k], limits)]
    if len(biased) < len(level):  # there is another choice
        order = [k for k in order if not _biased(found, known[k], limits)]
    same = [k for k in level if k in order]
    first = next(k for k in order if k in same or low[k] <= 0 or gap[k] <= margin)  # not worse, for certain
    name = [assessments[i].name for i in known]
    if first not in same:
        width = float((high[first] - low[first]) / 2)
        # to count as the same, gap + width must fall below 2 margins; to be ruled out, width below the gap
        goal = max(2 * margin - float(gap[first]), float(gap[first]))
        needed = math.ceil(limits.sequences * max(2.0, (width / goal) ** 2))
        reason = (
            f"not separable: {name[first]} and {name[best]} differ by {float(gap[first]):.3f} "
            f"+- {width:.3f} in expected cosine; about {needed} sequences of each kind would tell"
        )
        return Verdict(reason, needed_sequences=needed)
    picks = _picks(resampled, order, margin)
    sure = picks[first] >= _SURE * resampled.shape[1]
    alike = () if sure else (name[first], *(name[k] for k in same if k != first and picks[k]))
    others = [k for k in same if k != first] or [k for k in cosines.argsort(descending=True).tolist() if k != first]
    cosine = min(1.0, float(cosines[first]))
    reason = (
        f"in batches of {limits.batch_size} sequences, the update of {name[first]} has an expected cosine of "
        f"{cosine:.3f} with the exact gradient, within {margin:g} of the best ({name[best]}), and it changes the "
        f"coefficients least ({assessments[known[first]].intervention:.1%})"
    )
    if out := [name[k] for k in biased if k not in order]:
        reason += f"; {', '.join(out[:3])} would do by the cosine, but turn the direction by over {limits.max_bias:g}"
    runner_up = name[others[0]] if others else None
    return Verdict(
        reason, name[first], runner_up, alike if len(alike) > 1 else (), _for_half(found, known[first], limits)
    )


def _intervention(a: Assessment) -> tuple[float, float, str]:
    """The order of preference: what changes least, then what drops least, then the name; digits beyond 9 are noise."""
    return round(a.intervention, 9), round(a.metrics["rejected_tokens"], 9), a.name


def _biased(found: Comparison, i: int, limits: Limits) -> bool:
    interval = found.rows[i].direction_interval
    return interval is not None and interval[0] > limits.max_bias


def _picks(resampled: torch.Tensor, order: list[int], margin: float) -> Counter[int]:
    """How often each candidate is the first in order within the margin of a resample's best."""
    good = resampled[order] >= resampled[order].amax(0) - margin
    return Counter(order[k] for k in good.int().argmax(0).tolist())


def _for_half(found: Comparison, i: int, limits: Limits) -> int | None:
    """How many sequences would bring the interval of the recommended cosine within the margin; None if it is."""
    low, high = found.rows[i].interval
    half = (high - low) / 2
    return math.ceil(limits.sequences * (half / limits.margin) ** 2) if half > limits.margin else None
