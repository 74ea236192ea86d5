"""Waiting for what happens elsewhere, but not for ever."""

from __future__ import annotations

import contextlib
import threading
import time


def wait_for(condition, seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)


@contextlib.contextmanager
def in_background(function, *args, **kwargs):
    """Runs function beside the block; yields a list that gets its result, or what it raised, by the block's end."""
    results: list = []

    def run() -> None:
        try:
            results.append(function(*args, **kwargs))
        except BaseException as error:
            results.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    yield results
    thread.join(60)
    assert not thread.is_alive(), "hangs"
