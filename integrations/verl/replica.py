"""The two ends that verl knows of a rollout engine: the replica in the driver, the adapter in each trainer rank."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import ray
import torch
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from torch import Tensor
from verl.plugin.platform import get_platform
from verl.workers.rollout.base import BaseRollout
from verl.workers.rollout.replica import RolloutReplica

from ...engine.weights import TensorSpec
from ...engine.weights.spec import buckets, to_bytes
from ...kernels.contract import Contract
from . import limits
from .server import PREFIX, Server

MAX_DEATHS = 3  # of one replica, after which its requests fail
MAX_BUCKET = 256  # megabytes of an update that are under way at a time


class Replica(RolloutReplica):
    """verl's `rollout.name=samebits`: starts the actor of an engine, on the device of the trainer's worker beside it.

    Raises ValueError, naming them, for settings under which the promise can't be kept, and for models that don't learn.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        if self.is_reward_model or self.is_teacher_model:
            raise ValueError("samebits serves the policy alone: give reward and teacher models another rollout.name")
        limits.check(self.config, limits.ROLLOUT, "rollout")
        limits.check(self.model_config, limits.MODEL, "model")

    async def launch_servers(self) -> None:
        """Start the actor. Should it die, Ray starts it again, and repeats its calls."""
        platform = get_platform()
        resource = platform.ray_resource_name()

        def place(worker: Any) -> tuple[str, str]:
            context = ray.get_runtime_context()
            return context.get_node_id(), context.get_accelerator_ids()[resource][0]

        node, device = await self.workers[0].__ray_call__.remote(place)
        environment = {name: "1" for name in platform.ray_noset_envvars()} | platform.rollout_env_vars()
        environment[platform.visible_devices_envvar()] = device
        server = ray.remote(Server).options(
            name=f"{PREFIX}{self.replica_rank}",
            scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
            runtime_env={"env_vars": environment},
            max_concurrency=self.max_concurrency,
            max_restarts=MAX_DEATHS,
            max_task_retries=-1,
            num_cpus=0,
        )
        path = getattr(self.model_config, "local_path", None) or self.model_config.path
        handle: Any = server.remote(self.config, path, self.rollout_mode, platform.device_name)
        address = await handle.start.remote()
        self.servers = [handle]
        self._server_handle = handle
        self._server_address = f"{address}#{self.replica_rank}"  # by which verl tells replicas apart


class ServerAdapter(BaseRollout):
    """A trainer rank's end: sends the weights to the rank's replica, and puts that to sleep and wakes it up.

    contract: of the exact engine in this process, None where there is none. trained_steps: the step whose weights that
    engine holds, which its rollouts were sampled under; None once it has moved on.
    """

    contract: ClassVar[Contract | None] = None
    trained_steps: ClassVar[int | None] = None

    def _call(self, method: str, *args: Any) -> Any:
        return getattr(ray.get_actor(f"{PREFIX}{os.environ['RANK']}"), method).remote(*args)

    async def resume(self, tags: Sequence[str]) -> None:
        """Wake the replica up."""
        await self._call("wake_up", tags)

    async def release(self) -> None:
        """Put the replica to sleep."""
        await self._call("sleep")

    @torch.no_grad()
    async def update_weights(
        self,
        weights: Iterator[tuple[str, Tensor]],
        wire_format: str = "named_tensors",
        global_steps: int | None = None,
        **others: Any,
    ) -> None:
        """Send all weights, and put them in force, all or nothing. All ranks iterate `weights`, which gathers them.

        Raises ValueError for deltas and adapters, NumericsError where trainer and engine have other numerics.
        """
        if wire_format != "named_tensors" or others.get("peft_config") is not None:
            raise ValueError(f"samebits takes whole weights alone, no deltas and no adapters; got {wire_format}")
        try:
            await self._call("begin_weights", ServerAdapter.contract)
            megabytes = min(self.config.checkpoint_engine.update_weights_bucket_megabytes, MAX_BUCKET)
            for bucket in buckets(weights, lambda pair: pair[1].nbytes, megabytes << 20):
                specs = [TensorSpec.of(name, tensor) for name, tensor in bucket]
                await self._call("load_weights", [to_bytes(tensor) for _, tensor in bucket], specs)
        finally:
            for _ in weights:  # no other rank may wait for this one
                pass
        await self._call("commit_weights", global_steps)
        ServerAdapter.trained_steps = global_steps
