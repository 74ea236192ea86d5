"""verl's algorithm.rollout_correction."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from typing import Any

from ...correction.actions import TIM, Correction, Gate, Weight
from ...correction.losses import Mode
from ...correction.statistics import Ratio, Statistic
from .common import (
    HIGH,
    LEVELS,
    LOW,
    Translated,
    cannot,
    check_ratios,
    choose,
    gates_on_ratio,
    name_of,
    open_bounds,
    ratio_bounds,
    settings_of,
    translated,
)  # fmt: skip

_VERL: dict[str, Any] = {
    "rollout_is": None, "rollout_is_threshold": 2.0, "rollout_is_batch_normalize": False, "rollout_rs": None,
    "rollout_rs_threshold": None, "bypass_mode": False, "loss_type": "ppo_clip",
}  # fmt: skip
_VERL_GATES: dict[str, Any] = {}
for _kernel in ("k1", "k2", "k3"):
    for _prefix, _aggregate in (("token", "token"), ("seq_sum", "sum"), ("seq_mean", "mean"), ("seq_max", "max")):
        _VERL_GATES[f"{_prefix}_{_kernel}"] = _kernel, _aggregate
del _VERL_GATES["seq_max_k1"]
_PROPOSED = {"binary_kl": ("binary_kl", "token")}  # PR #6800, open in August 2026: read, never written


def from_verl(config: Mapping[str, Any]) -> Translated:
    """algorithm.rollout_correction; missing settings have the defaults of verl's YAML. Its loss_type="reinforce" is
    kind="reinforce" of `policy_loss`."""
    c = settings_of("verl's rollout_correction", config, _VERL)
    bypass = c.bypass_mode
    ratio: Ratio = "current/rollout" if bypass else TIM
    weight = None
    if c.rollout_is is not None:
        low, high = _parts("rollout_is_threshold", c.rollout_is_threshold, 2)
        statistic = Statistic(ratio, "log_ratio", choose("rollout_is", c.rollout_is, LEVELS))
        weight = Weight(
            statistic, *open_bounds(low, high), "clip" if low is None else "zero", c.rollout_is_batch_normalize
        )
    metric = choose("loss_type", c.loss_type, {"ppo_clip": bypass, "reinforce": False})
    gates: list[Gate] = []
    notes: dict[str, Any] = {}
    options = [] if c.rollout_rs is None else list(dict.fromkeys(map(str.strip, c.rollout_rs.split(","))))
    thresholds = str(c.rollout_rs_threshold).split(",")
    if options and (c.rollout_rs_threshold is None or len(thresholds) not in (1, len(options))):
        raise ValueError(f"rollout_rs_threshold={c.rollout_rs_threshold!r}; give one, or one for each of {options}")
    for option, threshold in zip(options, itertools.cycle(thresholds), strict=False):
        kernel, aggregate = choose("rollout_rs", option, _VERL_GATES | _PROPOSED)
        low, high = _parts("rollout_rs_threshold", threshold, 2 if kernel == "k1" else 1)
        if kernel != "k1":
            gates.append(Gate(Statistic(ratio, kernel, aggregate), high=high))
            continue
        low = low or 1 / high
        gates += gates_on_ratio(ratio, aggregate, low, high)
        inverted = (
            f"{option}: verl since 97eac9048 (January 2026) compares -log r with [log {low:g}, log {high:g}]: it "
            f"keeps {1 / high:.4g} <= r <= {1 / low:.4g}, not the documented {low:g} <= r <= {high:g}, which is "
            f"translated; there '{1 / high:.6g}_{1 / low:.6g}' has that meaning (PR #6377, closed unmerged)."
        )
        notes[inverted] = abs(math.log(low * high)) > 0.01 * math.log(high / low)
    kept = bool(gates) and not bypass
    notes |= {
        "rollout_is isn't set: null in verl's YAML (taken), 'sequence' in its dataclass.": "rollout_is" not in config,
        "In bypass_mode with ppo_clip verl's weight is a metric only: it isn't translated.": metric and weight,
        "Without bypass_mode verl ignores loss_type.": not bypass and c.loss_type != "ppo_clip",
        "binary_kl is a proposal (PR #6800): verl 0.9.1 refuses it.": "binary_kl" in options,
        "In bypass_mode verl normalises over a micro-batch.": bypass and c.rollout_is_batch_normalize,
        "In bypass_mode verl's engine workers divide by all tokens, its older actor by those kept.": bypass and gates,
        "In bypass_mode the loss is NaN where all is rejected, but for seq-mean-token-sum-norm.": bypass and gates,
        "verl divides by the kept tokens, in KL and entropy too: rejection raises the step size.": kept,
        "verl stops with an assertion where all tokens of a micro-batch are rejected.": kept,
    }
    return translated(None if metric else weight, gates, bypass, kept, notes)


def _parts(what: str, threshold: object, most: int) -> tuple[float | None, float]:
    """The bounds of "low_high" or "high". ValueError unless all of it is at most that many numbers."""
    try:
        *low, high = map(float, str(threshold).split("_"))
    except ValueError:
        low = [0.0] * most
        high = 0.0
    if len(low) >= most or min(*low, high, math.inf) <= 0:
        expected = '"high" or "low_high"' if most == 2 else '"high"'
        raise ValueError(f"{what}={threshold!r}; expected {expected}, positive numbers")
    return (low[0] if low else None), high


def to_verl(mode: Mode, correction: Correction) -> dict[str, Any]:
    """All of algorithm.rollout_correction, as verl 0.9.1 has it. A weight in mode bypass gets loss_type="reinforce"."""
    check_ratios("verl", mode, correction, "current/rollout" if mode == "bypass" else TIM)
    config: dict[str, Any] = {**_VERL, "bypass_mode": mode == "bypass"}
    if weight := correction.weight:
        low = weight.low or LOW
        high = weight.high or HIGH
        level = name_of(weight.statistic.aggregate, LEVELS)
        if level is None or weight.outside == "keep" or (weight.outside == "clip" and low != LOW):
            cannot("verl", weight)
        threshold = high if weight.outside == "clip" else f"{low:.12g}_{high:.12g}"
        config |= {"rollout_is": level, "rollout_is_threshold": threshold}
        config |= {"rollout_is_batch_normalize": weight.normalize}
        config |= {"loss_type": "reinforce"} if mode == "bypass" else {}
    options: dict[str, str] = {}
    for gate in correction.gates:
        bounds = ratio_bounds(gate)
        name = name_of(("k1" if bounds else gate.statistic.kernel, gate.statistic.aggregate), _VERL_GATES)
        if name is None or name in options or gate.side != "any" or gate.average or {LOW, HIGH} & set(bounds or ()):
            cannot("verl", gate)
        options[name] = f"{gate.high:.12g}" if bounds is None else f"{bounds[0]:.12g}_{bounds[1]:.12g}"
    if options:
        config |= {"rollout_rs": ",".join(options), "rollout_rs_threshold": ",".join(options.values())}
    return config
