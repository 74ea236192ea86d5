"""An engine behind HTTP is an `Engine`: `LLM` over it gives what `LLM` in this process gives, as bits."""

import pytest
import torch

from samebits import LLM, SamplingParams
from samebits.engine import Engine
from samebits.integrations import Client, RemoteEngine, ServerError
from samebits.trainer import exact_model, token_logprobs

from helpers.adapters import adapted_model, lora
from helpers.models import make_checkpoint
from helpers.serving import Serving, in_background, served_checkpoint, wait_for

PROMPTS = [[17, 900, 3, 44], "a text", {"prompt_token_ids": [5, 6, 7]}]
PARAMS = [
    SamplingParams(n=2, max_tokens=9, seed=1),
    SamplingParams(temperature=0.7, top_k=20, top_p=0.9, max_tokens=6, seed=-2, logprobs=3, ignore_eos=True),
    SamplingParams(max_tokens=4, min_tokens=2, seed=3, prompt_logprobs=2),
]


@pytest.fixture(scope="module")
def path(checkpoint, tmp_path_factory):
    return served_checkpoint(checkpoint("llama"), tmp_path_factory.mktemp("served") / "model")


@pytest.fixture(scope="module")
def updated(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("updated") / "model", "llama", seed=5)


@pytest.fixture
def remote(path):
    with Serving(path) as server, LLM(path, engine=RemoteEngine(Client(server.url), path)) as llm:
        yield llm


def results(llm):
    outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    samples = [(c.token_ids, c.logprobs, c.text, c.finish_reason) for o in outputs for c in o.completions]
    alternatives = outputs[1].completions[0].top_logprobs, outputs[2].prompt_logprobs, outputs[2].prompt_top_logprobs
    return samples, alternatives


def test_it_is_an_engine_and_gives_the_bits_of_one_in_this_process(path, remote):
    assert isinstance(remote.engine, Engine)
    local = LLM(path)
    assert results(remote) == results(local)
    assert remote.contract.hash == local.contract.hash
    assert remote.eos_token_ids == local.eos_token_ids
    assert not remote.has_unfinished_requests()


def test_what_a_server_does_not_say_or_take_is_neither_made_up_nor_dropped(remote):
    params = SamplingParams(max_tokens=2, seed=1, logprobs=2, prompt_logprobs=1)
    (output,) = remote.generate([[17, 900, 3]], params, use_tqdm=False)
    assert output.completions[0].top_logprobs
    assert output.completions[0].ranks is None
    assert output.prompt_ranks is None
    with pytest.raises(ValueError, match="cache_salt"):
        remote.generate([{"prompt_token_ids": [5], "cache_salt": "mine"}], use_tqdm=False)
    for name in ("weight_bytes", "kv_cache_bytes", "world_size"):
        with pytest.raises(TypeError, match="can't be reached"):
            getattr(remote, name)


def test_weights_without_a_number_are_refused_by_name(path):
    with Serving(path) as server, Client(server.url) as client:
        client.update_weights(exact_model(path).state_dict(), "step-7")
        with pytest.raises(ValueError, match="step-7"):
            RemoteEngine(client, path)


def test_a_call_waits_for_its_place_in_a_full_queue_but_not_for_a_paused_server(path):
    settings = {"max_num_seqs": 2}
    with Serving(path, settings, max_waiting=0) as server, Client(server.url) as client, Client(server.url) as other:
        long = SamplingParams(n=2, max_tokens=400, ignore_eos=True)
        with in_background(other.generate, [[17, 900]], long):
            wait_for(lambda: server.engine.num_sequences == 2)
            assert server.post("/generate", {"input_ids": [5]}).status_code == 503
            (output,) = client.generate([[5]], SamplingParams(max_tokens=3, seed=1))
            assert output.completions[0].token_ids
        server.ok("/pause")
        with pytest.raises(ServerError, match="paused"):
            client.generate([[5]])


def test_more_than_the_server_holds_goes_in_parts_and_what_never_fits_says_how_to_raise_it(path):
    params = [SamplingParams(n=2, max_tokens=5, seed=i, ignore_eos=True) for i in range(6)]
    params += [
        SamplingParams(max_tokens=3, seed=7, logprobs=4),
        SamplingParams(max_tokens=1, seed=8, prompt_logprobs=9),
    ]
    prompts = [[17, 900, 3, 44]] * len(params)
    local = LLM(path).generate(prompts, params, use_tqdm=False)
    with (
        Serving(path, {"max_num_seqs": 2}, max_waiting=3, max_reply_logprobs=50) as server,
        Client(server.url) as client,
    ):
        outputs = client.generate(prompts, params)
        assert [o.seed for o in outputs] == [p.seed for p in params]
        with pytest.raises(ServerError, match="--max-waiting 6"):
            client.generate([[5]], SamplingParams(n=6))
        with pytest.raises(ServerError, match="--max-reply-logprobs 51"):
            client.generate([[5]], SamplingParams(max_tokens=51))
        assert client.generate([]) == []
    for one, two in zip(outputs, local, strict=True):
        assert [(c.token_ids, c.logprobs, c.top_logprobs) for c in one.completions] == [
            (c.token_ids, c.logprobs, c.top_logprobs) for c in two.completions
        ]
        assert (one.prompt_logprobs, one.prompt_top_logprobs) == (two.prompt_logprobs, two.prompt_top_logprobs)


