"""The sampler: tokens and log-probs from hidden states. The distribution is that of `kernels.ops.sample`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..kernels import ops
from ..model.exact import LMHead
from .request import Sample, SampledToken

SAMPLED_ROWS = 256  # rows of fp32 logits in memory at a time


@dataclass
class LogitsRow:
    """A row of logits that a step computes: for the token after number `token` of the step.

    It becomes token number `position` of the sample: sampled, or scored where `target` says which it is. stale_kv:
    older weights computed some of the KV. draft: the token before it, not sampled yet; where another one is sampled,
    the row is void.
    """

    sample: Sample
    token: int
    position: int
    target: int = -1
    stale_kv: bool = False
    draft: int | None = None


@dataclass
class SamplingMetadata:
    """The sampling parameters of R rows of logits, without the sequences, so that they can travel.

    tokens int64 [R]: places in the step of the tokens whose hidden states give logits. targets int64 [R]: the token to
    score, or -1. seeds uint64, sample_indices int64, positions int64, [R] each: the random numbers' counters.
    num_logprobs: alternatives to report; -1: not even the rank. raw_logprobs: report the log-prob before temperature
    and filters, too.
    """

    tokens: np.ndarray
    targets: np.ndarray
    seeds: np.ndarray
    sample_indices: np.ndarray
    positions: np.ndarray
    params: ops.RowParams
    num_logprobs: list[int]
    raw_logprobs: bool

    @classmethod
    def of(cls, rows: Sequence[LogitsRow]) -> SamplingMetadata:
        """Return the metadata of these rows."""
        requests = [row.sample.request for row in rows]
        params = [request.params for request in requests]
        counts = [p.logprobs if r.target < 0 else p.prompt_logprobs for p, r in zip(params, rows, strict=True)]
        return cls(
            tokens=np.array([r.token for r in rows], np.int64),
            targets=np.array([r.target for r in rows], np.int64),
            seeds=np.array([r.seed for r in requests], np.uint64),
            sample_indices=np.array([r.sample.sample_index for r in rows], np.int64),
            positions=np.array([r.position for r in rows], np.int64),
            params=ops.RowParams(
                np.array([p.temperature for p in params], np.float64),
                np.array([p.top_k for p in params], np.int64),
                np.array([p.top_p for p in params], np.float64),
                np.array([p.min_p for p in params], np.float64),
                # what is scored is not masked
                *ops.stack_masks([r.sample.mask(r.position) if r.target < 0 else None for r in rows]),
            ),
            num_logprobs=[-1 if count is None else count for count in counts],
            raw_logprobs=any(p.raw_logprobs for p in params),
        )

    def __len__(self) -> int:
        return len(self.tokens)


class SamplerOutput:
    """The tokens of a step, on their way from the device: nothing waits for them but `wait`.

    token_ids int64 [R], logprobs f64 [R]. raw_logprobs f64 [R]: before temperature and filters; ranks int64 [R]: None
    where nobody asks for them. alternatives: ids and log-probs of the rows that ask for them.
    """

    def __init__(
        self,
        token_ids: Tensor,
        logprobs: Tensor,
        raw_logprobs: Tensor | None,
        ranks: Tensor | None,
        alternatives: dict[int, tuple[Tensor, Tensor]],
    ):
        self.token_ids = token_ids
        columns = token_ids, logprobs, raw_logprobs, ranks
        self._columns = [None if c is None else c.to("cpu", non_blocking=True) for c in columns]
        self._alternatives = {}
        for row, (ids, values) in alternatives.items():
            self._alternatives[row] = ids.to("cpu", non_blocking=True), values.to("cpu", non_blocking=True)
        self._copied = torch.cuda.Event() if token_ids.device.type == "cuda" else None
        if self._copied is not None:
            self._copied.record(torch.cuda.current_stream(token_ids.device))

    def wait(self) -> list[SampledToken]:
        """Return the tokens in the order of the rows. Log-probs, fp32, are NaN where the logits aren't finite."""
        if self._copied is not None:
            self._copied.synchronize()
        count = len(self.token_ids)
        columns: list[list] = []
        for column in self._columns:
            rounded = column.float() if column is not None and column.is_floating_point() else column
            columns.append([0] * count if rounded is None else rounded.tolist())
        tokens = [SampledToken(token, logprob, raw, rank) for token, logprob, raw, rank in zip(*columns, strict=True)]
        for row, (ids, logprobs) in self._alternatives.items():
            tokens[row].top_logprobs = dict(zip(ids.tolist(), logprobs.tolist(), strict=True))
        return tokens


