"""Requests that come while no replica serves: the engine keeps them, and the first replica that serves gets them."""

from queue import SimpleQueue
from types import SimpleNamespace

import pytest

from samebits import SamplingParams
from samebits.cluster.dispatcher import Dispatcher
from samebits.engine.request import Request, Sample

NAMES = [str(i) for i in range(100)]


class Requests(dict):
    """An engine's requests, which count how often all of them are looked at."""

    scans = 0

    def values(self):
        self.scans += 1
        return super().values()


class Client:
    """A replica that notes what it gets, and that requests of one id can't be pickled for."""

    index = 0
    num_unfinished = 0

    def __init__(self, refused: str = ""):
        self.refused = refused
        self.got: list[str] = []

    def post(self, method, request):
        if request.request_id == self.refused:
            raise TypeError("cannot pickle it")
        self.got.append(request.request_id)
        future = SimpleNamespace(add_done_callback=lambda callback: None)
        return SimpleNamespace(ref=SimpleNamespace(future=lambda: future))


@pytest.fixture
def dispatcher():
    """One that has been given requests as engines do it, while none served."""
    engine = SimpleNamespace(requests=Requests(), outbox={}, config=SimpleNamespace(replicas=1))
    made = Dispatcher(engine, SimpleQueue())
    for name in NAMES:
        request = Request(name, None, [1, 2, 3], SamplingParams(max_tokens=1), 0, (), 10)
        request.samples.append(Sample(request, 0, 1, True))
        made.assign(request)
        engine.requests[name] = request
    return made


def test_requests_that_wait_for_a_replica_are_looked_at_when_one_serves_and_no_earlier(dispatcher):
    """Or the submission of many would take time in proportion to their square."""
    assert dispatcher.engine.requests.scans == 0 and not dispatcher.assigned
    client = Client()
    dispatcher.serving = [client]
    dispatcher.assign_waiting()
    assert dispatcher.engine.requests.scans == 1 and client.got == NAMES
    dispatcher.assign_waiting()
    assert client.got == NAMES, "a request went out twice"
    dispatcher.serving = []
    dispatcher.reassign(client)
    assert not dispatcher.assigned
    other = Client()
    dispatcher.serving = [other]
    dispatcher.assign_waiting()
    assert other.got == NAMES


def test_a_request_that_cant_be_sent_after_its_wait_ends_alone(dispatcher):
    dispatcher.serving = [Client(refused="7")]
    dispatcher.assign_waiting()
    ended = dispatcher.engine.outbox["7"].samples[0]
    assert (ended.finish_reason, ended.stop_reason) == ("error", "TypeError: cannot pickle it")
    assert dispatcher.serving[0].got == [name for name in NAMES if name != "7"]
    assert "7" not in dispatcher.engine.requests
