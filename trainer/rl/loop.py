"""Reinforcement learning on exact rollouts: generate, score, update under FSDP2, hand the weights back."""

from __future__ import annotations

import dataclasses
import gc
import math
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from ...engine import LLM
from ...engine.sampling_params import RequestOutputKind
from ...kernels.contract import Contract, NumericsError
from ...model.exact import contract_of, exact_model
from ...model.routing import load_balancing_loss_of
from ..fsdp import init_process_group, shard, together
from .checkpoint import STATE, latest, load_checkpoint, save_checkpoint, step_of
from .config import TrainConfig
from .invariant import BitComparison
from .losses import advantages
from .objective import Objective, Sums, completion_logprobs, report, total
from .packing import pack
from .rollout import RolloutWorker, Trajectory
from .tasks import Task

LOSS_SCALE_GROWTH = 1000  # updates with finite gradients before the loss scale is doubled


@contextmanager
def frozen_heap() -> Iterator[None]:
    """Keep the garbage collector off the objects that are there before: to look through them takes 0.2 s each time."""
    frozen_by_others = gc.get_freeze_count() > 0
    if not frozen_by_others:
        gc.freeze()
    try:
        yield
    finally:
        if not frozen_by_others:
            gc.unfreeze()


@dataclass(frozen=True)
class Minibatch:
    """The sequences of one optimizer update, and this rank's share of them: indices into `rollouts`, packed.

    old: log-probs before the policy moved, by such indices; what has none is of the policy as it is.
    """

    rollouts: list[Trajectory]
    advantages: Tensor  # fp64 [S]
    packs: list[list[int]]
    old: dict[int, Tensor] = field(default_factory=dict)


