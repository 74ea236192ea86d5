"""The settings of a training run."""

from __future__ import annotations

import json
import math
import pathlib
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from ...correction import Correction
from ...correction.losses import check_clip, check_combination
from ...correction.statistics import require_choice
from ...engine import SamplingParams
from ...kernels.ops import backend, parse_device
from .losses import ALGORITHMS, Algorithm


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """A training run. `steps`, `check`, `save_every`, `keep` and `output_dir` don't change its results."""

    model: str
    """Checkpoint directory, hub id or "smollm2"."""
    device: str = "cpu"
    """Where engine and trainer compute, cpu or cuda; under torchrun each rank takes its own device."""
    dtype: str = "float32"
    """Number format of the computation, on both sides: float32, bfloat16 or float16. Master weights and optimizer are
    float32."""
    algorithm: str = "grpo"
    """Published algorithm: grpo, dr_grpo, dapo, gspo, cispo, rloo or reinforce."""
    mode: Literal["recompute", "bypass", "decoupled"] = "bypass"
    """Where the rollout's log-probs enter the loss; see `correction.policy_loss`."""
    correction: Correction = field(default_factory=Correction)
    """Weight and gates of the loss; see `correction.policy_loss`."""
    clip: tuple[float, float] | None = None
    """How far the ratio may lie below and above 1; unset, the algorithm's."""
    dual_clip: float | None = None
    """Tokens with a negative advantage A lose at most -dual_clip * A; unset, there is no such bound."""
    kl: Literal["k1", "k3"] = "k3"
    """Estimator of the KL to the initial model: k3 is added to the loss, k1 is taken off the advantages of the tokens
    before it."""
    kl_coef: float = 0.0
    """Weight of the KL to the initial model."""
    router_aux_loss_coef: float = 0.0
    """Weight of the loss that keeps the experts of a mixture equally busy, as transformers computes it; 0 is off."""
    steps: int = 200
    """Steps of the whole run."""
    groups_per_step: int = 16
    """Prompts per step."""
    group_size: int = 8
    """Samples of each prompt."""
    minibatches: int = 1
    """Optimizer updates per step, of equal numbers of sequences."""
    staleness: int = 0
    """Start the groups of this many steps ahead early, so that a token is at most that many steps old; 0 is on
    policy."""
    filter_uniform: bool = False
    """Leave out groups of equal rewards."""
    sampling: SamplingParams = field(default_factory=lambda: SamplingParams(max_tokens=64))
    """How completions are sampled; its n and seed are set by group_size and seed."""
    chat: bool = False
    """Put prompts through the chat template."""
    lr: float = 1e-6
    """Learning rate, which rises over `warmup` updates and stays."""
    warmup: int = 0
    """Updates until the learning rate is reached."""
    weight_decay: float = 0.0
    """AdamW's weight decay."""
    betas: tuple[float, float] = (0.9, 0.999)
    """AdamW's betas."""
    max_grad_norm: float = 1.0
    """The gradient's norm is clipped here; inf is off."""
    max_tokens_per_pack: int = 4096
    """Most tokens of a micro-batch."""
    activation_checkpointing: bool = False
    """Compute activations again in the backward pass, instead of keeping them."""
    sleep: bool = False
    """The engine frees its KV cache while the trainer works."""
    seed: int = 0
    """Fixes the random numbers of tasks and samples."""
    check: Literal["every", "first", "off"] = "every"
    """Compare the trainer's log-probs with the rollouts', as bits, and stop on a difference: at every step, at the
    first, or never. With off, the difference is still reported."""
    save_every: int = 0
    """Steps between checkpoints; 0 saves at the end only."""
    keep: int = 2
    """Checkpoints to keep."""
    output_dir: pathlib.Path | None = None
    """Where checkpoints go; an earlier run there can be resumed."""
    engine: dict[str, Any] = field(default_factory=dict)
    """More keywords of `LLM`. exact=False is the control without the promise, on both sides."""

    def __post_init__(self) -> None:
        require_choice("algorithm", self.algorithm, ALGORITHMS)
        require_choice("kl", self.kl, ("k1", "k3"))
        require_choice("check", self.check, ("every", "first", "off"))
        backend(parse_device(self.device))
        for name in ("steps", "groups_per_step", "group_size", "minibatches", "max_tokens_per_pack", "keep"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
        for name in ("staleness", "kl_coef", "router_aux_loss_coef", "warmup", "save_every", "weight_decay", "lr"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be finite and not negative, got {getattr(self, name)}")
        if not self.max_grad_norm > 0:
            raise ValueError(f"max_grad_norm must be positive (inf is off), got {self.max_grad_norm}")
        check_combination(self.mode, self.recipe.kind, self.correction)
        if self.group_size == 1 and self.recipe.baseline in ("group", "group-std", "leave-one-out"):
            raise ValueError(f"{self.algorithm} compares the samples of a group: group_size must be at least 2")
        if self.group_size == 1 and self.filter_uniform:
            raise ValueError("filter_uniform leaves out every group of one sample: group_size must be at least 2")
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas must lie in [0, 1), got {self.betas}")
        if self.clip is not None and self.recipe.kind == "reinforce":
            raise ValueError(f"{self.algorithm} doesn't clip: leave clip None")
        if self.dual_clip is not None and self.recipe.kind in ("reinforce", "cispo"):
            raise ValueError(f"{self.algorithm} has no clipped surrogate: leave dual_clip None")
        check_clip(self.clip or self.recipe.clip, self.dual_clip)
        if not self.sampling.detokenize:
            raise ValueError("rewards are of texts: sampling must detokenize")
        if self.sampling.max_tokens is None and self.recipe.aggregation.endswith("-norm"):
            raise ValueError(f"{self.algorithm} divides by max_tokens: sampling must set it")
        if self.sampling.temperature == 0 and self.group_size > 1:
            raise ValueError("temperature 0 makes all samples of a group equal: nothing to learn")
        if self.groups_per_step * self.group_size % self.minibatches:
            raise ValueError(f"{self.minibatches} minibatches don't divide a step's sequences evenly")
        if self.correction.denominator == "kept" or (self.correction.weight and self.correction.weight.normalize):
            raise ValueError("a 'kept' denominator or a normalized weight needs a whole update in one pack")
        if self.save_every and self.output_dir is None:
            raise ValueError("save_every needs an output_dir")

    def deciding(self) -> dict[str, Any]:
        """The fields that a run's results depend on, as JSON has them; the model's path and the engine's size don't."""
        free = ("model", "steps", "check", "save_every", "keep", "output_dir", "engine", "sleep")
        plain = asdict(replace(self, engine={}))  # asdict copies, and a drafter may be a model
        return json.loads(json.dumps({k: v for k, v in plain.items() if k not in free}, default=str))

    @property
    def recipe(self) -> Algorithm:
        """The algorithm's loss, advantages and means."""
        return ALGORITHMS[self.algorithm]
