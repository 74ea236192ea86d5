"""The way from rewards to a loss: advantages, KL to a reference, and the published algorithms as data.

The clipped and weighted losses themselves, in their three modes, are `samebits.correction`'s.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from ...correction.losses import Aggregation, Kind
from ...correction.statistics import CLAMP, require_choice

Baseline = Literal["none", "group", "group-std", "leave-one-out", "batch-whitened"]

_EPS = 1e-6


def advantages(rewards: Tensor, groups: Tensor, baseline: Baseline) -> Tensor:
    """fp64 [S]: how much better each sequence was than expected; 0 where the baseline leaves nothing to learn.

    rewards: [S]. groups: int64 [S], the prompt that each is an answer to. baseline: "none"; "group", the mean of its
    group (Dr. GRPO, Liu et al., 2025); "group-std", divided by the group's standard deviation too (GRPO, Shao et al.,
    2024); "leave-one-out", the mean of the others in its group (RLOO, Ahmadian et al., 2024); "batch-whitened", mean
    and standard deviation of the whole batch (REINFORCE++, Hu, 2025). Standard deviations are unbiased, plus 1e-6; of
    equal rewards, all of these but "none" make 0.
    """
    require_choice("baseline", baseline, Baseline)
    if rewards.shape != groups.shape or rewards.dim() != 1:
        raise ValueError(f"rewards {list(rewards.shape)} and groups {list(groups.shape)}: give one of each a sequence")
    rewards = rewards.double()
    if not torch.isfinite(rewards).all():
        raise ValueError("rewards must be finite")
    if baseline == "none":
        return rewards
    members = torch.zeros_like(groups) if baseline == "batch-whitened" else groups.unique(return_inverse=True)[1]
    count = torch.bincount(members).double()
    centered = rewards - (torch.bincount(members, rewards) / count)[members]
    spread = rewards.new_zeros(len(count)).scatter_reduce_(0, members, rewards, "amax", include_self=False)
    spread -= rewards.new_zeros(len(count)).scatter_reduce_(0, members, rewards, "amin", include_self=False)
    centered = torch.where(spread[members] == 0, 0.0, centered)  # exactly: rounding is nothing to learn from
    if baseline == "group":
        return centered
    if baseline == "leave-one-out":
        return centered * (count / (count - 1).clamp_min(1))[members]
    deviation = (torch.bincount(members, centered.square()) / (count - 1).clamp_min(1)).sqrt()
    return centered / (deviation + _EPS)[members]


def reference_kl(current: Tensor, reference: Tensor, kind: Literal["k1", "k3"] = "k3") -> Tensor:
    """Estimators of KL(current || reference) at sampled tokens (Schulman, 2020), of the inputs' shape, differentiable.

    k1 = log current - log reference: unbiased, of either sign; k3 = exp(-k1) - 1 + k1: never negative.
    A token that the current policy excludes has none. As a loss, k3 pulls towards the reference; k1 has no gradient on
    average and belongs into the advantages.
    """
    difference = torch.where(current == -torch.inf, 0.0, reference - current).clamp(-CLAMP, CLAMP)
    return -difference if kind == "k1" else difference.expm1() - difference


class Algorithm(NamedTuple):
    """The choices that make a published algorithm; see `correction.policy_loss`."""

    kind: Kind
    baseline: Baseline
    aggregation: Aggregation
    clip: tuple[float, float] = (0.2, 0.2)


ALGORITHMS: dict[str, Algorithm] = {
    "grpo": Algorithm("ppo", "group-std", "seq-mean-token-mean"),
    "dr_grpo": Algorithm("ppo", "group", "seq-mean-token-sum-norm"),
    "dapo": Algorithm("ppo", "group-std", "token-mean", (0.2, 0.28)),  # without its overlong shaping
    "gspo": Algorithm("gspo", "group-std", "seq-mean-token-mean", (3e-4, 4e-4)),
    "cispo": Algorithm("cispo", "group-std", "token-mean", (1.0, 0.2)),  # bounded from above alone
    "rloo": Algorithm("reinforce", "leave-one-out", "seq-mean-token-sum"),
    "reinforce": Algorithm("reinforce", "batch-whitened", "token-mean"),
}
