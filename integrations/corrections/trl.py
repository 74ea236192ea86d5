"""TRL's GRPOConfig."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...correction.actions import TIM, Correction, Outside, Weight, opsm
from ...correction.losses import Mode
from ...correction.statistics import Aggregate, Ratio, Statistic
from .common import Translated, cannot, check_ratios, choose, name_of, settings_of, translated

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
    c = settings_of("TRL", config, _TRL)
    aggregate, outside = choose("vllm_importance_sampling_mode", c.vllm_importance_sampling_mode, _TRL_MODES)
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
    return translated(weight, gates, False, False, notes)


def to_trl(mode: Mode, correction: Correction) -> dict[str, Any]:
    """Keyword arguments of GRPOConfig, for training with vLLM."""
    if mode == "bypass":
        cannot("TRL's GRPOTrainer", "mode bypass")
    check_ratios("TRL", mode, correction, TIM, "current/rollout")
    config: dict[str, Any] = {"vllm_importance_sampling_correction": correction.weight is not None}
    if weight := correction.weight:
        name = name_of((weight.statistic.aggregate, weight.outside), _TRL_MODES)
        if name is None or weight.normalize or weight.statistic.ratio != TIM:
            cannot("TRL", weight)
        config |= {"vllm_importance_sampling_mode": name, "vllm_importance_sampling_clip_max": weight.high}
        config |= {"vllm_importance_sampling_clip_min": weight.low}
    for gate in correction.gates:
        if len(correction.gates) > 1 or gate not in opsm(gate.high or 0.0, "current/rollout").gates:
            cannot("TRL", correction.gates)
        config["off_policy_mask_threshold"] = gate.high
    return config
