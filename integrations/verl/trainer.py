"""verl's FSDP2 engine on an exact model, whose log-probs are the rollouts' as bits; and runs of it that repeat as bits.

verl 0.9 names prompts and requests at random and takes samples in the order in which they end, so that two runs draw
other tokens and add gradients in another order. `trainer.v1.trainer_mode=samebits` is its synchronous trainer with
names and an order of its own.
"""

from __future__ import annotations

import hashlib
import itertools
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import ray
import torch
from omegaconf import DictConfig, open_dict
from tensordict import TensorDict
from torch import Tensor
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.v1 import AgentLoopManagerTQ, AgentLoopWorkerTQ, PPOTrainerSync, register_trainer
from verl.utils import tensordict_utils as tu
from verl.utils.device import get_device_id, get_device_name
from verl.utils.metric import AggregationType, Metric
from verl.utils.torch_dtypes import PrecisionType
from verl.workers.engine.base import EngineRegistry
from verl.workers.engine.fsdp import transformer_impl

from ...engine.sampling_params import SamplingParams
from ...model.exact import contract_of
from ...trainer import check_same_bits, exact_model, token_logprobs
from ...trainer.weight_sync import stored_names
from . import limits
from .rollout import ServerAdapter

UNSUPPORTED_OUTPUTS = ("calculate_sum_pi_squared", "distillation_use_topk", "distillation_only")


@EngineRegistry.register("language_model", backend=["fsdp", "fsdp2"], device=["cuda", "cpu"], vendor=limits.NAME)
class ExactFSDPEngine(transformer_impl.FSDPEngineWithLMHead):
    """`VERL_ENGINE_VENDOR=samebits`: verl's engine with `exact_model`, and `token_logprobs` for its forward.

    Where a batch has `rollout_log_probs` that were sampled under the weights which the trainer holds, each must be the
    trainer's, as bits; NumericsError, before the optimizer moves, says which isn't.
    """

    def __init__(self, model_config: Any, engine_config: Any, *args: Any, **kwargs: Any):
        limits.check(model_config, limits.MODEL, "model")
        limits.check(engine_config, limits.ENGINE, "fsdp_config")
        super().__init__(model_config, engine_config, *args, **kwargs)

    def _build_module(self) -> torch.nn.Module:
        dtype = PrecisionType.to_dtype(self.engine_config.model_dtype or "fp32")
        module = exact_model(self.model_config.local_path, dtype, get_device_name())
        self.as_stored = stored_names(module)
        if self.model_config.enable_gradient_checkpointing:
            module.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        return module

    def initialize(self) -> None:
        """Build all, and tell the adapter beside it the contract that rollouts must have."""
        super().initialize()
        if not self.engine_config.forward_only:
            ServerAdapter.contract = contract_of(self.module)

    def optimizer_step(self) -> Any:
        """Step; the weights are no longer those of the rollouts."""
        ServerAdapter.trained_steps = None
        return super().optimizer_step()

    def load_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        """Load; the weights are no longer those of the rollouts."""
        ServerAdapter.trained_steps = None
        super().load_checkpoint(*args, **kwargs)

    def get_per_tensor_param(self, *args: Any, **kwargs: Any) -> Any:
        """Return the tensors by the names of the family's checkpoints: verl's are those of Qwen's experts."""
        with patch.object(transformer_impl, "unfuse_moe_params", lambda weights, _: self.as_stored(weights)):
            return super().get_per_tensor_param(*args, **kwargs)

    @contextmanager
    def disable_adapter(self) -> Iterator[None]:
        """Score with the base model, verl's reference for an adapter: its log-probs are not the rollouts'."""
        with patch.object(ServerAdapter, "trained_steps", None), super().disable_adapter():
            yield

    def forward_step(self, micro_batch: TensorDict, loss_function: Callable | None, forward_only: bool) -> tuple:
        """Return the loss, and verl's record of it with log_probs and entropy: nested fp32, the value for a token at
        the place of the one before it.

        Only responses are scored where the batch tells them apart; other places hold 0.
        """
        if unsupported := [name for name in UNSUPPORTED_OUTPUTS if tu.get_non_tensor_data(micro_batch, name, False)]:
            raise ValueError(f"{', '.join(unsupported)}: not offered by samebits' engine")
        micro_batch = micro_batch.to(get_device_id())
        ids = micro_batch["input_ids"]
        prompt_lens = micro_batch["prompts"].offsets().diff().tolist() if "prompts" in micro_batch else None
        params = SamplingParams(temperature=_temperature(micro_batch["temperature"]))
        scored: Any = token_logprobs(self.module, ids.unbind(), params, prompt_lens=prompt_lens, return_entropy=True)
        values, entropies = scored
        compared = 0 if self.engine_config.forward_only else check_rollouts(micro_batch, values)
        outputs = {"log_probs": _at_previous(values, ids.offsets())}
        if tu.get_non_tensor_data(micro_batch, "calculate_entropy", False):
            outputs["entropy"] = _at_previous(entropies, ids.offsets())
        loss = torch.tensor(1.0)
        metrics: dict[str, Any] = {}
        if loss_function is not None:
            group = self.get_data_parallel_group()
            loss, metrics = loss_function(model_output=outputs, data=micro_batch, dp_group=group)
            metrics["compared_tokens"] = Metric(AggregationType.SUM, compared * self.get_data_parallel_size())
        return loss, {"model_output": transformer_impl.detach_tree(outputs), "loss": loss.item(), "metrics": metrics}


