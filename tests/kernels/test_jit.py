"""The cache of compiled kernels, when processes fill it at the same time."""

import multiprocessing

import numpy as np
import pytest

from samebits.kernels.cpu import jit


def total(values):
    found = 0.0
    for value in values:
        found += value
    return found


def largest(values):
    return values.max()


def compile_kernel(barrier, in_turn, misses):
    """Compile a kernel for two dtypes while another process does; report how often it wasn't in the cache."""
    if not in_turn:
        jit._in_turn = lambda compile_or_load, lock: compile_or_load
    jit.serial(largest)(np.ones(2))  # what numba does once in a process
    kernel = jit.serial(total)
    for dtype in (np.int16, np.uint16):
        barrier.wait(60)
        kernel(np.ones(2, dtype))
    misses.put(sum(kernel.stats.cache_misses.values()))


@pytest.mark.parametrize("in_turn", [True, False], ids=["in-turn", "control"])
def test_processes_compile_a_kernel_once(in_turn, tmp_path, monkeypatch):
    monkeypatch.setattr(jit.numba.config, "CACHE_DIR", str(tmp_path))
    context = multiprocessing.get_context("fork")
    barrier, misses = context.Barrier(2), context.SimpleQueue()
    processes = [context.Process(target=compile_kernel, args=(barrier, in_turn, misses)) for _ in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
    assert [process.exitcode for process in processes] == [0, 0]
    seen = misses.get() + misses.get()
    assert seen == 2 if in_turn else seen > 2
    again = jit.serial(total)
    for dtype in (np.int16, np.uint16):
        assert again(np.ones(2, dtype)) == 2.0
    assert not in_turn or not again.stats.cache_misses
