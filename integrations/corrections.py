"""Correction settings of verl, TRL and Miles, translated into ours and back.

`from_*` translate what a framework documents; `notes` say where its code or its defaults differ (docs/corrections.md).
`to_*` write the weight and the gates. They leave out the denominator, which these settings can't choose: `from_*` of
what they return notes the framework's own. All raise ValueError for unknown settings and for what can't be expressed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, NamedTuple, NoReturn

from ..correction.actions import TIM, Correction, Gate, Weight, opsm
from ..correction.losses import Mode
from ..correction.statistics import Aggregate, Ratio, Statistic


class Translated(NamedTuple):
    """mode: of `policy_loss`. notes: sentences on known defects and differences that apply to these settings."""

    mode: Mode
    correction: Correction
    notes: tuple[str, ...] = ()


_LOW, _HIGH = 1e-9, 1e9  # beyond exp(+-20), where verl and Miles' mis.py clamp ratios: bounds that never bind
_LEVELS: dict[str, Aggregate] = {"token": "token", "sequence": "sum"}
_AGGREGATES = {aggregate: level for level, aggregate in _LEVELS.items()}


def _settings(framework: str, config: Mapping[str, Any], defaults: dict[str, Any]) -> SimpleNamespace:
    if unknown := sorted(set(config) - set(defaults)):
        raise ValueError(f"{framework} has no {', '.join(unknown)}; known are {', '.join(defaults)}")
    return SimpleNamespace(**{**defaults, **config})


def _choose(what: str, value: Any, choices: Mapping[str, Any]) -> Any:
    if value not in choices:
        raise ValueError(f"{what}={value!r}; choose one of {', '.join(choices)}")
    return choices[value]


def _cannot(framework: str, what: object) -> NoReturn:
    raise ValueError(f"{framework} can't express {what}")


def _check_ratios(framework: str, mode: Mode, correction: Correction, *allowed: Ratio) -> None:
    if wrong := correction.ratios - set(() if mode == "recompute" else allowed):
        _cannot(framework, f"a correction of {' and '.join(sorted(wrong))} in mode {mode}")


def _notes(*notes: tuple[Any, str]) -> tuple[str, ...]:
    return tuple(note for applies, note in notes if applies)


def _bounds(low: float | None, high: float | None) -> tuple[float | None, float | None]:
    """None for a bound that never binds."""
    return (None if low is None or low <= _LOW else low), (None if high is None or high >= _HIGH else high)


def _on_ratio(ratio: Ratio, aggregate: Aggregate, low: float | None, high: float | None) -> tuple[Gate, ...]:
    bounds = _bounds(low, high)
    return () if bounds == (None, None) else (Gate.on_ratio(Statistic(ratio, "log_ratio", aggregate), *bounds),)


def _ratio_bounds(gate: Gate) -> tuple[float, float] | None:
    """Of the ratio, open ones as numbers that never bind; None for a gate that doesn't bound the ratio."""
    sign = {"log_ratio": 1, "k1": -1}.get(gate.statistic.kernel)
    if sign is None or gate.only_negative:
        return None
    low, high = (None if b is None else float(f"{math.exp(sign * b):.12g}") for b in (gate.low, gate.high)[::sign])
    return low or _LOW, high or _HIGH


# --- verl ------------------------------------------------------------------------------------------------------------

_VERL: dict[str, Any] = {"rollout_is": None, "rollout_is_threshold": 2.0, "rollout_is_batch_normalize": False}
_VERL |= {"rollout_rs": None, "rollout_rs_threshold": None, "bypass_mode": False, "loss_type": "ppo_clip"}
_VERL_LEVELS = {"token": "token", "seq_sum": "sum", "seq_mean": "mean", "seq_max": "max"}
_VERL_GATES: dict[str, Any] = {f"{p}_{k}": (k, a) for p, a in _VERL_LEVELS.items() for k in ("k1", "k2", "k3")}
_VERL_GATES = {**_VERL_GATES, "binary_kl": ("binary_kl", "token")}
del _VERL_GATES["seq_max_k1"]


