"""NVIDIA's matrix units on a CPU: the bits of their products of 16-bit numbers with fp32 sums.

The arithmetic is that of MMA-Sim (github.com/microsoft/MMA-Sim), which was compared with real GPUs; the code is ours.
A step adds the exact products of `terms` pairs and the sum so far at once: all are aligned to the largest exponent,
cut to `fraction` bits below it and added as integers; the result is rounded toward zero to fp32. The exponent of a
product is the sum of its factors' exponents, its significand may be up to 4. Subnormal numbers aren't normalised.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

_LEAST = {torch.bfloat16: -126, torch.float16: -14, torch.float32: -126}  # exponents of subnormal numbers
_ZERO = -126  # the exponent of a product of zero
_NAN = np.uint32(0x7FFF_FFFF).view(np.float32)


@dataclass(frozen=True)
class Unit:
    """A generation's matrix unit: the pairs that a step takes, the bits that it keeps below the largest exponent."""

    terms: int
    fraction: int


UNITS = {8: Unit(8, 24), 9: Unit(16, 25), 10: Unit(16, 25), 12: Unit(16, 25)}  # by compute capability's first number


def _exponents(x: np.ndarray, least: int) -> np.ndarray:
    return np.maximum(np.where(x == 0, least, np.frexp(x)[1] - 1), least)


def _toward_zero(x: np.ndarray) -> np.ndarray:
    """Round fp64 to fp32; what is 2**128 or more is infinite."""
    with np.errstate(over="ignore"):
        near = x.astype(np.float32)
    cut = np.where(np.abs(near) > np.abs(x), np.nextafter(near, np.float32(0)), near)
    return np.where(np.abs(x) >= 2.0**128, near, cut)


def dot(a: torch.Tensor, b: torch.Tensor, start: np.ndarray | None = None, unit: Unit = UNITS[9]) -> np.ndarray:
    """Return start + a @ b.T, fp32 [M, N], for a [M, K] and b [N, K] of one 16-bit dtype, over ascending K.

    start: fp32, [M, N]; None is zeros. K is filled up with zeros, which change nothing.
    """
    least, missing = _LEAST[a.dtype], -a.shape[1] % unit.terms
    wide, other = (np.pad(t.double().numpy(), ((0, 0), (0, missing))) for t in (a, b))
    exponents, others = _exponents(wide, least), _exponents(other, least)
    total = np.zeros((len(a), len(b)), np.float32) if start is None else start
    for k in range(0, wide.shape[1], unit.terms):
        part = slice(k, k + unit.terms)
        with np.errstate(invalid="ignore"):
            terms = wide[:, None, part] * other[None, :, part]
        places = np.where(terms == 0, _ZERO, exponents[:, None, part] + others[None, :, part])
        total = _step(terms, places, total, unit.fraction)
    return total


def _step(terms: np.ndarray, places: np.ndarray, total: np.ndarray, fraction: int) -> np.ndarray:
    """Return a step's fp32 sums [M, N]; terms, fp64, and their exponents [M, N, terms]; total fp32 [M, N]."""
    terms = np.concatenate((terms, total[..., None].astype(np.float64)), -1)
    places = np.concatenate((places, _exponents(total.astype(np.float64), _LEAST[torch.float32])[..., None]), -1)
    finite = np.isfinite(terms).all(-1)
    shift = fraction - places.max(-1)
    whole = np.trunc(np.ldexp(np.where(finite[..., None], terms, 0.0), shift[..., None]))  # below 2**28: sums are exact
    out = _toward_zero(np.ldexp(whole.sum(-1) + 0.0, -shift))
    with np.errstate(invalid="ignore"):
        special = terms.sum(-1)
    return np.where(finite, out, np.where(np.isnan(special), _NAN, special)).astype(np.float32)
