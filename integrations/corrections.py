"""Correction settings of verl, TRL and Miles, translated into ours and back.

`from_*` translate what a framework documents; `notes` say where its code or its defaults differ (docs/corrections.md).
`to_*` write the weight and the gates. They leave out the denominator, which these settings can't choose: `from_*` of
what they return notes the framework's own. All raise ValueError for unknown settings and for what can't be expressed.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, NamedTuple, NoReturn

from ..correction.actions import TIM, Correction, Gate, Outside, Weight, opsm
from ..correction.losses import Mode
from ..correction.statistics import Aggregate, Ratio, Statistic, require_choice


class Translated(NamedTuple):
    """Another framework's settings as ours. mode: of `policy_loss`. notes: sentences on known defects and differences
    that apply to these settings.
    """

    mode: Mode
    correction: Correction
    notes: tuple[str, ...] = ()


_LOW = 1e-9  # beyond exp(+-20), where verl and Miles' mis.py clamp ratios: bounds that never bind
_HIGH = 1e9
_LEVELS: dict[str, Aggregate] = {"token": "token", "sequence": "sum"}


def _settings(framework: str, config: Mapping[str, Any], defaults: dict[str, Any]) -> SimpleNamespace:
    if unknown := sorted(set(config) - set(defaults)):
        raise ValueError(f"{framework} has no {', '.join(unknown)}; known are {', '.join(defaults)}")
    return SimpleNamespace(**{**defaults, **config})


def _choose(what: str, value: Any, choices: Mapping[str, Any]) -> Any:
    require_choice(what, value, choices)
    return choices[value]


def _name_of(value: object, choices: Mapping[str, Any]) -> str | None:
    """A framework's name of what is ours; None if it has none."""
    return next((name for name, ours in choices.items() if ours == value), None)


def _cannot(framework: str, what: object) -> NoReturn:
    raise ValueError(f"{framework} can't express {what}")


def _check_ratios(framework: str, mode: Mode, correction: Correction, *allowed: Ratio) -> None:
    if wrong := correction.ratios - set(() if mode == "recompute" else allowed):
        _cannot(framework, f"a correction of {' and '.join(sorted(wrong))} in mode {mode}")


def _bounds(low: float | None, high: float | None) -> tuple[float | None, float | None]:
    """None for a bound that never binds."""
    return (None if low is None or low <= _LOW else low), (None if high is None or high >= _HIGH else high)


def _on_ratio(ratio: Ratio, aggregate: Aggregate, low: float | None, high: float | None) -> list[Gate]:
    bounds = _bounds(low, high)
    return [] if bounds == (None, None) else [Gate.on_ratio(Statistic(ratio, "log_ratio", aggregate), *bounds)]


def _ratio_bounds(gate: Gate) -> tuple[float, float] | None:
    """Bounds of the ratio, open ones as numbers that never bind; None for a gate that doesn't bound the ratio."""
    sign = {"log_ratio": 1, "k1": -1}.get(gate.statistic.kernel)
    if sign is None or gate.only_negative:
        return None
    low, high = (None if b is None else float(f"{math.exp(sign * b):.12g}") for b in (gate.low, gate.high)[::sign])
    return low or _LOW, high or _HIGH


def _translated(
    weight: Weight | None, gates: list[Gate], bypass: bool, kept: bool, notes: dict[str, Any]
) -> Translated:
    """Keep the notes that apply. notes: each with whether it applies."""
    mode: Mode = "bypass" if bypass else "decoupled" if weight or gates else "recompute"
    correction = Correction(weight, tuple(gates), "kept" if kept else "original")
    return Translated(mode, correction, tuple(note for note, applies in notes.items() if applies))


# --- verl ------------------------------------------------------------------------------------------------------------

_VERL: dict[str, Any] = {
    "rollout_is": None, "rollout_is_threshold": 2.0, "rollout_is_batch_normalize": False, "rollout_rs": None,
    "rollout_rs_threshold": None, "bypass_mode": False, "loss_type": "ppo_clip",
}  # fmt: skip
_VERL_GATES: dict[str, Any] = {"binary_kl": ("binary_kl", "token")}
for _kernel in ("k1", "k2", "k3"):
    for _prefix, _aggregate in (("token", "token"), ("seq_sum", "sum"), ("seq_mean", "mean"), ("seq_max", "max")):
        _VERL_GATES[f"{_prefix}_{_kernel}"] = _kernel, _aggregate
del _VERL_GATES["seq_max_k1"]


