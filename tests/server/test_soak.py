"""Many requests, a third of them aborted or left: nothing is lost, doubled or wrong, and nothing grows.

SOAK_REQUESTS says how many (20,000).
"""

import asyncio
import contextlib
import json
import os
import random

import httpx
import psutil
import pytest

from samebits import LLM, SamplingParams

from helpers.processes import command_line
from helpers.serving import served_checkpoint
from helpers.waiting import wait_for

pytestmark = pytest.mark.slow
REQUESTS = int(os.environ.get("SOAK_REQUESTS", "20000"))
CLIENTS = 24
CASES = 40


def cases() -> list[tuple[list[int], dict]]:
    rng = random.Random(1)
    found = []
    for seed in range(CASES):
        settings = {"n": rng.choice([1, 1, 2, 3]), "max_tokens": rng.randint(1, 40), "seed": seed, "ignore_eos": True}
        settings |= rng.choice([{}, {"temperature": 0.7, "top_p": 0.9}, {"temperature": 0.0}, {"top_k": 20}])
        prompt = rng.choice([[7] * 30, []]) + [rng.randrange(3, 1000) for _ in range(rng.randint(1, 60))]
        found.append((prompt, settings))
    return found


def body_of(route: str, prompt: list[int], settings: dict, name: str, stream: bool) -> dict:
    if route == "/generate":
        names = {"max_tokens": "max_new_tokens", "seed": "sampling_seed"}
        sampling = {names.get(k, k): v for k, v in settings.items()}
        return {"input_ids": prompt, "sampling_params": sampling, "return_logprob": True, "rid": name, "stream": stream}
    if route == "/inference/v1/generate":
        body = {"token_ids": prompt, "sampling_params": settings | {"logprobs": 0}}
    elif route == "/v1/completions":
        body = {"prompt": prompt, "logprobs": 0, "return_token_ids": True} | settings
    else:
        body = {"messages": [], "input_ids": prompt, "logprobs": True, "return_token_ids": True} | settings
    return body | {"request_id": name, "stream": stream}


def read(samples: dict[int, tuple[list, list, list]], route: str, event) -> None:
    """Add what a reply or an event tells to the samples: token ids, log-probs, finish reasons."""
    if route == "/generate":
        for i, e in enumerate(event if isinstance(event, list) else [event]):
            logprobs = [entry[0] for entry in e["meta_info"]["output_token_logprobs"]]
            reason = (e["meta_info"]["finish_reason"] or {}).get("type")
            samples[e.get("index", i)] = (e["output_ids"], logprobs, [reason] if reason else [])  # all so far
        return
    for c in event["choices"]:
        ids, logprobs, reasons = samples.setdefault(c["index"], ([], [], []))
        ids += c["token_ids"]
        told = c["logprobs"]
        logprobs += told["token_logprobs"] if "token_logprobs" in told else [e["logprob"] for e in told["content"]]
        reasons += [c["finish_reason"]] if c["finish_reason"] else []


ROUTES = ("/v1/completions", "/v1/chat/completions", "/inference/v1/generate", "/generate")


class Soak:
    """Clients that send request after request; `counts` says how they ended."""

    def __init__(self, url: str, control: str, expected: list):
        self.url, self.control, self.expected = url, control, expected
        self.cases = cases()
        self.counts = dict.fromkeys(("whole", "aborted", "left"), 0)
        self.cut_short = 0  # samples

    async def run(self, numbers: range) -> None:
        queue = iter(numbers)
        async with httpx.AsyncClient(timeout=120, limits=httpx.Limits(max_connections=CLIENTS + 8)) as http:

            async def client() -> None:
                for number in queue:
                    await self.one(http, number)

            await asyncio.gather(*(client() for _ in range(CLIENTS)))

    async def one(self, http: httpx.AsyncClient, number: int) -> None:
        rng = random.Random(number)
        case, route, stream, name = rng.randrange(CASES), rng.choice(ROUTES), rng.random() < 0.5, f"r{number}"
        end = "whole" if rng.random() < 0.7 else rng.choice(["aborted", "left"])
        prompt, settings = self.cases[case]
        samples: dict[int, tuple[list, list, list]] = {}
        work = asyncio.create_task(self.read(http, route, body_of(route, prompt, settings, name, stream), samples))
        if end != "whole":
            await asyncio.sleep(rng.random() * 0.3)
        if end == "left":
            work.cancel()
        elif end == "aborted":
            reply = await http.post(f"{self.control}/abort_requests", json={"request_ids": [name]})
            assert reply.status_code == 200, reply.text
        with contextlib.suppress(asyncio.CancelledError):
            await work
        self.check(case, samples, end)
        self.counts[end] += 1

    async def read(self, http: httpx.AsyncClient, route: str, body: dict, samples: dict) -> None:
        async with http.stream("POST", self.url + route, json=body) as reply:
            assert reply.status_code == 200, (await reply.aread())[:1000]
            if not body["stream"]:
                read(samples, route, json.loads(await reply.aread()))
                return
            async for line in reply.aiter_lines():
                if line.startswith("data: {"):
                    read(samples, route, json.loads(line[6:]))
            assert line == "" or line == "data: [DONE]"

    def check(self, case: int, samples: dict, end: str) -> None:
        wanted = self.expected[case]
        if end != "left":
            assert sorted(samples) == list(range(len(wanted))), "samples were lost or doubled"
        for index, (ids, logprobs, reasons) in samples.items():
            all_ids, all_logprobs = wanted[index]
            assert ids == all_ids[: len(ids)] and logprobs == all_logprobs[: len(ids)] and len(ids) == len(logprobs)
            assert end == "left" or reasons in (["length"], ["abort"])
            assert reasons != ["length"] or len(ids) == len(all_ids)
            assert reasons != ["abort"] or end == "aborted"
            self.cut_short += reasons == ["abort"]


def test_nothing_is_lost_doubled_or_wrong_and_nothing_grows(checkpoint, tmp_path):
    path = served_checkpoint(checkpoint("llama"), tmp_path / "model")
    llm = LLM(path, kv_cache_memory_bytes=2**22)
    prompts, params = zip(*((prompt, SamplingParams(**settings)) for prompt, settings in cases()), strict=True)
    outputs = llm.generate([list(p) for p in prompts], list(params), use_tqdm=False)
    expected = [[(c.token_ids, c.logprobs) for c in output.completions] for output in outputs]
    with command_line(path) as (process, url):
        info = httpx.get(f"{url}/server_info").json()
        soak = Soak(url, f"http://127.0.0.1:{info['control_port']}", expected)
        watched = psutil.Process(process.pid)
        idle = watched.num_fds()

        def held() -> tuple[int, int]:
            # The server learns of connections that clients have closed when it comes to read.
            wait_for(lambda: watched.num_fds() <= idle + 4)
            return watched.num_threads(), watched.memory_info().rss

        asyncio.run(soak.run(range(REQUESTS // 4)))
        before = held()
        asyncio.run(soak.run(range(REQUESTS // 4, REQUESTS)))
        after = held()
        print(soak.counts, soak.cut_short, "samples cut short; threads, bytes:", before, "->", after)
        assert soak.cut_short > REQUESTS / 50  # many aborts found their requests at work
        assert sum(soak.counts.values()) == REQUESTS and soak.counts["aborted"] + soak.counts["left"] > REQUESTS / 5
        load = httpx.get(f"{url}/v1/loads").json()
        assert load["num_total_reqs"] == 0 and load["kv_cache_bytes_used"] == 0
    assert after[0] <= before[0] + 2
    assert after[1] < before[1] + 24 * 2**20
