"""The HTTP server: every route gives the engine's tokens and bits, and bad input harms nobody."""

import concurrent.futures
import dataclasses
import itertools
import json
import math
import queue
import socket
import struct
import threading
import time

import anyio
import httpx
import numpy as np
import openai
import pytest
import torch

from samebits import LLM, SamplingParams
from samebits.integrations import Client
from samebits.server import async_engine
from samebits.trainer import exact_model, token_logprobs

from helpers import faults
from helpers.serving import Serving, in_background, served_checkpoint, wait_for

PROMPT = [17, 900, 3, 44]
SETTINGS = {
    "plain": {},
    "filtered": {"temperature": 0.7, "top_p": 0.9, "top_k": 50, "min_p": 0.01},
    "greedy": {"temperature": 0.0},
}


@pytest.fixture(scope="module")
def path(checkpoint, tmp_path_factory):
    return served_checkpoint(checkpoint("llama"), tmp_path_factory.mktemp("served") / "model")


@pytest.fixture(scope="module")
def shared(path):
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with Serving(path) as server:
        yield server
    torch.set_num_threads(before)


@pytest.fixture
def server(shared):
    yield shared
    shared.ok("/resume")
    shared.idle()


@pytest.fixture(scope="module")
def trainer(path):
    return exact_model(path)


def events(response_text: str) -> list[dict]:
    lines = [line.removeprefix("data: ") for line in response_text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


# --- every route, alone and under load, streamed or not: the same bits, the trainer's ---------------------------------


def by_completions(server, ids, setting, stream):
    body = {"prompt": ids, "logprobs": 0, "return_token_ids": True, "stream": stream} | setting
    if not stream:
        return [
            (c["token_ids"], c["logprobs"]["token_logprobs"]) for c in server.ok("/v1/completions", body)["choices"]
        ]
    return joined(server, "/v1/completions", body, lambda c: c["logprobs"]["token_logprobs"])


def by_chat(server, ids, setting, stream):
    body = {"messages": [], "input_ids": ids, "logprobs": True, "return_token_ids": True, "stream": stream}
    body |= setting

    def logprobs(choice):
        return [entry["logprob"] for entry in choice["logprobs"]["content"]]

    if not stream:
        choices = server.ok("/v1/chat/completions", body)["choices"]
        return [(c["token_ids"], logprobs(c)) for c in choices]
    return joined(server, "/v1/chat/completions", body, logprobs)


def by_inference(server, ids, setting, stream):
    body = {"token_ids": ids, "sampling_params": setting | {"logprobs": 1}, "stream": stream}

    def logprobs(choice):
        return [entry["logprob"] for entry in choice["logprobs"]["content"]]

    if not stream:
        return [(c["token_ids"], logprobs(c)) for c in server.ok("/inference/v1/generate", body)["choices"]]
    return joined(server, "/inference/v1/generate", body, logprobs)


def joined(server, route, body, logprobs):
    found: dict[int, tuple[list, list]] = {}
    response = server.post(route, body)
    assert response.status_code == 200, response.text
    for event in events(response.text):
        for choice in event["choices"]:
            ids, values = found.setdefault(choice["index"], ([], []))
            ids += choice["token_ids"]
            values += logprobs(choice)
    return [found[i] for i in sorted(found)]


def by_sglang(server, ids, setting, stream):
    names = {"max_tokens": "max_new_tokens", "seed": "sampling_seed"}
    sampling = {names.get(k, k): v for k, v in setting.items()}
    body = {"input_ids": ids, "sampling_params": sampling, "return_logprob": True, "stream": stream}
    if stream:
        last = {e.get("index", 0): e for e in events(server.post("/generate", body).text)}
        replies = [last[i] for i in sorted(last)]
    else:
        reply = server.ok("/generate", body)
        replies = reply if isinstance(reply, list) else [reply]
    return [(r["output_ids"], [e[0] for e in r["meta_info"]["output_token_logprobs"]]) for r in replies]


ROUTES = [by_completions, by_chat, by_inference, by_sglang]


@pytest.mark.parametrize("setting", SETTINGS)
def test_every_route_gives_the_engines_and_the_trainers_bits_alone_and_under_load_streamed_or_not(
    path, server, trainer, setting
):
    wanted = {"n": 2, "max_tokens": 12, "seed": 7, "ignore_eos": True} | SETTINGS[setting]
    params = SamplingParams(**wanted)
    engine = LLM(path, kv_cache_memory_bytes=2**22)
    expected = [(c.token_ids, c.logprobs) for c in engine.generate([PROMPT], params, use_tqdm=False)[0].completions]
    for ids, logprobs in expected:
        scored = token_logprobs(trainer, [PROMPT + ids], params)[0][len(PROMPT) :]
        assert torch.equal(scored, torch.tensor(logprobs)), "the engine differs from the trainer"
    runs = [(route, stream) for route in ROUTES for stream in (False, True)]
    for route, stream in runs:
        assert route(server, PROMPT, wanted, stream) == expected, f"{route.__name__}, stream={stream}, alone"
    noise = [{"token_ids": [5 + i] * (i + 1), "sampling_params": {"max_tokens": 20 + i}} for i in range(20)]
    with concurrent.futures.ThreadPoolExecutor(40) as pool:
        loads = [pool.submit(server.ok, "/inference/v1/generate", body) for body in noise]
        found = [pool.submit(route, server, PROMPT, wanted, stream) for route, stream in runs]
        for (route, stream), future in zip(runs, found, strict=True):
            assert future.result(60) == expected, f"{route.__name__}, stream={stream}, under load"
        for load in loads:
            load.result(60)


def test_the_text_of_a_stream_joins_to_the_whole_and_no_chunk_holds_half_a_character(server):
    body = {"prompt": "h\u00e9llo \U0001f600", "max_tokens": 200, "seed": 3, "ignore_eos": True}
    whole = server.ok("/v1/completions", body)["choices"][0]["text"]
    chunks = [e["choices"][0]["text"] for e in events(server.post("/v1/completions", body | {"stream": True}).text)]
    assert "".join(chunks) == whole
    assert "\ufffd" in whole, "every token was a whole character: this test proves nothing"
    sglang = {
        "text": body["prompt"],
        "sampling_params": {"max_new_tokens": 200, "sampling_seed": 3, "ignore_eos": True},
    }
    texts = [e["text"] for e in events(server.post("/generate", sglang | {"stream": True}).text)]
    assert texts[-1] == whole == server.ok("/generate", sglang)["text"]
    assert all(b.startswith(a) for a, b in itertools.pairwise(texts))


# --- what replies say -------------------------------------------------------------------------------------------------


def test_openais_client_reads_completions_chats_and_streams(server):
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
    assert client.models.list().data[0].id == "tiny"
    extra = {"return_token_ids": True, "return_tokens_as_token_ids": True, "return_weight_versions": True}
    done = client.completions.create(
        model="tiny",
        prompt=["ab", "cd"],
        n=2,
        max_tokens=5,
        seed=1,
        logprobs=2,
        extra_body=extra | {"ignore_eos": True},
    )
    assert [c.index for c in done.choices] == [0, 1, 2, 3]
    assert done.choices[0].prompt_token_ids == done.choices[1].prompt_token_ids != done.choices[2].prompt_token_ids
    first = done.choices[0]
    assert first.logprobs.tokens == [f"token_id:{t}" for t in first.token_ids]
    assert all(len(top) in (2, 3) for top in first.logprobs.top_logprobs)
    assert first.weight_versions == [{"version": "default", "start": 0, "end": 5}]
    assert (done.usage.prompt_tokens, done.usage.completion_tokens) == (4, 20)
    assert done.system_fingerprint == f"samebits-{server.llm.contract.hash}"

    messages = [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]
    settings = {"model": "tiny", "messages": messages, "max_completion_tokens": 6, "seed": 2, "logprobs": True}
    chat = client.chat.completions.create(**settings, top_logprobs=3, extra_body=extra | {"ignore_eos": True})
    entries = chat.choices[0].logprobs.content
    assert [e.token for e in entries] == [f"token_id:{t}" for t in chat.choices[0].token_ids]
    assert all(len(e.top_logprobs) == 3 for e in entries)
    assert chat.prompt_token_ids == server.llm.tokenizer.encode("<user>hi\n<assistant>")
    stream = client.chat.completions.create(
        **settings, stream=True, stream_options={"include_usage": True}, extra_body={"ignore_eos": True}
    )
    chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content for c in chunks if c.choices) == chat.choices[0].message.content
    assert chunks[-2].choices[0].finish_reason == "length"
    assert chunks[-1].usage.completion_tokens == 6


