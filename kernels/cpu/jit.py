"""How the CPU kernels are compiled: numba, cached on disk, never with fast-math.

Without fast-math LLVM may vectorise a loop only where that changes no bit, so the source's order of IEEE-754
operations *is* the reduction tree. The cache folder is keyed by a hash of every kernel source: numba itself looks at
one file only, and a stale object file must not outlive a change to a function that was inlined into it.
"""

import hashlib
import pathlib
import threading
from contextlib import contextmanager
from functools import wraps

import numba
import torch

SOURCES = sorted(pathlib.Path(__file__).parent.glob("*.py"))
SOURCE_HASH = hashlib.sha256(b"".join(p.read_bytes() for p in SOURCES)).hexdigest()[:16]

_pool = threading.Lock()  # numba's fallback pool (workqueue) aborts the process on concurrent launches


@contextmanager
def _cache_folder():
    before = numba.config.CACHE_DIR
    numba.config.CACHE_DIR = before or str(pathlib.Path.home() / ".cache" / "samebits" / f"kernels-{SOURCE_HASH}")
    try:
        yield
    finally:
        numba.config.CACHE_DIR = before


def inline(function):
    """A helper compiled into its callers."""
    return numba.njit(error_model="numpy", nogil=True)(function)


def kernel(function):
    """A serial kernel, callable from Python."""
    with _cache_folder():
        return numba.njit(cache=True, error_model="numpy", nogil=True)(function)


def parallel(function):
    """A kernel whose `prange` runs on as many threads as torch uses (`torch.set_num_threads`)."""
    with _cache_folder():
        compiled = numba.njit(cache=True, parallel=True, error_model="numpy", nogil=True)(function)

    @wraps(function)
    def launch(*args):
        with _pool:
            numba.set_num_threads(min(torch.get_num_threads(), numba.config.NUMBA_NUM_THREADS))
            return compiled(*args)

    launch.compiled = compiled  # type: ignore[attr-defined]
    return launch
