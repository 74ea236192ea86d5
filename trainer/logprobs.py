"""The trainer's log-probs: the engine's, as bits, and differentiable."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..engine.detokenizer import Tokenizer
from ..engine.sampling_params import SamplingParams
from ..engine.structured_outputs import Constraint
from ..kernels import ops
from ..kernels.contract import NumericsError
from ..model.exact import LMHead, LogprobRequest, compute_device, eos_token_ids
from ..model.packing import kept_tokens
from ..model.paged import group_size
from ..model.routing import RoutedExperts


@torch.compiler.disable  # compiled, the code around the model gave other numbers
def token_logprobs(
    model: PreTrainedModel,
    sequences: Tensor | Sequence[Sequence[int] | Tensor],
    sampling_params: SamplingParams | None = None,
    *,
    attention_mask: Tensor | None = None,
    prompt_lens: Sequence[int] | None = None,
    return_entropy: bool = False,
    return_argmax: bool = False,
    return_routed_experts: bool = False,
    return_router_loss: bool = False,
    chunk: int | None = None,
    forward: Callable | None = None,
    tokenizer: Tokenizer | None = None,
    routed_experts: Sequence[np.ndarray | Tensor | None] | None = None,
) -> Tensor | list[Tensor] | tuple:
    """Log-prob of each token given those before it; differentiable, and equal to the engine's, as bits.

    model: from `exact_model`, also under FSDP2, activation checkpointing or both.
    sequences: a list of token-id sequences of any lengths, run packed without padding -> a list of fp32 [len]; or
    int64 [B, T] with `attention_mask` [B, T] (1 = token; padding left, right or both) -> fp32 [B, T], 0 at padding.
    The first token of a sequence has no context: 0. prompt_lens: tokens of each prompt; they are not scored then (0),
    which saves their logits. The distribution is that of `sampling_params` (temperature, top_k, top_p, min_p; all of
    one kind per call; min_tokens needs prompt_lens); a token outside it has -inf and no gradient.

    return_entropy, return_argmax: return a tuple, with the entropies (nats) and the most likely tokens (int64) of the
    distributions in the same shape. return_routed_experts: next comes a list of the experts that the model's own
    routers chose, int64 [tokens, layers, k] per sequence. return_router_loss: and last their load-balancing loss over
    all tokens, differentiable. chunk: rows of logits in memory at a time (None: 256, on a GPU 1024); changes no
    bit. forward: called in place of the model by code that runs inside a wrapped model's forward (DDP's, FSDP2's)
    and must not run the wrapper's hooks again. tokenizer: the engine's; structured_outputs need it, and prompt_lens.

    routed_experts: for each sequence the experts that its tokens go to, or None, instead of those that routers choose
    (R3, arXiv 2510.11370): int [tokens - 1 or tokens, layers, k] in any order, as `Completion.routed_experts`; -1
    leaves a token its router's choice. Their weights are the router's own, so gradients reach it.
    """
    params = sampling_params or SamplingParams()
    if chunk is not None and chunk < 1:
        raise ValueError(f"chunk must be a positive number of rows, got {chunk}")
    if (params.min_tokens or params.structured_outputs) and prompt_lens is None:
        raise ValueError("min_tokens and structured_outputs need to know where completions begin: give prompt_lens")
    rows = _rows(sequences, attention_mask)
    if not rows or not all(len(r) for r in rows):
        raise ValueError("token_logprobs needs at least one sequence, and no empty ones")
    lengths = [len(r) for r in rows]
    prompts = [1] * len(rows) if prompt_lens is None else _checked(prompt_lens, lengths)
    # Also where nothing is predicted: under FSDP every rank must take part in every forward and backward.
    counts = [n - prompt for n, prompt in zip(lengths, prompts, strict=True)]
    batch = PackedBatch.of(model, rows, counts, routed_experts=routed_experts, note_experts=return_routed_experts)
    rows_at_once = chunk or ops.backend(compute_device(model)).LOGIT_ROWS
    found, router_loss = batch.score(model, params, rows_at_once, forward, tokenizer, return_router_loss)
    spread = (values.new_zeros(len(batch.ids)).scatter(0, batch.index + 1, values) for values in found)
    shaped = ops.TokenLogprobs(*(_shaped(values, sequences, attention_mask, lengths) for values in spread))
    extras: list[Any] = [shaped.entropy] * return_entropy + [shaped.argmax] * return_argmax
    if return_routed_experts:
        assert batch.routed is not None and batch.routed.noted is not None
        extras.append([*batch.routed.noted.split(lengths)])
    extras += [router_loss] * return_router_loss
    return (shaped.logprob, *extras) if extras else shaped.logprob


def selective_log_softmax(logits: Tensor, ids: Tensor, sampling_params: SamplingParams | None = None) -> Tensor:
    """Log-probs of token ids under logits, differentiable: with an exact model's, the bits of `token_logprobs`.

    logits: fp32 [..., V] as `model(...).logits` are, neither divided by the temperature nor filtered: both are done
    here, by `sampling_params`. ids: int64 [...], the token after each row of logits -> fp32 [...]. A token outside the
    distribution has -inf and no gradient. Raises TypeError for logits of another dtype, whose rounding changes bits.
    """
    params = sampling_params or SamplingParams()
    if logits.dtype != torch.float32:
        raise TypeError(
            f"selective_log_softmax needs float32 logits, as an exact model returns them, not {logits.dtype}"
        )
    if logits.shape[:-1] != ids.shape:
        raise ValueError(f"ids {list(ids.shape)} don't fit logits {list(logits.shape)}")
    if ids.min() < 0 or ids.max() >= logits.shape[-1]:
        raise ValueError(f"a token id is out of range; the vocabulary has {logits.shape[-1]} entries")
    if params.min_tokens:
        raise ValueError("min_tokens counts tokens of the completion, which logits don't show; use token_logprobs")
    if params.structured_outputs is not None:
        raise ValueError("structured_outputs depends on the whole completion; use token_logprobs, with the tokenizer")
    rows = ops.RowParams.repeat(ids.numel(), params.temperature, params.top_k, params.top_p, params.min_p)
    flat = ids.reshape(-1).to(logits.device)
    return ops.logit_logprobs(logits.reshape(len(flat), -1), flat, rows).logprob.view(ids.shape)


@dataclass(frozen=True)
class PackedBatch:
    """Sequences without padding, on the model's device.

    ids int64 [T], without the tokens that a sequence shares with the one before it. counts: how many tokens at each
    sequence's end are scored. index int64 [sum of counts]: the tokens before those.
    """

    ids: Tensor
    counts: list[int]
    index: Tensor
    layout: ops.PagedLayout
    routed: RoutedExperts | None = None

    @classmethod
    def of(
        cls,
        model: PreTrainedModel,
        rows: list[Tensor],
        counts: list[int],
        shared: list[int] | None = None,
        routed_experts: Sequence[np.ndarray | Tensor | None] | None = None,
        note_experts: bool = False,
    ) -> PackedBatch:
        """Return rows of token ids as a batch, without the first `shared` tokens of each: those of the row before it.

        routed_experts: see `token_logprobs`; then nothing is shared. note_experts: note the routers' own choices, too.
        """
        exact_head(model)
        ids = torch.cat(rows)
        if ids.min() < 0 or ids.max() >= model.config.vocab_size:
            raise ValueError(f"a token id is out of range; the vocabulary has {model.config.vocab_size} entries")
        lengths = [len(row) for row in rows]
        ends = (torch.tensor(lengths).cumsum(0) - 1).tolist()
        index = torch.cat([torch.arange(end - count, end) for end, count in zip(ends, counts, strict=True)])
        group = group_size(model.config)
        device = compute_device(model)
        layout = ops.packed_layout(lengths, group, device, shared)
        routed = None
        if routed_experts is not None or note_experts:
            routed = RoutedExperts.of_batch(model, lengths, routed_experts, device, note_experts)
        return cls(ids.to(device), counts, index.to(device), layout, routed)

    def inputs(self) -> dict[str, Any]:
        """The keywords of an exact model's forward."""
        positions = self.layout.on(self.ids.device).positions.long()[None]
        found = {"input_ids": self.ids[None], "position_ids": positions, "use_cache": False, "layout": self.layout}
        return found if self.routed is None else found | {"routed_experts": self.routed}

    def score(
        self,
        model: PreTrainedModel,
        params: SamplingParams,
        chunk: int,
        forward: Callable | None = None,
        tokenizer: Tokenizer | None = None,
        router_loss: bool = False,
    ) -> tuple[ops.TokenLogprobs, Tensor | None]:
        """Return the log-probs of the tokens after those in `index`, from `chunk` rows of logits at a time.

        router_loss: return the routers' load-balancing loss with it, not None.
        """
        rows = ops.RowParams.repeat(len(self.index), params.temperature, params.top_k, params.top_p, params.min_p)
        targets = self.ids[self.index + 1]
        if params.min_tokens or params.structured_outputs is not None:
            masks: list[np.ndarray | None] = []
            for completion in targets.cpu().split(self.counts):
                masks += _masks(model, params, tokenizer, completion.tolist())
            rows.masks, rows.mask_rows = ops.stack_masks(masks)
        call = forward or model
        found = call(**self.inputs(), logprobs=LogprobRequest(self.index, targets, rows, chunk, router_loss))
        return found if router_loss else (found, None)