def test_prompt_logprobs_are_the_trainers_in_every_dialect(server, trainer):
    ids = [17, 900, 3, 44, 500, 7]
    expected = token_logprobs(trainer, [ids])[0].tolist()[1:]
    body = {"prompt": ids, "max_tokens": 1, "prompt_logprobs": 2}
    rows = server.ok("/v1/completions", body)["choices"][0]["prompt_logprobs"]
    assert rows[0] is None
    assert [row[str(t)]["logprob"] for row, t in zip(rows[1:], ids[1:], strict=True)] == expected
    for row, token in zip(rows[1:], ids[1:], strict=True):
        assert len(row) in (2, 3)
        ranks = {entry["rank"] for entry in row.values()}
        assert {1, 2} <= ranks and row[str(token)]["rank"] in ranks
        assert next(iter(row)) == str(token)  # where prime-rl looks for it
    body = {"token_ids": ids, "sampling_params": {"max_tokens": 1, "prompt_logprobs": 0}}
    rows = server.ok("/inference/v1/generate", body)["prompt_logprobs"]
    assert [row[str(t)]["logprob"] for row, t in zip(rows[1:], ids[1:], strict=True)] == expected
    body = {"input_ids": ids, "sampling_params": {"max_new_tokens": 1}, "return_logprob": True, "logprob_start_len": 0}
    entries = server.ok("/generate", body)["meta_info"]["input_token_logprobs"]
    assert entries == [[None, ids[0], None], *([lp, t, None] for lp, t in zip(expected, ids[1:], strict=True))]


def test_generate_of_a_batch_takes_settings_for_each_prompt(server):
    body = {
        "input_ids": [PROMPT, [9, 8]],
        "sampling_params": [{"max_new_tokens": 3, "ignore_eos": True}, {"max_new_tokens": 5, "ignore_eos": True}],
        "rid": ["a", "b"],
        "return_logprob": [True, False],
        "top_logprobs_num": 2,
        "return_text_in_logprobs": True,
    }
    first, second = server.ok("/generate", body)
    assert (first["meta_info"]["id"], second["meta_info"]["id"]) == ("a", "b")
    assert [len(r["output_ids"]) for r in (first, second)] == [3, 5]
    assert first["meta_info"]["finish_reason"] == {"type": "length", "length": 3}
    token = first["output_ids"][0]
    assert first["meta_info"]["output_token_logprobs"][0][1:] == [token, server.llm.tokenizer.decode([token])]
    assert [len(top) for top in first["meta_info"]["output_top_logprobs"]] == [2, 2, 2]
    assert "output_token_logprobs" not in second["meta_info"]


