"""`samebits diagnose` on a mixture of experts: which experts differ, and what replaying the engine's would remove."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..correction import Diagnosis
from ..engine import SamplingParams
from ..engine.expert_wire import shape_ids
from ..integrations.rollouts import Rollout, RolloutFormatError
from ..model.routing import expert_sizes, routers
from ..trainer.rescore import rescore
from .provenance import pair_of

SHOWN = ("mean_abs", "k3", "max_abs", "chi2_token", "chi2_sequence")  # of a mismatch, with and without replay


class RoutingDiagnosis:
    """How far two choices of experts agree, counted over batches of tokens.

    layers: the numbers of those that have experts, in the whole model.
    """

    def __init__(self, layers: Sequence[int]):
        self.layers = list(layers)
        self.tokens = 0
        self.tokens_differ = 0
        self.differ = torch.zeros(len(layers), dtype=torch.int64)  # sets of a token's experts, by layer
        self.common = torch.zeros(len(layers), dtype=torch.int64)  # experts in both sets
        self.k = 0

    def add(self, first: Tensor, second: Tensor) -> None:
        """Compare experts, integers [T, all layers, k] in any order. Tokens with an id below 0 are left out."""
        known = ((first >= 0) & (second >= 0)).flatten(1).all(1)
        a, b = (ids[known][:, self.layers].long().sort(-1).values for ids in (first, second))
        differ = (a != b).any(-1)
        self.k = first.shape[-1]
        self.tokens += len(differ)
        self.tokens_differ += int(differ.any(-1).sum())
        self.differ += differ.sum(0)
        self.common += (a[..., None] == b[..., None, :]).any(-1).sum((0, 2))

    def summary(self) -> dict[str, Any]:
        """The shares of (token, layer) sets and of tokens that differ, the mean overlap, and both shares by layer.

        Raises ValueError without tokens.
        """
        if not self.tokens:
            raise ValueError("no tokens whose experts are known")
        shares = (self.differ / self.tokens).tolist()
        overlaps = (self.common / (self.tokens * self.k)).tolist()
        rows = zip(self.layers, shares, overlaps, strict=True)
        return {
            "tokens": self.tokens,
            "sets_differ": sum(shares) / len(shares),
            "tokens_differ": self.tokens_differ / self.tokens,
            "overlap": sum(overlaps) / len(overlaps),
            "by_layer": [{"layer": n, "sets_differ": share, "overlap": overlap} for n, share, overlap in rows],
        }


class ReplayReport:
    """The share of an engine's mismatch that its experts cause.

    routing: theirs against the model's own choices; own, replayed: the mismatch under either.
    """

    def __init__(self, model: PreTrainedModel):
        self.routing = RoutingDiagnosis(sorted(routers(model)))
        self.own = Diagnosis()
        self.replayed = Diagnosis()

    def summary(self) -> dict[str, Any] | None:
        """The report as plain numbers; None where no rollout said its experts."""
        if not self.routing.tokens:
            return None
        both = {"own": self.own.summary(), "replayed": self.replayed.summary()}
        return self.routing.summary() | {name: {key: s[key] for key in SHOWN} for name, s in both.items()}


def scored_with_replay(
    rollouts: Iterable[Rollout], model: PreTrainedModel, params: SamplingParams, report: ReplayReport
) -> Iterator[Rollout]:
    """Yield each rollout with `reference`, `best_token_ids` and, if it has its experts, `replayed`; fill `report`."""
    asked, again, given, waiting = itertools.tee(rollouts, 4)
    vocab = model.config.vocab_size
    own = rescore(model, (pair_of(r, vocab) for r in asked), params, note_experts=True)
    pairs = (pair_of(r, vocab) for r in again if r.routed_experts is not None)
    experts_given = (experts_of(r, model) for r in given if r.routed_experts is not None)
    replayed = rescore(model, pairs, params, routed_experts=experts_given)
    for rollout, (logprobs, best, chosen) in zip(waiting, own, strict=True):
        rollout.reference = logprobs.double().numpy()
        rollout.best_token_ids = best.numpy()
        experts = experts_of(rollout, model)
        if experts is not None:
            rollout.replayed = next(replayed)[0].double().numpy()
            report.routing.add(experts, chosen[: len(experts)])
        yield rollout


def experts_of(rollout: Rollout, model: PreTrainedModel) -> Tensor | None:
    """The experts that a rollout says, int64 [tokens - 1, layers, k], or None. RolloutFormatError for a wrong shape."""
    if rollout.routed_experts is None:
        return None
    layers, _, k = expert_sizes(model)
    prompt = 0 if rollout.prompt_token_ids is None else len(rollout.prompt_token_ids)
    try:
        ids = shape_ids(rollout.routed_experts, prompt + len(rollout.token_ids), layers, k)
    except ValueError as error:
        raise RolloutFormatError(f"{rollout.source}: {error}") from error
    return torch.from_numpy(ids.astype("int64"))