def check_rollouts(micro_batch: TensorDict, values: Sequence[Tensor]) -> int:
    """Raise NumericsError unless rollouts that were sampled under the trainer's weights have these log-probs, as bits.

    values: per sequence fp32 [len], at each token's own place. Only tokens of the response mask are compared, of
    rollouts whose every token is of the step that the trainer holds. Returns how many those are. Warns, once, of a
    batch that lacks what a comparison needs.
    """
    steps = ServerAdapter.trained_steps
    needed = ("rollout_log_probs", "responses", "response_mask", "extra_fields")
    if steps is None:
        return 0
    if missing := [name for name in needed if name not in micro_batch]:
        warnings.warn(f"rollouts are not compared: the batch has no {', '.join(missing)}", stacklevel=2)
        return 0
    rollouts, responses, masks = (micro_batch[name].unbind() for name in needed[:3])
    uids = micro_batch["uid"] if "uid" in micro_batch else ["unknown"] * len(responses)

    def name(row: int, token: int) -> str:
        return f"token {token}, id {int(responses[row][token])}, of a rollout of group {uids[row]} at step {steps}"

    compared = 0
    for row, fields in enumerate(tu.get(micro_batch, "extra_fields")):
        if steps == fields.get("min_global_steps") == fields.get("max_global_steps"):
            trainer = values[row].detach()[-len(responses[row]) :]
            compared += check_same_bits(rollouts[row], trainer, masks[row], partial(name, row))
    return compared


def _temperature(found: Any) -> float:
    """Return the one temperature of a micro-batch."""
    values = set(found.flatten().tolist()) if isinstance(found, Tensor) else {found}
    if len(values) != 1:
        raise ValueError(f"a micro-batch has the temperatures {sorted(values)}; set one for the whole run")
    return float(values.pop())


def _at_previous(values: Sequence[Tensor], offsets: Tensor) -> Tensor:
    """Return [len] values per sequence, of which the first is 0, as one nested tensor, each a place earlier."""
    return torch.nested.nested_tensor_from_jagged(torch.cat([*values]).roll(-1), offsets)


# --- a trainer mode whose runs repeat ---


@register_trainer(limits.NAME)
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


if get_device_name() == "cpu":  # verl's own engines, the critic's and a control, know of accelerators alone
    policy = transformer_impl.CPUOffloadPolicy
    transformer_impl.CPUOffloadPolicy = lambda **_: policy(pin_memory=False)  # only an accelerator can pin memory
    EngineRegistry.register("language_model", "fsdp2", "cpu")(transformer_impl.FSDPEngineWithLMHead)
    EngineRegistry.register("value_model", "fsdp2", "cpu")(transformer_impl.FSDPEngineWithValueHead)
