"""The way from a row of logits to the distribution sampled from, a draw, and its log-probability.

Rollout and trainer call the same kernels on the same logits. Each filter keeps the tokens whose tempered logit reaches
a threshold; ties at the edge stay in. A row's vocabulary is cut into parts of _PART tokens, a program each; sums are
fp64, of a part by one fixed tree, of a row over the parts ascending. Thresholds are sought only for the rows that want
one, by sums of integers, which have no order.
"""

from __future__ import annotations

import numpy as np
import torch
import triton
import triton.language as tl

from ..backend import Sampled, Scores
from ..layout import to_device
from .launch import aligned, await_inputs, launch
from .linear import scratch

_PART = 4096
_COLUMNS = tl.constexpr(9)  # of a row's numbers, int64; the first three are the bits of fp64
_TEMPERATURE, _TOP_P, _MIN_P, _TOP_K, _SEED, _SAMPLE, _POSITION, _MASK, _TARGET = map(tl.constexpr, range(9))
_INFINITY = tl.constexpr(float("inf"))
_NO_TOKEN = tl.constexpr(0x7FFFFFFF)


@triton.jit
def _number(numbers, NAME: tl.constexpr):
    """Return one of the numbers of this program's row."""
    value = tl.load(numbers + _COLUMNS * tl.program_id(0) + NAME)
    return value.to(tl.float64, bitcast=True) if NAME < 3 else value