def sample(head: LMHead, hidden: Tensor, metadata: SamplingMetadata) -> SamplerOutput:
    """Return the tokens that the metadata asks for. hidden: of all tokens of the step, [T, hidden]; head: lm_head."""
    columns: list[tuple[Tensor | None, ...]] = []
    alternatives: dict[int, tuple[Tensor, Tensor]] = {}
    ranked = max(metadata.num_logprobs, default=-1) >= 0
    for start in range(0, len(metadata), SAMPLED_ROWS):
        rows = slice(start, start + SAMPLED_ROWS)
        found, best = _sample_logits(head.logits(_rows(hidden, metadata.tokens[rows])), metadata, rows, ranked)
        columns.append(found)
        alternatives |= {start + row: pair for row, pair in best.items()}
    if not columns:
        columns = [(hidden.new_empty(0, dtype=torch.int64), hidden.new_empty(0, dtype=torch.float64), None, None)]
    return SamplerOutput(*map(_join, zip(*columns, strict=True)), alternatives)  # type: ignore[arg-type,call-arg]


def _rows(hidden: Tensor, tokens: np.ndarray) -> Tensor:
    """Return the tokens' rows: where these are neighbours, as in decoding, nothing is copied."""
    first = int(tokens[0])
    count = len(tokens)
    if np.array_equal(tokens, np.arange(first, first + count)):
        return hidden[first : first + count]
    return hidden[ops.to_device(tokens, hidden.device)]


def _join(parts: Sequence[Tensor | None]) -> Tensor | None:
    found = [part for part in parts if part is not None]
    return torch.cat(found) if len(found) > 1 else next(iter(found), None)


def _sample_logits(
    logits: Tensor, metadata: SamplingMetadata, rows: slice, ranked: bool
) -> tuple[tuple[Tensor | None, ...], dict[int, tuple[Tensor, Tensor]]]:
    """Return columns and alternatives of these rows' fp32 logits, as `SamplerOutput` takes them. Changes the logits."""
    params = metadata.params[rows]
    counters = metadata.seeds[rows], metadata.sample_indices[rows], metadata.positions[rows]
    tokens, scores, thresholds = ops.sample(logits, params, metadata.targets[rows], *counters)
    raw = ranks = None
    if metadata.raw_logprobs:
        raw = ops.sample(logits, ops.RowParams.repeat(len(logits)), tokens).scores.logprob
    alternatives = {}
    if ranked:
        for row, masked in params.outside(logits.shape[1], logits.device):
            logits[row].masked_fill_(masked, -torch.inf)
    for row, count in enumerate(metadata.num_logprobs[rows]):
        if count > 0:
            # by a tensor: by a number, CUDA multiplies with its reciprocal
            logp = logits[row] / logits.new_full((), params.temperature[row] or 1.0)
            logp = torch.where(logp >= thresholds[row], (logp.double() - scores.logsumexp[row]).float(), -torch.inf)
            values, ids = logp.topk(min(count, logp.numel()))
            alternatives[row] = ids, values
    if ranked:
        ranks = 1 + (logits > logits.gather(1, tokens[:, None])).sum(1)
    return (tokens, scores.logprob, raw, ranks), alternatives
