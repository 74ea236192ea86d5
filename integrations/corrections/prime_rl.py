"""prime-rl's trainer.loss."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...correction.actions import Weight, preset
from ...correction.statistics import Statistic
from .common import Translated, choose, settings_of, translated

_LOSSES: dict[str, dict[str, Any]] = {
    "default": {"type": "default", "dppo_mask_low": 0.2, "dppo_mask_high": 0.2, "adv_tau": 1.0, "kl_tau": 1e-3},
    "ipo": {"type": "ipo", "ipo_threshold": 0.1, "adv_tau": 1.0, "kl_tau": 1e-3},
}


def from_prime_rl(config: Mapping[str, Any]) -> Translated:
    """The loss of type "default" (DPPO's total-variation mask) or "ipo"; missing settings have the defaults of August
    2026. Both weigh by current/rollout, unbounded: kind="reinforce" of `policy_loss`."""
    kind = config.get("type", "default")
    c = settings_of("prime-rl's loss", config, choose("type", kind, _LOSSES))
    if kind == "ipo":
        gates = preset("ipo", high=c.ipo_threshold).gates
    else:
        gates = preset("dppo_tv", low=c.dppo_mask_low, high=c.dppo_mask_high).gates
    notes = {
        "kl_tau adds kl_tau * log(current/rollout)^2 to each token's loss: it isn't translated.": c.kl_tau,
        "adv_tau multiplies the advantages: it isn't translated.": c.adv_tau != 1.0,
    }
    return translated(Weight(Statistic("current/rollout")), list(gates), True, False, notes, "reinforce")
