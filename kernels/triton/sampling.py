"""From a row of logits to the distribution sampled from, a draw, and its log-probability: one program a row.

Rollout and trainer call the same kernel on the same logits. Each filter keeps the tokens whose tempered logit reaches
a threshold; ties at the edge stay in. Thresholds are found by bisection over the bits of an fp32 number, for the rows
that need one. Sums over the vocabulary have _TILE interleaved chains in fp64, joined by one fixed tree.
"""

from __future__ import annotations

import numpy as np
import torch
import triton
import triton.language as tl

from ..ops import to_device
from .launch import aligned, launch

_TILE = 2048
_INFINITY = tl.constexpr(float("inf"))


@triton.jit
def _tempered(logits, j, vocab, divisor, banned, ban_first, ban_last):
    """fp32 logits / T of tokens j; -inf for banned ones and beyond the vocabulary."""
    z = tl.div_rn(tl.load(logits + j, mask=j < vocab, other=-_INFINITY), divisor)
    for b in range(ban_first, ban_last):
        z = tl.where(j == tl.load(banned + b), -_INFINITY, z)
    return z


@triton.jit
def _unkey(key):
    """int64 -> the fp32 number that is its place in the order of all fp32 numbers."""
    bits = tl.where(key >= 0, key, key ^ 0x7FFFFFFF).to(tl.int32)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _key(x):
    bits = x.to(tl.int32, bitcast=True).to(tl.int64)
    return tl.where(bits >= 0, bits, bits ^ 0x7FFFFFFF)


@triton.jit
def _mass(z, most, threshold):
    """fp64 weights of the tokens that reach the threshold, 0 for others."""
    return tl.where(z >= threshold, tl.exp(z - most), 0.0).to(tl.float64)


@triton.jit
def _total(logits, vocab, divisor, banned, ban_first, ban_last, most, threshold, TILE: tl.constexpr):
    lanes = tl.zeros((TILE,), tl.float64)
    for start in range(0, vocab, TILE):
        z = _tempered(logits, start + tl.arange(0, TILE), vocab, divisor, banned, ban_first, ban_last)
        lanes += _mass(z, most, threshold)
    return tl.sum(lanes, 0)


@triton.jit
def _top_k_threshold(logits, vocab, divisor, banned, ban_first, ban_last, k, TILE: tl.constexpr):
    """The largest number that at least k tokens reach."""
    low, high = _key(tl.full((), -_INFINITY, tl.float32)), tl.full((), 0x7FFFFFFF, tl.int64)
    while low < high:
        middle = (low + high + 1) >> 1
        edge = _unkey(middle)
        lanes = tl.zeros((TILE,), tl.int32)
        for start in range(0, vocab, TILE):
            j = start + tl.arange(0, TILE)
            z = _tempered(logits, j, vocab, divisor, banned, ban_first, ban_last)
            lanes += ((z >= edge) & (j < vocab)).to(tl.int32)
        enough = tl.sum(lanes, 0) >= k
        low, high = tl.where(enough, middle, low), tl.where(enough, high, middle - 1)
    return _unkey(low)


@triton.jit
def _top_p_threshold(
    logits, vocab, divisor, banned, ban_first, ban_last, most, p, threshold, TILE: tl.constexpr
):  # fmt: skip
    """The largest number such that the tokens that reach it hold the share p of those above the threshold."""
    goal = p * _total(logits, vocab, divisor, banned, ban_first, ban_last, most, threshold, TILE)
    low, high = _key(threshold), tl.full((), 0x7FFFFFFF, tl.int64)
    while low < high:
        middle = (low + high + 1) >> 1
        total = _total(logits, vocab, divisor, banned, ban_first, ban_last, most, _unkey(middle), TILE)
        low, high = tl.where(total >= goal, middle, low), tl.where(total >= goal, high, middle - 1)
    return _unkey(low)


@triton.jit
def _mix(x):
    """The finaliser of SplitMix64 (Steele, Lea & Flood, 2014)."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def _uniform(seed, sample, position):
    """fp64 in [0, 1) with 53 random bits, a pure function of its three arguments; the CPU's, too."""
    golden = tl.full((), 0x9E3779B97F4A7C15, tl.uint64)
    x = _mix(seed.to(tl.uint64, bitcast=True) + golden)
    x = _mix(x ^ (sample.to(tl.uint64, bitcast=True) + golden))
    x = _mix(x ^ (position.to(tl.uint64, bitcast=True) + golden + golden))
    return (x >> 11).to(tl.float64) * (1.0 / 9007199254740992.0)


@triton.jit
def _draw(logits, vocab, divisor, banned, ban_first, ban_last, most, threshold, goal, TILE: tl.constexpr):
    """The first token at which the cumulative weight exceeds `goal`; the last of the distribution where none does."""
    mass = tl.zeros((), tl.float64)
    chosen = tl.full((), -1, tl.int64)
    last = tl.full((), 0, tl.int64)
    start = 0
    while (start < vocab) & (chosen < 0):
        j = start + tl.arange(0, TILE)
        z = _tempered(logits, j, vocab, divisor, banned, ban_first, ban_last)
        weights = _mass(z, most, threshold)
        reached = mass + tl.cumsum(weights, 0)
        first = tl.min(tl.where((reached > goal) & (weights > 0.0), j, 0x7FFFFFFF), 0).to(tl.int64)
        chosen = tl.where(first < 0x7FFFFFFF, first, chosen)
        last = tl.maximum(last, tl.max(tl.where(weights > 0.0, j, 0), 0).to(tl.int64))
        mass += tl.sum(weights, 0)
        start += TILE
    return tl.where(chosen >= 0, chosen, last)


