"""The machine operations that numba has no word for, against the same arithmetic in numpy."""

import numba
import numpy as np
import pytest

from samebits.kernels.cpu.simd import pairwise

SIZES = (2, 4, 8, 16, 32, 64)


def folding(size, kind):
    """Compile a function that folds an fp32 array of this size."""
    fold = pairwise(size, kind)

    @numba.njit
    def of(x):
        return fold(x.ctypes.data)

    return of


def tree(x, join):
    """The slow way: join the first half with the second until one value is left."""
    while len(x) > 1:
        x = join(x[: len(x) // 2], x[len(x) // 2 :])
    return x[0]


def bits(values):
    return np.array(values, np.float32).view(np.uint32).tolist()


def rows(size, count=50):
    """Numbers of wide exponents, so that each order of additions has other bits."""
    rng = np.random.default_rng(size)
    numbers = rng.standard_normal((count, size)) * 2.0 ** rng.integers(-12, 13, (count, size))
    return numbers.astype(np.float32)


@pytest.mark.parametrize("size", SIZES)
def test_a_sum_adds_the_first_half_to_the_second_and_so_on(size):
    total = folding(size, "sum")
    x = rows(size)
    found = bits([total(row) for row in x])
    assert found == bits([tree(row, np.add) for row in x])
    if size > 2:
        neighbours = [tree(row.reshape(2, -1).T.ravel(), np.add) for row in x]
        chains = [np.add.accumulate(row)[-1] for row in x]
        assert found != bits(neighbours), "the numbers can't tell one tree from another"
        assert found != bits(chains), "the numbers can't tell a tree from a chain"


@pytest.mark.parametrize("size", SIZES)
def test_a_maximum_keeps_the_first_of_equals_and_of_what_has_no_order(size):
    def join(a, b):
        return np.where(b > a, b, a)

    largest = folding(size, "max")
    x = rows(size)
    assert bits([largest(row) for row in x]) == bits(x.max(1))
    for row, place in zip(x, range(size), strict=False):  # the maximum in each place
        row[place] = np.float32(3e38)
        assert largest(row) == np.float32(3e38)
    odd = np.random.default_rng(size).choice(np.float32([0.0, -0.0, np.nan, -np.inf, 1.0]), (200, size))
    assert bits([largest(row) for row in odd]) == bits([tree(row, join) for row in odd])


def test_a_fold_reads_an_array_that_starts_anywhere():
    memory = rows(40, 1)[0]
    total = folding(32, "sum")
    assert [bits(total(memory[i : i + 32])) for i in range(8)] == [
        bits(tree(memory[i : i + 32], np.add)) for i in range(8)
    ]
