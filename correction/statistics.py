"""Ratios between policies and the statistics that every published correction is made of.

Three policies score each sampled token: `rollout` (mu, the engine that sampled it), `old` (pi_old, the trainer at
rollout time) and `current` (pi, the trainer now). All sums run in fp64 over valid tokens only, so padding may hold
anything, and batches padded to [B, T] give the same numbers as packed ones.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, get_args

import torch
from torch import Tensor

Ratio = Literal["old/rollout", "current/rollout", "current/old"]
Kernel = Literal["log_ratio", "k1", "k2", "k3", "abs", "binary_kl", "tv", "directed_kl", "log_prob"]
Aggregate = Literal["token", "sum", "mean", "max", "min"]

CLAMP = 20.0  # |log ratio| is cut here before it is exponentiated: exp(20) = 4.9e8
IMPOSSIBLE = -1000.0  # stands for the log-prob -inf, so that sums stay finite and 0 / 0 is a ratio of 1
_PROBABILITY = 1e-6, 1 - 1e-6  # where the Bernoulli KL clamps its probabilities


def require_choice(what: str, value: str, choices: Any) -> None:
    """ValueError, which lists the choices (a Literal, or strings), unless the value is one of them."""
    names = get_args(choices) or tuple(choices)
    if value not in names:
        raise ValueError(f"{what}={value!r}; choose one of {', '.join(names)}")


def wide(tensor: Tensor) -> Tensor:
    """The tensor in fp64, or fp32 on devices without it."""
    return tensor.to(torch.float32 if tensor.device.type == "mps" else torch.float64)


def exp(log_ratio: Tensor) -> Tensor:
    """The ratio, with its logarithm clamped to +-CLAMP."""
    return log_ratio.clamp(-CLAMP, CLAMP).exp()


@dataclass(frozen=True)
class LogProbs:
    """Log-probs of sampled tokens under up to three policies.

    mask: bool or 0/1, [B, T], True where a token was sampled; or, for packed sequences, [N] with `offsets` int64
    [S + 1]: sequence i is [offsets[i], offsets[i + 1]). rollout, old, current: floating, of the mask's shape; what an
    asked-for ratio needs must be there. Entries outside the mask are never read. -inf (a token that a policy's filter
    excludes) is legal in `old` and `current`. ValueError on a shape or dtype that doesn't fit, and on NaN.
    """

    mask: Tensor
    rollout: Tensor | None = None
    old: Tensor | None = None
    current: Tensor | None = None
    offsets: Tensor | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "mask", self.mask.bool())
        if self.mask.dim() != (2 if self.offsets is None else 1):
            raise ValueError(f"mask has shape {list(self.mask.shape)}; give [B, T], or [N] together with offsets")
        if self.offsets is not None:
            if self.offsets.numel() < 1 or self.offsets[0] != 0 or self.offsets[-1] != self.mask.numel():
                raise ValueError(f"offsets must run from 0 to the number of tokens, {self.mask.numel()}")
            if (self.offsets.diff() < 0).any():
                raise ValueError("offsets must not decrease")
        for name in ("rollout", "old", "current"):
            values = getattr(self, name)
            if values is None:
                continue
            if values.shape != self.mask.shape or not values.is_floating_point():
                raise ValueError(
                    f"{name} is {values.dtype} {list(values.shape)}; expected floating, {list(self.mask.shape)}"
                )
            valid = values.detach()[self.mask]
            wrong = valid.isnan() | (valid == torch.inf) | ((valid == -torch.inf) & (name == "rollout"))
            if wrong.any():
                raise ValueError(f"{name} holds {int(wrong.sum())} non-finite log-probs at valid tokens")

    def on_policy(self) -> LogProbs:
        """The log-probs with `current` set: to `old` where it was not given."""
        return self if self.current is not None else replace(self, current=self.old)

    def interpolated(self, share: float) -> LogProbs:
        """The log-probs with share * current + (1 - share) * rollout as `old`: a proximal policy without a forward pass
        ("loglinear" in AReaL). share: 0 to 1, e.g. 1 - 1 / staleness in versions."""
        if not 0 <= share <= 1:
            raise ValueError(f"share={share}; it lies between 0 (the engine's policy) and 1 (the current one)")
        if self.current is None or self.rollout is None:
            raise ValueError("interpolation needs the log-probs of 'rollout' and 'current'")
        return replace(self, old=torch.lerp(self.rollout, self.current.detach().to(self.rollout.dtype), share))

    @property
    def num_sequences(self) -> int:
        """The number of sequences, padded or packed."""
        return self.mask.shape[0] if self.offsets is None else len(self.offsets) - 1

    @cached_property
    def segment(self) -> Tensor:
        """int64 [valid tokens]: the sequence of each."""
        if self.offsets is None:
            return self.mask.nonzero()[:, 0]
        rows = torch.arange(self.num_sequences, device=self.mask.device)
        return rows.repeat_interleave(self.offsets.diff())[self.mask]

    @cached_property
    def lengths(self) -> Tensor:
        """int64 [sequences]: valid tokens of each."""
        return torch.bincount(self.segment, minlength=self.num_sequences)

    def values(self, policy: str) -> Tensor:
        """fp64 [valid tokens]: log-probs under "rollout", "old" or "current". ValueError where they weren't given."""
        values = getattr(self, policy)
        if values is None:
            raise ValueError(f"the log-probs of the {policy!r} policy are needed, and weren't given")
        values = wide(values.detach()[self.mask])
        return torch.where(values == -torch.inf, IMPOSSIBLE, values)

    def log_ratio(self, ratio: Ratio) -> Tensor:
        """fp64 [valid tokens]."""
        above, below = ratio.split("/")
        return self.values(above) - self.values(below)

    def per_sequence(self, values: Tensor, how: Literal["sum", "mean", "max", "min"]) -> Tensor:
        """[valid tokens] -> [sequences]; 0 for a sequence without valid tokens."""
        out = values.new_zeros(self.num_sequences)
        if how in ("max", "min"):
            return out.scatter_reduce_(0, self.segment, values, f"a{how}", include_self=False)
        sums = out.index_add_(0, self.segment, values)
        return sums if how == "sum" else sums / self.lengths.clamp_min(1)

    def spread(self, values: Tensor) -> Tensor:
        """[valid tokens] -> the mask's shape, 0 (False) outside the mask."""
        return values.new_zeros(self.mask.shape).masked_scatter_(self.mask, values)