def test_a_stop_token_and_a_stop_string_end_the_text_and_can_stay_in_it(server):
    body = {"prompt": PROMPT, "max_tokens": 40, "seed": 5, "ignore_eos": True, "return_token_ids": True}
    free = server.ok("/v1/completions", body)["choices"][0]
    decode = server.llm.tokenizer.decode
    token = next(t for i, t in enumerate(free["token_ids"]) if i > 4 and t not in free["token_ids"][:i])
    cut = free["token_ids"].index(token)
    ended = server.ok("/v1/completions", body | {"stop_token_ids": [token]})["choices"][0]
    assert (ended["finish_reason"], ended["stop_reason"]) == ("stop", token)
    assert ended["token_ids"] == free["token_ids"][: cut + 1]
    assert ended["text"] == decode(free["token_ids"][:cut])
    kept = server.ok("/v1/completions", body | {"stop_token_ids": [token], "include_stop_str_in_output": True})
    assert kept["choices"][0]["text"] == decode(free["token_ids"][: cut + 1])
    sampling = {"max_new_tokens": 40, "sampling_seed": 5, "ignore_eos": True, "stop_token_ids": [token]}
    reply = server.ok("/generate", {"input_ids": PROMPT, "sampling_params": sampling | {"no_stop_trim": True}})
    assert reply["text"] == kept["choices"][0]["text"]
    assert reply["meta_info"]["finish_reason"] == {"type": "stop", "matched": token}


def test_unseeded_samples_differ_and_seeded_ones_repeat(server):
    body = {"prompt": PROMPT, "max_tokens": 12, "n": 3, "return_token_ids": True, "ignore_eos": True}
    choices = [c["token_ids"] for _ in range(2) for c in server.ok("/v1/completions", body)["choices"]]
    assert len({tuple(c) for c in choices}) == 6
    seeded = [server.ok("/v1/completions", body | {"seed": 4})["choices"] for _ in range(2)]
    assert [c["token_ids"] for c in seeded[0]] == [c["token_ids"] for c in seeded[1]]


def test_tokenize_and_detokenize_are_the_tokenizers(server):
    reply = server.ok("/tokenize", {"prompt": "h\u00e9llo"})
    assert reply["tokens"] == server.llm.tokenizer.encode("h\u00e9llo")
    assert (reply["count"], reply["max_model_len"]) == (6, 512)
    assert server.ok("/detokenize", {"tokens": reply["tokens"]}) == {"prompt": "h\u00e9llo"}
    chat = server.ok("/tokenize", {"messages": [{"role": "user", "content": "x"}]})
    assert server.ok("/detokenize", {"tokens": chat["tokens"]})["prompt"] == "<user>x\n<assistant>"


def test_information_routes_say_what_both_dialects_ask(server):
    assert server.get("/get_world_size") == {"world_size": 1}
    assert server.get("/weight_info")["weight_version"] == "default"
    assert server.get("/is_paused") == {"is_paused": False, "state": "serving"}
    assert server.get("/is_sleeping") == {"is_sleeping": False}
    for route in ("/model_info", "/get_model_info"):
        assert server.get(route)["weight_version"] == "default"
    info = server.get("/server_info?config_format=json")
    assert (info["enable_memory_saver"], info["enable_return_routed_experts"]) == (False, False)  # as slime asks
    assert info["vllm_config"]["model_config"]["dtype"] == "float32"
    assert info["vllm_config"]["model_config"]["logprobs_mode"] == "processed_logprobs"  # TRL's trainers ask for it
    assert (info["tp_size"], info["pp_size"]) == (1, 1)
    assert "renormalised" in info["logprobs_mode"]
    loads = server.get("/v1/loads?include=core")
    assert (loads["num_running_reqs"], loads["num_waiting_reqs"], loads["num_total_reqs"]) == (0, 0, 0)
    assert server.get("/get_load") == [{"dp_rank": 0, "num_reqs": 0, "num_waiting_reqs": 0, "num_tokens": 0}]
    for route in ("/health", "/health_generate", "/ready"):
        server.get(route)
    contract = server.get("/v1/contract")
    assert contract["hash"] == server.llm.contract.hash == server.http.get("/health").headers["x-samebits-contract"]
    assert contract["contract"] == dataclasses.asdict(server.llm.contract)


def metrics(server):
    lines = server.http.get("/metrics").text.splitlines()
    return {k: float(v) for k, v in (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))}


def test_metrics_count_tokens_samples_and_steps(server):
    before = metrics(server)
    server.ok("/v1/completions", {"prompt": [9] * 40, "n": 2, "max_tokens": 7, "ignore_eos": True})
    after = metrics(server)
    grown = {name: after[name] - before.get(name, 0) for name in after}
    assert grown["samebits_generation_tokens_total"] == 14
    assert grown["samebits_prompt_tokens_total"] == 40
    assert grown['samebits_samples_finished_total{reason="length"}'] == 2
    assert grown["samebits_step_seconds_count"] >= 7
    assert after["samebits_kv_cache_usage_ratio"] == after["samebits_requests_running"] == 0
    server.ok("/v1/completions", {"prompt": [9] * 40, "max_tokens": 1})
    hits = "samebits_prefix_cache_hit_tokens_total"
    assert metrics(server)[hits] == after[hits] + 32