def from_verl(config: Mapping[str, Any]) -> Translated:
    """algorithm.rollout_correction; missing settings have the defaults of verl's YAML. Its loss_type="reinforce" is
    kind="reinforce" of `policy_loss`."""
    c = _settings("verl's rollout_correction", config, _VERL)
    ratio: Ratio = "current/rollout" if c.bypass_mode else TIM
    weight, gates, inverted = None, [], []
    if c.rollout_is is not None:
        *lower, upper = map(float, str(c.rollout_is_threshold).split("_"))
        statistic = Statistic(ratio, "log_ratio", _choose("rollout_is", c.rollout_is, _LEVELS))
        bounds = _bounds(lower[0] if lower else None, upper)
        weight = Weight(statistic, *bounds, "zero" if lower else "clip", c.rollout_is_batch_normalize)
    options = list(dict.fromkeys(filter(None, map(str.strip, (c.rollout_rs or "").split(",")))))
    thresholds = str(c.rollout_rs_threshold).split(",")
    if options and (c.rollout_rs_threshold is None or len(thresholds) not in (1, len(options))):
        raise ValueError(f"rollout_rs_threshold={c.rollout_rs_threshold!r}; give one, or one for each of {options}")
    for index, option in enumerate(options):
        kernel, aggregate = _choose("rollout_rs", option, _VERL_GATES)
        *lower, upper = map(float, thresholds[index % len(thresholds)].split("_"))
        if kernel != "k1":
            gates.append(Gate(Statistic(ratio, kernel, aggregate), high=upper))
            continue
        low = lower[0] if lower else 1 / upper
        gates += _on_ratio(ratio, aggregate, low, upper)
        if abs(math.log(low * upper)) > 0.01 * math.log(upper / low):
            inverted.append(
                f"{option}: verl since 97eac9048 (January 2026) compares -log r with [log {low:g}, log {upper:g}]: it "
                f"keeps {1 / upper:.4g} <= r <= {1 / low:.4g}, not the documented {low:g} <= r <= {upper:g}, which is "
                f"translated; there '{1 / upper:.6g}_{1 / low:.6g}' has that meaning (PR #6377, closed unmerged)."
            )
    bypass, metric = c.bypass_mode, _choose("loss_type", c.loss_type, {"ppo_clip": c.bypass_mode, "reinforce": False})
    notes = _notes(
        ("rollout_is" not in config, "rollout_is isn't set: null in verl's YAML (taken), 'sequence' in its dataclass."),
        (metric and weight, "In bypass_mode with ppo_clip verl's weight is a metric only: it isn't translated."),
        (bypass and c.rollout_is_batch_normalize, "In bypass_mode verl normalises over a micro-batch."),
        (bypass and gates, "In bypass_mode verl's engine workers divide by all tokens, its older actor by those kept."),
        (bypass and gates, "In bypass_mode the loss is NaN where all is rejected, but for seq-mean-token-sum-norm."),
        (
            gates and not bypass,
            "verl divides by the kept tokens, in KL and entropy too: rejection raises the step size.",
        ),
        (gates and not bypass, "verl stops with an assertion where all tokens of a micro-batch are rejected."),
    )
    weight = None if metric else weight
    mode: Mode = "bypass" if c.bypass_mode else "decoupled" if weight or gates else "recompute"
    correction = Correction(weight, tuple(gates), "kept" if gates and not c.bypass_mode else "original")
    return Translated(mode, correction, (*inverted, *notes))