@triton.jit
def _row(logits, numbers, masks, vocab):
    """Return the temperature of this program's row, and what `_tempered` wants to know of the row."""
    row = tl.program_id(0).to(tl.int64)
    temperature = _number(numbers, _TEMPERATURE)
    divisor = tl.where(temperature == 0.0, 1.0, temperature).to(tl.float32)
    mask = _number(numbers, _MASK)
    return temperature, (logits + row * vocab, vocab, divisor, masks + mask * ((vocab + 31) // 32), mask >= 0)


@triton.jit
def _tempered(source, j):
    """Return fp32 logits / T of tokens j; -inf for masked ones and beyond the vocabulary."""
    logits, vocab, divisor, words, masked = source
    z = tl.div_rn(tl.load(logits + j, mask=j < vocab, other=-_INFINITY), divisor)
    word = tl.load(words + j // 32, mask=masked & (j < vocab), other=-1)
    return tl.where(word >> (j % 32) & 1 == 0, -_INFINITY, z)


@triton.jit
def _unkey(key):
    """Return the fp32 number whose place in the order of all fp32 numbers is `key`, int64."""
    bits = tl.where(key >= 0, key, key ^ 0x7FFFFFFF).to(tl.int32)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _key(x):
    bits = x.to(tl.int32, bitcast=True).to(tl.int64)
    return tl.where(bits >= 0, bits, bits ^ 0x7FFFFFFF)


@triton.jit
def _largest(peaks, parts, PARTS: tl.constexpr):
    """Return the row's largest tempered logit, and whether the row has a distribution."""
    p = tl.arange(0, PARTS)
    most = tl.max(tl.load(peaks + tl.program_id(0).to(tl.int64) * parts + p, mask=p < parts, other=-_INFINITY), 0)
    return most, tl.abs(most) < _INFINITY


@triton.jit(do_not_specialize_on_alignment=["masks"])
def _peaks(logits, numbers, masks, peaks, thresholds, vocab, parts, PART: tl.constexpr):
    """Write each part's largest tempered logit, infinite if a logit is not finite; and a threshold that all reach."""
    await_inputs()
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    _, source = _row(logits, numbers, masks, vocab)
    j = part * PART + tl.arange(0, PART)
    raw = tl.load(logits + row * vocab + j, mask=j < vocab, other=0.0)
    bad = (~(tl.abs(raw) <= 3.4028235e38)).to(tl.int32)  # also a NaN
    most = tl.max(_tempered(source, j), 0)
    tl.store(peaks + row * parts + part, tl.where(tl.sum(bad, 0) > 0, _INFINITY, most))
    if part == 0:
        tl.store(thresholds + row, -_INFINITY)


@triton.jit
def _units(z, most, BY_MASS: tl.constexpr):
    """Return what a token adds to a share, int64: 1, or its weight in units of 2^-40 of the most likely token's."""
    if BY_MASS:
        return (tl.exp(z - most) * 1099511627776.0).to(tl.int64)
    return tl.full(z.shape, 1, tl.int64)


@triton.jit
def _share(source, vocab, most, edge, BY_MASS: tl.constexpr, PART: tl.constexpr):
    """Return the units and the number of the tokens that reach the edge."""
    units, count = tl.zeros((PART,), tl.int64), tl.zeros((PART,), tl.int32)
    for start in range(0, vocab, PART):
        j = start + tl.arange(0, PART)
        z = _tempered(source, j)
        reached = (z >= edge) & (j < vocab)
        units += tl.where(reached, _units(z, most, BY_MASS), 0)
        count += reached.to(tl.int32)
    return tl.sum(units, 0), tl.sum(count, 0)


@triton.jit
def _threshold(
    source, vocab, most, floor, goal, candidates, BY_MASS: tl.constexpr, PART: tl.constexpr, ROOM: tl.constexpr
):  # fmt: skip
    """Return the largest number that tokens of `goal` units reach; those that reach `floor` have as many.

    Passes over the row halve the range of values and that of their bits in turn, until the tokens between its ends fit
    `candidates` [ROOM]; the search ends among these.
    """
    low, high, above = _key(floor), _key(most), tl.full((), _INFINITY, tl.float32)
    units_above, between, count_above = tl.full((), 0, tl.int64), vocab, 0
    by_value = True
    while (low < high) & (between > ROOM):
        centre = _key(0.5 * tl.maximum(_unkey(low), most - 64.0) + 0.5 * _unkey(high))
        halfway = (low + high + 1) >> 1
        middle = tl.where(by_value & (centre > low) & (centre <= high), centre, halfway)
        edge = _unkey(middle)
        units, count = _share(source, vocab, most, edge, BY_MASS, PART)
        enough = units >= goal
        between = tl.where(enough, count - count_above, between + count_above - count)
        low, high = tl.where(enough, middle, low), tl.where(enough, high, middle - 1)
        above, units_above = tl.where(enough, above, edge), tl.where(enough, units_above, units)
        count_above = tl.where(enough, count_above, count)
        by_value = not by_value
    if low < high:
        found = 0
        for start in range(0, vocab, PART):
            j = start + tl.arange(0, PART)
            z = _tempered(source, j)
            inside = (z >= _unkey(low)) & (z < above) & (j < vocab)
            tl.store(candidates + found + tl.cumsum(inside.to(tl.int32), 0) - 1, z, mask=inside)
            found += tl.sum(inside.to(tl.int32), 0)
        tl.debug_barrier()  # what other threads stored is there
        c = tl.arange(0, ROOM)
        z = tl.load(candidates + c, mask=c < found, other=-_INFINITY)
        units = _units(z, most, BY_MASS)
        while low < high:
            middle = (low + high + 1) >> 1
            enough = units_above + tl.sum(tl.where(z >= _unkey(middle), units, 0), 0) >= goal
            low, high = tl.where(enough, middle, low), tl.where(enough, high, middle - 1)
    return _unkey(low)


@triton.jit(do_not_specialize_on_alignment=["masks"])
def _thresholds(
    logits, numbers, masks, peaks, thresholds, candidates, vocab, parts,
    PARTS: tl.constexpr, PART: tl.constexpr, ROOM: tl.constexpr,
):  # fmt: skip
    await_inputs()
    row = tl.program_id(0).to(tl.int64)
    temperature, source = _row(logits, numbers, masks, vocab)
    top_p, min_p, top_k = _number(numbers, _TOP_P), _number(numbers, _MIN_P), _number(numbers, _TOP_K)
    most, finite = _largest(peaks, parts, PARTS)
    candidates = candidates + row * ROOM
    threshold = tl.full((), -_INFINITY, tl.float32)
    if finite & (temperature != 0.0):
        if (top_k > 0) & (top_k < vocab):
            threshold = _threshold(source, vocab, most, threshold, top_k, candidates, False, PART, ROOM)
        if top_p < 1.0:
            total, _ = _share(source, vocab, most, threshold, True, PART)
            goal = tl.maximum(tl.ceil(top_p * total.to(tl.float64)).to(tl.int64), 1)
            tl.debug_barrier()  # every thread is done with the other filter's candidates
            threshold = _threshold(source, vocab, most, threshold, goal, candidates, True, PART, ROOM)
        if min_p > 0.0:
            threshold = tl.maximum(threshold, most + tl.log(min_p).to(tl.float32))
    tl.store(thresholds + row, threshold)


@triton.jit
def _weights(z, most, threshold):
    """Return fp64 weights of the tokens that reach the threshold, 0 for others."""
    return tl.where(z >= threshold, tl.exp(z - most), 0.0).to(tl.float64)


@triton.jit
def _mix(x):
    """Apply the finaliser of SplitMix64 (Steele, Lea & Flood, 2014)."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def _uniform(seed, sample, position):
    """Return an fp64 in [0, 1) with 53 random bits, a pure function of its three arguments; the CPU's, too."""
    golden = tl.full((), 0x9E3779B97F4A7C15, tl.uint64)
    x = _mix(seed.to(tl.uint64, bitcast=True) + golden)
    x = _mix(x ^ (sample.to(tl.uint64, bitcast=True) + golden))
    x = _mix(x ^ (position.to(tl.uint64, bitcast=True) + golden + golden))
    return (x >> 11).to(tl.float64) * (1.0 / 9007199254740992.0)


@triton.jit
def _draw(source, most, threshold, sums, parts, goal, PART: tl.constexpr):
    """Return the first token at which the cumulative weight exceeds `goal`; the distribution's last where none does."""
    before = tl.zeros((), tl.float64)
    start = tl.full((), -_INFINITY, tl.float64)
    chosen, last = -1, 0
    for part in range(parts):
        mass = tl.load(sums + part, cache_modifier=".cg")
        here = (chosen < 0) & (mass > 0.0) & (before + mass > goal)
        chosen, start = tl.where(here, part, chosen), tl.where(here, before, start)
        last = tl.where(mass > 0.0, part, last)
        before += mass
    j = tl.where(chosen >= 0, chosen, last) * PART + tl.arange(0, PART)
    weights = _weights(_tempered(source, j), most, threshold)
    first = tl.min(tl.where((start + tl.cumsum(weights, 0) > goal) & (weights > 0.0), j, _NO_TOKEN), 0)
    return tl.where(first < _NO_TOKEN, first, tl.max(tl.where(weights > 0.0, j, 0), 0)).to(tl.int64)


@triton.jit
def _finish(
    source, numbers, temperature, most, finite, threshold, sums, token, results, vocab, parts, PART: tl.constexpr
):  # fmt: skip
    """Draw this program's row's token unless it is given, and write it with its scores to results [5, R]."""
    row, rows = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    total, mean = tl.zeros((), tl.float64), tl.zeros((), tl.float64)
    best = tl.full((), _NO_TOKEN, tl.float64)
    for part in range(parts):
        total += tl.load(sums + part, cache_modifier=".cg")
        mean += tl.load(sums + parts + part, cache_modifier=".cg")
        best = tl.minimum(best, tl.load(sums + 2 * parts + part, cache_modifier=".cg"))
    if token < 0:
        token = best.to(tl.int64)
        if finite & (temperature != 0.0):
            u = _uniform(_number(numbers, _SEED), _number(numbers, _SAMPLE), _number(numbers, _POSITION))
            token = _draw(source, most, threshold, sums, parts, u * total, PART)
        token = tl.minimum(token, vocab - 1)
    here = tl.max(_tempered(source, token + tl.arange(0, 1)), 0)
    log_total = tl.log(total)
    log_sum_exp = most.to(tl.float64) + log_total
    wrong = tl.where(finite, 0.0, float("nan")).to(tl.float64)
    kept = tl.where(here >= threshold, here.to(tl.float64) - log_sum_exp, -_INFINITY)
    tl.store(results + row, token.to(tl.float64, bitcast=True))
    tl.store(results + rows + row, kept + wrong)
    tl.store(results + 2 * rows + row, log_total - mean / total + wrong)
    tl.store(results + 3 * rows + row, log_sum_exp + wrong)
    tl.store(results + 4 * rows + row, best + wrong)


@triton.jit(do_not_specialize=["stride"], do_not_specialize_on_alignment=["masks", "targets"])
def _scores(
    logits, numbers, masks, peaks, thresholds, targets, stride, sums, arrivals, results, vocab, parts,
    PARTS: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """Write f64 sums [R, 3, parts]: of weights, and of weights * (tempered logit - largest); the first largest.

    The last of a row's programs to finish takes them all, and draws and scores the row's token.
    """
    await_inputs()
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    temperature, source = _row(logits, numbers, masks, vocab)
    most, finite = _largest(peaks, parts, PARTS)
    threshold = tl.load(thresholds + row)
    j = part * PART + tl.arange(0, PART)
    z = _tempered(source, j)
    weights = _weights(z, most, threshold)
    sums = sums + 3 * row * parts
    tl.store(sums + part, tl.sum(weights, 0), cache_modifier=".cg")
    shifted = tl.where(weights > 0.0, weights * (z - most).to(tl.float64), 0.0)
    tl.store(sums + parts + part, tl.sum(shifted, 0), cache_modifier=".cg")
    best = tl.min(tl.where((z == most) & (j < vocab), j, _NO_TOKEN), 0)
    tl.store(sums + 2 * parts + part, best.to(tl.float64), cache_modifier=".cg")
    tl.debug_barrier()  # all three are written before this program counts as done
    if tl.atomic_add(arrivals + row, 1, sem="acq_rel") == parts - 1:
        tl.store(arrivals + row, 0)  # as the next launch expects it
        token = tl.load(targets + row * stride)
        _finish(source, numbers, temperature, most, finite, threshold, sums, token, results, vocab, parts, PART)


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

    Waits for nothing: one upload, two launches, and one more where a row has a filter.
    """
    logits = aligned(logits)
    rows, vocab = logits.shape
    device, parts = logits.device, -(-vocab // _PART)
    results, thresholds = logits.new_empty((5, rows), dtype=torch.float64), logits.new_empty(rows)
    found = Sampled(results[0].view(torch.int64), Scores(*results[1:].unbind()), thresholds)
    if not rows:
        return found
    settings = np.stack((temperature, top_p, min_p), 1).astype(np.float64).view(np.int64)
    on_host = isinstance(targets, np.ndarray)
    columns = top_k, np.asarray(seeds).view(np.int64), samples, positions, mask_rows, targets if on_host else top_k
    host = np.concatenate((settings, np.stack(columns, 1)), 1).view(np.int32).reshape(-1)
    words = masks.view(np.int32).reshape(-1)
    uploaded = to_device(np.concatenate((host, words)), device)
    numbers = uploaded[: host.size].view(torch.int64).view(rows, -1)
    shared = logits, numbers, uploaded[host.size :] if words.size else uploaded
    given = numbers[:, -1] if isinstance(targets, np.ndarray) else targets
    peaks = logits.new_empty(rows, parts)
    shape = {"PARTS": triton.next_power_of_2(parts), "PART": _PART}
    launch(_peaks, (rows, parts), *shared, peaks, thresholds, vocab, parts, PART=_PART, num_warps=8)
    if ((top_k > 0) | (top_p < 1) | (min_p > 0)).any():
        candidates = logits.new_empty(rows, _PART)
        now = *shared, peaks, thresholds, candidates
        launch(_thresholds, (rows,), *now, vocab, parts, ROOM=_PART, **shape, num_warps=16)
    sums = logits.new_empty((rows, 3, parts), dtype=torch.float64)
    arrivals = scratch(device, torch.int32, rows)
    launch(
        _scores, (rows, parts), *shared, peaks, thresholds, given, given.stride(0), sums, arrivals, results,
        vocab, parts, **shape, num_warps=8,
    )  # fmt: skip
    return found