def from_verl(config: Mapping[str, Any]) -> Translated:
    """algorithm.rollout_correction; missing settings have the defaults of verl's YAML. Its loss_type="reinforce" is
    kind="reinforce" of `policy_loss`."""
    c = _settings("verl's rollout_correction", config, _VERL)
    bypass = c.bypass_mode
    ratio: Ratio = "current/rollout" if bypass else TIM
    weight = None
    if c.rollout_is is not None:
        low, high = _verl_bounds(c.rollout_is_threshold)
        statistic = Statistic(ratio, "log_ratio", _choose("rollout_is", c.rollout_is, _LEVELS))
        weight = Weight(statistic, *_bounds(low, high), "clip" if low is None else "zero", c.rollout_is_batch_normalize)
    metric = _choose("loss_type", c.loss_type, {"ppo_clip": bypass, "reinforce": False})
    gates: list[Gate] = []
    notes: dict[str, Any] = {}
    options = list(dict.fromkeys(filter(None, map(str.strip, (c.rollout_rs or "").split(",")))))
    thresholds = str(c.rollout_rs_threshold).split(",")
    if options and (c.rollout_rs_threshold is None or len(thresholds) not in (1, len(options))):
        raise ValueError(f"rollout_rs_threshold={c.rollout_rs_threshold!r}; give one, or one for each of {options}")
    for option, threshold in zip(options, itertools.cycle(thresholds), strict=False):
        kernel, aggregate = _choose("rollout_rs", option, _VERL_GATES)
        low, high = _verl_bounds(threshold)
        if kernel != "k1":
            gates.append(Gate(Statistic(ratio, kernel, aggregate), high=high))
            continue
        low = low or 1 / high
        gates += _on_ratio(ratio, aggregate, low, high)
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
        "In bypass_mode verl normalises over a micro-batch.": bypass and c.rollout_is_batch_normalize,
        "In bypass_mode verl's engine workers divide by all tokens, its older actor by those kept.": bypass and gates,
        "In bypass_mode the loss is NaN where all is rejected, but for seq-mean-token-sum-norm.": bypass and gates,
        "verl divides by the kept tokens, in KL and entropy too: rejection raises the step size.": kept,
        "verl stops with an assertion where all tokens of a micro-batch are rejected.": kept,
    }
    return _translated(None if metric else weight, gates, bypass, kept, notes)


def _verl_bounds(threshold: object) -> tuple[float | None, float]:
    """The bounds of "low_high" or "high"."""
    *low, high = map(float, str(threshold).split("_"))
    return (low[0] if low else None), high


def to_verl(mode: Mode, correction: Correction) -> dict[str, Any]:
    """All of algorithm.rollout_correction. A weight in mode bypass needs, and gets, loss_type="reinforce"."""
    _check_ratios("verl", mode, correction, "current/rollout" if mode == "bypass" else TIM)
    config: dict[str, Any] = {**_VERL, "bypass_mode": mode == "bypass"}
    if weight := correction.weight:
        low = weight.low or _LOW
        high = weight.high or _HIGH
        level = _name_of(weight.statistic.aggregate, _LEVELS)
        if level is None or weight.outside == "keep" or (weight.outside == "clip" and low != _LOW):
            _cannot("verl", weight)
        threshold = high if weight.outside == "clip" else f"{low:.12g}_{high:.12g}"
        config |= {"rollout_is": level, "rollout_is_threshold": threshold}
        config |= {"rollout_is_batch_normalize": weight.normalize}
        config |= {"loss_type": "reinforce"} if mode == "bypass" else {}
    options: dict[str, str] = {}
    for gate in correction.gates:
        bounds = _ratio_bounds(gate)
        name = _name_of(("k1" if bounds else gate.statistic.kernel, gate.statistic.aggregate), _VERL_GATES)
        if name is None or name in options or gate.only_negative or {_LOW, _HIGH} & set(bounds or ()):
            _cannot("verl", gate)
        options[name] = f"{gate.high:.12g}" if bounds is None else f"{bounds[0]:.12g}_{bounds[1]:.12g}"
    if options:
        config |= {"rollout_rs": ",".join(options), "rollout_rs_threshold": ",".join(options.values())}
    return config


# --- TRL -------------------------------------------------------------------------------------------------------------

_TRL = {
    "vllm_importance_sampling_correction": True, "vllm_importance_sampling_mode": "sequence_mask",
    "vllm_importance_sampling_clip_max": 3.0, "vllm_importance_sampling_clip_min": None,
    "vllm_importance_sampling_cap": None, "off_policy_mask_threshold": None, "use_vllm": True,
}  # fmt: skip
_TRL_MODES: dict[str, tuple[Aggregate, Outside]] = {
    "token_truncate": ("token", "clip"), "token_mask": ("token", "zero"),
    "sequence_truncate": ("sum", "clip"), "sequence_mask": ("sum", "zero"),
}  # fmt: skip


