"""How graphs are recorded, without a GPU: torch's part is left out."""

import contextlib
import gc
from types import SimpleNamespace

import pytest
import torch

from samebits.engine.cuda_graphs import capture


def test_no_garbage_is_collected_while_a_graph_is_recorded(monkeypatch):
    stream = SimpleNamespace(wait_stream=lambda other: None)
    recording = []

    @contextlib.contextmanager
    def graph(*args, **options):
        recording.append(True)
        yield
        recording.clear()

    for name in ("device", "stream"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: SimpleNamespace(replay=None))
    monkeypatch.setattr(torch.cuda, "graph", graph)
    seen = []

    def run():
        seen.append((bool(recording), gc.isenabled()))

    capture(run, torch.device("cuda"), None, stream)
    assert seen == [(False, True), (True, False)] and gc.isenabled()

    def fail():
        if recording:
            raise torch.OutOfMemoryError("no memory")

    with pytest.raises(torch.OutOfMemoryError):
        capture(fail, torch.device("cuda"), None, stream)
    assert gc.isenabled()
