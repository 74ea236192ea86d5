"""The way from a row of logits to the distribution sampled from, a draw, and its log-probability.

Rollout and trainer call the same kernel on the same logits, so they agree on every filter's edge. Each filter keeps
the tokens whose tempered logit reaches a threshold; ties at the edge stay in. A threshold is a token's logit: a
histogram says in which bin it lies, and a bisection finds it there. No sort, and no sum but that of one tree decides.
"""

import math

import numpy as np
import torch
from numba import float32, float64, int32, int64, prange, uint32, uint64

from ..backend import Sampled, Scores
from .elementwise import exp
from .jit import inline, parallel

_GROUP = 256  # entries per partial sum; a sum is 32 interleaved chains per group, then groups ascending, all in fp64
_LARGEST = float32(3.4028235e38)
_BINS, _PER_NAT = 2048, float32(64.0)  # of a histogram, from the largest logit down
_SLACK = 1e-9  # relative: far more than fp64 sums of the same weights differ by


@inline
def _temper(logits, divisor, z):
    """Write logits / divisor to z; return the largest, and whether all logits are finite."""
    lanes, bad = np.full(32, -np.inf, np.float32), np.zeros(32, np.int32)
    whole = z.size - z.size % 32
    for start in range(0, whole, 32):
        for lane in range(32):
            x = logits[start + lane]
            z[start + lane] = x / divisor
            lanes[lane] = max(lanes[lane], x / divisor)
            bad[lane] += int32(not abs(x) <= _LARGEST)  # also a NaN
    for j in range(whole, z.size):
        z[j] = logits[j] / divisor
        lanes[0] = max(lanes[0], z[j])
        bad[0] += int32(not abs(logits[j]) <= _LARGEST)
    return _most(lanes), bad.sum() == 0


@inline
def _mask(words, z):
    """Give -inf to the tokens whose bits are not set; return the largest of the others' z."""
    lanes = np.full(32, -np.inf, np.float32)
    for j in range(z.size):
        if words[j >> 5] >> uint32(j & 31) & uint32(1) == 0:
            z[j] = -np.inf
        lanes[0] = max(lanes[0], z[j])
    return lanes[0]


@inline
def _most(lanes):
    most = lanes[0]
    for lane in range(1, 32):
        most = max(most, lanes[lane])
    return most


@inline
def _group_sum(weights, z, threshold, lanes):
    """Return the sum of the weights of a group's tokens with z >= threshold, by 32 interleaved chains."""
    lanes[:] = 0.0
    whole = z.size - z.size % 32
    for first in range(0, whole, 32):
        for lane in range(32):
            weight = float64(weights[first + lane])  # read also where it doesn't count, or the loop is no vector's
            lanes[lane] += weight if z[first + lane] >= threshold else 0.0
    for j in range(whole, z.size):
        lanes[j - whole] += float64(weights[j]) if z[j] >= threshold else 0.0
    return _fold(lanes)


@inline
def _group(row, number):
    """Return a row's group: a view, in which indices are seen to be none from the end, or loops are no vectors'."""
    return row[number * _GROUP : (number + 1) * _GROUP]


@inline
def _fold(lanes):
    width = 16
    while width > 0:
        for lane in range(width):
            lanes[lane] += lanes[lane + width]
        width //= 2
    return lanes[0]


@inline
def _term(weight, z, most, threshold):
    """Return what a token adds to the sum of weight * (z - most)."""
    term = float64(weight) * (float64(z) - float64(most))
    return term if z >= threshold and weight > 0.0 else 0.0


@inline
def _add_products(weights, z, most, threshold, lanes):
    """Add weight * (z - most) of a group's tokens with z >= threshold to 32 interleaved chains."""
    whole = z.size - z.size % 32
    for first in range(0, whole, 32):
        for lane in range(32):
            lanes[lane] += _term(weights[first + lane], z[first + lane], most, threshold)
    for j in range(whole, z.size):
        lanes[j - whole] += _term(weights[j], z[j], most, threshold)