def to_verl(mode: Mode, correction: Correction) -> dict[str, Any]:
    """All of algorithm.rollout_correction. A weight in mode bypass needs, and gets, loss_type="reinforce"."""
    _check_ratios("verl", mode, correction, "current/rollout" if mode == "bypass" else TIM)
    config: dict[str, Any] = {**_VERL, "bypass_mode": mode == "bypass"}
    if weight := correction.weight:
        low, high, level = weight.low or _LOW, weight.high or _HIGH, _AGGREGATES.get(weight.statistic.aggregate)
        if level is None or weight.outside == "keep" or (weight.outside == "clip" and low != _LOW):
            _cannot("verl", weight)
        threshold = high if weight.outside == "clip" else f"{low:.12g}_{high:.12g}"
        config |= {"rollout_is": level, "rollout_is_threshold": threshold}
        config |= {"rollout_is_batch_normalize": weight.normalize}
        config |= {"loss_type": "reinforce"} if mode == "bypass" else {}
    names, options = {pair: name for name, pair in _VERL_GATES.items()}, {}
    for gate in correction.gates:
        bounds = _ratio_bounds(gate)
        name = names.get(("k1" if bounds else gate.statistic.kernel, gate.statistic.aggregate))
        if name is None or name in options or gate.only_negative or {_LOW, _HIGH} & set(bounds or ()):
            _cannot("verl", gate)
        options[name] = f"{gate.high:.12g}" if bounds is None else f"{bounds[0]:.12g}_{bounds[1]:.12g}"
    if options:
        config |= {"rollout_rs": ",".join(options), "rollout_rs_threshold": ",".join(options.values())}
    return config


# --- TRL -------------------------------------------------------------------------------------------------------------

_IS = "vllm_importance_sampling"
_TRL = {f"{_IS}_correction": True, f"{_IS}_mode": "sequence_mask", f"{_IS}_clip_max": 3.0, f"{_IS}_clip_min": None}
_TRL |= {f"{_IS}_cap": None, "off_policy_mask_threshold": None, "use_vllm": True}
_OUTSIDE = {"truncate": "clip", "mask": "zero"}
_TRL_MODES = {f"{level}_{what}": (level, outside) for level in _LEVELS for what, outside in _OUTSIDE.items()}


def from_trl(config: Mapping[str, Any]) -> Translated:
    """Those settings of a GRPOConfig that correct; missing ones have its defaults, but use_vllm is on."""
    settings = _settings("TRL", config, _TRL)
    correct, mode, high, low, cap, threshold, vllm = (getattr(settings, name) for name in _TRL)
    level, outside = _choose(f"{_IS}_mode", mode, _TRL_MODES)
    weight, high = None, high if cap is None else cap
    if correct and vllm:
        weight = Weight(Statistic(TIM, "log_ratio", _LEVELS[level]), low, high, outside)
    gates = () if threshold is None else opsm(threshold, "current/rollout" if vllm else "current/old").gates
    notes = _notes(
        (cap is not None, f"{_IS}_cap is the older name of {_IS}_clip_max."),
        (weight and high is None, "Without an upper bound TRL's ratio can overflow: it isn't clamped to exp(+-20)."),
        (weight and outside == "zero", "TRL multiplies what it keeps by the ratio; its KL term keeps what is outside."),
        (
            gates and not vllm,
            "Without vLLM's log-probs TRL falls back to the trainer's old ones: it sees staleness only.",
        ),
    )
    return Translated("decoupled" if weight or gates else "recompute", Correction(weight, gates), notes)


def to_trl(mode: Mode, correction: Correction) -> dict[str, Any]:
    """Keyword arguments of GRPOConfig, for training with vLLM."""
    if mode == "bypass":
        _cannot("TRL's GRPOTrainer", "mode bypass")
    _check_ratios("TRL", mode, correction, TIM, "current/rollout")
    config: dict[str, Any] = {f"{_IS}_correction": correction.weight is not None}
    if weight := correction.weight:
        names = {pair: name for name, pair in _TRL_MODES.items()}
        name = names.get((_AGGREGATES.get(weight.statistic.aggregate, ""), weight.outside))
        if name is None or weight.normalize or weight.statistic.ratio != TIM:
            _cannot("TRL", weight)
        config |= {f"{_IS}_mode": name, f"{_IS}_clip_max": weight.high, f"{_IS}_clip_min": weight.low}
    for gate in correction.gates:
        if len(correction.gates) > 1 or gate not in opsm(gate.high or 0.0, "current/rollout").gates:
            _cannot("TRL", correction.gates)
        config["off_policy_mask_threshold"] = gate.high
    return config


