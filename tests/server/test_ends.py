"""How the server ends, and what its processes do when others die: as processes, under signals and behind a proxy."""

import contextlib
import http.client
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import psutil
import pytest

from samebits.engine.weights import WeightGroup

from helpers.processes import command_line, started
from helpers.serving import free_port, in_background, served_checkpoint, wait_for


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
            silent = socket.create_server(("127.0.0.1", 0))  # a rendezvous that never answers
            address = free_port() if step == "transfer" else silent.getsockname()[1]
            where = {"master_address": "127.0.0.1", "master_port": address, "rank_offset": 1, "world_size": 2}
            join = {**where, "group_name": "g", "backend": "gloo"}
            tensors = {"names": ["model.norm.weight"], "dtypes": ["float32"], "shapes": [[100]], "group_name": "g"}
            with contextlib.ExitStack() as open_calls:
                open_calls.enter_context(in_background(http.post, f"{url}/init_weights_update_group", json=join))
                if step == "transfer":
                    group = WeightGroup("127.0.0.1", where["master_port"], 0, 2, "g")
                    wait_for(lambda url=url: http.get(f"{url}/weight_info").json()["weight_groups"] == ["g"])
                    post = in_background(http.post, f"{url}/update_weights_from_distributed", json=tensors)
                    open_calls.enter_context(post)
                wait_for(lambda url=url: http.get(f"{url}/is_paused").json()["state"] == "updating")
                process.send_signal(signal.SIGTERM)
                assert process.wait(40) == 0, (step, process.stdout.read())
            silent.close()
            if step == "transfer":
                group.close()


@pytest.mark.slow
@pytest.mark.parametrize("signals", [1, 2])
def test_sigterm_lets_slow_readers_have_their_replies_and_a_second_one_doesn_t(path, signals):
    body = {"prompt": [7] * 100, "max_tokens": 400, "n": 60, "logprobs": 20, "ignore_eos": True}
    with command_line(path, "--max-num-seqs", "64") as (process, url), contextlib.closing(connect(url)) as connection:
        connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**16)
        connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
        reply = connection.getresponse()  # its head: what follows is more than sockets hold
        for _ in range(signals):
            process.send_signal(signal.SIGTERM)
            time.sleep(1)
        if signals == 1:
            time.sleep(6)  # longer than replies of aborted requests have
            choices = json.loads(reply.read())["choices"]
            assert len(choices) == 60 and {c["finish_reason"] for c in choices} == {"length"}
        assert process.wait(5) == 0, process.stdout.read()


def connect(url: str) -> http.client.HTTPConnection:
    """A connection that reads when it is told to."""
    address = url.removeprefix("http://")
    connection = http.client.HTTPConnection(address, timeout=60)
    connection.connect()
    return connection


# --- behind a proxy ---------------------------------------------------------------------------------------------------

NGINX = """
daemon off; pid {folder}/pid; error_log stderr; worker_processes 1; events {{}}
http {{ access_log off; client_body_temp_path {folder}; proxy_temp_path {folder}; fastcgi_temp_path {folder};
        uwsgi_temp_path {folder}; scgi_temp_path {folder};
        server {{ listen 127.0.0.1:{port}; {location} }} }}
"""


def nginx(folder, port, url) -> list[str]:
    if shutil.which("nginx") is None:
        pytest.skip("needs nginx")
    folder.chmod(0o777)
    docs = Path(__file__).parents[2] / "docs/serving.md"
    location = re.search(r"^location / .*$", docs.read_text(), re.MULTILINE)[0].replace("http://127.0.0.1:8000", url)
    (folder / "nginx.conf").write_text(NGINX.format(folder=folder, port=port, location=location))
    return ["nginx", "-c", str(folder / "nginx.conf")]


def router(module: str, port: int, url: str) -> list[str]:
    pytest.importorskip(module)
    command = [sys.executable, "-m", f"{module}.launch_router", "--port", str(port), "--worker-urls", url]
    return [*command, "--prometheus-port", str(free_port())]


