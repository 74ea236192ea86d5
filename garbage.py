"""The garbage collector, switched off for a while."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_lock = threading.Lock()
_blocks = 0  # that are under way, in all threads
_was_on = False


@contextmanager
def without_collections() -> Iterator[None]:
    """Let no cycle be collected, by any thread, until the block ends, and all others like it."""
    global _blocks, _was_on
    with _lock:
        if _blocks == 0:
            _was_on = gc.isenabled()
            gc.disable()
        _blocks += 1
    try:
        yield
    finally:
        with _lock:
            _blocks -= 1
            if _blocks == 0 and _was_on:
                gc.enable()
