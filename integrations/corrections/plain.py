"""Corrections as plain data, which a JSON file can hold, and in words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...correction.actions import Correction, Gate, Weight, preset
from ...correction.statistics import Statistic

_OF_STATISTIC = ("ratio", "kernel", "aggregate")


def from_plain(settings: Mapping[str, Any]) -> Correction:
    """A correction from {"preset": name, threshold: value ...}, or from {"weight": {...}, "gates": [{...}],
    "denominator": ...} with the fields of `Weight` and `Gate`, those of their statistic among them. Raises ValueError
    or TypeError for what these don't know."""
    if not isinstance(settings, Mapping):
        raise TypeError(f"a correction is an object, not {settings!r}")
    if "preset" in settings:
        return preset(settings["preset"], **{name: value for name, value in settings.items() if name != "preset"})
    if unknown := set(settings) - {"weight", "gates", "denominator"}:
        raise ValueError(f"unknown {', '.join(sorted(unknown))}; known are preset, weight, gates, denominator")
    gates = tuple(_action(Gate, fields) for fields in settings.get("gates", ()))
    weight = None if settings.get("weight") is None else _action(Weight, settings["weight"])
    return Correction(weight, gates, settings.get("denominator", "original"))


def _action(kind: Any, fields: Mapping[str, Any]) -> Any:
    if not isinstance(fields, Mapping):
        raise TypeError(f"a {kind.__name__.lower()} is an object, not {fields!r}")
    statistic = Statistic(**{name: fields[name] for name in _OF_STATISTIC if name in fields})
    return kind(statistic, **{name: value for name, value in fields.items() if name not in _OF_STATISTIC})


def in_words(correction: Correction) -> str:
    """Return what a correction does to a loss, for those who don't know its name."""
    said = []
    if weight := correction.weight:
        whose = {"token": "its", "sum": "its sequence's", "mean": "its sequence's mean"}[weight.statistic.aggregate]
        beyond = {"clip": "cut at", "zero": "0 beyond", "keep": "counted beyond"}[weight.outside]
        ends = " and ".join(f"{bound:.4g}" for bound in (weight.low, weight.high) if bound) or "no bound"
        said.append(f"multiplies a token's loss by {whose} probability ratio {weight.statistic.ratio}, {beyond} {ends}")
        if weight.normalize:
            said[-1] += ", over the batch's mean of it"
    for gate in correction.gates:
        of = gate.statistic
        if gate.average:
            said.append(
                f"drops the tokens with the largest {of.kernel} of {of.ratio} until the mean is at most {gate.high:.4g}"
            )
            continue
        what = "tokens" if of.per_token else "sequences"
        how = "" if of.per_token else f"{of.aggregate} of "
        ends = " or ".join(f"{sign} {b:.4g}" for sign, b in (("<", gate.low), (">", gate.high)) if b is not None)
        side = {"any": "", "negative": " and A < 0", "outward": " on A's side"}[gate.side]
        said.append(f"drops {what} where the {how}{of.kernel} of {of.ratio} is {ends}{side}")
    if correction.denominator == "kept":
        said.append("divides by what is kept")
    return ", and ".join(said) or "leaves the loss as it is"