def from_trl(config: Mapping[str, Any]) -> Translated:
    """Those settings of a GRPOConfig that correct; missing ones have its defaults, but use_vllm is on."""
    c = _settings("TRL", config, _TRL)
    aggregate, outside = _choose("vllm_importance_sampling_mode", c.vllm_importance_sampling_mode, _TRL_MODES)
    cap = c.vllm_importance_sampling_cap
    high = c.vllm_importance_sampling_clip_max if cap is None else cap
    weight = None
    if c.vllm_importance_sampling_correction and c.use_vllm:
        statistic = Statistic(TIM, "log_ratio", aggregate)
        weight = Weight(statistic, c.vllm_importance_sampling_clip_min, high, outside)
    ratio: Ratio = "current/rollout" if c.use_vllm else "current/old"
    threshold = c.off_policy_mask_threshold
    gates = [] if threshold is None else [*opsm(threshold, ratio).gates]
    notes = {
        "vllm_importance_sampling_cap is the older name of vllm_importance_sampling_clip_max.": cap is not None,
        "Without an upper bound TRL's ratio can overflow: it isn't clamped to exp(+-20).": weight and high is None,
        "TRL multiplies what it keeps by the ratio; its KL term keeps what is outside.": weight and outside == "zero",
        "Without vLLM TRL falls back to the trainer's old log-probs: it sees staleness only.": gates and not c.use_vllm,
    }
    return _translated(weight, gates, False, False, notes)


def to_trl(mode: Mode, correction: Correction) -> dict[str, Any]:
    """Keyword arguments of GRPOConfig, for training with vLLM."""
    if mode == "bypass":
        _cannot("TRL's GRPOTrainer", "mode bypass")
    _check_ratios("TRL", mode, correction, TIM, "current/rollout")
    config: dict[str, Any] = {"vllm_importance_sampling_correction": correction.weight is not None}
    if weight := correction.weight:
        name = _name_of((weight.statistic.aggregate, weight.outside), _TRL_MODES)
        if name is None or weight.normalize or weight.statistic.ratio != TIM:
            _cannot("TRL", weight)
        config |= {"vllm_importance_sampling_mode": name, "vllm_importance_sampling_clip_max": weight.high}
        config |= {"vllm_importance_sampling_clip_min": weight.low}
    for gate in correction.gates:
        if len(correction.gates) > 1 or gate not in opsm(gate.high or 0.0, "current/rollout").gates:
            _cannot("TRL", correction.gates)
        config["off_policy_mask_threshold"] = gate.high
    return config


# --- Miles -----------------------------------------------------------------------------------------------------------

_MIS = {
    "tis_level": "token", "tis_mode": "truncate", "tis_lower_bound": 0.5, "tis_upper_bound": 2.0,
    "tis_batch_normalize": False, "use_rs": False, "rs_level": "token", "rs_lower_bound": None,
    "rs_upper_bound": None, "rs_veto_threshold": 1e-4,
}  # fmt: skip
_MILES = {
    "use_tis": False, "tis_clip": 2.0, "tis_clip_low": 0.0, "custom_tis_function_path": None,
    "use_rollout_logprobs": False, "use_opsm": False, "opsm_delta": 1e-4, **_MIS,
}  # fmt: skip
_MIS_LEVELS: dict[str, Aggregate] = {**_LEVELS, "geometric": "mean"}
_ICEPOP = "miles.backends.training_utils.loss.hub.corrections.icepop_function"
_MIS_PATH = "examples.infra_features.train_infer_mismatch_helper.mis.compute_mis_weights_with_cp"
_FUNCTIONS = {path.rpartition(".")[2]: path for path in (_ICEPOP, _MIS_PATH)}  # paths of August 2026; names are enough


def from_miles(config: Mapping[str, Any]) -> Translated:
    """Arguments of Miles, and the settings of mis.yaml, which imply mis.py's function."""
    c = _settings("Miles", config, _MILES)
    bypass = c.use_rollout_logprobs
    path = c.custom_tis_function_path
    if path:
        path = _choose("custom_tis_function_path", path.rpartition(".")[2], _FUNCTIONS)
    if c.use_tis and bypass:
        raise ValueError("Miles refuses use_tis together with use_rollout_logprobs")
    weight = None
    gates: list[Gate] = []
    if c.use_tis and (path == _MIS_PATH or (not path and _MIS.keys() & config.keys())):
        weight, gates = _from_mis(c)
    elif c.use_tis:
        weight = Weight(Statistic(TIM), *_bounds(c.tis_clip_low, c.tis_clip), "zero" if path else "clip")
    notes = {
        "use_rs without use_tis: mis.py returns before it rejects; no gate is taken.": c.use_rs and not c.use_tis,
        "use_rs: bounds that aren't set are those of tis.": c.use_rs and None in (c.rs_lower_bound, c.rs_upper_bound),
        "rs_veto_threshold acts only with use_rs, unlike its README.": not c.use_rs and config.get("rs_veto_threshold"),
        "tis_batch_normalize: Miles' batch is one micro-batch of one rank.": c.tis_batch_normalize,
        "Miles divides by all sampled tokens, though its README says that rejected ones leave the average.": bool(
            gates
        ),
        "use_opsm compares with the trainer: it sees staleness only.": c.use_opsm and not bypass,
    }
    if c.use_opsm:
        gates += opsm(c.opsm_delta, "current/rollout" if bypass else "current/old").gates
    return _translated(weight, gates, bypass, False, notes)


