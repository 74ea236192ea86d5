"""The server under real clients, load and signals. Needs the extra `clients` and a Chromium; `make test-server`."""

import asyncio
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import psutil
import pytest
import torch

from samebits import LLM, SamplingParams

from helpers.processes import command_line, started
from helpers.serving import Serving, free_port, served_checkpoint, wait_for

pytestmark = pytest.mark.slow
PROMPT = [17, 900, 3, 44]
SAMPLING = {"max_tokens": 12, "seed": 7, "n": 2, "ignore_eos": True, "logprobs": 0}


@pytest.fixture(scope="module")
def path(checkpoint, tmp_path_factory):
    return served_checkpoint(checkpoint("llama"), tmp_path_factory.mktemp("served") / "model")


@pytest.fixture(scope="module")
def expected(path):
    params = SamplingParams(max_tokens=12, seed=7, n=2, ignore_eos=True)
    output = LLM(path, kv_cache_memory_bytes=2**22).generate([PROMPT], params, use_tqdm=False)[0]
    return [(c.token_ids, c.logprobs) for c in output.completions]


@pytest.fixture(scope="module")
def servers(path):
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with Serving(path) as first, Serving(path) as second:
        yield first, second
    torch.set_num_threads(before)


@contextlib.contextmanager
def router(module, servers):
    """A router in front of the servers, round robin; an HTTP client of it. Each server must get a part."""
    pytest.importorskip(module)
    port, before = free_port(), [sum(s.engine.finished.values()) for s in servers]
    command = [sys.executable, "-m", f"{module}.launch_router", "--port", str(port), "--policy", "round_robin"]
    command += ["--prometheus-port", str(free_port()), "--worker-urls", *(s.url for s in servers)]
    with started(command, port), httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as http:
        yield http
    after = [sum(s.engine.finished.values()) for s in servers]
    assert all(a > b for a, b in zip(after, before, strict=True)), "one server got nothing"


# --- routers and clients ----------------------------------------------------------------------------------------------


def test_sglangs_router_in_front_of_two_servers(servers, expected):
    sampling = {"max_new_tokens": 12, "sampling_seed": 7, "n": 2, "ignore_eos": True}
    body = {"input_ids": PROMPT, "sampling_params": sampling, "return_logprob": True}
    with router("sglang_router", servers) as http:
        wait_for(lambda: http.post("/generate", json=body).status_code == 200)
        for _ in range(6):
            replies = http.post("/generate", json=body).json()
            logprobs = [[e[0] for e in r["meta_info"]["output_token_logprobs"]] for r in replies]
            assert list(zip([r["output_ids"] for r in replies], logprobs, strict=True)) == expected
        lines = http.post("/generate", json=body | {"stream": True}).text.split("\n\n")
        last = {e["index"]: e for e in (json.loads(x[6:]) for x in lines if x.startswith("data: {"))}
        assert [last[i]["output_ids"] for i in (0, 1)] == [ids for ids, _ in expected]


def test_vllms_router_in_front_of_two_servers(servers, expected):
    body = {"model": "tiny", "prompt": PROMPT, "return_token_ids": True} | SAMPLING
    with router("vllm_router", servers) as http:
        wait_for(lambda: http.post("/v1/completions", json=body).status_code == 200)
        for _ in range(6):
            choices = http.post("/v1/completions", json=body).json()["choices"]
            assert [(c["token_ids"], c["logprobs"]["token_logprobs"]) for c in choices] == expected
        assert http.post("/v1/completions", json=body | {"stream": True}).text.endswith("data: [DONE]\n\n")


def test_renderers_strict_client(servers):
    client = pytest.importorskip("renderers.client")
    import openai

    class Plain:
        """A renderer of one message's characters."""

        def __init__(self, tokenizer):
            self.tokenizer = tokenizer

        def get_stop_token_ids(self):
            return [2]

        def parse_response(self, ids, **_):
            from types import SimpleNamespace

            text = self.tokenizer.decode(ids)
            return SimpleNamespace(content=text, reasoning_content=None, tool_calls=[], reasoning_complete=True)

    server = servers[0]

    async def run():
        api = openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none")
        renderer = Plain(server.llm.tokenizer)
        settings = {"max_tokens": 9, "seed": 3, "temperature": 1.0}
        return await client.generate(
            client=api, renderer=renderer, messages=[], model="tiny", prompt_ids=PROMPT, sampling_params=settings,
            cache_salt="v1",
        )  # fmt: skip

    found = asyncio.run(run())
    params = SamplingParams(max_tokens=9, seed=3, stop_token_ids=[2])
    llm = LLM(server.llm.path, kv_cache_memory_bytes=2**22)
    completion = llm.generate([PROMPT], params, use_tqdm=False)[0].completions[0]
    assert (found["completion_ids"], found["completion_logprobs"]) == (completion.token_ids, completion.logprobs)