@inline
def _sums(weights, z, most, threshold, sums, lanes, products):
    """Return the sums of weight and weight * (z - most) of the tokens with z >= threshold.

    The first is that of the groups' sums, which are written to `sums`; the second is one of 32 interleaved chains.
    """
    total = 0.0
    products[:] = 0.0
    for number in range(sums.size):
        part, of_part = _group(weights, number), _group(z, number)
        sums[number] = _group_sum(part, of_part, threshold, lanes)
        _add_products(part, of_part, most, threshold, products)
        total += sums[number]
    return total, _fold(products)


@inline
def _sum(weights, z, threshold, sums, lanes):
    """Return the sum of the weights of the tokens with z >= threshold; write the groups' to `sums`."""
    total = 0.0
    for number in range(sums.size):
        sums[number] = _group_sum(_group(weights, number), _group(z, number), threshold, lanes)
        total += sums[number]
    return total


@inline
def _bin(z, most):
    return max(int32(0), min(int32(min((most - z) * _PER_NAT, float32(_BINS))), int32(_BINS - 1)))


@inline
def _within(z, most, first, last, found, owners):
    """Put the logits of bins `first` to `last` into `found`, and the groups that they are in; return how many."""
    count = 0
    for j in range(z.size):
        if uint32(_bin(z[j], most) - first) <= uint32(last - first):  # one branch, hardly ever taken
            found[count] = z[j]
            owners[count] = j // _GROUP
            count += 1
    return count


@inline
def _between(low, high, found, owners, count):
    """Keep the logits from low to high, in their order; return how many."""
    kept = 0
    for i in range(count):
        if low <= found[i] <= high:
            found[kept] = found[i]
            owners[kept] = owners[i]
            kept += 1
    return kept


@inline
def _halve(found, low, high):
    """Return the largest of the logits `found` below the middle of [low, high], and the smallest of the others."""
    middle = low * float32(0.5) + high * float32(0.5) if low >= -_LARGEST else -_LARGEST
    if not middle > low:  # neighbours
        middle = high
    below, above = low, high
    for x in found:
        if x < middle:
            below = max(below, x)
        else:
            above = min(above, x)
    return below, above


@inline
def _top_k_threshold(z, most, k, found, owners):
    """Return the k-th largest logit; -inf, which masked tokens have, where k exceeds the others."""
    counts = np.zeros(_BINS, np.int32)
    for j in range(z.size):
        counts[_bin(z[j], most)] += 1
    above, place = 0, 0
    while above + counts[place] < k:
        above += counts[place]
        place += 1
    count = _within(z, most, place, place, found, owners)
    low, high = found[:count].min(), found[:count].max()
    while low < high:
        below, edge = _halve(found[:count], low, high)
        reached = above
        for x in found[:count]:
            reached += int64(x >= edge)
        if reached >= k:
            low = edge
        else:
            high = below
    return low


