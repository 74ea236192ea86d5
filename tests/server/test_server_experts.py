"""Routed experts over HTTP: both dialects' forms hold the engine's array."""

import base64
import io

import numpy as np
import orjson
import pytest
import torch

from samebits import LLM, SamplingParams
from samebits.integrations import Client, RemoteEngine
from samebits.integrations.rollouts import read_rollouts
from samebits.trainer import exact_model

from helpers.moe import save_tiny_moe, stored
from helpers.schedules import tight_pool
from helpers.serving import Serving, add_tokenizer

PROMPT = [17, 90, 3, 44, 7]
PARAMS = {"n": 2, "temperature": 1.0, "seed": 5}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    path = save_tiny_moe(tmp_path_factory.mktemp("moe") / "model", "qwen3_moe", vocab_size=300)
    add_tokenizer(path, 300)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with Serving(path) as running:
        yield running
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def expected(server):
    llm = LLM(server.llm.path, kv_cache_memory_bytes=1 << 20)
    params = SamplingParams(**PARAMS, max_tokens=6, routed_experts=True)
    return [c.routed_experts for c in llm.generate([PROMPT], params, use_tqdm=False)[0].completions]


def test_experts_count_towards_the_size_of_a_reply(server):
    """Two samples of 6 tokens after 5 have 2 x 6 log-probs, and experts that count as 4 x 2 x 11."""
    with Serving(server.llm.path, max_reply_logprobs=100) as small:
        body = {"prompt": PROMPT, "n": 2, "max_tokens": 6, "ignore_eos": True}
        small.ok("/v1/completions", body | {"routed_experts": True})
        small.ok("/v1/completions", body | {"n": 16})
        refused = small.post("/v1/completions", body | {"routed_experts": True, "max_tokens": 7})
        assert refused.status_code == 400 and "four for a token's experts" in refused.json()["message"]


def test_the_client_asks_for_no_more_experts_than_a_reply_holds(server):
    """Each prompt's 2 x 6 log-probs and 4 x 2 x 11 of experts fill a call; without experts three would fit."""
    params = SamplingParams(**PARAMS, max_tokens=6, ignore_eos=True, routed_experts=True)
    prompts = [PROMPT, PROMPT[::-1], PROMPT[1:]]
    local = LLM(server.llm.path, kv_cache_memory_bytes=1 << 20).generate(prompts, params, use_tqdm=False)
    with Serving(server.llm.path, max_reply_logprobs=100) as small, Client(small.url) as client:
        found = client.generate(prompts, params)
    for one, two in zip(found, local, strict=True):
        for ours, theirs in zip(one.completions, two.completions, strict=True):
            assert ours.token_ids == theirs.token_ids
            assert np.array_equal(ours.routed_experts, theirs.routed_experts)


def test_an_update_over_http_brings_experts_one_by_one(server, tmp_path):
    new = save_tiny_moe(tmp_path / "new", "qwen3_moe", seed=1, vocab_size=300)
    params = SamplingParams(**PARAMS, max_tokens=6, routed_experts=True)

    def found(engine, **more):
        (output,) = engine.generate([PROMPT], params, **more)
        return [(c.token_ids, c.logprobs, c.routed_experts.tolist()) for c in output.completions]

    with Client(server.url) as client:
        before = found(client)
        client.update_weights(stored(new))
        expected = found(LLM(new, kv_cache_memory_bytes=1 << 20), use_tqdm=False)
        assert found(client) == expected != before
        client.update_weights(stored(server.llm.path))
        assert found(client) == before


def from_npy(text):
    return np.load(io.BytesIO(base64.b64decode(text)))


def body_of(route, **more):
    if route == "/inference/v1/generate":
        return {"token_ids": PROMPT, "sampling_params": PARAMS | {"max_tokens": 6} | more}
    if route == "/v1/completions":
        return {"prompt": PROMPT, "max_tokens": 6, **PARAMS, **more}
    return {"messages": [], "input_ids": PROMPT, "max_tokens": 6, **PARAMS, **more}


@pytest.mark.parametrize("route", ["/inference/v1/generate", "/v1/completions", "/v1/chat/completions"])
def test_vllms_form(server, expected, route):
    for start in (0, 3):
        reply = server.ok(route, body_of(route, routed_experts_prompt_start=start))
        for choice, ids in zip(reply["choices"], expected, strict=True):
            found = from_npy(choice["routed_experts"])
            assert found.dtype == np.uint8 and np.array_equal(found, ids[start:])
    asked = server.ok(route, body_of(route, routed_experts=True))["choices"]
    assert np.array_equal(from_npy(asked[1]["routed_experts"]), expected[1])
    assert all(c.get("routed_experts") is None for c in server.ok(route, body_of(route))["choices"])


