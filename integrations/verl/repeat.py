"""Runs of verl that repeat as bits: `trainer.v1.trainer_mode=samebits`.

verl 0.9 names prompts and requests at random and takes samples in the order in which they end, so that two runs draw
other tokens and add gradients in another order. This is its synchronous trainer with names and an order of its own.
"""

from __future__ import annotations

import hashlib
import itertools
from collections import defaultdict
from typing import Any

import ray
from omegaconf import DictConfig, open_dict
from tensordict import TensorDict
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.v1 import AgentLoopManagerTQ, AgentLoopWorkerTQ, PPOTrainerSync, register_trainer
from verl.utils import tensordict_utils as tu

from .limits import NAME


@register_trainer(NAME)
class RepeatableTrainer(PPOTrainerSync):
    """verl's synchronous trainer, whose batches and requests are the same in each run of the same settings."""

    def __init__(self, config: DictConfig):
        with open_dict(config):
            config.trainer.v1.trainer_mode = "sync"
            config.actor_rollout_ref.rollout.full_determinism = True
            config.actor_rollout_ref.rollout.agent.agent_loop_manager_class = f"{__name__}.{AgentLoopManager.__name__}"
        super().__init__(config)
        self._numbers: defaultdict[int, Any] = defaultdict(itertools.count)

    def _fetch_one_gen_batch(self) -> TensorDict:
        batch = super()._fetch_one_gen_batch()
        names = [f"{self.global_steps:08d}-{next(self._numbers[self.global_steps]):06d}" for _ in range(len(batch))]
        tu.assign_non_tensor_stack(batch, "uid", names)
        return batch

    def _balance_batch(self, batch: KVBatchMeta, *args: Any, **kwargs: Any) -> KVBatchMeta:
        batch.reorder(sorted(range(len(batch)), key=batch.keys.__getitem__))
        return super()._balance_batch(batch, *args, **kwargs)


class _AgentLoopWorker(AgentLoopWorkerTQ.__ray_metadata__.modified_class):
    async def _run_agent_loop(self, sampling_params: dict[str, Any], **kwargs: Any) -> Any:
        """Run a trajectory; verl's loops make the ids of their requests of its `priority`."""
        name = f"{kwargs['uid']}_{kwargs['session_id']}"
        kwargs["priority"] = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=7).digest(), "big")
        return await super()._run_agent_loop(sampling_params, **kwargs)


class AgentLoopManager(AgentLoopManagerTQ):
    """verl's manager of agent loops, whose requests have names that the next run has, too."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.agent_loop_workers_class = ray.remote(_AgentLoopWorker)
