"""AReaL's PPOActorConfig."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...correction.actions import TIM, Gate, Weight
from ...correction.losses import Kind
from ...correction.statistics import Aggregate, Ratio, Statistic
from .common import Translated, choose, gates_on_ratio, settings_of, translated

_ACTOR = {
    "use_decoupled_loss": False, "recompute_logprob": False, "rejection_sampling": None, "m2_threshold": None,
    "prox_logp_method": "recompute", "importance_sampling_level": "token", "use_sapo_loss": False,
    "use_cispo_loss": False,
}  # fmt: skip
_REJECTION = {"level": "token", "action": "mask", "metric": "ratio", "agg": "mean", "upper": 5.0, "lower": None}
_KERNELS = {"ratio": "log_ratio", "kl_k1": "log_ratio", "kl_k2": "k2", "kl_k3": "k3", "binary_kl": "binary_kl"}
_AGGREGATES: dict[str, Aggregate] = {"sum": "sum", "mean": "mean", "max": "max"}
_METHODS = ("recompute", "loglinear", "metrics", "reuse_train_logp")


def from_areal(config: Mapping[str, Any]) -> Translated:
    """Those settings of an actor that correct; missing ones have AReaL's defaults of September 2026."""
    c = settings_of("AReaL's actor", config, _ACTOR)
    choose("prox_logp_method", c.prox_logp_method, {name: name for name in _METHODS})
    kind: Kind = choose("importance_sampling_level", c.importance_sampling_level, {"token": "ppo", "sequence": "gspo"})
    if c.use_sapo_loss and (c.use_decoupled_loss or c.use_cispo_loss):
        raise ValueError("AReaL refuses use_sapo_loss together with use_decoupled_loss or use_cispo_loss")
    kind = "sapo" if c.use_sapo_loss else "cispo" if c.use_cispo_loss else kind
    bypass = not c.use_decoupled_loss and not c.recompute_logprob
    weight: Weight | None = None
    gates: list[Gate] = []
    if c.rejection_sampling is not None and c.use_decoupled_loss:
        weight, gates = _rejection(settings_of("AReaL's rejection_sampling", c.rejection_sampling, _REJECTION))
    # Without the decoupled loss, AReaL's proximal log-probs are the old ones: no difference is left to drop.
    drops = c.use_decoupled_loss or c.prox_logp_method == "reuse_train_logp"
    if c.m2_threshold is not None and drops:
        ratio: Ratio = TIM if c.use_decoupled_loss else "current/rollout" if bypass else "current/old"
        gates.append(Gate(Statistic(ratio, "k2"), high=c.m2_threshold / 2, average=True))
    notes = {
        "use_decoupled_loss without rejection_sampling: AReaL applies no weight of old/rollout.": (
            c.use_decoupled_loss and c.rejection_sampling is None
        ),
        "m2_threshold drops nothing without use_decoupled_loss.": c.m2_threshold is not None and not drops,
        "m2_threshold: AReaL divides by the tokens that it keeps.": c.m2_threshold is not None and drops,
        "rejection_sampling is ignored without use_decoupled_loss.": (
            c.rejection_sampling is not None and not c.use_decoupled_loss
        ),
        "binary_kl is documented, but the configuration's check refuses it.": any(
            gate.statistic.kernel == "binary_kl" for gate in gates
        ),
        "loglinear: give LogProbs.interpolated(share) in place of the trainer's log-probs.": (
            c.use_decoupled_loss and c.prox_logp_method == "loglinear"
        ),
        "reuse_train_logp: the current log-probs are the old ones.": c.prox_logp_method == "reuse_train_logp",
    }
    return translated(weight, gates, bypass, False, notes, kind)


def _rejection(r: Any) -> tuple[Weight, list[Gate]]:
    kernel = choose("metric", r.metric, _KERNELS)
    level = choose("level", r.level, {"token": "token", "sequence": "mean"})
    clamp = choose("action", r.action, {"mask": False, "clamp": True})
    if clamp and r.metric != "ratio":
        raise ValueError("AReaL clamps ratios only: action='clamp' needs metric='ratio'")
    weighed: Aggregate = level if r.metric == "ratio" else "token"
    aggregate: Aggregate = choose("agg", r.agg, _AGGREGATES)
    if clamp:
        if level == "mean" and aggregate == "max" and r.lower:
            raise ValueError(
                "AReaL decides by agg='max' which means to clamp from below: give another agg, or no lower"
            )
        return Weight(Statistic(TIM, "log_ratio", weighed), r.lower or None, r.upper), []
    weight = Weight(Statistic(TIM, "log_ratio", weighed))
    aggregate = "token" if level == "token" else aggregate
    if r.metric == "ratio":
        return weight, gates_on_ratio(TIM, aggregate, r.lower, r.upper)
    lower = r.lower if r.metric == "kl_k1" else None
    return weight, [Gate(Statistic(TIM, kernel, aggregate), lower, r.upper)]
