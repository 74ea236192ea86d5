"""The control plane: who may use it, the server's states, and two clients who use it at once."""

import contextlib
import json
import shutil
import time

import httpx
import pytest
import torch

from samebits import LLM, SamplingParams
from samebits.engine.weights import specs_of
from samebits.integrations import Client
from samebits.server.auth import Guard, read_key
from samebits.server.options import ServerOptions
from samebits.trainer import exact_model

from helpers.models import make_checkpoint
from helpers.serving import Serving, in_background, served_checkpoint, wait_for
from helpers.weights import Sender

PROMPT = [17, 900, 3, 44]
LONG = {"token_ids": PROMPT, "sampling_params": {"max_tokens": 400, "ignore_eos": True, "seed": 1, "logprobs": 0}}
SHORT = {"token_ids": PROMPT, "sampling_params": {"max_tokens": 3, "seed": 1}}


@pytest.fixture(scope="module")
def path(checkpoint, tmp_path_factory):
    return served_checkpoint(checkpoint("llama"), tmp_path_factory.mktemp("served") / "model")


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("other") / "model", "llama", seed=5)


@pytest.fixture(scope="module")
def shared(path):
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with Serving(path, transfer_timeout=4) as server:
        yield server
    torch.set_num_threads(before)


@pytest.fixture
def server(shared):
    yield shared
    shared.ok("/wake_up")
    shared.ok("/resume")
    shared.idle()


def state(server) -> str:
    return server.get("/is_paused")["state"]


@contextlib.contextmanager
def generating(server):
    """A long generation runs; yields what gets its reply."""
    before = server.llm.stats().generation_tokens
    with in_background(server.post, "/inference/v1/generate", LONG) as replies:
        wait_for(lambda: server.llm.stats().generation_tokens > before)
        yield replies
    assert replies[0].status_code == 200, replies[0].text


# --- keys and ports ---------------------------------------------------------------------------------------------------


def test_keys_that_no_client_could_send_are_refused(monkeypatch, tmp_path):
    for key in ("", " ", "a b", "k\n", "schlüssel"):
        for kind in ("api_key", "admin_key"):
            with pytest.raises(ValueError, match="no client can send"):
                Guard(**{kind: key})
    monkeypatch.setenv("KEY", "")
    assert read_key(None, "KEY") == "", "an empty variable is a mistake, not the wish for no key"
    monkeypatch.setenv("KEY", "from-environment")
    assert read_key(None, "KEY") == "from-environment"
    (tmp_path / "key").write_text("from-file\n")
    assert read_key(tmp_path / "key", "KEY") == "from-file"
    monkeypatch.delenv("KEY")
    assert read_key(None, "KEY") is None


def test_control_without_a_key_answers_at_its_own_port_alone(path):
    guard = Guard()
    with Serving(path, guard=guard, control=True) as server, Client(server.url) as client:
        assert server.control_port != server.port and guard.control_port == server.control_port
        free = {"/v1/completions", "/v1/chat/completions", "/inference/v1/generate", "/generate"}
        posts = {p for p, methods in server.app.openapi()["paths"].items() if "post" in methods}
        control = posts - free - {"/tokenize", "/detokenize"}
        assert len(control) > 20
        for route in control:  # as a proxy that adds no header asks
            refused = server.post(route, {})
            assert refused.status_code == 403 and f"127.0.0.1:{server.control_port}" in refused.text, route
        for route in ("/flush_cache", "/release_memory_occupation", "/resume_memory_occupation"):
            assert server.http.get(route).status_code == 403
        assert state(server) == "serving" and server.llm.ready
        with httpx.Client(base_url=f"http://127.0.0.1:{server.control_port}", timeout=60) as direct:
            assert direct.post("/pause").json() == {"status": "paused"}
            assert direct.post("/resume").json() == {"status": "resumed"}
            assert direct.post("/inference/v1/generate", json=SHORT).status_code == 200, "all routes answer here"
            assert direct.post("/pause", headers={"x-forwarded-for": "10.0.0.1"}).status_code == 403
            assert direct.get("/flush_cache", headers={"sec-fetch-site": "same-site"}).status_code == 403
        assert client.update_weights(exact_model(path)) == 1, "our client finds the port"


IGNORED = {
    "a misspelt mode": ("/pause?mod=keep", None, "unknown query parameter 'mod': /pause takes mode, clear_cache"),
    "a mode in the body": ("/pause", {"mode": "keep"}, "unknown body: /pause takes mode, clear_cache in its query"),
    "a level in the body": ("/sleep", {"level": 2}, "unknown body: /sleep takes level, mode"),
    "a mode in the query": ("/pause_generation?mode=in_place", None, "unknown query parameter 'mode'"),
    "vLLM's older word": ("/pause?wait_for_inflight_requests=true", None, "unknown query parameter 'wait_for_inflight"),
    "a label in the query": ("/update_weights?weight_version=3", {}, "unknown query parameter 'weight_version'"),
}