def test_metrics_count_drafts_by_their_method(path, server, rows_cost_nothing):
    body = {"prompt": [9] * 20, "max_tokens": 40, "ignore_eos": True, "seed": 3, "logprobs": 1}
    expected = server.ok("/v1/completions", body)["choices"]
    with Serving(path, {"speculative_config": {"method": "suffix"}}) as drafting:
        for _ in range(2):
            assert drafting.ok("/v1/completions", body)["choices"] == expected
        found = metrics(drafting)
    accepted = found['samebits_accepted_tokens_total{method="suffix"}']
    assert 30 <= accepted <= found['samebits_draft_tokens_total{method="suffix"}']
    assert found['samebits_tokens_per_step{method="suffix"}'] > 1.5


# --- pausing, aborting, memory ----------------------------------------------------------------------------------------

LONG = {"token_ids": PROMPT, "sampling_params": {"max_tokens": 400, "ignore_eos": True, "seed": 1, "logprobs": 0}}
SHORT = {"token_ids": PROMPT, "sampling_params": {"max_tokens": 2, "ignore_eos": True}}


def running(server):
    wait_for(lambda: server.llm.stats().num_running > 0)


@pytest.mark.parametrize("route", ["/abort_requests", "/inference/v1/abort_requests", "/abort_request"])
def test_an_abort_gives_what_there_is(server, route):
    with in_background(server.ok, "/inference/v1/generate", LONG | {"request_id": "mine"}) as results:
        running(server)
        server.ok(route, {"rid": "mine"} if route == "/abort_request" else {"request_ids": ["other", "mine"]})
    choice = results[0]["choices"][0]
    assert choice["finish_reason"] == "abort"
    assert 0 < len(choice["token_ids"]) == len(choice["logprobs"]["content"]) < 400


@pytest.mark.parametrize(
    ("rid", "aborted", "reasons"),
    [
        (["a", "b", "c"], "b", ["length", "abort", "length"]),
        (["a", "b", "c"], "a", ["abort", "length", "length"]),
        ("a", "a-2", ["length", "length", "abort"]),
        ("a", "a", ["abort", "abort", "abort"]),
    ],
    ids=str,
)
def test_a_prompt_of_a_batch_is_aborted_by_its_own_id(server, rid, aborted, reasons):
    sampling = {"max_new_tokens": 400, "ignore_eos": True}
    body = {"input_ids": [PROMPT, [9], [8, 7]], "sampling_params": sampling, "rid": rid}
    with in_background(server.ok, "/generate", body) as results:
        wait_for(lambda: server.llm.stats().num_running == 3)
        assert server.ok("/abort_request", {"rid": aborted})["aborted"] == reasons.count("abort")
    assert [sample["meta_info"]["finish_reason"]["type"] for sample in results[0]] == reasons
    assert server.ok("/abort_request", {"rid": aborted})["aborted"] == 0


def test_pause_abort_turns_requests_away_until_resume(server):
    with in_background(server.ok, "/inference/v1/generate", LONG) as results:
        running(server)
        assert server.ok("/pause") == {"status": "paused"}
    assert results[0]["choices"][0]["finish_reason"] == "abort"
    response = server.post("/inference/v1/generate", SHORT)
    assert (response.status_code, response.headers["retry-after"]) == (503, "1")
    assert server.get("/is_paused") == {"is_paused": True, "state": "paused"}
    assert server.ok("/resume") == {"status": "resumed"}
    server.ok("/inference/v1/generate", SHORT)


def test_pause_wait_lets_requests_finish(server):
    body = {"token_ids": PROMPT, "sampling_params": {"max_tokens": 60, "ignore_eos": True}}
    with in_background(server.ok, "/inference/v1/generate", body) as results:
        running(server)
        server.ok("/pause?mode=wait")
        assert server.engine.num_sequences == 0
    assert results[0]["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize(
    ("pause", "go_on"),
    [
        (("/pause?mode=keep", None), "/resume"),
        (("/pause_generation", {"mode": "in_place"}), "/continue_generation"),
        (("/pause_generation", {"mode": "retract"}), "/continue_generation"),
    ],
)
def test_a_pause_that_keeps_requests_changes_no_bit_and_queues_new_ones(server, pause, go_on):
    alone = server.ok("/inference/v1/generate", LONG)["choices"][0]
    with in_background(server.ok, "/inference/v1/generate", LONG) as results:
        running(server)
        server.ok(*pause)
        steps = server.llm.stats().steps
        with in_background(server.ok, "/inference/v1/generate", SHORT) as queued:
            time.sleep(0.3)
            assert server.llm.stats().steps == steps and not results and not queued
            used = server.llm.stats().kv_blocks_used
            assert (used == 0) == (pause[1] == {"mode": "retract"})
            server.ok("/flush_cache") if pause[1] == {"mode": "retract"} else None
            server.ok(go_on)
    assert results[0]["choices"][0] == alone
    assert queued[0]["choices"][0]["finish_reason"] == "length"


def test_flush_is_refused_while_requests_run_and_works_while_they_are_paused(server):
    alone = server.ok("/inference/v1/generate", LONG)["choices"][0]
    with in_background(server.ok, "/inference/v1/generate", LONG) as results:
        running(server)
        assert server.http.get("/flush_cache").status_code == 400
        server.ok("/pause_generation", {"mode": "in_place"})
        server.ok("/flush_cache")
        assert server.llm.stats().kv_blocks_used == 0
        server.ok("/continue_generation", {})
    assert results[0]["choices"][0] == alone


