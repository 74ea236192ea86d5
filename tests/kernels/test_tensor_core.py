"""The model of the matrix unit against a slow transcription in fractions, and the kernels' bits that it predicts."""

import json
import math
from fractions import Fraction

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

import predicted_bits
import triton.language as tl
from triton.runtime import interpreter

from samebits.kernels import ops

import helpers.interpreter  # noqa: F401  # it mends Triton's
from helpers.tensor_core import UNITS, dot


def slow_step(pairs, total, fraction, least):
    """A step on fractions: no float takes part in it."""
    terms = [(Fraction(a) * Fraction(b), place(a, least) + place(b, least)) for a, b in pairs]
    terms = [(value, where if value else -126) for value, where in terms]
    terms.append((Fraction(total), place(total, -126)))
    most = max(where for _, where in terms)
    whole = sum(toward_zero(value * Fraction(2) ** (fraction - most)) for value, _ in terms)
    value = Fraction(whole) * Fraction(2) ** (most - fraction)
    if value == 0:
        return 0.0
    last = max(exponent(value), -126) - 23
    return float(Fraction(toward_zero(value / Fraction(2) ** last)) * Fraction(2) ** last)


def toward_zero(value: Fraction) -> int:
    size = abs(value.numerator) // value.denominator
    return size if value > 0 else -size


def exponent(value: Fraction) -> int:
    size, found = abs(value), 0
    while size >= 2:
        size, found = size / 2, found + 1
    while size < 1:
        size, found = size * 2, found - 1
    return found


def place(x: float, least: int) -> int:
    return max(exponent(Fraction(x)), least) if x else least


def numbers(dtype, shape, spread, generator):
    """Random numbers with as wide exponents, some of them subnormal or zero."""
    x = torch.randn(shape, generator=generator) * torch.exp2(
        torch.randint(-spread, spread + 1, shape, generator=generator)
    )
    tiny = torch.finfo(dtype).smallest_normal * torch.rand(shape, generator=generator)
    kind = torch.randint(0, 10, shape, generator=generator)
    return torch.where(kind == 0, 0.0, torch.where(kind == 1, tiny, x)).to(dtype)


@pytest.mark.parametrize("capability", [8, 9])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_steps_are_those_of_whole_numbers(dtype, capability):
    unit, generator = UNITS[capability], torch.Generator().manual_seed(0)
    least = {torch.bfloat16: -126, torch.float16: -14}[dtype]
    for spread in (0, 4, 9):
        a, b = (numbers(dtype, (n, 3 * unit.terms), spread, generator) for n in (3, 5))
        start = torch.randn(3, 5, generator=generator).numpy()
        if spread == 9:  # all subnormal, and nothing beside which they would vanish
            a = torch.rand(a.shape, generator=generator).mul(torch.finfo(dtype).smallest_normal).to(dtype)
            start = np.zeros_like(start)
        found = dot(a, b, start, unit)
        for i, j in np.ndindex(found.shape):
            total = float(start[i, j])
            for k in range(0, a.shape[1], unit.terms):
                pairs = zip(a[i, k : k + unit.terms].tolist(), b[j, k : k + unit.terms].tolist(), strict=True)
                total = slow_step(pairs, total, unit.fraction, least)
            assert found[i, j] == total, (spread, i, j)


def test_what_is_lost_is_lost_toward_zero():
    """Worked by hand: the place of the last bit kept, and the two ways to lose what is below it."""
    one, small = torch.tensor([[1.0, 1.0]]).bfloat16(), torch.tensor([[1.0, 2.0**-25]]).bfloat16()
    assert dot(one, small)[0, 0] == 1, "kept in the step, cut from its sum"
    four = torch.tensor([[1.0, 1.0, 1.0]]).bfloat16()
    assert dot(four, torch.tensor([[1.0, 2.0**-24, 2.0**-24]]).bfloat16())[0, 0] == 1 + 2.0**-23
    assert dot(four, torch.tensor([[1.0, 2.0**-26, 2.0**-26]]).bfloat16())[0, 0] == 1, "cut before they are added"
    assert dot(four, torch.tensor([[1.0, -(2.0**-26), 0.0]]).bfloat16())[0, 0] == 1
    assert dot(four, torch.tensor([[1.0, -(2.0**-25), 0.0]]).bfloat16())[0, 0] == 1 - 2.0**-24
    assert dot(four, torch.tensor([[1.0, 2.0**-24, 2.0**-24]]).bfloat16(), unit=UNITS[8])[0, 0] == 1 + 2.0**-23
    assert dot(one, small, -np.ones((1, 1), np.float32), UNITS[8])[0, 0] == 0, "an older unit keeps a bit less"
    assert dot(one, small, -np.ones((1, 1), np.float32))[0, 0] == 2.0**-25


def test_specials():
    inf, nan, huge = math.inf, math.nan, 3.0e38
    for row, expected in [
        ([inf, 1], inf), ([-inf, 1], -inf), ([inf, -inf], nan),
        ([nan, 1], nan), ([huge, huge], inf), ([-0.0, -0.0], 0.0),
    ]:  # fmt: skip
        found = dot(torch.tensor([row]).bfloat16(), torch.ones(1, 2).bfloat16())
        assert np.array_equal(found, np.full((1, 1), expected, np.float32), equal_nan=True), row
        assert not np.signbit(found).any() or expected == -inf
    assert np.isnan(dot(torch.tensor([[inf]]).bfloat16(), torch.zeros(1, 1).bfloat16())[0, 0])
    just_below = torch.tensor([[2.0**127, 2.0**127, -(2.0**103)]]).bfloat16()
    assert dot(just_below, torch.ones(1, 3).bfloat16())[0, 0] == np.finfo(np.float32).max, "no rounding up to infinity"


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_the_kernels_give_the_bits_that_were_predicted(monkeypatch):
    """Interpreted, with the model in the matrix unit's place: the predictions walk the kernels' trees."""
    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", modelled_dot)
    monkeypatch.setitem(ops.BACKENDS, "cpu", "triton")
    ops.backend.cache_clear()
    try:
        found = predicted_bits.computed(torch.device("cpu"))
    finally:
        ops.backend.cache_clear()
    kept = json.loads(predicted_bits.KEPT.read_text())
    assert found == kept["9"], "run benchmarks/predicted_bits.py if a tree was changed on purpose"
    assert kept["8"] == predicted_bits.predicted(8)
    sums = [case for case in found if case.startswith("linear") and "rounded" not in case]
    assert not [case for case in sums if kept["8"][case] == kept["9"][case]], "the units differ"


def modelled_dot(self, a, b, d, *_):
    kind = torch.bfloat16 if a.dtype.scalar == tl.bfloat16 else torch.float16
    left, right = (torch.from_numpy(np.ascontiguousarray(t.data).view(np.int16)).view(kind) for t in (a, b))
    return interpreter.TensorHandle(dot(left, right.t(), d.data), d.dtype.scalar)