@pytest.mark.slow
@pytest.mark.parametrize("proxy", ["nginx", "vllm_router", "sglang_router"])
def test_no_control_route_is_open_through_a_proxy(path, proxy, tmp_path):
    control = free_port()
    with command_line(path, "--control-port", str(control), "--served-model-name", "tiny") as (_, url):
        port = free_port()
        command = nginx(tmp_path, port, url) if proxy == "nginx" else router(proxy, port, url)
        paths = httpx.get(f"{url}/openapi.json").json()["paths"]
        calls = {(method, route): call["tags"][0] for route, calls in paths.items() for method, call in calls.items()}
        controls = {call for call, tag in calls.items() if tag.endswith("control")}
        free = {"/v1/completions", "/v1/chat/completions", "/inference/v1/generate", "/generate", "/tokenize",
                "/detokenize"}  # fmt: skip
        assert {route for method, route in calls.keys() - controls if method == "post"} == free
        assert ("get", "/flush_cache") in controls

        def cached_tokens() -> int:
            body = {"prompt": [5] * 100, "max_tokens": 1, "model": "tiny"}
            usage = httpx.post(f"{url}/v1/completions", json=body).json()["usage"]
            return usage["prompt_tokens_details"]["cached_tokens"]

        def told() -> tuple:
            routes = ("/is_paused", "/is_sleeping", "/weight_info")
            return cached_tokens() > 0, *(httpx.get(f"{url}{route}").json() for route in routes)

        with started(command, port), httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as http:
            wait_for(lambda: http.post("/v1/completions", json={"prompt": "x", "model": "tiny"}).status_code == 200)
            assert cached_tokens() == 0
            before = told()
            assert before[0] and before[1] == {"is_paused": False, "state": "serving"}
            body = {"new_version": "pwned", "model_path": str(path), "mode": "abort", "abort_all": True}
            for method, route in controls:
                reply = http.request(method, route, json=body)
                # routers ask each worker to flush and sum up what came: vLLM's by a 500, SGLang's by "1 failed"
                failed = route == "/flush_cache" and "failed" in reply.text
                assert failed or reply.status_code in (403, 404, 405), (method, route, reply.text)
                assert told() == before, (method, route)
        local = f"http://127.0.0.1:{control}"
        assert httpx.post(f"{local}/flush_cache").status_code == 200
        assert cached_tokens() == 0
        assert httpx.post(f"{local}/pause").json() == {"status": "paused"}
        assert httpx.post(f"{local}/update_weight_version", json={"new_version": "own"}).status_code == 200
        told_now = [httpx.get(f"{url}{route}").json() for route in ("/is_paused", "/weight_version")]
        assert told_now == [{"is_paused": True, "state": "paused"}, {"weight_version": "own"}]


@pytest.mark.slow
@pytest.mark.parametrize(("proxy", "status"), [("nginx", 200), ("vllm_router", 401)])
def test_an_admin_key_controls_through_nginx_and_vllms_router_drops_it(path, proxy, status, tmp_path):
    (tmp_path / "admin").write_text("secret")
    with command_line(path, "--admin-key-file", str(tmp_path / "admin"), "--served-model-name", "tiny") as (_, url):
        port = free_port()
        command = nginx(tmp_path, port, url) if proxy == "nginx" else router(proxy, port, url)
        with started(command, port), httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as http:
            wait_for(lambda: http.post("/v1/completions", json={"prompt": "x", "model": "tiny"}).status_code == 200)
            assert http.post("/pause").status_code == 401
            assert http.post("/pause", headers={"authorization": "Bearer secret"}).status_code == status
        assert httpx.get(f"{url}/is_paused").json()["is_paused"] is (status == 200)


@pytest.mark.slow
def test_keys_come_from_files_and_empty_ones_are_refused_before_the_model_loads(path, tmp_path):
    (tmp_path / "admin").write_text("secret\n")
    with command_line(path, "--admin-key-file", str(tmp_path / "admin")) as (process, url):
        assert "secret" not in " ".join(psutil.Process(process.pid).cmdline())
        assert httpx.post(f"{url}/pause").status_code == 401
        header = {"authorization": "Bearer secret"}
        assert httpx.post(f"{url}/pause", headers=header | {"x-forwarded-for": "10.0.0.1"}).status_code == 200
    command = [Path(sys.executable).with_name("samebits"), "serve", "nowhere"]
    for variable in ("SAMEBITS_API_KEY", "SAMEBITS_ADMIN_KEY"):
        environment = os.environ | {variable: ""}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
        assert done.returncode == 2 and "a key is empty" in done.stderr