@pytest.mark.parametrize(
    ("query", "body"), [("?reset_running_requests=true", None), ("", {"reset_running_requests": True})], ids=str
)
def test_running_requests_forget_their_prefixes_by_query_or_by_body(server, query, body):
    with in_background(server.ok, "/inference/v1/generate", LONG) as results:
        running(server)
        server.ok("/pause_generation", {"mode": "in_place"})
        server.ok("/reset_prefix_cache", {"reset_running_requests": False})
        assert server.llm.stats().kv_blocks_used > 0
        server.ok(f"/reset_prefix_cache{query}", body)
        assert server.llm.stats().kv_blocks_used == 0
        server.ok("/continue_generation", {})
    assert results[0]["choices"][0] == server.ok("/inference/v1/generate", LONG)["choices"][0]


@pytest.mark.parametrize("level", [1, 2])
def test_sleep_frees_memory_and_after_wake_up_the_bits_are_the_same(server, level):
    before = server.ok("/inference/v1/generate", LONG)["choices"]
    freed = server.ok(f"/sleep?level={level}")["freed_bytes"]
    stats = server.llm.stats()
    assert freed == stats.kv_cache_bytes + (server.llm.weight_bytes if level == 2 else 0) > 0
    assert server.get("/is_sleeping") == {"is_sleeping": True}
    assert server.post("/inference/v1/generate", SHORT).status_code == 503
    assert server.http.get("/health_generate").status_code == 503
    server.ok("/wake_up?tags=weights")
    assert server.get("/is_sleeping") == {"is_sleeping": True}
    server.ok("/wake_up?tags=kv_cache")
    assert server.get("/is_sleeping") == {"is_sleeping": False}
    assert server.ok("/inference/v1/generate", LONG)["choices"] == before


def test_released_memory_keeps_requests_for_later(server):
    alone = server.ok("/inference/v1/generate", LONG)["choices"][0]
    with in_background(server.ok, "/inference/v1/generate", LONG) as results:
        running(server)
        response = server.post("/release_memory_occupation", {"tags": ["kv_cache", "cuda_graph"]})
        assert response.json() is None and int(response.headers["x-samebits-freed-bytes"]) > 0
        assert server.ok("/resume_memory_occupation", {}) is None
    assert results[0]["choices"][0] == alone


def test_cache_salts_keep_prefixes_apart(server):
    def hits(salt):
        body = {"input_ids": [11] * 100, "sampling_params": {"max_new_tokens": 1}, "cache_salt": salt}
        return server.ok("/generate", body)["meta_info"]["cached_tokens"]

    server.ok("/flush_cache")
    assert [hits("a"), hits("a"), hits("b"), hits(None), hits("b")] == [0, 96, 0, 0, 96]


# --- bad input and bad clients ----------------------------------------------------------------------------------------

BAD = [
    ("/v1/completions", {"prompt": "x", "presence_penalty": 0.5}, "presence_penalty=0.5 is not supported"),
    ("/v1/completions", {"prompt": "x", "logit_bias": {"5": 1}}, "logit_bias"),
    ("/v1/completions", {"prompt": "x", "echo": True}, "echo=True is not supported"),
    ("/v1/completions", {"prompt": "x", "temperature": -1}, "temperature must be in"),
    ("/v1/completions", {"prompt": "x", "temperature": "hot"}, "temperature"),
    ("/v1/completions", {"prompt": "x", "max_tokens": 0}, "max_tokens must be at least 1"),
    ("/v1/completions", {"prompt": "x", "max_tokens": True}, "max_tokens"),
    ("/v1/completions", {"prompt": "x", "n": 0}, "n must be at least 1"),
    ("/v1/completions", {"prompt": []}, "empty list"),
    ("/v1/completions", {"prompt": ""}, "empty prompt"),
    ("/v1/completions", {"prompt": [5, 5000]}, "token id 5000 is out of range"),
    ("/v1/completions", {"prompt": [7] * 600}, "leaves no room in max_model_len 512"),
    ("/v1/completions", {"prompt": "x", "request_id": ""}, "request_id"),
    ("/v1/completions", {"prompt": "x", "top_k": 2**63}, "top_k must be at least -1 and at most"),
    ("/v1/completions", {"prompt": "x", "stream_options": {"include_usage": True}}, "include_usage is a stream's"),
    ("/v1/completions", {"prompt": "x", "structured_outputs": {"regx": "a"}}, "has 'regx'; it takes one of json,"),
    ("/v1/completions", {"prompt": "x", "structured_outputs": {"choice": []}}, "list of non-empty strings"),
    (
        "/generate",
        {"text": "x", "sampling_params": {"regex": "a", "structured_outputs": {"regex": "b"}}},
        "field of its own",
    ),
    ("/generate", {"text": "x", "cache_salt": "a", "extra_key": "b"}, "another name of cache_salt"),
    ("/v1/completions", {}, "prompt"),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "must be text"),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "top_logprobs": 2}, "needs logprobs"),
    ("/v1/chat/completions", {"messages": [{"role": "user"}], "tool_choice": "required"}, "tool_choice"),
    ("/v1/chat/completions", {"messages": [{"content": "x"}], "chat_template": "{{ x }}"}, "chat_template"),
    ("/v1/chat/completions", {"messages": [{}], "chat_template_kwargs": {"tokenize": True}}, "may not set tokenize"),
    ("/inference/v1/generate", {"token_ids": [1], "priority": 3}, "priority=3 is not supported"),
    ("/inference/v1/generate", {"token_ids": [1], "sampling_params": {"bad_words": ["x"]}}, "bad_words"),
    ("/generate", {"text": "x", "sampling_params": {"json_schema": "{"}}, "structured_outputs"),
    ("/generate", {"text": "x", "sampling_params": {"structural_tag": "{}"}}, "structural_tag"),
    ("/generate", {"text": "x", "sampling_params": {"seed": 0}}, "sampling_seed"),
    ("/generate", {"text": "x", "sampling_params": {"max_tokens": 3}}, "max_new_tokens"),
    ("/generate", {"text": "x", "max_new_tokens": 3}, "belongs in sampling_params"),
    ("/generate", {"text": "x", "temperature": 0}, "belongs in sampling_params"),
    ("/generate", {"text": "x", "sampling_params": {"temprature": 0}}, "did you mean temperature?"),
    ("/v1/completions", {"prompt": "x", "temprature": 0}, "did you mean temperature?"),
    ("/v1/completions", {"prompt": "x", "typical_p": 0.5}, "unknown field 'typical_p'"),
    ("/v1/completions", {"prompt": "x", "no_repeat_ngram_size": 2}, "unknown field 'no_repeat_ngram_size'"),
    ("/v1/chat/completions", {"messages": [{}], "stream_options": {"include_usge": True}}, "include_usage?"),
    ("/v1/chat/completions", {"messages": [{}], "reasoning_effort": "high"}, "unknown field"),
    ("/tokenize", {"prompt": "x", "add_special_token": False}, "did you mean add_special_tokens?"),
    ("/detokenize", {"tokens": [5], "skip": 1}, "unknown field"),
    ("/update_weights_from_disk", {"model_path": "x", "weight_verison": "5"}, "did you mean weight_version?"),
    ("/pause_generation", {"moed": "retract"}, "did you mean mode?"),
    ("/v1/completions", {"prompt": "x", "max_new_tokens": 3}, "max_tokens"),
    ("/v1/completions", {"prompt": "x", "sampling_seed": 3}, "seed"),
    ("/inference/v1/generate", {"token_ids": [5], "seed": 3}, "sampling_params"),
    ("/inference/v1/generate", {"token_ids": [5], "return_token_ids": False}, "return_token_ids"),
    ("/generate", {"text": "x", "input_ids": [1]}, "either text or input_ids"),
    ("/generate", {"input_ids": [[1], [2]], "rid": ["a"]}, "rid has 1 entries for 2 prompts"),
    ("/generate", {"input_ids": [[1], [2]], "rid": ["a", "a"]}, "the same request_id"),
    ("/tokenize", {}, "either prompt or messages"),
    ("/detokenize", {"tokens": [99999]}, "out of range"),
    ("/pause_generation", {"mode": "sometimes"}, "mode"),
    ("/abort_request", {}, "give rid"),
    ("/sleep?level=3", {}, "level"),
    ("/update_weights", {}, "either update_info or weight_dir"),
    ("/weight_checker", {"action": "guess"}, "action"),
]


