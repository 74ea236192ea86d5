"""The way from a row of logits to the distribution sampled from, a draw, and its log-probability.

Rollout and trainer call the same kernel on the same logits, so they agree on every filter's edge. Each filter keeps
the tokens whose tempered logit reaches a threshold; ties at the edge stay in. Thresholds are found by bisection over
the bits of an fp32 number: no sort, no order to depend on.
"""

import math

import numpy as np
import torch
from numba import float32, float64, int32, int64, prange, uint32, uint64

from ..backend import Sampled, Scores
from .elementwise import exp
from .jit import inline, parallel
from .simd import bits_float, float_bits

_GROUP = 256  # entries per partial sum; a sum is 32 interleaved chains per group, then groups ascending, all in fp64
_LARGEST = float32(3.4028235e38)


@inline
def _key(x):
    """Return the int32 that is fp32 number x's place in the order of all fp32 numbers."""
    bits = float_bits(x)
    return bits if bits >= 0 else bits ^ int32(0x7FFFFFFF)


@inline
def _unkey(key):
    return bits_float(int32(key)) if key >= 0 else bits_float(int32(key) ^ int32(0x7FFFFFFF))


@inline
def _maximum(z):
    lanes = np.full(32, -np.inf, np.float32)
    whole = z.size - z.size % 32
    for start in range(0, whole, 32):
        for lane in range(32):
            lanes[lane] = max(lanes[lane], z[start + lane])
    for j in range(whole, z.size):
        lanes[0] = max(lanes[0], z[j])
    most = lanes[0]
    for lane in range(1, 32):
        most = max(most, lanes[lane])
    return most


@inline
def _all_finite(x):
    bad = 0
    for j in range(x.size):
        bad += int64(not abs(x[j]) <= _LARGEST)  # also a NaN
    return bad == 0


@inline
def _group_sum(weights, z, threshold, start, lanes):
    stop = min(start + _GROUP, z.size)
    lanes[:] = 0.0
    whole = stop - (stop - start) % 32
    for first in range(start, whole, 32):
        for lane in range(32):
            lanes[lane] += float64(weights[first + lane]) if z[first + lane] >= threshold else 0.0
    for lane in range(stop - whole):
        lanes[lane] += float64(weights[whole + lane]) if z[whole + lane] >= threshold else 0.0
    width = 16
    while width > 0:
        for lane in range(width):
            lanes[lane] += lanes[lane + width]
        width //= 2
    return lanes[0]


@inline
def _sum(weights, z, threshold, lanes):
    """Return the sum of the weights of the tokens with z >= threshold."""
    total = 0.0
    for start in range(0, z.size, _GROUP):
        total += _group_sum(weights, z, threshold, start, lanes)
    return total


@inline
def _top_k_threshold(z, k):
    low, high = int64(_key(float32(-np.inf))), int64(2**31 - 1)
    while (
        low < high
    ):  # the largest key that at least k tokens reach; -inf, which masked tokens have, where k exceeds all
        middle = (low + high + 1) >> 1
        edge = _unkey(middle)
        count = 0
        for j in range(z.size):
            count += int64(z[j] >= edge)
        if count >= k:
            low = middle
        else:
            high = middle - 1
    return _unkey(low)


@inline
def _top_p_threshold(weights, z, p, threshold, lanes):
    mass = p * _sum(weights, z, threshold, lanes)
    low, high = int64(_key(threshold)), int64(2**31 - 1)
    while low < high:  # the largest key whose tokens hold the mass
        middle = (low + high + 1) >> 1
        if _sum(weights, z, _unkey(middle), lanes) >= mass:
            low = middle
        else:
            high = middle - 1
    return _unkey(low)


@inline
def _mix(x):
    """Apply the finaliser of SplitMix64 (Steele, Lea & Flood, 2014)."""
    x = (x ^ (x >> uint64(30))) * uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> uint64(27))) * uint64(0x94D049BB133111EB)
    return x ^ (x >> uint64(31))


@inline
def uniform(seed, sample, position):
    """Return a number in [0, 1) with 53 random bits, a pure function of its three arguments."""
    golden = uint64(0x9E3779B97F4A7C15)
    x = _mix(uint64(seed) + golden)
    x = _mix(x ^ (uint64(sample) + golden))
    x = _mix(x ^ (uint64(position) + golden + golden))
    return float64(x >> uint64(11)) * (1.0 / 9007199254740992.0)


