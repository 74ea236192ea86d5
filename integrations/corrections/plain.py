"""Corrections as plain data: what a JSON file can hold."""

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
    weight = settings.get("weight")
    denominator = settings.get("denominator", "original")
    gates = tuple(_action(Gate, fields) for fields in settings.get("gates", ()))
    return Correction(None if weight is None else _action(Weight, weight), gates, denominator)


def _action(kind: Any, fields: Mapping[str, Any]) -> Any:
    if not isinstance(fields, Mapping):
        raise TypeError(f"a {kind.__name__.lower()} is an object, not {fields!r}")
    statistic = Statistic(**{name: fields[name] for name in _OF_STATISTIC if name in fields})
    return kind(statistic, **{name: value for name, value in fields.items() if name not in _OF_STATISTIC})