@pytest.mark.parametrize(("route", "body", "message"), BAD, ids=[f"{r} {m}" for r, _, m in BAD])
def test_bad_input_is_a_400_that_says_why(server, route, body, message):
    response = server.post(route, body)
    reply = response.json()
    assert response.status_code == 400, response.text
    assert message in reply["error"]["message"] == reply["message"]
    assert reply["success"] is False


def test_a_query_that_is_wrong_is_no_matter_of_json(server):
    assert "send JSON" not in server.http.post("/sleep?level=3").json()["message"]
    assert "send JSON" in server.http.post("/v1/completions", content=b"x").json()["message"]


def test_any_json_is_a_grammar(server):
    """An empty schema allows any; a flag that is off asks for nothing."""
    body = {"prompt": [5], "max_tokens": 6, "seed": 3, "return_token_ids": True}
    kinds = [{"json": "{}"}, {"json": {}}, None, {"json_object": False, "regex": None, "disable_any_whitespace": False}]
    bodies = [body | {"structured_outputs": kind} for kind in kinds]
    bodies.append(body | {"response_format": {"type": "json_schema", "json_schema": {"name": "any", "schema": {}}}})
    text, mapping, free, off, openai = (server.ok("/v1/completions", b)["choices"][0]["token_ids"] for b in bodies)
    assert text == mapping == openai and free == off != text


def test_a_prompt_has_no_log_probs_beyond_its_end(server):
    body = {"input_ids": [5, 6], "return_logprob": True, "logprob_start_len": 2**63}
    assert (
        server.ok("/generate", body | {"sampling_params": {"max_new_tokens": 2}})["meta_info"]["input_token_logprobs"]
        == []
    )


def test_the_client_takes_and_returns_what_the_engine_does(server, path):
    """One prompt or several; what the filter leaves out has -inf, which JSON lacks."""
    params = SamplingParams(max_tokens=3, seed=1, top_k=1, logprobs=2, prompt_logprobs=0)
    llm = LLM(path, kv_cache_memory_bytes=2**22)
    with Client(server.url) as client:
        for prompts in ("ab", ["ab", "c"], [5, 6, 7], [[5, 6], [7]], torch.tensor([5, 6]), [np.array([5, 6])]):
            found = client.generate(prompts, params)
            expected = llm.generate(prompts, params, use_tqdm=False)
            assert len(found) == len(expected)
            for ours, theirs in zip(found, expected, strict=True):
                assert ours.prompt_token_ids == theirs.prompt_token_ids
                assert ours.prompt_logprobs == theirs.prompt_logprobs
                assert ours.completions[0].logprobs == theirs.completions[0].logprobs
                assert ours.completions[0].top_logprobs == theirs.completions[0].top_logprobs
        assert -math.inf in found[0].prompt_logprobs
        for prompts in ({"prompt": "ab"}, [{"prompt": "ab"}], ["ab", [5]]):
            with pytest.raises(TypeError, match="strings, or lists of token ids"):
                client.generate(prompts, params)


