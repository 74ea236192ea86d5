"""How kernels are compiled: callees with them, and into a cache that processes fill at the same time."""

import multiprocessing
import time
from contextlib import nullcontext

import numba
import numpy as np
import pytest
from numba.core.caching import IndexDataCacheFile

from samebits.kernels.cpu import jit
from samebits.kernels.cpu.callees import _CalleeLibrary

DTYPES = (np.int16, np.uint16)
IN_TURN = pytest.mark.parametrize("in_turn", [True, False], ids=["in-turn", "control"])


def total(values):
    found = 0.0
    for value in values:
        found += value
    return found


def largest(values):
    return values.max()


def compile_kernel(dtypes, barrier, in_turn, together, misses):
    """Compile a kernel for these dtypes while another process does; report how often it wasn't in the cache.

    together: in each process another dtype, which waits until the other process compiles, too.
    """
    if not in_turn:
        jit.FileLock = nullcontext
    jit.serial(largest)(np.ones(2))  # what numba does once in a process
    kernel = jit.serial(total)
    if together:
        compile_types, read_index = kernel._compiler.compile, IndexDataCacheFile._load_index

        def compile_beside_the_other(*args):
            barrier.wait(60)
            return compile_types(*args)

        def read_slowly(index):
            found = read_index(index)
            time.sleep(0.3)
            return found

        kernel._compiler.compile, IndexDataCacheFile._load_index = compile_beside_the_other, read_slowly
    for dtype in dtypes:
        barrier.wait(60)
        kernel(np.ones(2, dtype))
    misses.put(sum(kernel.stats.cache_misses.values()))


def misses_of_two_processes(first, second, *args):
    context = multiprocessing.get_context("fork")
    barrier, misses = context.Barrier(2), context.SimpleQueue()
    processes = [
        context.Process(target=compile_kernel, args=(dtypes, barrier, *args, misses)) for dtypes in (first, second)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
    assert [process.exitcode for process in processes] == [0, 0]
    return misses.get() + misses.get()


def misses_of_a_third():
    kernel = jit.serial(total)
    for dtype in DTYPES:
        assert kernel(np.ones(2, dtype)) == 2.0
    return sum(kernel.stats.cache_misses.values())


@IN_TURN
def test_processes_compile_a_kernel_once(in_turn, tmp_path, monkeypatch):
    monkeypatch.setattr(jit.numba.config, "CACHE_DIR", str(tmp_path))
    seen = misses_of_two_processes(DTYPES, DTYPES, in_turn, False)
    assert seen == 2 if in_turn else seen > 2
    assert not in_turn or not misses_of_a_third()


@IN_TURN
def test_processes_compile_a_kernel_for_two_dtypes_at_once_and_save_both(in_turn, tmp_path, monkeypatch):
    monkeypatch.setattr(jit.numba.config, "CACHE_DIR", str(tmp_path))
    assert misses_of_two_processes(DTYPES[:1], DTYPES[1:], in_turn, True) == 2
    assert misses_of_a_third() == (0 if in_turn else 1)


@jit.inline
def checked(value):
    if value < 0:
        raise ValueError("negative", value)
    return value * 2


@jit.region
def double_all(values):
    for i in numba.prange(values.shape[0]):
        values[i] *= 2


def doubled(values):
    double_all(values)
    return checked(values[0])


def test_what_a_kernel_calls_is_compiled_for_it_alone_and_its_errors_arrive(tmp_path, monkeypatch):
    """The first time and from the cache: a callee's error needs what numba sets up for functions of their own."""
    monkeypatch.setattr(jit.numba.config, "CACHE_DIR", str(tmp_path))
    for misses in (1, 0):
        kernel = jit.serial(doubled)
        assert kernel(np.ones(3)) == 4.0  # the region's two times the helper's
        assert sum(kernel.stats.cache_misses.values()) == misses
        with pytest.raises(ValueError, match="negative") as caught:
            kernel(-np.ones(3))
        assert caught.value.args == ("negative", -2.0)
    for callee in checked, double_all:
        assert {type(result.library) for result in callee.overloads.values()} == {_CalleeLibrary}


def test_where_the_cache_can_not_be_written_nothing_is_cached_beside_the_sources(tmp_path, monkeypatch, caplog):
    """numba would, by the stamp of one file: machine code that outlives a change to what was inlined into it."""
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(jit.numba.config, "CACHE_DIR", str(tmp_path / "file" / "cache"))
    kernel = jit.serial(total)
    assert kernel(np.ones(2, np.int8)) == 2
    assert "samebits-kernels-" in kernel.stats.cache_path
    assert "set NUMBA_CACHE_DIR" in caplog.text
