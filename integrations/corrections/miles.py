"""Arguments of Miles and of slime, which it grew from, and the settings of their mis.yaml."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from ...correction.actions import TIM, Correction, Gate, Weight, opsm
from ...correction.losses import Mode
from ...correction.statistics import Aggregate, Ratio, Statistic, require_choice
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

_MIS = {
    "tis_level": "token", "tis_mode": "truncate", "tis_lower_bound": 0.5, "tis_upper_bound": 2.0,
    "tis_batch_normalize": False, "use_rs": False, "rs_level": "token", "rs_lower_bound": None,
    "rs_upper_bound": None, "rs_veto_threshold": 1e-4,
}  # fmt: skip
_MILES = {
    "use_tis": False, "tis_clip": 2.0, "tis_clip_low": 0.0, "custom_tis_function_path": None,
    "use_rollout_logprobs": False, "use_opsm": False, "opsm_delta": 1e-4, **_MIS,
}  # fmt: skip
_MIS_LEVELS: dict[str, Aggregate] = {**LEVELS, "geometric": "mean"}
_ICEPOP = "icepop_function"
_MIS_FUNCTION = "compute_mis_weights_with_cp"
_PATHS = {  # as of August 2026; names are enough to be read
    "Miles": {
        _ICEPOP: "miles.backends.training_utils.loss_hub.corrections.icepop_function",
        _MIS_FUNCTION: "examples.infra_features.train_infer_mismatch_helper.mis.compute_mis_weights_with_cp",
    },
    "slime": {
        _ICEPOP: "slime.backends.megatron_utils.loss.icepop_function",
        _MIS_FUNCTION: "examples.train_infer_mismatch_helper.mis.compute_mis_weights_with_cp",
    },
}


def from_miles(config: Mapping[str, Any]) -> Translated:
    """Arguments of Miles, and the settings of mis.yaml, which imply mis.py's function."""
    return _from("Miles", config)


def from_slime(config: Mapping[str, Any]) -> Translated:
    """Arguments of slime, and the settings of mis.yaml, which imply mis.py's function."""
    return _from("slime", config)


def _from(framework: str, config: Mapping[str, Any]) -> Translated:
    c = settings_of(framework, config, _MILES)
    bypass = c.use_rollout_logprobs
    path = c.custom_tis_function_path
    if path:
        path = path.rpartition(".")[2]
        require_choice("custom_tis_function_path", path, _PATHS[framework])
    if c.use_tis and bypass:
        raise ValueError(f"{framework} refuses use_tis together with use_rollout_logprobs")
    weight = None
    gates: list[Gate] = []
    if c.use_tis and (path == _MIS_FUNCTION or (not path and _MIS.keys() & config.keys())):
        weight, gates = _from_mis(c)
    elif c.use_tis:
        weight = Weight(Statistic(TIM), *open_bounds(c.tis_clip_low, c.tis_clip), "zero" if path else "clip")
    notes = {
        "use_rs without use_tis: mis.py returns before it rejects; no gate is taken.": c.use_rs and not c.use_tis,
        "use_rs: bounds that aren't set are those of tis.": c.use_rs and None in (c.rs_lower_bound, c.rs_upper_bound),
        "rs_veto_threshold acts only with use_rs, unlike its README.": not c.use_rs and config.get("rs_veto_threshold"),
        f"tis_batch_normalize: {framework}'s batch is one micro-batch of one rank.": c.tis_batch_normalize,
        f"{framework} divides by all sampled tokens; its README says that rejected ones leave the average.": bool(
            gates
        ),
        "use_opsm compares with the trainer: it sees staleness only.": c.use_opsm and not bypass,
    }
    if c.use_opsm:
        gates += opsm(c.opsm_delta, "current/rollout" if bypass else "current/old").gates
    return translated(weight, gates, bypass, False, notes)