@dataclass(frozen=True)
class Statistic:
    """aggregate(kernel(log ratio)): what weights and gates look at.

    kernel, of d = log ratio: log_ratio d; k1 -d; k2 d^2 / 2; k3 exp(d) - 1 - d (Schulman's estimators of
    KL(denominator || numerator)); abs |d|. Of the sampled token against the rest, with p of the numerator and q of the
    denominator: binary_kl max(KL(p || q), KL(q || p)); tv p - q, the signed total variation; directed_kl
    sign(p - q) KL(q || p). log_prob: log p alone. aggregate: token, or per sequence sum, mean, max, min. The ratio is
    always named: there is no default to mistake.
    """

    ratio: Ratio
    kernel: Kernel = "log_ratio"
    aggregate: Aggregate = "token"

    def __post_init__(self) -> None:
        require_choice("ratio", self.ratio, Ratio)
        require_choice("kernel", self.kernel, Kernel)
        require_choice("aggregate", self.aggregate, Aggregate)

    @property
    def per_token(self) -> bool:
        """True if every token has its own value."""
        return self.aggregate == "token"

    def of(self, logprobs: LogProbs) -> Tensor:
        """fp64, [valid tokens] for the aggregate "token", [sequences] otherwise."""
        above, below = (logprobs.values(policy) for policy in self.ratio.split("/"))
        values = KERNELS[self.kernel](above, below)
        return values if self.aggregate == "token" else logprobs.per_sequence(values, self.aggregate)

    def per_token_of(self, logprobs: LogProbs) -> Tensor:
        """fp64 [valid tokens]: a sequence's value at each of its tokens."""
        values = self.of(logprobs)
        return values if self.per_token else values[logprobs.segment]


def _k3(d: Tensor) -> Tensor:
    d = d.clamp(-CLAMP, CLAMP)
    return d.expm1() - d  # exp(d) - 1 - d loses all digits where d is small


def _bernoulli_kls(log_p: Tensor, log_q: Tensor) -> tuple[Tensor, Tensor]:
    """KL(p || q) and KL(q || p) of a token against all others."""
    p, q = (v.exp().clamp(*_PROBABILITY) for v in (log_p, log_q))
    base = ((1 - p) / (1 - q)).log()
    logit_gap = (p / q).log() - base
    return p * logit_gap + base, -(q * logit_gap + base)


KERNELS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {  # of log-probs of numerator and denominator, elementwise
    "log_ratio": torch.sub,
    "k1": lambda p, q: q - p,
    "k2": lambda p, q: (p - q).square() / 2,
    "k3": lambda p, q: _k3(p - q),
    "abs": lambda p, q: (p - q).abs(),
    "binary_kl": lambda p, q: torch.maximum(*_bernoulli_kls(p, q)),
    "directed_kl": lambda p, q: torch.sign(p - q) * _bernoulli_kls(p, q)[1],
    "tv": lambda p, q: p.exp() - q.exp(),
    "log_prob": lambda p, q: p,
}