@pytest.mark.parametrize("case", IGNORED)
def test_what_a_control_route_would_ignore_is_a_400(server, case):
    route, body, message = IGNORED[case]
    refused = server.post(route, body)
    assert refused.status_code == 400 and message in refused.json()["message"], refused.text
    assert state(server) == "serving"
    server.ok("/pause?wait_for_inflight_requests=false", {})
    server.ok("/resume", {})
    server.ok("/inference/v1/generate?api-version=2026", SHORT)


# --- states -----------------------------------------------------------------------------------------------------------


def test_a_resume_ends_a_pause_that_waits_for_good(server):
    with generating(server):
        with in_background(server.post, "/pause?mode=wait") as paused:
            wait_for(lambda: state(server) == "pausing")
            server.ok("/resume")
        assert paused[0].status_code == 409 and "ended by another call" in paused[0].text
    assert state(server) == "serving"
    server.ok("/inference/v1/generate", SHORT)


def test_a_sleep_that_waits_is_ended_by_a_resume(server):
    with generating(server):
        with in_background(server.post, "/sleep?level=1&mode=wait") as slept:
            wait_for(lambda: state(server) == "pausing")
            server.ok("/resume")
        assert slept[0].status_code == 409
    server.ok("/inference/v1/generate", SHORT)


def test_a_pause_that_waits_is_in_force_when_the_last_request_ends(server):
    with generating(server), in_background(server.post, "/pause?mode=wait") as paused:
        wait_for(lambda: state(server) == "pausing")
        assert server.post("/inference/v1/generate", SHORT).status_code == 503
    assert paused[0].status_code == 200 and state(server) == "paused"
    assert server.post("/inference/v1/generate", SHORT).status_code == 503


@pytest.mark.parametrize(
    ("stop", "go_on"),
    [("/pause?mode=keep", "/resume"), ("/release_memory_occupation", "/resume_memory_occupation")],
)
def test_a_pause_never_waits_for_requests_that_cannot_end(server, stop, go_on):
    with generating(server):
        with in_background(server.post, "/pause?mode=wait") as paused:
            wait_for(lambda: state(server) == "pausing")
            server.post(stop)
        assert paused[0].status_code == 409
        refused = server.post("/pause?mode=wait", timeout=5)
        assert refused.status_code == 409 and "can't end" in refused.text
        server.post(go_on)
        assert state(server) == "serving"
        server.ok("/inference/v1/generate", SHORT)


def test_waking_up_in_the_midst_of_an_update_ends_no_pause(server, path):
    server.ok("/pause?mode=keep")
    server.ok("/begin_weight_update")
    server.ok("/wake_up")
    assert server.get("/is_paused") == {"is_paused": True, "state": "updating"}
    server.ok("/update_weights_from_disk", {"model_path": str(path)})
    server.ok("/wake_up")
    assert state(server) == "updating", "what came isn't in force yet"
    server.ok("/end_weight_update")
    assert state(server) == "paused"


def test_a_server_that_sleeps_says_so_and_lives(server):
    server.ok("/sleep?level=1")
    assert state(server) == "asleep"
    server.ok("/resume")
    assert state(server) == "asleep", "a resume wakes nobody"
    for route in ("/health", "/ready"):
        assert server.http.get(route).status_code == 503 and "asleep" in server.http.get(route).text
    assert server.get("/liveness") == {"status": "ok"}
    assert server.post("/inference/v1/generate", SHORT).status_code == 503
    server.ok("/wake_up")
    assert server.get("/health") == {"status": "ok"} and state(server) == "serving"


def test_a_resume_in_an_update_is_refused_with_its_name_and_harms_nothing(server, path):
    weights = exact_model(path).state_dict()
    sender = Sender(server)
    server.ok("/pause")
    with in_background(server.post, "/update_weights_from_distributed", sender.body(weights)) as updated:
        wait_for(lambda: state(server) == "updating")
        for route in ("/resume", "/continue_generation"):
            refused = server.post(route)
            assert refused.status_code == 409 and "over group 'g'" in refused.text
        refused = server.post("/update_weights_from_disk", {"model_path": str(path)})
        assert refused.status_code == 409 and "over group 'g'" in refused.text
        sender.group.send(weights.items(), specs_of(weights))
    assert updated[0].status_code == 200, updated[0].text
    assert state(server) == "paused"