def _from_mis(c: SimpleNamespace) -> tuple[Weight, list[Gate]]:
    level = choose("tis_level", c.tis_level, _MIS_LEVELS)
    outside = choose("tis_mode", c.tis_mode, {"truncate": "clip", "clip": "clip", "mask": "keep"})
    if c.tis_batch_normalize and level == "mean":
        raise ValueError("Miles refuses tis_batch_normalize with tis_level='geometric', though its blog advises both")
    high = c.tis_upper_bound
    low = 1 / high if c.tis_lower_bound is None else c.tis_lower_bound
    bounds = open_bounds(None if c.tis_mode == "truncate" else low, high)
    weight = Weight(Statistic(TIM, "log_ratio", level), *bounds, outside, c.tis_batch_normalize)
    gates = gates_on_ratio(TIM, level, *bounds) if c.tis_mode == "mask" else []  # the weight itself stays as it is
    if c.use_rs:
        low = low if c.rs_lower_bound is None else c.rs_lower_bound
        high = high if c.rs_upper_bound is None else c.rs_upper_bound
        gates += gates_on_ratio(TIM, choose("rs_level", c.rs_level, _MIS_LEVELS), low, high)
        gates += gates_on_ratio(TIM, "min", c.rs_veto_threshold, None)
    return weight, gates


def to_miles(mode: Mode, correction: Correction) -> dict[str, Any]:
    """Arguments of Miles of August 2026, with the settings of mis.yaml where its built-in functions don't do."""
    return _to("Miles", mode, correction)


def to_slime(mode: Mode, correction: Correction) -> dict[str, Any]:
    """Arguments of slime of August 2026, with the settings of mis.yaml where its built-in functions don't do."""
    return _to("slime", mode, correction)


def _to(framework: str, mode: Mode, correction: Correction) -> dict[str, Any]:
    bypass = mode == "bypass"
    stale: Ratio = "current/rollout" if bypass else "current/old"
    check_ratios(framework, mode, correction, *((stale,) if bypass else (TIM, stale)))
    weight = correction.weight
    if weight and (bypass or weight.statistic.ratio != TIM):
        cannot(framework, f"a weight of {weight.statistic.ratio} in mode {mode}")
    config: dict[str, Any] = {"use_tis": weight is not None, "use_rollout_logprobs": bypass}
    gates = []
    for gate in correction.gates:
        if gate in opsm(gate.high or 0.0, stale).gates:
            if "use_opsm" in config:
                cannot(framework, f"a second opsm: {gate}")
            config |= {"use_opsm": True, "opsm_delta": gate.high}
        else:
            gates.append(gate)
    if weight is None:
        return cannot(framework, f"rejection without a weight: {gates}") if gates else config
    if gates or weight.normalize or weight.statistic.aggregate != "token" or weight.outside == "keep":
        return config | _to_mis(framework, weight, gates)
    path = _PATHS[framework][_ICEPOP] if weight.outside == "zero" else None
    bounds = {"tis_clip": weight.high or HIGH, "tis_clip_low": weight.low or 0.0}
    return config | bounds | {"custom_tis_function_path": path}


def _to_mis(framework: str, weight: Weight, gates: list[Gate]) -> dict[str, Any]:
    aggregate = weight.statistic.aggregate
    low = weight.low or LOW
    high = weight.high or HIGH
    tis_mode = "mask" if weight.outside == "zero" else "truncate" if low == LOW else "clip"
    if weight.outside == "keep" and gates[:1] == gates_on_ratio(TIM, aggregate, low, high):
        tis_mode = "mask"
        gates = gates[1:]
    elif weight.outside == "keep" or (weight.normalize and (weight.outside == "zero" or aggregate == "mean")):
        cannot(framework, weight)
    config: dict[str, Any] = {
        "custom_tis_function_path": _PATHS[framework][_MIS_FUNCTION],
        "tis_level": name_of(aggregate, _MIS_LEVELS), "tis_mode": tis_mode,
        "tis_lower_bound": low, "tis_upper_bound": high, "tis_batch_normalize": weight.normalize,
        "use_rs": bool(gates), "rs_veto_threshold": None,
    }  # fmt: skip
    if gates:
        config |= {"rs_level": "token", "rs_lower_bound": LOW, "rs_upper_bound": HIGH}
    seen: set[bool] = set()
    for gate in gates:
        bounds = ratio_bounds(gate)
        level = name_of(gate.statistic.aggregate, _MIS_LEVELS)
        veto = gate.statistic == Statistic(TIM, "log_ratio", "min") and gate.high is None
        if bounds is None or gate.statistic.ratio != TIM or veto in seen or not (veto or level):
            cannot(framework, gate)
        seen.add(veto)
        if veto:
            config["rs_veto_threshold"] = bounds[0]
        else:
            config |= {"rs_level": level, "rs_lower_bound": bounds[0], "rs_upper_bound": bounds[1]}
    return config
