from __future__ import annotations

import json
import math
import pathlib
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import torch

from ...correction import Correction
from ...correction.losses import Mode, check_clip, check_combination
from ...engine import SamplingParams
from ...kernels.ops import backend
from .losses import ALGORITHMS, Algorithm


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """A training run. `steps`, `check`, `save_every`, `keep` and `output_dir` don't change its results.

    model: checkpoint directory, hub id or "smollm2". device: of engine and trainer, one that samebits has kernels for;
    under torchrun each rank takes its own. dtype: of the computation, on both sides; master weights and
    optimizer are fp32. groups_per_step x group_size sequences a step, in `minibatches` optimizer updates of equal size.
    algorithm: one of `losses.ALGORITHMS`; mode, correction, clip, dual_clip: see `correction.policy_loss` (clip None:
    the algorithm's). kl: "k3" adds kl_coef * KL to the loss, "k1" takes it off the advantages of the tokens before it.
    staleness: groups of so many steps ahead are started early, so that a token is at most so many steps old (0: on
    policy). filter_uniform: leave out groups of equal rewards. max_tokens_per_pack: a micro-batch's size. sleep: the
    engine frees its KV cache while the trainer works.
    sampling: its n and seed are set by group_size and seed. chat: prompts go through the chat template.
    check: compare the trainer's log-probs with the rollouts', as bits, and stop on a difference, at "every" step, the
    "first", or never ("off"; the difference is still reported). engine: more keywords of `LLM`. exact=False there is
    the control without the promise, on both sides. lr rises over `warmup` updates and stays.
    """

    model: str
    device: str = "cpu"
    dtype: str = "float32"
    algorithm: str = "grpo"
    mode: Mode = "bypass"
    correction: Correction = field(default_factory=Correction)
    clip: tuple[float, float] | None = None
    dual_clip: float | None = None
    kl: Literal["k1", "k3"] = "k3"
    kl_coef: float = 0.0
    steps: int = 200
    groups_per_step: int = 16
    group_size: int = 8
    minibatches: int = 1
    staleness: int = 0
    filter_uniform: bool = False
    sampling: SamplingParams = field(default_factory=lambda: SamplingParams(max_tokens=64))
    chat: bool = False
    lr: float = 1e-6
    warmup: int = 0
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.999)
    max_grad_norm: float = 1.0
    max_tokens_per_pack: int = 4096
    activation_checkpointing: bool = False
    sleep: bool = False
    seed: int = 0
    check: Literal["every", "first", "off"] = "every"
    save_every: int = 0
    keep: int = 2
    output_dir: pathlib.Path | None = None
    engine: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, choices in (("algorithm", ALGORITHMS), ("kl", ("k1", "k3")), ("check", ("every", "first", "off"))):
            if getattr(self, name) not in choices:
                raise ValueError(f"{name} {getattr(self, name)!r}; choose one of {', '.join(choices)}")
        backend(torch.device(self.device))
        for name in ("steps", "groups_per_step", "group_size", "minibatches", "max_tokens_per_pack", "keep"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
        for name in ("staleness", "kl_coef", "warmup", "save_every", "weight_decay", "lr"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be finite and not negative, got {getattr(self, name)}")
        if not self.max_grad_norm > 0:
            raise ValueError(f"max_grad_norm must be positive (inf is off), got {self.max_grad_norm}")
        check_combination(self.mode, self.recipe.kind, self.correction)
        if self.group_size == 1 and self.recipe.baseline in ("group", "group-std", "leave-one-out"):
            raise ValueError(f"{self.algorithm} compares the samples of a group: group_size must be at least 2")
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
        fields = {name: value for name, value in asdict(self).items() if name not in free}
        return json.loads(json.dumps(fields, default=str))

    @property
    def recipe(self) -> Algorithm:
        return ALGORITHMS[self.algorithm]
