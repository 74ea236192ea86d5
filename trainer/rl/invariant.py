"""The step invariant: before the optimizer moves, the trainer's log-probs of fresh rollouts are the engine's."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor

from ...kernels.contract import Contract, NumericsError
from .rollout import Trajectory


@dataclass
class BitComparison:
    """A comparison of tokens sampled under the present weights; older ones differ because the policy moved."""

    tokens: int = 0
    differing: int = 0
    total: float = 0.0
    worst: float = 0.0
    first: str | None = None

    def see(self, trajectory: Trajectory, logprobs: Tensor, version: int) -> None:
        """Compare a trajectory. logprobs: the trainer's, fp32 [T]."""
        fresh = trajectory.versions == version
        unequal = (trajectory.logprobs != logprobs) & fresh
        gap = (trajectory.logprobs.double() - logprobs.double()).abs().nan_to_num(math.inf)[unequal]
        self.tokens += int(fresh.sum())
        if len(gap):
            self.differing += len(gap)
            self.total += float(gap.sum())
            self.worst = max(self.worst, float(gap.max()))
            place = int(unequal.nonzero()[0])
            self.first = self.first or (
                f"group {trajectory.group}, prompt {trajectory.problem.prompt!r}: token {place} of {len(logprobs)} "
                f"(id {trajectory.token_ids[place]}) has log-prob {trajectory.logprobs[place]:.9g} in the rollout and "
                f"{logprobs[place]:.9g} in the trainer"
            )

    def reduce(self) -> BitComparison:
        """The comparison over all ranks."""
        found: list = [None] * dist.get_world_size()
        dist.all_gather_object(found, self)
        return BitComparison(
            sum(c.tokens for c in found), sum(c.differing for c in found), sum(c.total for c in found),
            max(c.worst for c in found), next((c.first for c in found if c.first), None),
        )  # fmt: skip

    def require_equal(self, engine: Contract | None, trainer: Contract) -> None:
        """NumericsError naming the first difference, and the contract's fields that explain it."""
        if not self.differing:
            return
        reason = f"both sides have contract {trainer.hash}: run `samebits verify` on the model to find the module"
        try:
            if engine is None:
                reason = "the engine runs with exact=False"
            else:
                engine.check(trainer)
        except NumericsError as error:
            reason = str(error)
        raise NumericsError(f"{self.differing} of {self.tokens} tokens differ. {self.first}; {reason}")