class Trainer:
    """Call `step()` again and again, or `fit()`. Every rank makes one, with an engine of its own (data parallel).

    llm: this rank's engine, instead of one made from the configuration; with a `samebits.integrations.RemoteEngine` it
    is in another process. It gets the trainer's weights at once. `resume()` goes on with an earlier run.
    """

    def __init__(self, config: TrainConfig, task: Task, llm: LLM | None = None):
        init_process_group(config.device)
        self.config = config
        self.task = task
        self.rank = dist.get_rank()
        self.world = dist.get_world_size()
        settings = {"adapter_dtype": config.dtype} | config.engine  # to which `shard` casts all parameters
        self.llm = llm or LLM(config.model, dtype=config.dtype, device=config.device, **settings)
        self.model = self._load_model()
        self.contract = contract_of(self.model)  # of the computation: master weights are fp32 whatever it is
        if config.check != "off" and self.llm.contract is not None:
            self.llm.contract.check(self.contract)
        if llm is not None:
            if ignored := config.engine.keys() - {"exact", "adapter"}:
                raise ValueError(f"a given engine has its own settings; leave out engine={sorted(ignored)}")
            self.sync()
        if config.activation_checkpointing:
            self.model.gradient_checkpointing_enable()
            self.model.train()
        reference = self._load_model().requires_grad_(False) if config.kl_coef else None
        if config.router_aux_loss_coef and load_balancing_loss_of(self.model) is None:
            raise ValueError(f"router_aux_loss_coef: transformers has no such loss for {type(self.model).__name__}")
        self.objective = Objective(config, self.model, reference, self.llm.tokenizer)
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=config.lr, betas=config.betas, weight_decay=config.weight_decay)
        params = replace(config.sampling, n=config.group_size, seed=None, output_kind=RequestOutputKind.FINAL_ONLY)
        self.worker = RolloutWorker(self.llm, task, params, config.seed, config.chat)
        for parameter in trained:  # or a checkpoint before the first update would lack them
            self.optimizer.state[parameter] = {
                "step": torch.tensor(0.0),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }
        self.steps_done = 0
        self.updates_done = 0
        self.loss_scale = 2.0**16 if config.dtype == "float16" else 1.0
        self._finite_updates = 0  # since the loss scale changed
        self._checked = False
        self._seconds: dict[str, float] = {}

    def _load_model(self) -> PreTrainedModel:
        policy = {}
        if self.config.dtype != "float32":
            dtype = getattr(torch, self.config.dtype)
            policy["mp_policy"] = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
        chosen = {name: self.config.engine[name] for name in ("exact", "adapter") if name in self.config.engine}
        return shard(exact_model(self.config.model, device=self.config.device, **chosen), **policy)

    # --- a step -----------------------------------------------------------------------------------------------------

    @frozen_heap()
    def step(self) -> dict[str, float]:
        """One batch of rollouts and its updates. Returns metrics, but for times the same on every rank.

        Raises NumericsError, before the optimizer moves, when a log-prob isn't the rollout's or a rollout isn't of the
        weights that it should be; RewardError, after which the step may be tried again; FloatingPointError for a
        gradient that isn't finite. After the others, `resume()`. Where there is nothing to learn (all advantages 0 and
        no KL), nothing moves.
        """
        config = self.config
        self.optimizer.zero_grad()  # an earlier step may have failed
        self._seconds = dict.fromkeys(("rollout", "train", "sync"), 0.0)
        with self._timed("rollout"):
            start = self.steps_done * config.groups_per_step
            ahead = config.staleness * config.groups_per_step
            rollouts = self.worker.collect(start, start + config.groups_per_step, ahead)
            freed = self.llm.sleep() if config.sleep else 0
        metrics = self._describe(rollouts) | {"slept_bytes": freed}
        with self._timed("train"):
            first, *later, left_out = self._minibatches(rollouts)
            comparison = self._score([*later, left_out] if self._must_compare else later)
            parts = []
            norms = []
            for minibatch in (first, *later):
                backward = partial(self._backward, minibatch, comparison)
                parts.append(backward())
                if minibatch is first:
                    metrics |= self._compare(comparison)
                if self._has_gradient(minibatch):
                    norms.append(self._finite_norm(backward))
                    self._update()
                self.optimizer.zero_grad()
        with self._timed("sync"):
            if norms:
                self.sync()
            if config.sleep:
                self.llm.wake_up()
        self.steps_done += 1
        every: list[Sums] = [{}] * self.world
        dist.all_gather_object(every, total(parts))
        metrics |= report(total(every)) | {
            "grad_norm": max(norms, default=0.0),
            "updates": len(norms),
            "loss_scale": self.loss_scale,
        }
        return metrics | self._speed(rollouts)

    def sync(self, least: int = 0) -> None:
        """Give the engine the model's weights, on every rank under the same version, at least this one."""
        versions: list[int] = [0] * self.world
        dist.all_gather_object(versions, self.llm.weight_version)
        agreed = None  # the next
        if len({*versions, max(*versions, least)}) > 1:  # a sync failed on some ranks, or engines are new
            agreed = max(max(versions) + 1, least)
        with together():
            self.llm.update_weights(self.model, agreed)

    def _minibatches(self, rollouts: list[Trajectory]) -> list[Minibatch]:
        """Equal parts of what is trained on, one for each update, and last what is left out."""
        rewards = torch.tensor([r.reward for r in rollouts], dtype=torch.float64)
        groups = torch.tensor([r.group for r in rollouts])
        values = advantages(rewards, groups, self.config.recipe.baseline)
        everything = range(len(rollouts))
        kept = list(everything)
        if self.config.filter_uniform:
            uniform = {g for g in groups.unique().tolist() if len(rewards[groups == g].unique()) == 1}
            kept = [i for i in kept if rollouts[i].group not in uniform]
        count = self.config.minibatches
        bounds = [len(kept) * i // count for i in range(count + 1)]
        parts = [kept[a:b] for a, b in pairwise(bounds)]
        result = []
        for part in (*parts, sorted({*everything} - {*kept})):
            lengths = [len(rollouts[i].sequence) for i in part]
            packs = pack(lengths, self.config.max_tokens_per_pack, self.world)[self.rank]
            result.append(Minibatch([rollouts[i] for i in part], values[part], packs))
        return result

    @torch.no_grad()
    def _score(self, minibatches: list[Minibatch]) -> BitComparison:
        """Give minibatches the policy's log-probs before it moves, and return their comparison with the rollouts'."""
        comparison = BitComparison()
        for minibatch in minibatches:
            for members in minibatch.packs if minibatch.rollouts else ():
                rollouts = [minibatch.rollouts[i] for i in members]
                logprobs, *_ = completion_logprobs(self.model, rollouts, self.config.sampling, self.llm.tokenizer)
                self._see(comparison, rollouts, logprobs)
                minibatch.old.update(zip(members, logprobs, strict=True))
        return comparison

    def _backward(self, minibatch: Minibatch, comparison: BitComparison) -> Sums:
        """Accumulate the gradients of one update. What has no old log-probs goes into the comparison: it needs no
        forward of its own."""
        by_token = self.config.recipe.aggregation == "token-mean"
        count = sum(len(r.token_ids) for r in minibatch.rollouts) if by_token else len(minibatch.rollouts)
        tokens = sum(len(r.sequence) for r in minibatch.rollouts)
        parts = []
        for number, members in enumerate(minibatch.packs, 1):
            rollouts = [minibatch.rollouts[i] for i in members]
            before = [minibatch.old[i] for i in members if i in minibatch.old] or None
            self.model.set_requires_gradient_sync(number == len(minibatch.packs))  # type: ignore[operator]
            share = sum(len(r.sequence) for r in rollouts) / max(1, tokens)
            loss, logprobs, found = self.objective(rollouts, minibatch.advantages[members], before, count, share)
            (loss * (self.world * self.loss_scale)).backward()  # FSDP takes the mean over ranks
            parts.append(found)
            if before is None:
                self._see(comparison, rollouts, logprobs)
        return total(parts)

    def _see(self, comparison: BitComparison, rollouts: list[Trajectory], logprobs: list[Tensor]) -> None:
        for rollout, values in zip(rollouts, logprobs, strict=True):
            comparison.see(rollout, values.detach().cpu(), self.llm.weight_version)

    @property
    def _must_compare(self) -> bool:
        return self.config.check == "every" or (self.config.check == "first" and not self._checked)

    def _compare(self, comparison: BitComparison) -> dict[str, float]:
        whole = comparison.reduce()
        if self._must_compare:
            whole.require_equal(self.llm.contract, self.contract)
            self._checked = whole.tokens > 0
        return {
            "max_difference": whole.worst,
            "mean_difference": whole.total / max(1, whole.tokens),
            "compared_tokens": whole.tokens,
        }

    def _has_gradient(self, minibatch: Minibatch) -> bool:
        return bool(minibatch.advantages.any()) or bool(minibatch.rollouts and self.objective.reference is not None)

    @torch.no_grad()
    def _gradient_norm(self) -> float:
        """The gradient's norm before it is clipped; the loss scale, a power of two, is taken off."""
        if self.loss_scale != 1:
            for parameter in self.model.parameters():
                if parameter.grad is not None:
                    parameter.grad /= self.loss_scale
        found = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.max_grad_norm)
        return float(found.full_tensor() if isinstance(found, DTensor) else found)

    def _finite_norm(self, backward: Callable[[], object]) -> float:
        """Return the gradient's norm, of a loss scaled down until it is finite in fp16 (Micikevicius et al., 2018)."""
        scale = self.loss_scale
        norm = self._gradient_norm()
        while not norm < math.inf and self.loss_scale > 1:
            self.loss_scale /= 2
            self._finite_updates = 0
            self.optimizer.zero_grad()
            backward()
            norm = self._gradient_norm()
        if not norm < math.inf:
            self.loss_scale = scale
            raise FloatingPointError(
                f"step {self.steps_done}, update {self.updates_done}: the gradient's norm is {norm}; the weights are "
                "those before this update"
            )
        return norm

    def _update(self) -> None:
        config = self.config
        for group in self.optimizer.param_groups:  # a checkpoint brought those of its run
            group["lr"] = config.lr * min(1.0, (self.updates_done + 1) / (config.warmup + 1))
            group["betas"] = config.betas
            group["weight_decay"] = config.weight_decay
        self.optimizer.step()
        self.updates_done += 1
        self._finite_updates += 1
        if config.dtype == "float16" and self._finite_updates == LOSS_SCALE_GROWTH:
            self.loss_scale *= 2
            self._finite_updates = 0

    # --- what to report ---------------------------------------------------------------------------------------------

    def _describe(self, rollouts: list[Trajectory]) -> dict[str, float]:
        rewards = torch.tensor([r.reward for r in rollouts], dtype=torch.float64)
        ages = torch.cat([self.llm.weight_version - r.versions for r in rollouts]).double()
        if ages.min() < 0 or ages.max() > self.config.staleness:
            raise NumericsError(
                f"rollouts are {ages.min():.0f} to {ages.max():.0f} weight versions old, expected 0 to "
                f"{self.config.staleness}: was the engine restarted, or updated by someone else?"
            )
        lengths = torch.tensor([len(r.token_ids) for r in rollouts], dtype=torch.float64)
        return {
            "step": self.steps_done,
            "version": self.llm.weight_version,
            "reward": float(rewards.mean()),
            "length": float(lengths.mean()),
            "truncated": sum(r.finish_reason == "length" for r in rollouts) / len(rollouts),
            "staleness": float(ages.mean()),
            "max_staleness": float(ages.max()),
        }

    def _speed(self, rollouts: list[Trajectory]) -> dict[str, float]:
        return {
            "rollout_tokens_per_second": sum(len(r.token_ids) for r in rollouts) / self._seconds["rollout"],
            "train_tokens_per_second": sum(len(r.sequence) for r in rollouts) / self._seconds["train"],
            **{f"{name}_seconds": value for name, value in self._seconds.items()},
        }

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self._seconds[name] += time.perf_counter() - start

    # --- a run ------------------------------------------------------------------------------------------------------

    def fit(self, on_step: Callable[[dict[str, float]], None] = lambda metrics: None) -> None:
        """Train until `config.steps` are done, with checkpoints; `on_step` gets each step's metrics.

        ValueError where `output_dir` holds checkpoints of a run that is further.
        """
        with together():
            newest = latest(self.config.output_dir) if self.config.output_dir else None
            if newest is not None and step_of(newest) > self.steps_done:
                raise ValueError(f"{newest} is of a run that is further: call resume(), or choose another output_dir")
        while self.steps_done < self.config.steps:
            metrics = self.step()
            due = self.config.save_every and self.steps_done % self.config.save_every == 0
            if due or (self.config.output_dir and self.steps_done == self.config.steps):
                self.save()
            on_step(metrics)

    @frozen_heap()
    def evaluate(self, count: int = 256, temperature: float = 0.0) -> float:
        """Mean reward of answers to `count` validation problems: greedy ones, or sampled ones with fixed seeds."""
        return self.worker.evaluate(count, temperature)

    def save(self) -> None:
        """A checkpoint in `output_dir`, complete or absent. OSError where it can't be written; older ones stay."""
        assert self.config.output_dir is not None, "the configuration has no output_dir"
        state = {
            "step": self.steps_done,
            "updates": self.updates_done,
            "weight_version": self.llm.weight_version,
            "loss_scale": [self.loss_scale, self._finite_updates],
            "contract": asdict(self.contract),
            "config": self._deciding(),
        }
        save_checkpoint(self.config.output_dir, self.steps_done, self.model, self.optimizer, state, self.config.keep)

    def resume(self) -> bool:
        """Go on from the newest checkpoint in `output_dir`; False without one.

        Bit for bit what an uninterrupted run would have done, with the same configuration and number of ranks and with
        staleness 0 (groups that were on their way start anew); a changed configuration is a warning. NumericsError for
        a checkpoint of another contract.
        """
        found = [latest(self.config.output_dir) if self.config.output_dir else None]
        dist.broadcast_object_list(found)  # rank 0 decides
        if found[0] is None:
            return False
        state = load_checkpoint(found[0], self.model, self.optimizer, self._check_state)
        self.steps_done = state["step"]
        self.updates_done = state["updates"]
        self.loss_scale, self._finite_updates = state["loss_scale"]
        self.llm.wake_up()  # if a step failed while it slept
        if self.updates_done:
            self.sync(state["weight_version"])
        self.worker.restart(self.steps_done * self.config.groups_per_step)
        return True

    def _deciding(self) -> dict[str, Any]:
        """The settings that the run's results depend on, as JSON has them."""
        settings = {k: v for k, v in vars(self.task).items() if isinstance(v, str | int | float)}
        return self.config.deciding() | {"task": {"class": type(self.task).__name__, **settings}}

    def _check_state(self, state: dict) -> None:
        if missing := {"step", "updates", "weight_version", "loss_scale", "contract", "config"} - state.keys():
            raise ValueError(f"{STATE} lacks {', '.join(sorted(missing))}")
        fields = {f.name for f in dataclasses.fields(Contract)}
        self.contract.check(Contract(**{k: v for k, v in state["contract"].items() if k in fields}))
        now = self._deciding()
        then = state["config"]
        changed = [f"{name} {then.get(name)!r} -> {now.get(name)!r}" for name in now if now[name] != then.get(name)]
        if changed and self.rank == 0:
            warnings.warn(f"the run resumes with another configuration: {', '.join(changed)}", stacklevel=3)