def _from_mis(c: SimpleNamespace) -> tuple[Weight, list[Gate]]:
    level = _choose("tis_level", c.tis_level, _MIS_LEVELS)
    outside = _choose("tis_mode", c.tis_mode, {"truncate": "clip", "clip": "clip", "mask": "keep"})
    if c.tis_batch_normalize and level == "mean":
        raise ValueError("Miles refuses tis_batch_normalize with tis_level='geometric', though its blog advises both")
    high = c.tis_upper_bound
    low = 1 / high if c.tis_lower_bound is None else c.tis_lower_bound
    bounds = _bounds(None if c.tis_mode == "truncate" else low, high)
    weight = Weight(Statistic(TIM, "log_ratio", level), *bounds, outside, c.tis_batch_normalize)
    gates = _on_ratio(TIM, level, *bounds) if c.tis_mode == "mask" else []  # the weight itself stays as it is
    if c.use_rs:
        low = low if c.rs_lower_bound is None else c.rs_lower_bound
        high = high if c.rs_upper_bound is None else c.rs_upper_bound
        gates += _on_ratio(TIM, _choose("rs_level", c.rs_level, _MIS_LEVELS), low, high)
        gates += _on_ratio(TIM, "min", c.rs_veto_threshold, None)
    return weight, gates


def to_miles(mode: Mode, correction: Correction) -> dict[str, Any]:
    """Arguments of Miles, with the settings of mis.yaml where its built-in functions don't do."""
    bypass = mode == "bypass"
    stale: Ratio = "current/rollout" if bypass else "current/old"
    _check_ratios("Miles", mode, correction, *((stale,) if bypass else (TIM, stale)))
    weight = correction.weight
    if weight and (bypass or weight.statistic.ratio != TIM):
        _cannot("Miles", f"a weight of {weight.statistic.ratio} in mode {mode}")
    config: dict[str, Any] = {"use_tis": weight is not None, "use_rollout_logprobs": bypass}
    gates = []
    for gate in correction.gates:
        if gate in opsm(gate.high or 0.0, stale).gates:
            config |= {"use_opsm": True, "opsm_delta": gate.high}
        else:
            gates.append(gate)
    if weight is None:
        return _cannot("Miles", f"rejection without a weight: {gates}") if gates else config
    if gates or weight.normalize or weight.statistic.aggregate != "token" or weight.outside == "keep":
        return config | _to_mis(weight, gates)
    path = _ICEPOP if weight.outside == "zero" else None
    bounds = {"tis_clip": weight.high or _HIGH, "tis_clip_low": weight.low or 0.0}
    return config | bounds | {"custom_tis_function_path": path}


def _to_mis(weight: Weight, gates: list[Gate]) -> dict[str, Any]:
    aggregate = weight.statistic.aggregate
    low = weight.low or _LOW
    high = weight.high or _HIGH
    tis_mode = "mask" if weight.outside == "zero" else "truncate" if low == _LOW else "clip"
    if weight.outside == "keep" and gates[:1] == _on_ratio(TIM, aggregate, low, high):
        tis_mode = "mask"
        gates = gates[1:]
    elif weight.outside == "keep" or (weight.normalize and (weight.outside == "zero" or aggregate == "mean")):
        _cannot("Miles", weight)
    config: dict[str, Any] = {
        "custom_tis_function_path": _MIS_PATH, "tis_level": _name_of(aggregate, _MIS_LEVELS), "tis_mode": tis_mode,
        "tis_lower_bound": low, "tis_upper_bound": high, "tis_batch_normalize": weight.normalize,
        "use_rs": bool(gates), "rs_veto_threshold": None,
    }  # fmt: skip
    if gates:
        config |= {"rs_level": "token", "rs_lower_bound": _LOW, "rs_upper_bound": _HIGH}
    seen: set[bool] = set()
    for gate in gates:
        bounds = _ratio_bounds(gate)
        level = _name_of(gate.statistic.aggregate, _MIS_LEVELS)
        veto = gate.statistic == Statistic(TIM, "log_ratio", "min") and gate.high is None
        if bounds is None or gate.statistic.ratio != TIM or veto in seen or not (veto or level):
            _cannot("Miles", gate)
        seen.add(veto)
        if veto:
            config["rs_veto_threshold"] = bounds[0]
        else:
            config |= {"rs_level": level, "rs_lower_bound": bounds[0], "rs_upper_bound": bounds[1]}
    return config
