"""The common parts of the translations: checked settings, bounds, and what is never approximated."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, NamedTuple, NoReturn

from ...correction.actions import Correction, Gate, Weight
from ...correction.losses import Kind, Mode
from ...correction.statistics import Aggregate, Ratio, Statistic, require_choice


class Translated(NamedTuple):
    """Another framework's settings as ours. mode: of `policy_loss`. notes: sentences on its other arguments, and on
    known defects and differences, that apply to these settings.
    """

    mode: Mode
    correction: Correction
    notes: tuple[str, ...] = ()


LOW = 1e-9  # beyond exp(+-20), where verl and Miles' mis.py clamp ratios: bounds that never bind
HIGH = 1e9
LEVELS: dict[str, Aggregate] = {"token": "token", "sequence": "sum"}


def settings_of(framework: str, config: Mapping[str, Any], defaults: dict[str, Any]) -> SimpleNamespace:
    """The settings with their defaults. ValueError for unknown ones, with those that are known."""
    if unknown := sorted(set(config) - set(defaults)):
        raise ValueError(f"{framework} has no {', '.join(unknown)}; known are {', '.join(defaults)}")
    return SimpleNamespace(**{**defaults, **config})


def choose(what: str, value: Any, choices: Mapping[str, Any]) -> Any:
    """Return what a choice stands for. ValueError, which lists the choices, unless it is one of them."""
    require_choice(what, value, choices)
    return choices[value]


def name_of(value: object, choices: Mapping[str, Any]) -> str | None:
    """A framework's name of what is ours; None if it has none."""
    return next((name for name, ours in choices.items() if ours == value), None)


def cannot(framework: str, what: object) -> NoReturn:
    """Raise ValueError: the framework has nothing for this."""
    raise ValueError(f"{framework} can't express {what}")


def check_ratios(framework: str, mode: Mode, correction: Correction, *allowed: Ratio) -> None:
    """ValueError unless the correction looks at the allowed ratios alone."""
    if wrong := correction.ratios - set(() if mode == "recompute" else allowed):
        cannot(framework, f"a correction of {' and '.join(sorted(wrong))} in mode {mode}")


def open_bounds(low: float | None, high: float | None) -> tuple[float | None, float | None]:
    """None for a bound that never binds."""
    return (None if low is None or low <= LOW else low), (None if high is None or high >= HIGH else high)


def gates_on_ratio(ratio: Ratio, aggregate: Aggregate, low: float | None, high: float | None) -> list[Gate]:
    """A gate on the ratio; none where its bounds never bind."""
    bounds = open_bounds(low, high)
    return [] if bounds == (None, None) else [Gate.on_ratio(Statistic(ratio, "log_ratio", aggregate), *bounds)]


def ratio_bounds(gate: Gate) -> tuple[float, float] | None:
    """Bounds of the ratio, open ones as numbers that never bind; None for a gate that doesn't bound the ratio."""
    sign = {"log_ratio": 1, "k1": -1}.get(gate.statistic.kernel)
    if sign is None or gate.side != "any" or gate.average:
        return None
    low, high = (None if b is None else float(f"{math.exp(sign * b):.12g}") for b in (gate.low, gate.high)[::sign])
    return low or LOW, high or HIGH


def translated(
    weight: Weight | None, gates: list[Gate], bypass: bool, kept: bool, notes: dict[str, Any], kind: Kind = "ppo"
) -> Translated:
    """A translation with the notes that apply. notes: each with whether it applies; kind: of `policy_loss`."""
    mode: Mode = "bypass" if bypass else "decoupled" if weight or gates else "recompute"
    correction = Correction(weight, tuple(gates), "kept" if kept else "original")
    notes = {f"The loss is kind={kind!r} of policy_loss.": kind != "ppo", **notes}
    return Translated(mode, correction, tuple(note for note, applies in notes.items() if applies))