def check_same_bits(rollout: Tensor, trainer: Tensor, mask: Tensor, name: Callable[..., str]) -> int:
    """Raise NumericsError unless two sides' log-probs, fp32 of one shape, are equal as bits where `mask` is set.

    name: called with the place of the first that differs, an int per dimension, it says in words which token that is.
    Returns the number of tokens in the mask.
    """
    differ = (rollout.contiguous().view(torch.int32) != trainer.contiguous().view(torch.int32)) & mask.bool()
    if differ.any():
        place = tuple(differ.nonzero()[0].tolist())
        raise NumericsError(
            f"{int(differ.sum())} of {int(mask.sum())} tokens have another log-prob in the trainer than in the "
            f"rollout. The first is {name(*place)}: {rollout[place]:.9g} in the rollout, {trainer[place]:.9g} in the "
            "trainer. Was it another engine's?"
        )
    return int(mask.sum())


def exact_head(model: PreTrainedModel) -> LMHead:
    """Return the head of an exact model. TypeError for another model."""
    head = model.get_output_embeddings()
    if not isinstance(head, LMHead):
        raise TypeError("scoring tokens needs a model from samebits.trainer.exact_model")
    return head


def _masks(
    model: PreTrainedModel, params: SamplingParams, tokenizer: Tokenizer | None, completion: list[int]
) -> list[np.ndarray | None]:
    """The mask that each token of a completion was sampled under."""
    vocab = model.config.vocab_size
    eos = () if params.ignore_eos else eos_token_ids(model.config, model.generation_config)
    if params.structured_outputs is not None:
        if tokenizer is None:
            raise ValueError("structured_outputs needs the engine's tokenizer: give tokenizer")
        return [*Constraint(params.structured_outputs, tokenizer, vocab, eos).masks(completion)]
    bad = [t for t in params.stop_token_ids if t >= vocab]
    if bad:
        raise ValueError(f"stop_token_ids {bad} are out of range; the vocabulary has {vocab} entries")
    early = min(params.min_tokens, len(completion))
    return [ops.mask_without([*eos, *params.stop_token_ids], vocab)] * early + [None] * (len(completion) - early)


