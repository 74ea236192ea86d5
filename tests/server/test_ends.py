"""How the server ends, and what its processes do when others die: as processes, under signals and behind a proxy."""

import contextlib
import signal

import httpx
import pytest

from samebits.engine.weights import WeightGroup

from helpers.processes import command_line
from helpers.serving import free_port, in_background, served_checkpoint, wait_for

PROMPT = [17, 900, 3, 44]


@pytest.fixture(scope="module")
def path(checkpoint, tmp_path_factory):
    return served_checkpoint(checkpoint("llama"), tmp_path_factory.mktemp("served") / "model")


def test_sigterm_with_a_live_weight_group_exits_0(path):
    port = free_port()
    with command_line(path, "--control-port", str(port)) as (process, _), httpx.Client(timeout=60) as http:
        where = {"master_address": "127.0.0.1", "master_port": free_port(), "rank_offset": 1, "world_size": 2}
        body = where | {"group_name": "g", "backend": "gloo"}
        url = f"http://127.0.0.1:{port}/init_weights_update_group"
        with in_background(http.post, url, json=body) as replies:
            group = WeightGroup("127.0.0.1", where["master_port"], 0, 2, "g")
        assert replies[0].status_code == 200, replies[0].text
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0, process.stdout.read()
        group.close()


@pytest.mark.slow
def test_sigterm_in_a_rendezvous_and_in_a_transfer_exits_0(path):
    for step in ("rendezvous", "transfer"):
        port = free_port()
        with command_line(path, "--control-port", str(port)) as (process, _), httpx.Client(timeout=60) as http:
            url = f"http://127.0.0.1:{port}"
            where = {"master_address": "127.0.0.1", "master_port": free_port(), "rank_offset": 1, "world_size": 2}
            join = {**where, "group_name": "g", "backend": "gloo"}
            manifest = {"names": ["model.norm.weight"], "dtypes": ["float32"], "shapes": [[100]], "group_name": "g"}
            with contextlib.ExitStack() as open_calls:
                open_calls.enter_context(in_background(http.post, f"{url}/init_weights_update_group", json=join))
                if step == "transfer":
                    group = WeightGroup("127.0.0.1", where["master_port"], 0, 2, "g")
                    wait_for(lambda url=url: http.get(f"{url}/weight_info").json()["weight_groups"] == ["g"])
                    post = in_background(http.post, f"{url}/update_weights_from_distributed", json=manifest)
                    open_calls.enter_context(post)
                wait_for(lambda url=url: http.get(f"{url}/is_paused").json()["state"] == "updating")
                process.send_signal(signal.SIGTERM)
                assert process.wait(40) == 0, (step, process.stdout.read())
            if step == "transfer":
                group.close()