def test_curl(servers):
    curl = shutil.which("curl")
    if curl is None:
        pytest.skip("no curl")
    body = json.dumps({"prompt": PROMPT, "stream": True, "max_tokens": 3, "ignore_eos": True})
    command = [curl, "-sN", f"{servers[0].url}/v1/completions", "-H", "Content-Type: application/json", "-d", body]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    assert lines[-2] == "data: [DONE]" and len([x for x in lines if x.startswith("data: {")]) == 3
    for data in (["-d", "{}", "-H", "Content-Type: application/json"], []):
        reply = subprocess.run([curl, "-sX", "POST", f"{servers[0].url}/resume", *data], capture_output=True, text=True)
        assert json.loads(reply.stdout) == {"status": "resumed"}


# --- load, faults, signals --------------------------------------------------------------------------------------------


def test_500_streams_at_once_all_end_with_their_own_bits(servers, expected):
    server = servers[0]
    body = {"token_ids": PROMPT, "sampling_params": SAMPLING, "stream": True}

    async def one(http, i):
        response = await http.post("/inference/v1/generate", json=body | {"request_id": f"s{i}"})
        assert response.status_code == 200, response.text
        found = {}
        for line in response.text.split("\n\n"):
            if line.startswith("data: {"):
                for c in json.loads(line[6:])["choices"]:
                    ids, values = found.setdefault(c["index"], ([], []))
                    ids += c["token_ids"]
                    values += [e["logprob"] for e in c["logprobs"]["content"]]
        return [found[i] for i in sorted(found)]

    async def run():
        limits = httpx.Limits(max_connections=500)
        async with httpx.AsyncClient(base_url=server.url, timeout=120, limits=limits) as http:
            return await asyncio.gather(*(one(http, i) for i in range(500)))

    assert all(found == expected for found in asyncio.run(run()))
    server.idle()


def test_killed_clients_leave_nothing_behind(servers):
    server = servers[0]
    script = (
        "import httpx, sys\n"
        "body = {'prompt': [5, 6], 'max_tokens': 490, 'ignore_eos': True, 'stream': True}\n"
        "with httpx.stream('POST', sys.argv[1] + '/v1/completions', json=body) as r:\n"
        "    for line in r.iter_lines():\n"
        "        print('got', flush=True)\n"
    )
    before = server.engine.finished.get("abort", 0)
    command = [sys.executable, "-c", script, server.url]
    clients = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    server.ok("/pause?mode=keep")
    server.ok("/resume")
    for client in clients:
        assert client.stdout.readline() == "got\n"
        client.send_signal(signal.SIGKILL)
        client.wait()
    server.idle()
    assert server.engine.finished["abort"] > before


@pytest.mark.parametrize("layout", [("--pp", 2), ("--replicas", 2, "--backend", "ray")], ids=str)
def test_stages_and_replicas_behind_one_address(path, expected, layout):
    """On Ray without a cluster, which `samebits serve` then starts, and ends."""
    with command_line(path, *layout, seconds=120) as (process, url):

        def completions():
            reply = httpx.post(f"{url}/v1/completions", json={"prompt": PROMPT, "return_token_ids": True} | SAMPLING)
            return [(c["token_ids"], c["logprobs"]["token_logprobs"]) for c in reply.json()["choices"]]

        def children():
            return psutil.Process(process.pid).children(recursive=True)

        assert httpx.get(f"{url}/get_world_size").json() == {"world_size": 2}
        assert completions() == expected
        if "ray" in layout:
            actors = [p for p in children() if "ray::Host" in p.name()]
            actors[0].kill()
            assert completions() == expected
            wait_for(lambda: len({p for p in children() if "ray::Host" in p.name()} - set(actors)) == 1, 60)
            assert completions() == expected
        left = children()
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
        assert left and not psutil.wait_procs(left, 60)[1]  # Ray's own agents look for their raylet now and then


def test_sigterm_under_load_finishes_what_runs_turns_the_rest_away_and_exits_0(path):
    with command_line(path, "--shutdown-timeout", "60") as (process, url):
        body = {"token_ids": PROMPT, "sampling_params": {"max_tokens": 500, "ignore_eos": True, "n": 8}}

        async def run():
            async with httpx.AsyncClient(base_url=url, timeout=60) as http:
                work = [asyncio.create_task(http.post("/inference/v1/generate", json=body)) for _ in range(3)]
                await asyncio.sleep(0.5)
                process.send_signal(signal.SIGTERM)
                await asyncio.sleep(0.1)
                late = await http.post("/inference/v1/generate", json=body)
                return await asyncio.gather(*work), late

        replies, late = asyncio.run(run())
        for reply in replies:
            assert {c["finish_reason"] for c in reply.json()["choices"]} == {"length"}
        assert late.status_code == 503 and "retry-after" in late.headers
        assert process.wait(20) == 0


