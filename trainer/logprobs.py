"""The trainer's log-probs: the engine's, as bits, and differentiable."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..engine.sampling_params import SamplingParams
from ..kernels import ops
from ..model.exact import LMHead, LogprobRequest, eos_token_ids


def token_logprobs(
    model: PreTrainedModel,
    sequences: Tensor | Sequence[Sequence[int] | Tensor],
    sampling_params: SamplingParams | None = None,
    *,
    attention_mask: Tensor | None = None,
    prompt_lens: Sequence[int] | None = None,
    return_entropy: bool = False,
    return_argmax: bool = False,
    chunk: int | None = None,
    forward: Callable | None = None,
) -> Tensor | list[Tensor] | tuple:
    """Log-prob of each token given those before it; differentiable, and equal to the engine's, as bits.

    model: from `exact_model`, also under FSDP2, activation checkpointing or both.
    sequences: a list of token-id sequences of any lengths, run packed without padding -> a list of fp32 [len]; or
    int64 [B, T] with `attention_mask` [B, T] (1 = token; padding left, right or both) -> fp32 [B, T], 0 at padding.
    The first token of a sequence has no context: 0. prompt_lens: tokens of each prompt; they are not scored then (0),
    which saves their logits. The distribution is that of `sampling_params` (temperature, top_k, top_p, min_p; all of
    one kind per call; min_tokens needs prompt_lens); a token outside it has -inf and no gradient.

    return_entropy, return_argmax: return a tuple, with the entropies (nats) and the most likely tokens (int64) of the
    distributions in the same shape. chunk: rows of logits in memory at a time (None: 256, on a GPU 1024); changes no
    bit. forward: what to call instead of `model`: its own forward, inside of a wrapper's call whose hooks have run.
    """
    params = sampling_params or SamplingParams()
    if not isinstance(model.get_output_embeddings(), LMHead):
        raise TypeError("token_logprobs needs a model from samebits.trainer.exact_model")
    rows = _rows(sequences, attention_mask)
    if not rows or not all(len(r) for r in rows):
        raise ValueError("token_logprobs needs at least one sequence, and no empty ones")
    lengths = [len(r) for r in rows]
    ids = torch.cat(rows)
    if ids.min() < 0 or ids.max() >= model.config.vocab_size:
        raise ValueError(f"a token id is out of range; the vocabulary has {model.config.vocab_size} entries")
    group = model.config.num_attention_heads // model.config.num_key_value_heads
    layout = ops.packed_layout(lengths, group, model.device)
    ends = torch.tensor(lengths).cumsum(0) - 1
    predicts = torch.ones(len(ids), dtype=torch.bool)
    predicts[ends] = False
    if prompt_lens is not None:
        for start, prompt in zip(
            (ends - torch.tensor(lengths) + 1).tolist(), _checked(prompt_lens, lengths), strict=True
        ):
            predicts[start : start + prompt - 1] = False
    index = predicts.nonzero().flatten()
    # Also where nothing is predicted: under FSDP every rank must take part in every forward and backward.
    found = score_packed(
        forward or model,
        ids.to(model.device),
        index,
        layout,
        row_params(model, params, lengths, prompt_lens, index),
        chunk or ops.backend(model.device).LOGIT_ROWS,
    )
    spread = (values.new_zeros(len(ids)).scatter(0, (index + 1).to(values.device), values) for values in found)
    shaped = ops.TokenLogprobs(*(_shaped(values, sequences, attention_mask, lengths) for values in spread))
    extras = [shaped.entropy] * return_entropy + [shaped.argmax] * return_argmax
    return (shaped.logprob, *extras) if extras else shaped.logprob


def score_packed(
    forward: Callable, ids: Tensor, index: Tensor, layout: ops.PagedLayout, params: ops.RowParams, chunk: int
) -> ops.TokenLogprobs:
    """Return the log-probs of the tokens after those numbered `index` int64 [R] in a packed batch `ids` int64 [T]."""
    index = index.to(ids.device)
    return forward(
        input_ids=ids[None],
        position_ids=layout.on(ids.device).positions.long()[None],
        use_cache=False,
        layout=layout,
        logprobs=LogprobRequest(index, ids[index + 1], params, chunk),
    )


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
    if attention_mask.shape != sequences.shape:
        raise ValueError(f"attention_mask {list(attention_mask.shape)} differs from {list(sequences.shape)}")
    mask = attention_mask.bool().cpu()
    starts = mask & ~mask.roll(1, 1)
    starts[:, 0] = mask[:, 0]
    if (starts.sum(1) > 1).any():
        raise ValueError("attention_mask has a hole; padding may be at the ends only")
    return [row[keep] for row, keep in zip(sequences, mask, strict=True)]


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


def row_params(
    model: PreTrainedModel,
    params: SamplingParams,
    lengths: Sequence[int],
    prompt_lens: Sequence[int] | None,
    index: Tensor,
) -> ops.RowParams:
    """Return the distribution of each scored token's row. min_tokens needs prompt_lens, and rows of completions."""
    rows = ops.RowParams.repeat(len(index), params.temperature, params.top_k, params.top_p, params.min_p)
    if params.min_tokens:
        if prompt_lens is None:
            raise ValueError("min_tokens bans EOS early in the completion: give prompt_lens, one per sequence")
        bad = [t for t in params.stop_token_ids if t >= model.config.vocab_size]
        if bad:
            raise ValueError(
                f"stop_token_ids {bad} are out of range; the vocabulary has {model.config.vocab_size} entries"
            )
        eos = () if params.ignore_eos else eos_token_ids(model.config, model.generation_config)
        banned = [*eos, *params.stop_token_ids]
        rows.banned = [
            banned if position < params.min_tokens else []
            for prompt, length in zip(prompt_lens, lengths, strict=True)
            for position in range(length - prompt)
        ]
    return rows