@pytest.mark.parametrize(
    "content", [b"{", b"", b"\xff\xfe", b'{"prompt": "\xc3("}', b'{"prompt": "\\ud800"}', b"[]", b'{"prompt": NaN}']
)
def test_broken_json_and_utf8_are_a_400(server, content):
    response = server.http.post("/v1/completions", content=content, headers={"content-type": "application/json"})
    assert response.status_code == 400, response.text


def test_a_prompt_of_ten_megabytes_is_refused_quickly_and_others_go_on(server):
    with in_background(server.ok, "/inference/v1/generate", LONG) as results:
        begin = time.monotonic()
        assert server.post("/v1/completions", {"prompt": "word " * 2_000_000}).status_code == 400
        assert server.post("/v1/completions", {"prompt": [7] * 2_000_000}).status_code == 400
        assert time.monotonic() - begin < 10
    assert results[0]["choices"][0]["finish_reason"] == "length"
    assert server.post("/v1/completions", {"prompt": "x" * (65 * 2**20)}).status_code == 413


def test_fields_that_ask_for_nothing_here_pass(server):
    """Labels, hints to routers and neutral values; a null is a field that isn't set."""
    body = SHORT | {"priority": 0, "session_id": "s", "kv_transfer_params": None, "user": "u", "unheard_of": None}
    theirs = {"spaces_between_special_tokens": True, "output_kind": 2}
    body["sampling_params"] = SHORT["sampling_params"] | {"repetition_penalty": 1.0, "presence_penalty": 0} | theirs
    server.ok("/inference/v1/generate", body)


def test_another_models_name_is_a_404(server):
    for route, body in [
        ("/v1/completions", {"prompt": "x"}),
        ("/tokenize", {"prompt": "x"}),
        ("/detokenize", {"tokens": [5]}),
    ]:
        assert server.post(route, body | {"model": "gpt"}).status_code == 404
        assert server.post(route, body | {"model": "tiny"}).status_code == 200
    with pytest.raises(openai.NotFoundError, match="is not served here"):
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="k", max_retries=0).completions.create(model="o", prompt="x")


def raw_post(body: dict) -> bytes:
    content = json.dumps(body).encode()
    head = f"host: localhost\r\ncontent-type: application/json\r\ncontent-length: {len(content)}\r\n\r\n"
    return b"POST /v1/completions HTTP/1.1\r\n" + head.encode() + content


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_is_aborted(server, stream):
    body = {"prompt": PROMPT, "max_tokens": 450, "ignore_eos": True, "stream": stream}
    before = server.engine.finished.get("abort", 0)
    with socket.create_connection(("127.0.0.1", server.port)) as s:
        s.sendall(raw_post(body))
        running(server)
        if stream:
            s.recv(1000)
        s.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # as a killed process: reset
    wait_for(lambda: server.engine.finished.get("abort", 0) == before + 1)


def test_a_request_id_in_use_is_refused_and_free_afterwards(server):
    with in_background(server.ok, "/inference/v1/generate", LONG | {"request_id": "r"}):
        running(server)
        assert "in use" in server.post("/inference/v1/generate", SHORT | {"request_id": "r"}).json()["message"]
    server.ok("/inference/v1/generate", SHORT | {"request_id": "r"})


def test_a_full_queue_is_a_503_with_retry_after(path):
    with Serving(path, {"max_num_seqs": 2}, max_waiting=3) as server:
        with in_background(
            server.ok, "/inference/v1/generate", LONG | {"sampling_params": {"n": 4, "max_tokens": 200}}
        ):
            wait_for(lambda: server.engine.num_sequences == 4)
            many = server.post("/v1/completions", {"prompt": "x", "n": 2})
            assert (many.status_code, many.headers["retry-after"]) == (503, "1")
            assert server.post("/v1/completions", {"prompt": "x", "n": 1}).status_code == 200
        server.idle()


@pytest.mark.parametrize("error", [MemoryError, SystemExit], ids=lambda e: e.__name__)
def test_a_failing_step_fails_its_requests_and_the_next_are_served(server, monkeypatch, error):
    def fail(plan, hidden):
        raise error("no more")

    with monkeypatch.context() as patch:
        patch.setattr(server.llm.engine.executor.workers[0].runner, "run", fail)
        response = server.post("/v1/completions", {"prompt": "x"})
        assert (response.status_code, response.json()["message"]) == (500, f"{error.__name__}: no more")
        stream = server.post("/v1/completions", {"prompt": "x", "stream": True})
        assert f"{error.__name__}: no more" in events(stream.text)[-1]["error"]["message"]
    server.ok("/v1/completions", {"prompt": "x"})


def test_a_failing_step_is_told_before_the_engine_is_cleared(server, monkeypatch):
    """Which may take as long as replicas let it wait."""
    told, cleared, reset = threading.Event(), threading.Event(), server.llm.reset_prefix_cache

    def slow_reset(*args):
        assert told.wait(60)
        reset(*args)
        cleared.set()

    with monkeypatch.context() as patch:
        patch.setattr(server.llm, "reset_prefix_cache", slow_reset)
        faults.before_step(patch, server.llm, faults.fail(MemoryError("no more")), at=1)
        response = server.post("/v1/completions", {"prompt": "x"}, timeout=20)
        assert (response.status_code, response.json()["message"]) == (500, "MemoryError: no more")
        told.set()
        assert cleared.wait(60)
    server.ok("/v1/completions", {"prompt": "x"})