@pytest.mark.parametrize("then", ["disk", "again", "other label", "finish"])
def test_an_update_left_half_way_does_not_harm_the_next(server, other, path, then):
    weights = exact_model(other).state_dict()
    items = list(weights.items())
    sender = Sender(server)
    assert "to come" in sender.send(dict(items[:3]), weight_version="half").json()["message"]
    if then == "disk":
        server.ok("/update_weights_from_disk", {"model_path": str(other), "weight_version": "half"})
    elif then == "again":
        assert sender.send(weights, weight_version="half").status_code == 200
    elif then == "other label":
        message = sender.send(dict(items[3:]), weight_version="whole").json()["message"]
        assert "to come" in message, "tensors of two labels are not one update"
        assert sender.send(dict(items[:3]), weight_version="whole").status_code == 200
    else:
        assert server.post("/finish_weight_update").status_code == 409, "nobody has begun it"
        assert sender.send(dict(items[3:]), weight_version="half").status_code == 200
    assert state(server) == "serving"
    params = SamplingParams(max_tokens=3, seed=1, logprobs=0)
    with Client(server.url) as client:
        found = client.generate([PROMPT], params)[0].completions[0]
    expected = LLM(other, kv_cache_memory_bytes=2**22).generate([PROMPT], params, use_tqdm=False)[0].completions[0]
    assert (found.token_ids, found.logprobs) == (expected.token_ids, expected.logprobs)
    server.ok("/update_weights_from_disk", {"model_path": str(path)})


@pytest.mark.parametrize(
    ("wrong", "message"),
    [({"rank_offset": 0}, "rank_offset"), ({"world_size": 1}, "world_size"), ({"master_port": "abc"}, "master_port"),
     ({"master_port": 0}, "master_port"), ({"world_size": -3}, "world_size")],
)  # fmt: skip
def test_a_group_that_makes_no_sense_is_a_400_at_once(server, wrong, message):
    where = {"master_address": "127.0.0.1", "master_port": 29500, "rank_offset": 1, "world_size": 2, "backend": "gloo"}
    begin = time.monotonic()
    refused = server.post("/init_weights_update_group", where | wrong)
    assert refused.status_code == 400 and message in refused.text
    assert time.monotonic() - begin < 2


def test_empty_updates_and_long_labels_are_a_400(server):
    sender = Sender(server)
    assert server.post("/update_weights_from_distributed", sender.body({})).status_code == 400
    assert server.post("/update_weight_version", {"new_version": "x" * 1000}).status_code == 400
    assert server.post("/update_weights_from_disk", {"model_path": ""}).status_code == 400


def test_directories_that_are_no_checkpoints_are_a_400_that_says_why(server, path, tmp_path):
    copy = tmp_path / "model"
    version = server.get("/weight_info")
    shutil.copytree(path, copy)

    def refusal() -> str:
        response = server.post("/update_weights_from_disk", {"model_path": str(copy)})
        assert (response.status_code, response.json()["success"]) == (400, False), response.text
        return response.json()["message"]

    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 0.5}))
    assert "rms_norm_eps is 0.5" in refusal()
    (copy / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "/etc/passwd"}}))
    assert "not below its directory" in refusal()
    (copy / "model.safetensors.index.json").write_text("{}")
    assert "not an index" in refusal()
    shutil.rmtree(copy)
    assert "there is no directory" in refusal()
    assert server.get("/weight_info") == version


@pytest.mark.parametrize(
    ("setting", "cleared"),
    [
        ("mode=abort", True),
        ("mode=abort&clear_cache=false", False),
        ("mode=keep", False),
        ("mode=keep&clear_cache=true", True),
    ],
)
def test_a_pause_forgets_prefixes_unless_it_is_told_not_to(server, setting, cleared):
    prompt = {"token_ids": [*range(3, 90)], "sampling_params": {"max_tokens": 1}}
    server.ok("/inference/v1/generate", prompt)
    server.ok(f"/pause?{setting}")
    server.ok("/resume")
    before = server.llm.stats().prefix_hit_tokens
    server.ok("/inference/v1/generate", prompt)
    assert (server.llm.stats().prefix_hit_tokens == before) == cleared


def test_a_sleep_of_level_0_is_a_pause_and_says_so(server):
    assert server.ok("/sleep?level=0")["status"] == "paused" == state(server)
    server.ok("/wake_up")


def test_wrong_options_are_refused():
    with pytest.raises(ValueError, match="pause_keep must be stale or recompute, got 'recomputed'"):
        ServerOptions(pause_keep="recomputed")
    with pytest.raises(ValueError, match="transfer_timeout must be positive"):
        ServerOptions(transfer_timeout=-1.0)
