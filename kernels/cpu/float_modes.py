"""The modes of the CPU's arithmetic, which any library may change in a thread, and on which every bit depends."""

import numba
import numpy as np
import torch

from ..backend import NumericsError
from .jit import parallel

_DENORMAL = np.array([1 << 20], np.uint32).view(np.float32)[0]  # by its bits: a literal might be flushed, too
_NUMBERS = np.array([_DENORMAL, 0.5, 1.0, 1e-10], np.float32)  # operands that no compiler can fold
FLUSHES = 1
ROUNDS_ELSEWHERE = 2


@parallel
def _find_modes(numbers, found):
    for i in numba.prange(found.shape[0]):
        one = numbers[2]
        if numbers[0] * numbers[1] == 0.0:
            found[i] |= FLUSHES
        if one + numbers[3] != one or one - numbers[3] != one:
            found[i] |= ROUNDS_ELSEWHERE


def check_float_modes() -> None:
    """Raise NumericsError, naming the mode, unless all threads of the team keep denormals and round to nearest."""
    found = np.zeros(torch.get_num_threads(), np.int64)
    _find_modes(_NUMBERS, found)
    modes = int(np.bitwise_or.reduce(found))
    if modes & FLUSHES:
        raise NumericsError(
            "denormal numbers are flushed to zero in this process (torch.set_flush_denormal, or a library that was "
            "compiled with -ffast-math); bits depend on it: unset it before threads start"
        )
    if modes & ROUNDS_ELSEWHERE:
        raise NumericsError(
            "the rounding mode of this process is not to nearest (fesetround); bits depend on it: set FE_TONEAREST"
        )
