"""SkyRL's trainer.algorithm."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...correction.actions import TIM, Gate, Weight, preset
from ...correction.statistics import Statistic
from .common import LEVELS, Translated, choose, gates_on_ratio, settings_of, translated

_ALGORITHM: dict[str, Any] = {"off_policy_correction": {}, "policy_loss_type": "regular", "dppo": {}}
_CORRECTION = {
    "tis_ratio_type": None, "token_tis_ratio_clip_high": 2.0, "sequence_tis_ratio_clip_high": 5.0,
    "sequence_mask_metric": None, "geo_mask_high": 1.01, "geo_mask_low": 0.99, "product_mask_high": 2.0,
    "product_mask_low": 0.5, "outlier_token_is_threshold_low": None, "outlier_token_is_threshold_high": None,
    "token_mask_is_threshold_low": None, "token_mask_is_threshold_high": None,
}  # fmt: skip
_DPPO = {"dppo_type": "binary_tv", "delta_low": 0.2, "delta_high": 0.2}
_KINDS = {"regular": "ppo", "dual_clip": "ppo", "gspo": "gspo", "cispo": "cispo", "sapo": "sapo"}
_KINDS |= {"rollout_is": "reinforce", "dppo": "reinforce"}


def from_skyrl(config: Mapping[str, Any]) -> Translated:
    """policy_loss_type, off_policy_correction and dppo; missing ones have SkyRL's defaults of August 2026."""
    c = settings_of("SkyRL's algorithm", config, _ALGORITHM)
    o = settings_of("SkyRL's off_policy_correction", c.off_policy_correction, _CORRECTION)
    kind = choose("policy_loss_type", c.policy_loss_type, _KINDS)
    bypass = kind == "reinforce"
    weight = None
    if o.tis_ratio_type is not None:
        aggregate = choose("tis_ratio_type", o.tis_ratio_type, LEVELS)
        cap = o.token_tis_ratio_clip_high if aggregate == "token" else o.sequence_tis_ratio_clip_high
        weight = Weight(Statistic(TIM, "log_ratio", aggregate), high=cap)
    gates: list[Gate] = []
    if o.sequence_mask_metric is not None:
        geometric = choose("sequence_mask_metric", o.sequence_mask_metric, {"geometric": True, "product": False})
        bounds = (o.geo_mask_low, o.geo_mask_high) if geometric else (o.product_mask_low, o.product_mask_high)
        gates += gates_on_ratio(TIM, "mean" if geometric else "sum", *bounds)
    gates += gates_on_ratio(TIM, "min", o.outlier_token_is_threshold_low, None)
    gates += gates_on_ratio(TIM, "max", None, o.outlier_token_is_threshold_high)
    token_mask = (o.token_mask_is_threshold_low, o.token_mask_is_threshold_high)
    if None not in token_mask:
        gates += gates_on_ratio(TIM, "token", *token_mask)
    if c.policy_loss_type == "dppo":
        d = settings_of("SkyRL's dppo", c.dppo, _DPPO)
        name = choose("dppo_type", d.dppo_type, {"binary_tv": "dppo_tv", "binary_kl": "dppo_kl"})
        gates += preset(name, low=d.delta_low, high=d.delta_high).gates
    if bypass:
        if weight is not None:
            raise ValueError(f"{c.policy_loss_type} already has the ratio current/rollout: leave tis_ratio_type out")
        weight = Weight(Statistic("current/rollout"))
    notes = {
        "A token mask with one bound alone is ignored, whatever SkyRL's help says.": (
            None in token_mask and token_mask != (None, None)
        ),
        "SkyRL leaves out masked tokens from ratios of sequences; here these have all tokens.": (
            None not in token_mask and (o.sequence_mask_metric is not None or o.tis_ratio_type == "sequence")
        ),
        "rollout_is: its bounds are those of policy_loss's clip, as Weight(low, high, 'zero').": (
            c.policy_loss_type == "rollout_is"
        ),
        "dual_clip: give policy_loss its dual_clip, SkyRL's clip_ratio_c.": c.policy_loss_type == "dual_clip",
    }
    return translated(weight, gates, bypass, False, notes, kind)