def _rows(sequences, attention_mask: Tensor | None) -> list[Tensor]:
    if not isinstance(sequences, Tensor):
        if attention_mask is not None:
            raise ValueError("attention_mask goes with a [B, T] tensor; a list of sequences has no padding")
        rows = [torch.as_tensor(s) for s in sequences]
        if any(len(r) and (r.is_floating_point() or r.is_complex() or r.dtype == torch.bool) for r in rows):
            raise TypeError("token ids must be integers")
        return [r.long().cpu() for r in rows]
    sequences = sequences.cpu()
    if sequences.dim() != 2:
        raise ValueError(f"expected [B, T] token ids, got shape {list(sequences.shape)}")
    if attention_mask is None:
        return list(sequences)
    return [row[keep] for row, keep in zip(sequences, kept_tokens(attention_mask, sequences.shape), strict=True)]


def _shaped(flat: Tensor, sequences, attention_mask: Tensor | None, lengths: list[int]):
    if not isinstance(sequences, Tensor):
        return list(flat.split(lengths))
    mask = torch.ones_like(sequences, dtype=torch.bool) if attention_mask is None else attention_mask.bool()
    return flat.new_zeros(sequences.shape).masked_scatter(mask.to(flat.device), flat)


def _checked(prompt_lens: Sequence[int], lengths: list[int]) -> list[int]:
    prompts = [int(n) for n in prompt_lens]
    if len(prompts) != len(lengths) or any(not 1 <= p <= n for p, n in zip(prompts, lengths, strict=True)):
        raise ValueError(f"prompt_lens needs one entry per sequence, at least 1 and at most its length; got {prompts}")
    return prompts
