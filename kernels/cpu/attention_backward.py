"""Gradients of blocked attention, as plain tensor code in fp32: a fixed order, and products that fit the cache."""

from collections.abc import Iterator, Sequence

import torch

_SPAN = 128  # tokens
_ROWS = 256  # of queries in a tile


def attention_backward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    grad: torch.Tensor,
    lengths: Sequence[int],
    scale: float,
    window: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of q [T, heads, D], k and v [T, kv_heads, D], in their dtypes, for packed sequences."""
    dtypes = q.dtype, k.dtype, v.dtype
    q, k, v, out, lse, grad = (t.float() for t in (q, k, v, out, lse, grad))
    grads = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    sequence = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    first = 0
    for count in _spans(lengths):
        span = slice(first, first + count)
        parts = _span_backward(
            q[span], k[span], v[span], out[span], lse[span], grad[span], sequence[span], scale, window
        )
        for whole, part in zip(grads, parts, strict=True):
            whole[span] = part
        first += count
    return grads[0].to(dtypes[0]), grads[1].to(dtypes[1]), grads[2].to(dtypes[2])


def _spans(lengths: Sequence[int]) -> Iterator[int]:
    """Yield the number of tokens of neighbouring sequences to take together, up to _SPAN.

    Short sequences alone would be many small products.
    """
    span = 0
    for length in lengths:
        if span and span + length > _SPAN:
            yield span
            span = 0
        span += length
    if span:
        yield span


def _span_backward(q, k, v, out, lse, grad, sequence, scale, window):
    """Return the gradients of packed sequences, [T, heads, D] fp32, by tiles of query rows: a fixed order.

    Source: Dao et al., 2022, section B.2. sequence: int64 [T], the sequence of each token.
    """
    length, kv_heads = k.shape[:2]
    group = q.shape[1] // kv_heads

    def by_kv_head(t):  # [T, heads, x] -> [kv_heads, T * group, x]
        return t.reshape(t.shape[0], kv_heads, group, -1).transpose(0, 1).flatten(1, 2)

    keys, values = k.transpose(0, 1), v.transpose(0, 1)
    delta = (grad * out).sum(-1, keepdim=True)
    grad_q, grad_k, grad_v = torch.empty_like(q), torch.zeros_like(keys), torch.zeros_like(values)
    for start in range(0, length, _ROWS):
        stop = min(start + _ROWS, length)
        low = max(0, start - window + 1) if window else 0
        seen = slice(low, stop)
        queries, upstream = by_kv_head(q[start:stop]), by_kv_head(grad[start:stop])
        row, column = torch.arange(start, stop)[:, None], torch.arange(low, stop)
        hidden = (column > row) | (sequence[column] != sequence[row])
        if window:
            hidden |= column <= row - window
        minus_lse, minus_delta = (-by_kv_head(t) for t in (lse[start:stop, :, None], delta[start:stop]))
        logp = torch.baddbmm(minus_lse, queries, keys[:, seen].transpose(1, 2), alpha=scale)
        weights = logp.clamp_max_(1.0).exp_()  # hidden ones may be any, and infinity times 0 is NaN; others are <= 0
        weights.unflatten(1, (-1, group)).mul_(~hidden[:, None])
        grad_v[:, seen] += weights.transpose(1, 2) @ upstream
        grad_scores = torch.baddbmm(minus_delta, upstream, values[:, seen].transpose(1, 2)).mul_(weights)
        grad_k[:, seen] += grad_scores.transpose(1, 2) @ queries
        part = (grad_scores @ keys[:, seen]).unflatten(1, (-1, group))
        grad_q[start:stop] = part.transpose(0, 1).flatten(1, 2)
    return grad_q.mul_(scale), grad_k.mul_(scale).transpose(0, 1), grad_v.transpose(0, 1)
