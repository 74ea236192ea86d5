"""The loss of a pack of rollouts, and what to report about it."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ...correction import LogProbs, Statistic, contribution, correction_metrics, policy_loss, summarize
from ...correction.losses import aggregate
from ...engine import SamplingParams
from ...engine.detokenizer import Tokenizer
from ..logprobs import token_logprobs
from .config import TrainConfig
from .losses import reference_kl
from .rollout import Trajectory

Sums = dict[str, float]


def total(parts: Iterable[Sums]) -> Sums:
    """The sums of several parts, added by name."""
    result: Sums = {}
    for part in parts:
        for name, value in part.items():
            result[name] = result.get(name, 0.0) + value
    return result


def completion_logprobs(
    model: PreTrainedModel,
    rollouts: list[Trajectory],
    params: SamplingParams,
    tokenizer: Tokenizer | None = None,
    router_loss: bool = False,
) -> tuple[list[Tensor], Tensor, Tensor | None]:
    """Log-probs fp32 [T] of each completion, all entropies [sum of T], and the routers' loss if it is asked for.

    Without rollouts, a forward all the same: under FSDP a rank with nothing to do takes part in the others'.
    tokenizer: the engine's, which grammars need.
    """
    sequences = [r.sequence for r in rollouts] or [[0]]
    lens = [len(r.prompt_token_ids) for r in rollouts] or [1]
    logprobs, entropies, *more = token_logprobs(
        model,
        sequences,
        params,
        prompt_lens=lens,
        return_entropy=True,
        return_router_loss=router_loss,
        tokenizer=tokenizer,
    )
    completions = [values[n:] for values, n in zip(logprobs, lens, strict=True)]
    entropy = torch.cat([values[n:] for values, n in zip(entropies, lens, strict=True)])
    return completions[: len(rollouts)], entropy, more[0] if more else None


class Objective:
    """The configured loss of packs whose sum over all packs and ranks is one update's."""

    def __init__(
        self,
        config: TrainConfig,
        model: PreTrainedModel,
        reference: PreTrainedModel | None,
        tokenizer: Tokenizer | None = None,
    ):
        self.config = config
        self.model = model
        self.reference = reference
        self.tokenizer = tokenizer

    def __call__(
        self,
        rollouts: list[Trajectory],
        advantages: Tensor,
        old: list[Tensor] | None,
        normalizer: float,
        share: float = 1.0,
    ) -> tuple[Tensor, list[Tensor], Sums]:
        """(loss, the completions' log-probs, sums for `report`).

        advantages: fp64 [S]. old: log-probs of the policy that the update started from, each fp32 [T]; None when that
        is the model as it is. normalizer: tokens or sequences of the whole update, as the algorithm counts. share: the
        part of the update's tokens, prompts included, that the pack has: the weight of its routers' loss.
        """
        config = self.config
        recipe = config.recipe
        coefficient = config.router_aux_loss_coef
        current, entropy, balance = completion_logprobs(
            self.model, rollouts, config.sampling, self.tokenizer, coefficient > 0
        )
        reference: list[Tensor] = []
        if self.reference is not None:
            with torch.no_grad():
                reference, *_ = completion_logprobs(self.reference, rollouts, config.sampling, self.tokenizer)
        if not rollouts:
            return (entropy.sum() if balance is None else entropy.sum() + balance) * 0.0, [], {}
        lengths = [len(r.token_ids) for r in rollouts]
        tokens = torch.cat(current)
        data = LogProbs(
            mask=torch.ones_like(tokens),
            rollout=torch.cat([r.logprobs for r in rollouts]).to(tokens.device),
            old=torch.cat(old) if old is not None else tokens.detach(),
            current=tokens,
            offsets=torch.tensor([0, *lengths], device=tokens.device).cumsum(0),
        )
        advantage = advantages.repeat_interleave(torch.tensor(lengths)).to(tokens.device)
        if reference and config.kl == "k1":
            penalties = reference_kl(data.old, torch.cat(reference), "k1").split(lengths)  # type: ignore[arg-type]
            to_go = [p.flip(0).cumsum(0).flip(0) for p in penalties]
            advantage = advantage - config.kl_coef * torch.cat(to_go)
        divisor = float(config.sampling.max_tokens) if recipe.aggregation.endswith("-norm") else None  # type: ignore[arg-type]
        result = policy_loss(
            data, advantage, config.mode, recipe.kind, config.correction, clip=config.clip or recipe.clip,
            dual_clip=config.dual_clip, aggregation=recipe.aggregation, divisor=divisor, normalizer=normalizer,
        )  # fmt: skip
        loss = result.loss
        sums = self._sums(data, advantage, entropy, result.clipped)
        if reference:
            kl = reference_kl(tokens, torch.cat(reference), "k3").double()
            sums["kl"] = float(kl.detach().sum())
            if config.kl == "k3":
                mean = aggregate(kl, data.mask, data, recipe.aggregation, "original", divisor, normalizer)
                loss = loss + config.kl_coef * mean
        if balance is not None:
            loss = loss + coefficient * share * balance
            sums["router_loss"] = float(balance.detach()) * len(tokens)
        return loss, current, sums

    @torch.no_grad()
    def _sums(self, data: LogProbs, advantage: Tensor, entropy: Tensor, clipped: Tensor) -> Sums:
        share = contribution(data.log_ratio("current/rollout"), advantage)
        sums = {
            "entropy": entropy.sum(),
            "clipped": clipped.sum(),
            "k1": Statistic("old/rollout", "k1").of(data).sum(),
            "k3": Statistic("old/rollout", "k3").of(data).sum(),
            "contribution_positive": share[advantage > 0].sum(),
            "contribution_negative": share[advantage < 0].sum(),
            **correction_metrics(self.config.correction, data, advantage),
        }
        return {name: float(value) for name, value in sums.items()}


def report(sums: Sums) -> dict[str, float]:
    """Means per token of an update's sums (of all ranks); corrections as `summarize` has them.

    k1, k3: estimators of the mismatch KL(rollout || old). kl: k3 of the KL to the reference. contribution_*: C(r) of
    current/rollout, by the advantage's sign. router_loss: the load-balancing loss. Empty without tokens.
    """
    if not sums:
        return {}
    own = ("entropy", "clipped", "k1", "k3", "kl", "contribution_positive", "contribution_negative", "router_loss")
    result = {name: sums[name] / sums["tokens"] for name in own if name in sums}
    corrected = {name: value for name, value in sums.items() if name not in own}
    return result | {f"correction/{name}": value for name, value in summarize(corrected).items()}