@inline
def _top_p_threshold(weights, z, most, p, threshold, sums, lanes, found, owners):
    """Return the largest logit such that the tokens which reach it hold a share p of those that reach `threshold`."""
    mass = p * _sum(weights, z, threshold, sums, lanes)
    masses = np.zeros(_BINS, np.float64)
    for j in range(z.size):
        if z[j] >= threshold:
            masses[_bin(z[j], most)] += weights[j]
    first, reached = 0, 0.0
    while first < _BINS - 1 and reached + masses[first] < mass * (1 - _SLACK):
        reached += masses[first]
        first += 1
    last = first
    while last < _BINS - 1 and reached + masses[last] < mass * (1 + _SLACK):
        reached += masses[last]
        last += 1
    count = _within(z, most, first, last, found, owners)
    low, high = max(found[:count].min(), threshold), found[:count].max()
    _sum(weights, z, low, sums, lanes)
    while low < high:
        below, edge = _halve(found[:count], low, high)
        for i in range(count):  # the other groups' sums are the same for any edge from low to high
            if i == 0 or owners[i] != owners[i - 1]:
                number = owners[i]
                sums[number] = _group_sum(_group(weights, number), _group(z, number), edge, lanes)
        total = 0.0
        for number in range(sums.size):
            total += sums[number]
        if total >= mass:
            low = edge
        else:
            high = below
        count = _between(low, high, found, owners, count)
    return low


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
def _draw(weights, z, threshold, u, total, sums):
    """Return the first token at which the cumulative weight exceeds u * total; sums: of the groups' weights."""
    goal, mass, chosen = u * total, 0.0, -1
    for number in range(sums.size):
        if mass + sums[number] > goal:
            for j in range(number * _GROUP, min((number + 1) * _GROUP, z.size)):
                if z[j] >= threshold and weights[j] > 0.0:
                    chosen = j
                    mass += weights[j]
                    if mass > goal:
                        return j
            return chosen
        mass += sums[number]
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
        found, owners = np.empty(vocab, np.float32), np.empty(vocab, np.int32)
        lanes, products = np.empty(32, np.float64), np.empty(32, np.float64)
        sums = np.empty((vocab + _GROUP - 1) // _GROUP, np.float64)
        greedy = temperature[i] == 0.0
        divisor = float32(1.0) if greedy else float32(temperature[i])
        most, finite = _temper(logits[i], divisor, z)
        if mask_rows[i] >= 0:
            most = _mask(masks[mask_rows[i]], z)
        for j in range(vocab):
            weights[j] = exp(z[j] - most)
        threshold = float32(-np.inf)
        if not greedy:
            if 0 < top_k[i] < vocab:
                threshold = _top_k_threshold(z, most, top_k[i], found, owners)
            if top_p[i] < 1.0:
                threshold = _top_p_threshold(weights, z, most, top_p[i], threshold, sums, lanes, found, owners)
            if min_p[i] > 0.0:
                threshold = max(threshold, most + float32(math.log(min_p[i])))
        total, mean = _sums(weights, z, most, threshold, sums, lanes, products)
        token, best = targets[i], -1
        if token >= 0 or greedy:
            best = 0
            while best < vocab - 1 and z[best] != most:
                best += 1
        if token < 0:
            if greedy:
                token = best
            else:
                token = _draw(weights, z, threshold, uniform(seeds[i], samples[i], positions[i]), total, sums)
        tokens[i] = max(token, 0)  # of logits that aren't finite: a step under way may read it
        log_total = math.log(total)
        log_sum_exp = float64(most) + log_total
        kept = token >= 0 and z[token] >= threshold
        logprob[i] = float64(z[token]) - log_sum_exp if kept else -np.inf
        entropy[i] = log_total - mean / total
        logsumexp[i] = log_sum_exp
        argmax[i] = best
        if not (finite and math.isfinite(total)):
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
    targets: torch.Tensor | np.ndarray,
    seeds: np.ndarray,
    samples: np.ndarray,
    positions: np.ndarray,
) -> Sampled:
    """Return a token of each row of fp32 logits [R, V], drawn or given, and its scores; see `Backend.sample`.

    The most likely token is -1 where a token was drawn by chance.
    """
    rows = logits.shape[0]
    targets = torch.from_numpy(np.ascontiguousarray(targets)) if isinstance(targets, np.ndarray) else targets
    tokens, thresholds = torch.empty_like(targets), logits.new_empty(rows)
    scores = logits.new_empty(4, rows, dtype=torch.float64)
    _sample(
        logits.numpy(), temperature, top_k, top_p, min_p, masks, mask_rows, targets.numpy(), seeds, samples, positions,
        tokens.numpy(), scores.numpy(), thresholds.numpy(),
    )  # fmt: skip
    return Sampled(tokens, Scores(*scores.unbind()), thresholds)