@inline
def _draw(weights, z, threshold, u, total, lanes):
    """Return the first token at which the cumulative weight exceeds u * total."""
    goal, mass, chosen = u * total, 0.0, -1
    for start in range(0, z.size, _GROUP):
        group = _group_sum(weights, z, threshold, start, lanes)
        if mass + group > goal:
            for j in range(start, min(start + _GROUP, z.size)):
                if z[j] >= threshold and weights[j] > 0.0:
                    chosen = j
                    mass += weights[j]
                    if mass > goal:
                        return j
            return chosen
        mass += group
    for j in range(z.size):  # u * total rounded up to the total: the last token of the distribution
        if z[j] >= threshold and weights[j] > 0.0:
            chosen = j
    return chosen


@parallel
def _sample(
    logits,
    temperature,
    top_k,
    top_p,
    min_p,
    masks,
    mask_rows,
    targets,
    seeds,
    samples,
    positions,
    tokens,
    scores,
    thresholds,
):
    vocab = logits.shape[1]
    logprob = scores[0]  # the fields of `Scores`, in one array: each costs the call a microsecond
    entropy = scores[1]
    logsumexp = scores[2]
    argmax = scores[3]
    for i in prange(logits.shape[0]):
        z, weights = np.empty(vocab, np.float32), np.empty(vocab, np.float32)
        lanes = np.empty(32, np.float64)
        greedy = temperature[i] == 0.0
        divisor = float32(1.0) if greedy else float32(temperature[i])
        for j in range(vocab):
            z[j] = logits[i, j] / divisor
        mask = mask_rows[i]
        if mask >= 0:
            for j in range(vocab):
                if masks[mask, j >> 5] >> uint32(j & 31) & uint32(1) == 0:
                    z[j] = -np.inf
        most = _maximum(z)
        for j in range(vocab):
            weights[j] = exp(z[j] - most)
        threshold = float32(-np.inf)
        if not greedy:
            if 0 < top_k[i] < vocab:
                threshold = _top_k_threshold(z, top_k[i])
            if top_p[i] < 1.0:
                threshold = _top_p_threshold(weights, z, top_p[i], threshold, lanes)
            if min_p[i] > 0.0:
                threshold = max(threshold, most + float32(math.log(min_p[i])))
        total = _sum(weights, z, threshold, lanes)
        token, best = targets[i], -1
        if token >= 0 or greedy:
            best = 0
            while best < vocab - 1 and z[best] != most:
                best += 1
        if token < 0:
            if greedy:
                token = best
            else:
                token = _draw(weights, z, threshold, uniform(seeds[i], samples[i], positions[i]), total, lanes)
        tokens[i] = token
        log_total = math.log(total)
        mean = 0.0
        for j in range(vocab):
            if z[j] >= threshold and weights[j] > 0.0:
                mean += float64(weights[j]) * (float64(z[j]) - float64(most))
        log_sum_exp = float64(most) + log_total
        kept = token >= 0 and z[token] >= threshold
        logprob[i] = float64(z[token]) - log_sum_exp if kept else -np.inf
        entropy[i] = log_total - mean / total
        logsumexp[i] = log_sum_exp
        argmax[i] = best
        if not (_all_finite(logits[i]) and math.isfinite(total)):
            logprob[i] = np.nan
            entropy[i] = np.nan
            logsumexp[i] = np.nan
            argmax[i] = np.nan
        thresholds[i] = threshold


def sample(
    logits: torch.Tensor,
    temperature: np.ndarray,
    top_k: np.ndarray,
    top_p: np.ndarray,
    min_p: np.ndarray,
    masks: np.ndarray,
    mask_rows: np.ndarray,
    targets: torch.Tensor,
    seeds: np.ndarray,
    samples: np.ndarray,
    positions: np.ndarray,
) -> Sampled:
    """Return a token of each row of fp32 logits [R, V], drawn or given, and its scores; see `Backend.sample`.

    The most likely token is -1 where a token was drawn by chance.
    """
    rows = logits.shape[0]
    tokens, thresholds = torch.empty_like(targets), logits.new_empty(rows)
    scores = logits.new_empty(4, rows, dtype=torch.float64)
    _sample(
        logits.numpy(), temperature, top_k, top_p, min_p, masks, mask_rows, targets.numpy(), seeds, samples, positions,
        tokens.numpy(), scores.numpy(), thresholds.numpy(),
    )  # fmt: skip
    return Sampled(tokens, Scores(*scores.unbind()), thresholds)
