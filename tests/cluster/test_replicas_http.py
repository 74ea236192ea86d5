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


def test_a_server_of_replicas_hides_the_death_of_one(paths, expected, ray_cluster):
    with Serving(paths[0], llm={"replicas": 2, **SMALL}) as server, Client(server.url) as client:
        assert server.get("/get_world_size") == {"world_size": 2}
        info = server.get("/server_info")
        assert (info["dp_size"], info["pp_size"], info["max_running_requests"]) == (2, 1, 32)
        client.update_weights(exact_model(paths[1]))
        victim = faults.process_of(server.llm.engine.replicas[0])
        threading.Timer(0.3, victim.kill).start()
        found = [bits(client.generate(PROMPTS, PARAMS)) for _ in range(4)]
        assert found == [expected[1]] * 4
        wait_for(lambda: len(server.llm.engine.serving) == 2, 60)  # without any request that asks for it
        assert server.get("/health") == {"status": "ok"}
        assert client.update_weights(exact_model(paths[0])) == 2, "the group is made again, with the new replica"
        assert bits(client.generate(PROMPTS, PARAMS)) == expected[0]
        with in_background(client.generate, PROMPTS, PARAMS) as failed:
            wait_for(lambda: server.llm.stats().num_running > 0)
            server.kill_engine_thread()
        assert "SystemExit" in str(failed[0]), "a clear error, in time"
        assert bits(client.generate(PROMPTS, PARAMS)) == expected[0]
        server.idle()


def test_a_request_does_not_wait_for_news_of_busy_replicas(paths, expected, ray_cluster, monkeypatch):
    """One replica is long in a step, nobody else has work: the engine's thread waits for its report."""
    monkeypatch.setattr("samebits.cluster.replicated_engine.POLL", 25.0)
    long = dataclasses.replace(PARAMS, max_tokens=400)
    with Serving(paths[0], llm={"replicas": 2, **SMALL}) as server, Client(server.url) as client:
        processes = {replica.client: faults.process_of(replica) for replica in server.llm.engine.replicas}
        with in_background(client.generate, PROMPTS[:1], long) as late:
            wait_for(lambda: any(a.received for a in list(server.llm.engine.dispatcher.assigned.values())))
            stopped = processes[next(a.client for a in list(server.llm.engine.dispatcher.assigned.values()))]
            stopped.suspend()
            try:
                start = time.monotonic()
                assert bits(client.generate(PROMPTS[1:2], PARAMS)) == expected[0][2:4]
                assert time.monotonic() - start < 10 and not late
            finally:
                stopped.resume()
    assert bits(late[0]) == bits(LLM(paths[0], **SMALL).generate(PROMPTS[:1], long, use_tqdm=False))


def test_a_paused_server_makes_its_replicas_pause(paths, expected, ray_cluster):
    with Serving(paths[0], llm={"replicas": 2, **SMALL}) as server, Client(server.url) as client:
        server.ok("/pause_generation", {"mode": "in_place"})
        with in_background(client.generate, PROMPTS, PARAMS) as found:
            time.sleep(1)
            assert server.llm.stats().generation_tokens == 0 and not found
            faults.kill(server.llm.engine.replicas[0])
            wait_for(lambda: len(server.llm.engine.serving) < 2)
            wait_for(lambda: len(server.llm.engine.serving) == 2, 60)
            time.sleep(1)
            assert server.llm.stats().generation_tokens == 0, "a new replica pauses, too"
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