@pytest.mark.parametrize("error", [MemoryError, SystemExit], ids=lambda e: e.__name__)
def test_a_failing_admission_fails_its_call_and_the_next_are_served(server, monkeypatch, error):
    with monkeypatch.context() as patch:
        faults.before(patch, server.llm.engine, "add_request", faults.fail(error("no more")), at=2)
        response = server.post("/v1/completions", {"prompt": ["x", "y"]})
        assert (response.status_code, response.json()["message"]) == (500, f"{error.__name__}: no more")
    server.ok("/v1/completions", {"prompt": ["x", "y"]})


def test_an_exit_in_a_control_call_fails_the_call_and_the_next_are_served(server, monkeypatch):
    with monkeypatch.context() as patch:
        faults.before(patch, server.llm.engine, "reset_prefix_cache", faults.fail(SystemExit("no more")), at=1)
        response = server.post("/flush_cache")
        assert (response.status_code, response.json()["message"]) == (500, "SystemExit: no more")
    server.ok("/flush_cache")


def test_the_engines_thread_outlives_a_kill_between_two_turns(server, monkeypatch):
    nothing = queue.SimpleQueue()
    turns = []

    def turn():  # CPython calls nothing after this wait where it could raise what came meanwhile: the loop does
        turns.append(1)
        try:
            nothing.get(timeout=0.1)
        except queue.Empty:
            return

    with monkeypatch.context() as patch:
        patch.setattr(server.engine, "_turn", turn)
        wait_for(lambda: turns)
        server.kill_engine_thread()
        seen = len(turns)
        wait_for(lambda: len(turns) > seen + 1)
    server.ok("/v1/completions", {"prompt": "x"})


def test_non_finite_logits_are_a_500_and_never_nan_in_json(server, monkeypatch):
    head = server.llm.engine.executor.workers[0].runner.head
    with monkeypatch.context() as patch:
        patch.setattr(type(head), "__call__", lambda self, hidden: torch.full((len(hidden), 1001), torch.nan))
        response = server.post("/v1/completions", {"prompt": "x"})
    assert response.status_code == 500 and "non-finite logits" in response.json()["message"]
    server.ok("/v1/completions", {"prompt": "x"})


# --- keys -------------------------------------------------------------------------------------------------------------


def test_control_routes_without_a_key_answer_this_machine_alone(server):
    for headers in [
        *({name: "10.0.0.1"} for name in ("x-forwarded-for", "x-forwarded-host", "forwarded", "via", "x-real-ip")),
        {"cf-connecting-ip": "10.0.0.1"},
        {"origin": "https://evil.example"},
        {"host": "evil.example", "origin": "http://evil.example"},
        {"sec-fetch-site": "cross-site"},
    ]:
        assert server.post("/pause", headers=headers).status_code == 403
    assert server.post("/resume", headers={"origin": server.url}).status_code == 200


def test_keys_are_asked_for(path):
    from samebits.server.auth import Guard

    with Serving(path, guard=Guard("user", "admin")) as server:

        def status(method, route, key=None, body=None):
            headers = {"authorization": f"Bearer {key}"} if key else {}
            return server.http.request(method, route, json=body, headers=headers).status_code

        completion = {"prompt": "x", "max_tokens": 1}
        for key, api, control in [(None, 401, 401), ("no", 401, 401), ("user", 200, 401), ("admin", 200, 200)]:
            assert status("POST", "/v1/completions", key, completion) == api
            assert status("GET", "/v1/models", key) == status("GET", "/metrics", key) == api
            assert status("POST", "/resume", key) == status("POST", "/continue_generation", key) == control
        assert status("GET", "/health") == status("GET", "/") == 200


def test_keys_are_checked_in_the_event_loop(server, monkeypatch):
    """A turn in a pool of threads at each request, for a comparison, would cost more than the comparison."""
    functions = []
    run = anyio.to_thread.run_sync

    def noted(function, *args, **options):
        functions.append(function)
        return run(function, *args, **options)

    monkeypatch.setattr(anyio.to_thread, "run_sync", noted)
    server.get("/v1/models")
    server.ok("/resume")
    assert not functions


def test_every_control_route_is_guarded(server):
    """No route that changes anything is left open; a new one must be on one of these lists."""
    routes = server.app.openapi()["paths"]
    posts = {path for path, methods in routes.items() if "post" in methods}
    free = {
        "/v1/completions",
        "/v1/chat/completions",
        "/inference/v1/generate",
        "/generate",
        "/tokenize",
        "/detokenize",
    }
    for route in posts - free:
        assert server.post(route, {}, headers={"x-forwarded-for": "10.0.0.1"}).status_code == 403, route


def test_the_engine_survives_no_reader_at_all(server):
    """A slow reader holds nobody up: its stream waits in memory, its KV is freed."""
    body = {"prompt": PROMPT, "max_tokens": 450, "ignore_eos": True, "stream": True, "logprobs": 20}
    with socket.create_connection(("127.0.0.1", server.port)) as s:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
        s.sendall(raw_post(body))
        running(server)
        wait_for(lambda: server.llm.stats().kv_blocks_used == 0)
        server.ok("/inference/v1/generate", SHORT)


def test_long_prompts_are_tokenised_off_the_event_loop(server):
    length = async_engine.INLINE_PROMPT + 1
    assert "leaves no room" in server.post("/v1/completions", {"prompt": "a " * length}).json()["message"]
    with httpx.Client(base_url=server.url) as http:
        assert http.get("/health").status_code == 200