def test_an_unset_seed_is_drawn_here_and_can_be_repeated(remote):
    request = remote.process([5, 6, 7], SamplingParams(max_tokens=6), "mine")
    remote.add_request(request)
    (out,) = remote.step()
    again = remote.generate([[5, 6, 7]], SamplingParams(max_tokens=6, seed=request.seed), use_tqdm=False)[0]
    assert out.completions[0].logprobs == again.completions[0].logprobs


@pytest.mark.parametrize("kind", ["module", "pairs", "directory"])
def test_weights_come_from_any_source(path, updated, remote, kind):
    model = exact_model(updated)
    source = {"module": model, "pairs": iter(model.state_dict().items()), "directory": updated}[kind]
    assert remote.update_weights(source, 7) == remote.weight_version == 7
    new = LLM(path)
    new.update_weights(updated, 7)
    assert remote.weight_checksums() == new.weight_checksums()
    assert results(remote) == results(new)


def test_it_sleeps_wakes_and_counts(remote):
    before = results(remote)
    assert remote.sleep() > 0
    assert not remote.ready
    remote.wake_up()
    remote.reset_prefix_cache()
    assert results(remote) == before
    assert remote.stats().generation_tokens > 0
    assert remote.stats().weight_version == 0


def test_what_the_server_refuses_is_an_error_and_leaves_nothing(path):
    with (
        Serving(path, {"max_model_len": 32}, max_reply_logprobs=20) as server,
        LLM(path, engine=RemoteEngine(Client(server.url), path)) as llm,
    ):
        assert llm.max_model_len == 32
        with pytest.raises(ValueError, match="max_model_len 32"):  # known here
            llm.generate([[5] * 40], SamplingParams(max_tokens=2), use_tqdm=False)
        with pytest.raises(ServerError, match="--max-reply-logprobs 21"):
            llm.generate([[5] * 4], SamplingParams(max_tokens=21), use_tqdm=False)
        assert not llm.has_unfinished_requests()
        assert llm.generate([[5] * 4], SamplingParams(max_tokens=2), use_tqdm=False)[0].finished


def test_a_request_can_be_aborted_before_the_step(remote):
    remote.add_request([5, 6], SamplingParams(max_tokens=4), request_id="mine")
    assert remote.abort("mine")
    (out,) = remote.take_outputs()
    assert out.completions[0].finish_reason == "abort"
    assert not remote.abort("mine")


def test_stale_kv_is_the_servers_to_allow(remote):
    with pytest.raises(ValueError, match="mode=keep"):
        remote.update_weights([("x", torch.zeros(1))], recompute_running=False)


@pytest.mark.parametrize("over", ["group", "folder"])
def test_an_update_of_an_adapter_alone_reaches_a_server(path, tmp_path, over):
    model = adapted_model(path)
    with Serving(path, {"adapter": lora()}) as server:
        folder = tmp_path / "sync" if over == "folder" else None
        with LLM(path, engine=RemoteEngine(Client(server.url), path, folder)) as llm:
            assert llm.update_weights(model) == 1
            out = llm.generate([[5, 6, 7]], SamplingParams(max_tokens=9, seed=1), use_tqdm=False)[0]
        (expected,) = token_logprobs(model, [[5, 6, 7, *out.completions[0].token_ids]])
        assert torch.equal(torch.tensor(out.completions[0].logprobs), expected[3:].detach())


@pytest.mark.parametrize("url", ["http://127.0.0.1:9", "127.0.0.1:9"])
def test_a_server_that_is_not_there_is_named(url):
    with pytest.raises(ConnectionError, match=r"no answer from .*127\.0\.0\.1"):
        Client(url)


def test_an_update_brings_back_weights_that_were_dropped(path, remote):
    remote.sleep(2)
    remote.wake_up(["kv_cache"])
    remote.update_weights(exact_model(path))
    assert remote.engine.has_weights and remote.weight_checksums()
