"""Links of a pipeline's stages. Over nccl the code is the same, but for how it waits."""

import threading
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from samebits.cluster import pipeline
from samebits.cluster.pipeline import Link
from samebits.engine.weights import WorkerError
from samebits.engine.weights.group import listening_store


def linked(stages: int, timeout: float = 30.0) -> list[Link]:
    """Links of stages that are threads here."""
    store = listening_store("127.0.0.1")
    found: dict[int, Link] = {}

    def join(rank: int) -> None:
        found[rank] = Link("127.0.0.1", store.port, rank, stages, timeout, torch.device("cpu"))

    threads = [threading.Thread(target=join, args=(rank,)) for rank in range(stages)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [found[rank] for rank in range(stages)]


def test_steps_go_through_all_stages_in_order():
    """The first stage is several steps ahead, and the tensors that it sent are gone when they are received."""
    first, middle, last = linked(3)
    steps = [torch.full((3, 4), float(i)).bfloat16() for i in range(5)]
    for hidden in steps:
        first.send(hidden.clone())
    for hidden in steps:
        got = torch.empty_like(hidden)
        middle.receive(got)
        middle.send(got + 1)
    for hidden in steps:
        got = torch.empty_like(hidden)
        last.receive(got)
        assert torch.equal(got, hidden + 1)
    for link in (first, middle, last):
        link.close()


def test_hidden_states_that_do_not_come_are_an_error():
    first, last = linked(2, timeout=0.3)
    with pytest.raises(WorkerError, match=r"hidden states of stage 0 did not come within 0\.3 s"):
        last.receive(torch.empty(2, 2))
    first.close()
    last.close()


@pytest.mark.parametrize(("device", "expected"), [("cpu", (timedelta(seconds=7),)), ("cuda", ())])
def test_nccl_is_not_waited_for_on_the_host(device, expected, monkeypatch):
    """torch says of nccl's `wait`: with a timeout it blocks the CPU thread, without it the current stream."""
    assert "block the CPU thread" in dist.Work.wait.__doc__
    waited, made = [], []

    class Backend:
        def recv(self, tensors, source, tag):
            return self

        def wait(self, *limit):
            waited.append(limit)

    monkeypatch.setattr(pipeline, "new_backend", lambda *args: made.append(args[4]) or Backend())
    link = Link("127.0.0.1", 1, 1, 2, 7, torch.device(device))
    link.receive(torch.empty(1))
    assert waited == [expected]
    assert made == ["nccl" if device == "cuda" else "gloo"]