# --- Miles -----------------------------------------------------------------------------------------------------------

_MIS = {"tis_level": "token", "tis_mode": "truncate", "tis_lower_bound": 0.5, "tis_upper_bound": 2.0}
_MIS |= {"tis_batch_normalize": False, "use_rs": False, "rs_level": "token", "rs_lower_bound": None}
_MIS |= {"rs_upper_bound": None, "rs_veto_threshold": 1e-4}
_MILES = {"use_tis": False, "tis_clip": 2.0, "tis_clip_low": 0.0, "custom_tis_function_path": None, **_MIS}
_MILES |= {"use_rollout_logprobs": False, "use_opsm": False, "opsm_delta": 1e-4}
_MIS_LEVELS: dict[str, Aggregate] = {**_LEVELS, "geometric": "mean"}
_FUNCTIONS = {  # where they live in August 2026; for reading, the name is enough
    "icepop_function": "miles.backends.training_utils.loss.hub.corrections",
    "compute_mis_weights_with_cp": "examples.infra_features.train_infer_mismatch_helper.mis",
}


def from_miles(config: Mapping[str, Any]) -> Translated:
    """Arguments of Miles, and the settings of mis.yaml, which imply mis.py's function."""
    c, weight = _settings("Miles", config, _MILES), None
    gates: tuple[Gate, ...] = ()
    function = (c.custom_tis_function_path or "").rpartition(".")[2]
    if function:
        _choose("custom_tis_function_path", function, _FUNCTIONS)
    if c.use_tis and c.use_rollout_logprobs:
        raise ValueError("Miles refuses use_tis together with use_rollout_logprobs")
    if c.use_tis and (function == "compute_mis_weights_with_cp" or (not function and _MIS.keys() & config.keys())):
        weight, gates = _from_mis(c)
    elif c.use_tis:
        weight = Weight(Statistic(TIM), *_bounds(c.tis_clip_low, c.tis_clip), "zero" if function else "clip")
    notes = _notes(
        (c.use_rs and not c.use_tis, "use_rs without use_tis: mis.py returns before it rejects; no gate is taken."),
        (c.use_rs and None in (c.rs_lower_bound, c.rs_upper_bound), "use_rs: bounds that aren't set are those of tis."),
        (
            not c.use_rs and config.get("rs_veto_threshold"),
            "rs_veto_threshold acts only with use_rs, unlike its README.",
        ),
        (c.tis_batch_normalize, "tis_batch_normalize: Miles' batch is one micro-batch of one rank."),
        (gates, "Miles divides by all sampled tokens, though its README says that rejected ones leave the average."),
        (c.use_opsm and not c.use_rollout_logprobs, "use_opsm compares with the trainer: it sees staleness only."),
    )
    if c.use_opsm:
        gates += opsm(c.opsm_delta, "current/rollout" if c.use_rollout_logprobs else "current/old").gates
    mode: Mode = "bypass" if c.use_rollout_logprobs else "decoupled" if weight or gates else "recompute"
    return Translated(mode, Correction(weight, gates), notes)