@pytest.mark.slow
@pytest.mark.parametrize("layout", [{"replicas": 2}, {"pipeline_parallel_size": 2}], ids=str)
def test_replicas_stages_and_preemptions_change_none(server, ray_cluster, layout):
    """In a pool for little more than one sample of the largest size."""
    params = [SamplingParams(n=2, max_tokens=90, seed=i, ignore_eos=True, routed_experts=True) for i in range(6)]
    prompts = [[i, *PROMPT] for i in range(6)]
    local = LLM(server.llm.path, kv_cache_memory_bytes=1 << 20).generate(prompts, params, use_tqdm=False)
    pool = tight_pool(exact_model(server.llm.path), [*zip(prompts, params, strict=True)], 1)
    pool //= layout.get("pipeline_parallel_size", 1)
    with Serving(server.llm.path, llm={**layout, "kv_cache_memory_bytes": pool}) as many, Client(many.url) as client:
        found = client.generate(prompts, params)
        assert many.llm.stats().preemptions
        assert "samebits_step_seconds_count 0.0" in many.http.get("/metrics").text  # they step elsewhere
    for one, two in zip(found, local, strict=True):
        for ours, theirs in zip(one.completions, two.completions, strict=True):
            assert ours.token_ids == theirs.token_ids and ours.logprobs == theirs.logprobs
            assert np.array_equal(ours.routed_experts, theirs.routed_experts)


def sglang_body(**more):
    names = {"n": 2, "temperature": 1.0, "sampling_seed": 5, "max_new_tokens": 6}
    return {"input_ids": PROMPT, "sampling_params": names, "return_logprob": True, **more}


def test_sglangs_form(server, expected):
    for start in (0, 3):
        replies = server.ok("/generate", sglang_body(return_routed_experts=True, routed_experts_start_len=start))
        for reply, ids in zip(replies, expected, strict=True):
            flat = np.frombuffer(base64.b64decode(reply["meta_info"]["routed_experts"]), np.int32)
            assert np.array_equal(flat.reshape(-1, *ids.shape[1:]), ids[start:])
    assert "routed_experts" not in server.ok("/generate", sglang_body())[0]["meta_info"]


def test_a_stream_ends_with_them(server, expected):
    with server.http.stream("POST", "/generate", json=sglang_body(return_routed_experts=True, stream=True)) as stream:
        events = [orjson.loads(line[6:]) for line in stream.iter_lines() if line.startswith("data: {")]
    ends = {e["index"]: e["meta_info"] for e in events if e["meta_info"]["finish_reason"]}
    assert len(ends) == 2
    for index, ids in enumerate(expected):
        flat = np.frombuffer(base64.b64decode(ends[index]["routed_experts"]), np.int32)
        assert np.array_equal(flat.reshape(ids.shape), ids)
    assert all("routed_experts" not in e["meta_info"] for e in events if not e["meta_info"]["finish_reason"])


def test_the_client_and_a_remote_engine_have_the_array(server, expected):
    params = SamplingParams(**PARAMS, max_tokens=6, routed_experts=True)
    with Client(server.url) as client:
        remote = LLM(server.llm.path, engine=RemoteEngine(client, server.llm.path))
        for outputs in (client.generate([PROMPT], params), remote.generate([PROMPT], params, use_tqdm=False)):
            found = [c.routed_experts for c in outputs[0].completions]
            assert all(np.array_equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("route", ["/generate", "/inference/v1/generate"])
def test_readers_of_rollouts_take_the_replies(server, expected, tmp_path, route):
    body = sglang_body(return_routed_experts=True, return_prompt_token_ids=True)
    if route != "/generate":
        body = body_of(route, routed_experts=True, logprobs=0)
    (tmp_path / "replies.jsonl").write_bytes(orjson.dumps(server.ok(route, body)))
    found = [rollout.routed_experts for rollout in read_rollouts(tmp_path / "replies.jsonl")]
    assert all(np.array_equal(a.reshape(b.shape), b) for a, b in zip(found, expected, strict=True))


def test_wrong_starts_are_refused(server):
    reply = server.post("/v1/completions", body_of("/v1/completions", routed_experts_prompt_start=-1))
    assert reply.status_code == 400 and "routed_experts_prompt_start" in reply.json()["message"]