@triton.jit
def _distribution(
    logits, settings, counters, banned, tokens, fields, thresholds, vocab, stride, TILE: tl.constexpr
):  # fmt: skip
    """settings f64 [R, 3]: temperature, top_p, min_p; counters i64 [R, 6]: top_k, seed, sample, position, banned
    from, up to."""
    row = tl.program_id(0).to(tl.int64)
    logits = logits + row * stride
    temperature, top_p = tl.load(settings + 3 * row), tl.load(settings + 3 * row + 1)
    min_p, top_k = tl.load(settings + 3 * row + 2), tl.load(counters + 6 * row)
    ban_first, ban_last = tl.load(counters + 6 * row + 4), tl.load(counters + 6 * row + 5)
    token = tl.load(tokens + row)
    greedy = temperature == 0.0
    divisor = tl.where(greedy, 1.0, temperature).to(tl.float32)

    lanes = tl.full((TILE,), -_INFINITY, tl.float32)
    bad = tl.zeros((TILE,), tl.int32)
    for start in range(0, vocab, TILE):
        j = start + tl.arange(0, TILE)
        raw = tl.load(logits + j, mask=j < vocab, other=0.0)
        bad += (~(tl.abs(raw) <= 3.4028235e38)).to(tl.int32)  # also a NaN
        lanes = tl.maximum(lanes, _tempered(logits, j, vocab, divisor, banned, ban_first, ban_last))
    most = tl.max(lanes, 0)
    finite = (tl.sum(bad, 0) == 0) & (tl.abs(most) < _INFINITY)

    threshold = tl.full((), -_INFINITY, tl.float32)
    if finite & (temperature != 0.0):
        if (top_k > 0) & (top_k < vocab):
            threshold = _top_k_threshold(logits, vocab, divisor, banned, ban_first, ban_last, top_k, TILE)
        if top_p < 1.0:
            threshold = _top_p_threshold(
                logits, vocab, divisor, banned, ban_first, ban_last, most, top_p, threshold, TILE
            )  # fmt: skip
        if min_p > 0.0:
            threshold = tl.maximum(threshold, most + tl.log(min_p).to(tl.float32))

    sums = tl.zeros((TILE,), tl.float64)
    means = tl.zeros((TILE,), tl.float64)
    best = tl.full((TILE,), 0x7FFFFFFF, tl.int32)
    for start in range(0, vocab, TILE):
        j = start + tl.arange(0, TILE)
        z = _tempered(logits, j, vocab, divisor, banned, ban_first, ban_last)
        weights = _mass(z, most, threshold)
        sums += weights
        means += tl.where(weights > 0.0, weights * (z - most).to(tl.float64), 0.0)
        best = tl.minimum(best, tl.where((z == most) & (j < vocab), j, 0x7FFFFFFF))
    total, mean, argmax = tl.sum(sums, 0), tl.sum(means, 0), tl.min(best, 0).to(tl.int64)
    if token < 0:
        token = argmax
        if finite & (temperature != 0.0):
            u = _uniform(
                tl.load(counters + 6 * row + 1), tl.load(counters + 6 * row + 2), tl.load(counters + 6 * row + 3)
            )
            token = _draw(logits, vocab, divisor, banned, ban_first, ban_last, most, threshold, u * total, TILE)
        token = tl.minimum(token, vocab - 1)
        tl.store(tokens + row, token)

    here = tl.max(_tempered(logits, token + tl.arange(0, 1), vocab, divisor, banned, ban_first, ban_last), 0)
    log_total = tl.log(total)
    log_sum_exp = most.to(tl.float64) + log_total
    wrong = tl.where(finite, 0.0, float("nan")).to(tl.float64)
    kept = tl.where(here >= threshold, here.to(tl.float64) - log_sum_exp, -_INFINITY)
    tl.store(fields + 4 * row, kept + wrong)
    tl.store(fields + 4 * row + 1, log_total - mean / total + wrong)
    tl.store(fields + 4 * row + 2, log_sum_exp + wrong)
    tl.store(fields + 4 * row + 3, argmax.to(tl.float64) + wrong)
    tl.store(thresholds + row, threshold)


def distribution(logits, temperature, top_k, top_p, min_p, banned, tokens, seeds, samples, positions):
    """Tempered, filtered, renormalised distribution of each row of fp32 logits [R, V], on their device.

    Per row (numpy): temperature f64 (0: greedy, reported at 1), top_k i64 (0: off), top_p and min_p f64, `banned` a
    list of token-id lists, and the draw's seed u64, sample i64, position i64. tokens: int64 tensor (-1: draw one,
    written in place). Returns fields f64 [R, 4] = (log-prob of the token, entropy, log-sum-exp, most likely token)
    and thresholds f32 [R]: a token is in the distribution if its tempered logit reaches the threshold. NaN where a
    row holds a non-finite logit. Waits for nothing.
    """
    logits = aligned(logits)
    rows, vocab = logits.shape
    starts = np.zeros(rows + 1, np.int64)
    np.cumsum([len(b) for b in banned], out=starts[1:])
    settings = np.stack((temperature, top_p, min_p), 1).astype(np.float64)
    columns = top_k, np.asarray(seeds).view(np.int64), samples, positions, starts[:-1], starts[1:]
    flat = np.array([t for b in banned for t in b] or [-1], np.int64)
    device = logits.device
    fields, thresholds = logits.new_empty((rows, 4), dtype=torch.float64), logits.new_empty(rows)
    launch(
        _distribution, (rows,), logits, to_device(settings, device), to_device(np.stack(columns, 1), device),
        to_device(flat, device), tokens, fields, thresholds, vocab, logits.stride(0), TILE=_TILE, num_warps=8,
    )  # fmt: skip
    return fields, thresholds