def _from_mis(c: SimpleNamespace) -> tuple[Weight, tuple[Gate, ...]]:
    level, high = _choose("tis_level", c.tis_level, _MIS_LEVELS), c.tis_upper_bound
    outside = _choose("tis_mode", c.tis_mode, {"truncate": "clip", "clip": "clip", "mask": "keep"})
    low = 1 / high if c.tis_lower_bound is None else c.tis_lower_bound
    if c.tis_batch_normalize and level == "mean":
        raise ValueError("Miles refuses tis_batch_normalize with tis_level='geometric', though its blog advises both")
    bounds = _bounds(None if c.tis_mode == "truncate" else low, high)
    weight = Weight(Statistic(TIM, "log_ratio", level), *bounds, outside, c.tis_batch_normalize)
    gates = _on_ratio(TIM, level, *bounds) if c.tis_mode == "mask" else ()  # the weight itself stays as it is
    if c.use_rs:
        low = low if c.rs_lower_bound is None else c.rs_lower_bound
        high = high if c.rs_upper_bound is None else c.rs_upper_bound
        gates += _on_ratio(TIM, _choose("rs_level", c.rs_level, _MIS_LEVELS), low, high)
        gates += _on_ratio(TIM, "min", c.rs_veto_threshold, None)
    return weight, gates


def to_miles(mode: Mode, correction: Correction) -> dict[str, Any]:
    """Arguments of Miles, with the settings of mis.yaml where its built-in functions don't do."""
    bypass, weight = mode == "bypass", correction.weight
    _check_ratios("Miles", mode, correction, *(("current/rollout",) if bypass else (TIM, "current/old")))
    if weight and (bypass or weight.statistic.ratio != TIM):
        _cannot("Miles", f"a weight of {weight.statistic.ratio} in mode {mode}")
    config: dict[str, Any] = {"use_tis": weight is not None, "use_rollout_logprobs": bypass}
    gates = []
    for gate in correction.gates:
        if gate in opsm(gate.high or 0.0, "current/rollout" if bypass else "current/old").gates:
            config |= {"use_opsm": True, "opsm_delta": gate.high}
        else:
            gates.append(gate)
    if weight is None:
        return _cannot("Miles", f"rejection without a weight: {gates}") if gates else config
    if gates or weight.normalize or weight.statistic.aggregate != "token" or weight.outside == "keep":
        return config | _to_mis(weight, gates)
    path = _path("icepop_function") if weight.outside == "zero" else None
    config |= {"tis_clip": weight.high or _HIGH, "tis_clip_low": weight.low or 0.0}
    return config | {"custom_tis_function_path": path}


def _path(function: str) -> str:
    return f"{_FUNCTIONS[function]}.{function}"


def _to_mis(weight: Weight, gates: list[Gate]) -> dict[str, Any]:
    levels = {aggregate: level for level, aggregate in _MIS_LEVELS.items()}
    aggregate, low, high = weight.statistic.aggregate, weight.low or _LOW, weight.high or _HIGH
    tis_mode = "mask" if weight.outside == "zero" else "truncate" if low == _LOW else "clip"
    if weight.outside == "keep" and tuple(gates[:1]) == _on_ratio(TIM, aggregate, low, high):
        tis_mode, gates = "mask", gates[1:]
    elif weight.outside == "keep" or (weight.normalize and (weight.outside == "zero" or aggregate == "mean")):
        _cannot("Miles", weight)
    config: dict[str, Any] = {"custom_tis_function_path": _path("compute_mis_weights_with_cp")}
    config |= {"tis_level": levels[aggregate], "tis_mode": tis_mode, "tis_lower_bound": low, "tis_upper_bound": high}
    config |= {"tis_batch_normalize": weight.normalize, "use_rs": bool(gates), "rs_veto_threshold": None}
    config |= {"rs_level": "token", "rs_lower_bound": _LOW, "rs_upper_bound": _HIGH} if gates else {}
    seen: set[bool] = set()
    for gate in gates:
        bounds, level = _ratio_bounds(gate), levels.get(gate.statistic.aggregate)
        veto = gate.statistic == Statistic(TIM, "log_ratio", "min") and gate.high is None
        if bounds is None or gate.statistic.ratio != TIM or veto in seen or not (veto or level):
            _cannot("Miles", gate)
        seen.add(veto)
        rejection = {"rs_level": level, "rs_lower_bound": bounds[0], "rs_upper_bound": bounds[1]}
        config |= {"rs_veto_threshold": bounds[0]} if veto else rejection
    return config