@pytest.mark.parametrize("stream", [False, True])
def test_sigterm_with_a_deadline_aborts_and_gives_what_there_is(path, stream):
    with command_line(path, "--shutdown-timeout", "0.3", "--max-num-seqs", "1") as (process, url):
        body = {"prompt": PROMPT, "max_tokens": 500, "n": 30, "ignore_eos": True, "stream": stream}

        async def run():
            async with httpx.AsyncClient(base_url=url, timeout=60) as http:
                work = asyncio.create_task(http.post("/v1/completions", json=body))
                await asyncio.sleep(0.5)
                process.send_signal(signal.SIGTERM)
                return await work

        reply = asyncio.run(run())
        assert '"finish_reason":"abort"' in reply.text
        assert process.wait(20) == 0


def test_nothing_grows_over_many_requests(servers):
    server, process = servers[0], __import__("psutil").Process()

    async def run(count):
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as http:
            gate = asyncio.Semaphore(32)

            async def one(i):
                async with gate:
                    body = {"prompt": [3 + i % 900, 9], "max_tokens": 2, "stream": i % 2 == 0}
                    assert (await http.post("/v1/completions", json=body)).status_code == 200

            await asyncio.gather(*map(one, range(count)))
        server.idle()

    asyncio.run(run(500))
    before = process.num_fds(), process.memory_info().rss
    asyncio.run(run(2000))
    wait_for(lambda: process.num_fds() <= before[0] + 4)
    assert process.memory_info().rss < before[1] + 24 * 2**20


# --- the document and the page ----------------------------------------------------------------------------------------


HALTING = "/(pause.*|sleep|release_memory_occupation|weights?_checker)$"  # then others wait or get 503, as they should
RENDEZVOUS = "/init_weight.*"  # waits for a trainer


@pytest.mark.parametrize(
    ("at", "paths"),
    [
        ("port", []),  # control answers 403 there
        ("control_port", ["--exclude-path-regex", f"{HALTING}|{RENDEZVOUS}"]),
        ("control_port", ["--include-path-regex", HALTING]),
    ],
    ids=["everybody's port", "control", "halting control"],
)
def test_schemathesis_finds_no_500_and_no_undocumented_reply(path, tmp_path, at, paths):
    pytest.importorskip("schemathesis")
    with command_line(path) as (_, url):
        if at == "control_port":
            url = f"http://127.0.0.1:{httpx.get(f'{url}/server_info').json()['control_port']}"
        examples = os.environ.get("SCHEMATHESIS_EXAMPLES", "10")
        command = [Path(sys.executable).with_name("schemathesis"), "run", f"{url}/openapi.json"]
        checks = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"
        command += ["--checks", checks, "--seed", "1", "--max-examples", examples, "--request-timeout", "60", *paths]
        command += ["--suppress-health-check", "too_slow"]  # of its own generator, on a busy machine
        done = subprocess.run([*map(str, command)], capture_output=True, text=True, cwd=tmp_path)
        assert done.returncode == 0, done.stdout[-6000:]
        assert httpx.get(f"{url}/liveness").status_code == 200


def test_the_page_shows_the_load_and_the_log_probs_of_a_prompt(servers):
    playwright = pytest.importorskip("playwright.sync_api")
    chromium = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("no Chromium")
    server = servers[0]
    with playwright.sync_playwright() as p:
        browser = p.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page, problems = browser.new_page(), []
        page.on("console", lambda m: problems.append(m.text) if m.type == "error" else None)
        page.on("pageerror", lambda e: problems.append(str(e)))
        page.goto(server.url)
        page.wait_for_function("document.getElementById('state').textContent === 'serving'")
        assert page.text_content("#hash") == server.llm.contract.hash
        page.fill("#prompt", "ab")
        page.fill("#max_tokens", "7")
        page.fill("#seed", str(2**53 + 1))
        page.click("button")
        page.wait_for_function("document.querySelectorAll('#output span').length === 7")
        body = {"prompt": "ab", "max_tokens": 7, "seed": 2**53 + 1, "logprobs": 0}
        logprobs = server.ok("/v1/completions", body)["choices"][0]["logprobs"]["token_logprobs"]
        spans = page.query_selector_all("#output span")
        assert [s.get_attribute("title").split()[1] for s in spans] == [f"{lp:.6f}," for lp in logprobs]
        colours = [s.evaluate("e => getComputedStyle(e).backgroundColor") for s in spans]
        assert len(set(colours)) > 1
        page.fill("#max_tokens", "100000")
        page.fill("#temperature", "-1")
        page.click("button", force=True)
        server.ok("/pause?mode=keep")
        page.wait_for_function("document.getElementById('state').textContent === 'paused'")
        server.ok("/resume")
        assert not problems
        browser.close()


def test_a_second_server_on_the_same_port_says_so(path):
    with command_line(path) as (_, url):
        port = url.rsplit(":", 1)[1]
        command = [str(Path(sys.executable).with_name("samebits")), "serve", str(path), "--port", port]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert done.returncode == 2 and "Address already in use" in " ".join(done.stderr.split()), done.stderr
