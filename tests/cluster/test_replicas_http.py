"""Replicas and stages behind the HTTP server."""

import dataclasses
import threading
import time

import pytest

from samebits import LLM
from samebits.integrations import Client
from samebits.trainer import exact_model

from helpers import faults
from helpers.cluster_runs import PARAMS, PROMPTS, SMALL, bits
from helpers.serving import Serving, in_background, wait_for


@pytest.fixture(scope="module")
def serving(paths, ray_cluster):
    with Serving(paths[0], llm={"replicas": 2, **SMALL}) as server:
        yield server


@pytest.fixture
def server(serving, paths):
    """A server of two replicas that both live, with the first weights."""
    wait_for(lambda: len(serving.llm.engine.serving) == 2, 60)
    serving.ok("/update_weights_from_disk", {"model_path": str(paths[0])})
    return serving


@pytest.fixture
def client(server):
    with Client(server.url) as client:
        yield client


@pytest.mark.slow
def test_a_server_without_a_replica_that_lives_says_so_in_its_health_and_its_metrics(server, monkeypatch):
    """Before any of them has served a request, too: this test comes first."""
    waits = threading.Event()
    start = type(server.llm.engine)._start

    def held(engine, one):
        waits.wait(60)
        return start(engine, one)

    monkeypatch.setattr(type(server.llm.engine), "_start", held)
    assert server.get("/health") == {"status": "ok"}
    for replica in server.llm.engine.replicas:
        faults.kill(replica)
    wait_for(lambda: not server.llm.engine.serving)
    assert server.http.get("/health").status_code == 503 and "no replica" in server.http.get("/health").text
    assert server.get("/liveness") == {"status": "ok"}
    assert server.http.get("/metrics").status_code == 200
    for route in ("/v1/loads", "/get_load", "/server_info"):
        server.get(route)
    waits.set()
    wait_for(lambda: len(server.llm.engine.serving) == 2, 90)
    assert server.get("/health") == {"status": "ok"}
    server.ok("/inference/v1/generate", {"token_ids": [3], "sampling_params": {"max_tokens": 1}})


def test_a_server_of_replicas_hides_the_death_of_one(server, client, paths, expected):
    assert server.get("/get_world_size") == {"world_size": 2}
    info = server.get("/server_info")
    assert (info["dp_size"], info["pp_size"], info["max_running_requests"]) == (2, 1, 32)
    version = client.update_weights(exact_model(paths[1]))
    victim = faults.process_of(server.llm.engine.replicas[0])
    threading.Timer(0.3, victim.kill).start()
    found = [bits(client.generate(PROMPTS, PARAMS)) for _ in range(4)]
    assert found == [expected[1]] * 4
    wait_for(lambda: len(server.llm.engine.serving) == 2, 60)  # without any request that asks for it
    assert server.get("/health") == {"status": "ok"}
    assert client.update_weights(exact_model(paths[0])) == version + 1, "the group is made again, with the new replica"
    assert bits(client.generate(PROMPTS, PARAMS)) == expected[0]
    with in_background(client.generate, PROMPTS, PARAMS) as failed:
        wait_for(lambda: server.llm.stats().num_running > 0)
        server.kill_engine_thread()
    assert "SystemExit" in str(failed[0]), "a clear error, in time"
    assert bits(client.generate(PROMPTS, PARAMS)) == expected[0]
    server.idle()


def test_a_request_does_not_wait_for_news_of_busy_replicas(server, client, paths, monkeypatch):
    """One replica is long in a step, nobody else has work: the engine's thread waits for its report."""
    monkeypatch.setattr("samebits.cluster.replicated_engine.POLL", 25.0)
    first, second = [[[900 - i, 3] * 5] for i in range(2)]  # which no replica knows
    long = dataclasses.replace(PARAMS, max_tokens=400)
    here = LLM(paths[0], **SMALL)
    expected = [bits(here.generate(first, long, use_tqdm=False)), bits(here.generate(second, PARAMS, use_tqdm=False))]
    processes = {replica.client: faults.process_of(replica) for replica in server.llm.engine.replicas}
    with in_background(client.generate, first, long) as late:
        wait_for(lambda: any(a.received for a in list(server.llm.engine.dispatcher.assigned.values())))
        stopped = processes[next(a.client for a in list(server.llm.engine.dispatcher.assigned.values()))]
        stopped.suspend()
        try:
            start = time.monotonic()
            assert bits(client.generate(second, PARAMS)) == expected[1]
            assert time.monotonic() - start < 10 and not late
        finally:
            stopped.resume()
    assert bits(late[0]) == expected[0]


@pytest.mark.slow
def test_a_paused_server_makes_its_replicas_pause(server, client, expected):
    before = server.llm.stats().generation_tokens
    server.ok("/pause_generation", {"mode": "in_place"})
    with in_background(client.generate, PROMPTS, PARAMS) as found:
        time.sleep(1)
        assert server.llm.stats().generation_tokens == before and not found
        faults.kill(server.llm.engine.replicas[0])
        wait_for(lambda: len(server.llm.engine.serving) < 2)
        wait_for(lambda: len(server.llm.engine.serving) == 2, 60)
        time.sleep(1)
        assert server.llm.stats().generation_tokens == before, "a new replica pauses, too"
        server.ok("/continue_generation")
    assert bits(found[0]) == expected[0]


@pytest.mark.slow
def test_a_server_of_two_stages_hides_the_death_of_one(paths, expected, ray_cluster):
    with Serving(paths[0], llm={"pipeline_parallel_size": 2, **SMALL}) as server, Client(server.url) as client:
        assert server.get("/get_world_size") == {"world_size": 2}
        client.update_weights(exact_model(paths[1]))
        assert bits(client.generate(PROMPTS, PARAMS)) == expected[1]
        server.ok("/update_weights_from_disk", {"model_path": str(paths[0])})
        faults.kill(server.llm.engine.replicas[0].client.actors[1])
        assert bits(client.generate(PROMPTS, PARAMS)) == expected[0]
