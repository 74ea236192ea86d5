"""The cache of compiled kernels, when processes fill it at the same time."""

import contextlib
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from numba.core.caching import IndexDataCacheFile

from samebits.kernels.cpu import jit


def total(values):
    found = 0.0
    for value in values:
        found += value
    return found


@pytest.mark.parametrize("locked", [True, False], ids=["locked", "control"])
def test_processes_that_save_at_once_take_files_of_their_own(locked, tmp_path, monkeypatch):
    """Two dispatchers are as two processes; each waits for the other once it has read the index."""
    monkeypatch.setattr(jit.numba.config, "CACHE_DIR", str(tmp_path))
    if not locked:
        monkeypatch.setattr(jit, "_locked", lambda method, lock: method)
    kernels = [jit.serial(total) for _ in range(2)]
    for kernel, dtype in zip(kernels, (np.int16, np.uint16), strict=True):
        kernel(np.ones(2, dtype))
        kernel._cache.flush()
    both, save_index = threading.Barrier(2), IndexDataCacheFile._save_index

    def wait_and_save(self, overloads):
        with contextlib.suppress(threading.BrokenBarrierError):
            both.wait(0.5 if locked else 30.0)
        save_index(self, overloads)

    monkeypatch.setattr(IndexDataCacheFile, "_save_index", wait_and_save)
    saves = [(kernel._cache.save_overload, *entry) for kernel in kernels for entry in kernel.overloads.items()]
    with ThreadPoolExecutor(2) as threads:
        for done in [threads.submit(*save) for save in saves]:
            done.result()
    files = kernels[0]._cache._cache_file._load_index()
    assert both.broken == locked
    assert len(files) == (2 if locked else 1)
