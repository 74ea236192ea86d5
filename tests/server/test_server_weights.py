"""Weight updates over HTTP: all or nothing, over every way, and never a hang."""

import base64
import json
import os
import pathlib
import pickle
import shutil
import signal
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from samebits import LLM, NumericsError, SamplingParams
from samebits.engine.weights import TransferError, specs_of
from samebits.engine.weights.group import WHOLE
from samebits.integrations import Client, ServerError
from samebits.server.updates import MAX_LABELS, WeightUpdates
from samebits.trainer import exact_model, token_logprobs

from helpers.models import make_checkpoint
from helpers.serving import Serving, free_port, in_background, served_checkpoint, wait_for
from helpers.weights import Sender

PROMPT = [17, 900, 3, 44]
PARAMS = SamplingParams(n=2, max_tokens=9, seed=1, logprobs=0)
LONG = {"token_ids": PROMPT, "sampling_params": {"max_tokens": 300, "ignore_eos": True, "seed": 1, "logprobs": 0}}

TRAINER = """
import os, signal, sys
from samebits.integrations import Client
from samebits.trainer import exact_model
path, url, act = sys.argv[1:]
model = exact_model(path)
client = Client(url, timeout=30)
if act == "die":
    from samebits.engine.weights import group as transfer
    broadcast = transfer.WeightGroup._broadcast
    count = iter(range(100))
    def dying(self, tensor):
        if next(count) == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return broadcast(self, tensor)
    transfer.WeightGroup._broadcast = dying
    import samebits.integrations.client as c
    c.BUCKET_BYTES = 1000
print(client.update_weights(model, version=12))
"""


@pytest.fixture(scope="module")
def path(checkpoint, tmp_path_factory):
    return served_checkpoint(checkpoint("llama"), tmp_path_factory.mktemp("served") / "model")


@pytest.fixture(scope="module")
def updated(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("updated") / "model", "llama", seed=5)


@pytest.fixture(scope="module")
def state(updated):
    return exact_model(updated).state_dict()


@pytest.fixture
def server(path):
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with Serving(path, transfer_timeout=4) as server:
        yield server
        wait_for(lambda: server.engine.state.update is None, 20)  # a broadcast ends a moment after its sender has
        server.ok("/resume")
        server.idle()
    torch.set_num_threads(before)


def rollout(path):
    llm = LLM(path, kv_cache_memory_bytes=2**22)
    return [(c.token_ids, c.logprobs) for c in llm.generate([PROMPT], PARAMS, use_tqdm=False)[0].completions]


@pytest.fixture(scope="module")
def old_rollout(path):
    return rollout(path)


@pytest.fixture(scope="module")
def new_rollout(updated):
    return rollout(updated)


def served(server):
    sampling = {"max_tokens": 9, "seed": 1, "n": 2, "logprobs": 0}
    choices = server.ok("/inference/v1/generate", {"token_ids": PROMPT, "sampling_params": sampling})["choices"]
    return [(c["token_ids"], [e["logprob"] for e in c["logprobs"]["content"]]) for c in choices]


def test_a_trainer_in_another_process_updates_the_weights(server, updated, old_rollout, new_rollout):
    assert served(server) == old_rollout
    done = subprocess.run([sys.executable, "-c", TRAINER, updated, server.url, "send"], capture_output=True, text=True)
    assert done.stdout.strip() == "12", done.stderr
    assert served(server) == new_rollout
    assert server.get("/weight_info")["weight_version"] == "12"
    assert server.get("/model_info")["weight_version"] == "12"


def test_a_trainer_killed_in_its_broadcast_leaves_the_old_weights(server, updated, old_rollout):
    done = subprocess.run([sys.executable, "-c", TRAINER, updated, server.url, "die"], capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    wait_for(lambda: server.engine.state.update is None, 20)
    assert served(server) == old_rollout
    assert server.get("/weight_info")["weight_version"] == "default"


def test_a_whole_update_over_a_group_tensor_by_tensor_or_flattened(server, state, new_rollout):
    sender = Sender(server)
    reply = sender.send(state, weight_version="7")
    assert reply.json()["success"] is True, reply.text
    assert served(server) == new_rollout
    reply = sender.send(state, WHOLE, load_format="flattened_bucket", weight_version="step-8")
    assert reply.json()["success"] is True, reply.text
    assert server.get("/weight_info")["weight_version"] == "step-8"
    assert served(server) == new_rollout
    assert server.ok("/destroy_weights_update_group", {"group_name": "g"})["success"] is True
    assert server.ok("/destroy_weights_update_group", {"group_name": "g"})["success"] is True
    assert server.post("/update_weights_from_distributed", sender.body(state)).status_code == 409


def test_buckets_are_in_force_together_when_the_last_has_come(server, state, old_rollout, new_rollout):
    sender, items = Sender(server), list(state.items())
    server.ok("/pause_generation", {"mode": "retract"})
    assert "to come" in sender.send(dict(items[:5]), weight_version="3").json()["message"]
    assert server.get("/weight_info")["weight_version"] == "default"
    response = server.post("/continue_generation", {})
    assert (response.status_code, response.json()["success"]) == (409, False)
    assert "never came" in response.json()["message"]
    server.ok("/continue_generation", {})
    assert served(server) == old_rollout
    sender.send(dict(items[:5]), weight_version="3")
    assert sender.send(dict(items[5:]), weight_version="3").json()["message"] == "version '3' is in force"
    assert served(server) == new_rollout


def test_vllms_sequence_of_calls(server, state, new_rollout):
    sender = Sender(server, "vllm")
    server.ok("/pause?mode=keep")
    server.ok("/start_weight_update", {"is_checkpoint_format": True})
    for part in (list(state.items())[:7], list(state.items())[7:]):
        body = sender.body(dict(part))
        info = {"names": body["names"], "dtype_names": body["dtypes"], "shapes": body["shapes"], "group_name": "g"}
        with in_background(server.post, "/update_weights", {"update_info": info}) as replies:
            sender.group.send(part, specs_of(dict(part)))
        assert replies[0].status_code == 200, replies[0].text
        assert server.get("/weight_info")["weight_version"] == "default"
    assert server.ok("/finish_weight_update", {"weight_version": "12"})["weight_version"] == "12"
    server.ok("/resume")
    assert served(server) == new_rollout
    assert server.post("/finish_weight_update").status_code == 409
    server.ok("/start_weight_update")
    assert "20 tensors are missing" in server.post("/finish_weight_update").json()["message"]


def test_the_name_that_an_update_begins_with_is_its_versions(server, updated):
    server.ok("/begin_weight_update", {"weight_version": "v7"})
    server.ok("/update_weights_from_disk", {"model_path": str(updated)})
    server.ok("/end_weight_update")
    assert server.get("/weight_info")["weight_version"] == "v7"


def test_vllms_own_nccl_group_is_refused_with_the_reason(server):
    info = {"master_address": "127.0.0.1", "master_port": 1, "rank_offset": 1, "world_size": 2}
    for extra, reason in [
        ({}, "torch process groups"),
        ({"packed": True, "backend": "gloo"}, "packed=True is not supported"),
        ({"nccl_unique_id_b64": "AA==", "backend": "gloo"}, "nccl_unique_id_b64"),
    ]:
        response = server.post("/init_weight_transfer_engine", {"init_info": info | extra})
        assert response.status_code == 400 and reason in response.json()["message"]


def test_from_disk_by_both_dialects(server, path, updated, old_rollout, new_rollout):
    reply = server.ok("/update_weights_from_disk", {"model_path": str(updated), "weight_version": 4})
    assert reply["success"] is True and reply["num_paused_requests"] == 0
    assert served(server) == new_rollout
    server.ok("/update_weights", {"weight_dir": str(path)})
    assert (served(server), server.get("/weight_info")["weight_version"]) == (old_rollout, "5")
    assert server.ok("/update_weight_version", {"new_version": "renamed"})["new_version"] == "renamed"
    choice = server.ok("/inference/v1/generate", LONG)["choices"][0]
    assert choice["weight_versions"] == [{"version": "renamed", "start": 0, "end": 300}]
    server.ok("/sleep?level=2")
    server.ok("/wake_up")
    assert served(server) == old_rollout


def test_requests_end_for_an_update_once_its_weights_are_there(server, state, updated, tmp_path):
    """One that brings none ends no request."""
    server.ok("/pause?mode=keep")
    asked = {"abort_all_requests": True}
    with in_background(server.ok, "/inference/v1/generate", LONG) as replies:
        wait_for(lambda: server.engine.num_sequences == 1)
        assert server.post("/update_weights_from_disk", asked | {"model_path": str(tmp_path)}).status_code == 400
        nobodys = {"names": ["lm_head.weight"], "dtypes": ["float32"], "shapes": [[1]], "group_name": "nobody"}
        assert server.post("/update_weights_from_distributed", asked | nobodys).status_code == 409
        assert server.engine.num_sequences == 1
        server.ok("/update_weights_from_disk", asked | {"model_path": str(updated)})
    assert replies[0]["choices"][0]["finish_reason"] == "abort"
    with in_background(server.ok, "/inference/v1/generate", LONG) as replies:
        wait_for(lambda: server.engine.num_sequences == 1)
        assert Sender(server).send(state, **asked).status_code == 200
    assert replies[0]["choices"][0]["finish_reason"] == "abort"


class Gadget:
    """Creates a file where it is unpickled."""

    def __init__(self, file):
        self.file = file

    def __reduce__(self):
        return pathlib.Path.touch, (self.file,)


def test_nothing_that_a_client_names_or_sends_is_unpickled(server, path, tmp_path, old_rollout):
    """SGLang's pickled tensors have no route; of a directory's files only safetensors are read."""
    canary, model = tmp_path / "canary", tmp_path / "model"
    gadget = pickle.dumps(Gadget(canary))
    pickle.loads(gadget)
    canary.unlink()  # so it works
    body = {"serialized_named_tensors": [base64.b64encode(gadget).decode()], "load_format": None}
    assert server.post("/update_weights_from_tensor", body).status_code == 404
    shutil.copytree(path, model)
    (model / "model.safetensors").unlink()
    for name in ("pytorch_model.bin", "model.pt", "model.safetensors"):
        (model / name).write_bytes(gadget)
        torch.save({"model.norm.weight": Gadget(canary)}, model / f"whole-{name}")
        reply = server.post("/update_weights_from_disk", {"model_path": str(model)})
        assert (reply.status_code, reply.json()["success"]) == (400, False), reply.text
    assert not canary.exists()
    assert served(server) == old_rollout


def test_the_newest_versions_keep_their_names_and_older_ones_go_by_number():
    updates = WeightUpdates(SimpleNamespace(state=None), timeout=1.0)
    assert (updates.label_of(0), updates.label_of(7)) == ("default", "7")
    for version in range(1, 3 * MAX_LABELS):
        updates.relabel(f"step-{version}", version)
    newest = 3 * MAX_LABELS - 1
    assert updates.label_of(newest) == f"step-{newest}"
    assert updates.label_of(newest - MAX_LABELS + 1) == f"step-{newest - MAX_LABELS + 1}"
    assert updates.label_of(newest - MAX_LABELS) == str(newest - MAX_LABELS)
    updates.relabel("renamed", newest)
    assert updates.label_of(newest) == "renamed"


DOWN = "model.layers.1.mlp.down_proj.weight"
DAMAGE = {
    "unknown": (lambda s: {**s, "extra": s[DOWN]}, "unknown tensor 'extra'"),
    "shape": (lambda s: {**s, DOWN: s[DOWN].t().contiguous()}, r"shape [172, 100], expected [100, 172]"),
    "dtype": (lambda s: {**s, DOWN: s[DOWN].double()}, "torch.float64, expected one of"),
    "nan": (lambda s: {**s, DOWN: s[DOWN] * float("nan")}, "holds NaN or infinity"),
}


@pytest.mark.parametrize("kind", DAMAGE)
@pytest.mark.parametrize("way", ["group", "disk"])
def test_a_damaged_update_is_a_400_and_the_old_version_serves_on(
    server, state, old_rollout, new_rollout, kind, way, tmp_path, path
):
    damage, message = DAMAGE[kind]
    bad = damage(dict(state))
    if way == "group":
        sender = Sender(server)
        begin = time.monotonic()
        replies = []
        try:
            replies.append(sender.send(bad, weight_version="9"))
        except TransferError:  # refused before the broadcast: the server left the group, so that we don't wait
            replies.append(server.post("/update_weights_from_distributed", sender.body(bad)))
        assert time.monotonic() - begin < 15
        reply = replies[0]
        if reply.status_code == 409:
            assert kind != "nan"
            return
    else:
        (tmp_path / "config.json").write_text((path / "config.json").read_text())
        save_file({n: t.clone().contiguous() for n, t in bad.items()}, tmp_path / "model.safetensors")
        reply = server.post("/update_weights_from_disk", {"model_path": str(tmp_path)})
    assert (reply.status_code, reply.json()["success"]) == (400, False), reply.text
    assert message in reply.json()["message"]
    assert served(server) == old_rollout
    assert server.get("/weight_info")["weight_version"] == "default"
    assert Sender(server).send(state).status_code == 200
    assert served(server) == new_rollout


@pytest.mark.parametrize("kind", ["wrong", "huge", "unknown"])
def test_a_config_that_is_none_is_a_400(server, state, path, tmp_path, kind):
    config = json.loads((path / "config.json").read_text())
    file = tmp_path / "config.json"
    changed = {"wrong": {"rms_norm_eps": "abc"}, "unknown": {"model_type": "nobody's"}, "huge": {}}[kind]
    file.write_text(json.dumps(config | changed))
    if kind == "huge":
        os.truncate(file, 2**34)  # without blocks on disk
    save_file({n: t.clone().contiguous() for n, t in state.items()}, tmp_path / "model.safetensors")
    reply = server.post("/update_weights_from_disk", {"model_path": str(tmp_path)})
    assert reply.status_code == 400 and str(tmp_path) in reply.json()["message"], reply.text


def test_a_sender_that_never_sends_is_a_500_in_time_while_requests_are_served(server, state, old_rollout):
    sender = Sender(server)
    with in_background(server.post, "/update_weights_from_distributed", sender.body(state)) as replies:
        wait_for(lambda: server.engine.state.update is not None)
        assert server.post("/update_weights_from_disk", {"model_path": "x"}).status_code == 409
        assert served(server) == old_rollout
    assert (replies[0].status_code, replies[0].json()["success"]) == (500, False)
    assert "more than 4 s" in replies[0].json()["message"]
    assert served(server) == old_rollout


def test_a_rendezvous_without_a_trainer_is_a_500_in_time(server):
    where = {"master_address": "127.0.0.1", "master_port": free_port(), "rank_offset": 1, "world_size": 2}
    response = server.post("/init_weights_update_group", {**where, "backend": "gloo"})
    assert (response.status_code, response.json()["success"]) == (500, False)
    refused = server.post("/init_weights_update_group", {**where, "backend": "gloo", "rank_offset": 5})
    assert refused.status_code == 400 and "ranks 5 to 5 don't fit in a group of 2" in refused.json()["message"]
    if not torch.cuda.is_available():
        assert "use 'gloo'" in server.post("/init_weights_update_group", where).json()["message"]


def test_a_group_of_a_trainer_that_is_not_there_holds_no_update_up(server, updated, new_rollout, monkeypatch):
    where = {"master_address": "127.0.0.1", "master_port": free_port(), "rank_offset": 1, "world_size": 2}
    waiting, reach = threading.Event(), server.service.updates._reach
    monkeypatch.setattr(server.service.updates, "_reach", lambda *where: waiting.set() or reach(*where))
    with in_background(server.post, "/init_weights_update_group", {**where, "backend": "gloo"}) as replies:
        assert waiting.wait(30)
        server.ok("/update_weights_from_disk", {"model_path": str(updated)})
        assert served(server) == new_rollout and not replies
    assert replies[0].status_code == 500 and "nobody listens at 127.0.0.1" in replies[0].json()["message"]
    where["master_address"] = "no.such.host.invalid"
    assert "nobody listens" in server.post("/init_weights_update_group", {**where, "backend": "gloo"}).text


@pytest.mark.parametrize("mode", ["retract", "in_place", None])
def test_running_requests_are_recomputed_or_say_that_they_were_not(server, path, updated, mode):
    with in_background(server.ok, "/inference/v1/generate", LONG) as results:
        wait_for(lambda: server.llm.stats().generation_tokens > 20)
        if mode:
            server.ok("/pause_generation", {"mode": mode})
        server.ok("/update_weights_from_disk", {"model_path": str(updated), "weight_version": "5"})
        if mode:
            server.ok("/continue_generation", {})
    choice = results[0]["choices"][0]
    first, second = choice["weight_versions"]
    assert (first["version"], second["version"], second["end"]) == ("default", "5", 300)
    assert second.get("stale_kv", False) == (mode == "in_place")
    sequence, begin = [PROMPT + choice["token_ids"]], second["start"]
    logprobs = torch.tensor([e["logprob"] for e in choice["logprobs"]["content"]])
    old, new = (token_logprobs(exact_model(p), sequence)[0][len(PROMPT) :] for p in (path, updated))
    assert torch.equal(logprobs[:begin], old[:begin])
    assert torch.equal(logprobs[begin:], new[begin:]) == (mode != "in_place")


@pytest.mark.parametrize("keep", ["stale", "recompute"])
def test_prime_rls_pause_keeps_requests_and_on_request_their_exactness(path, updated, keep):
    """Its calls in an update: /pause?mode=keep&clear_cache=false, /update_weights with weight_dir, /resume."""
    with Serving(path, pause_keep=keep) as server, in_background(server.ok, "/inference/v1/generate", LONG) as results:
        wait_for(lambda: server.llm.stats().generation_tokens > 20)
        server.ok("/pause?mode=keep&clear_cache=false")
        server.ok("/update_weights", {"weight_dir": str(updated), "weight_version": "5"})
        server.ok("/resume")
        assert server.get("/liveness") == {"status": "ok"}
    choice = results[0]["choices"][0]
    spans = choice["weight_versions"]
    assert [span["version"] for span in spans] == ["default", "5"]
    assert any("stale_kv" in span for span in spans) == (keep == "stale")
    logprobs = torch.tensor([e["logprob"] for e in choice["logprobs"]["content"]])
    for span, model in zip(spans, (path, updated), strict=True):
        exact = token_logprobs(exact_model(model), [PROMPT + choice["token_ids"]])[0][len(PROMPT) :]
        part = slice(span["start"], span["end"])
        assert torch.equal(logprobs[part], exact[part]) == ("stale_kv" not in span)


def test_stale_kv_is_never_shared(server, updated, new_rollout):
    """A request that keeps old KV goes on beside new ones of the same prompt."""
    prompt = [7] * 64
    body = {"token_ids": prompt, "sampling_params": LONG["sampling_params"]}
    with in_background(server.ok, "/inference/v1/generate", body):
        wait_for(lambda: server.llm.stats().generation_tokens > 40)
        server.ok("/pause?mode=keep")
        server.ok("/update_weights_from_disk", {"model_path": str(updated)})
        server.ok("/resume")
        short = {"token_ids": prompt, "sampling_params": {"max_tokens": 9, "seed": 1, "logprobs": 0}}
        choice = server.ok("/inference/v1/generate", short)["choices"][0]
    llm = LLM(updated, kv_cache_memory_bytes=2**22)
    fresh = llm.generate([prompt], SamplingParams(max_tokens=9, seed=1), use_tqdm=False)[0].completions[0]
    assert (choice["token_ids"], [e["logprob"] for e in choice["logprobs"]["content"]]) == (
        fresh.token_ids,
        fresh.logprobs,
    )


def test_checksums_compare_two_versions(server, path, updated):
    old = server.ok("/weight_checker", {"action": "checksum"})["checksums"]
    assert len(old) == len(load_file(path / "model.safetensors"))
    assert server.ok("/weight_checker", {"action": "compare", "baseline": old}) == {"match": True, "mismatches": []}
    server.ok("/update_weights_from_disk", {"model_path": str(updated)})
    assert server.ok("/weight_checker", {"action": "compare", "baseline": old})["mismatches"] == sorted(old)
    server.ok("/update_weights_from_disk", {"model_path": str(path)})
    assert server.ok("/weight_checker", {"action": "compare", "baseline": old})["match"] is True
    assert server.ok("/weight_checker", {"action": "reset"})["status"] == "reset"
    assert server.http.get("/health_generate").status_code == 503
    server.ok("/update_weights_from_disk", {"model_path": str(path)})
    assert server.ok("/weight_checker", {"action": "compare", "baseline": old})["match"] is True


# --- the Python client ------------------------------------------------------------------------------------------------


MILES = {"allow_quant_error": False, "selector": "all"}


@pytest.mark.parametrize("more", [{}, MILES], ids=["slime", "Miles"])
def test_the_check_of_an_update(server, path, updated, more):
    """Snapshot, reset, update, compare: what slime and Miles ask for with --check-weight-update-equal."""
    for name in ("/get_weight_version", "/weight_version"):
        assert server.get(name) == {"weight_version": "default"}
    assert server.post("/weights_checker", {"action": "compare", **more}).status_code == 409
    assert server.ok("/weights_checker", {"action": "snapshot", **more})["success"] is True
    server.ok("/weights_checker", {"action": "reset_tensors", **more})
    assert server.post("/generate", {"input_ids": PROMPT}).status_code == 503
    response = server.post("/weights_checker", {"action": "compare", **more})
    assert (response.status_code, "dropped" in response.json()["message"]) == (400, True)
    server.ok("/update_weights_from_disk", {"model_path": str(path), "weight_version": "6"})
    assert server.ok("/weights_checker", {"action": "compare", **more})["success"] is True
    assert server.get("/get_weight_version") == {"weight_version": "6"}
    server.ok("/update_weights_from_disk", {"model_path": str(updated)})
    response = server.post("/weights_checker", {"action": "compare", **more})
    assert (response.status_code, response.json()["success"]) == (400, False)
    assert "differ from the snapshot" in response.json()["message"]


def test_the_client_returns_what_the_engine_does(server, path, updated):
    prompts = [PROMPT, [9, 8, 7]]
    each = [
        SamplingParams(n=2, max_tokens=7, seed=3, logprobs=2, prompt_logprobs=2),
        SamplingParams(max_tokens=4, seed=1),
    ]
    llm = LLM(path, kv_cache_memory_bytes=2**22)
    with Client(server.url, llm.contract) as client:
        for version in (0, 3):
            theirs, ours = client.generate(prompts, each), llm.generate(prompts, each, use_tqdm=False)
            for a, b in zip(theirs, ours, strict=True):
                assert (a.prompt_token_ids, a.prompt_logprobs) == (b.prompt_token_ids, b.prompt_logprobs)
                for c, d in zip(a.completions, b.completions, strict=True):
                    for name in (
                        "index",
                        "token_ids",
                        "logprobs",
                        "finish_reason",
                        "weight_versions",
                        "text",
                        "top_logprobs",
                    ):
                        assert getattr(c, name) == getattr(d, name), name
            if version == 0:
                model = exact_model(updated)
                assert client.update_weights(model, version=3) == llm.update_weights(model, version=3)
        assert client.generate(["ab"], SamplingParams(max_tokens=2))[0].prompt == "ab"
        with pytest.raises(ServerError, match="out of range"):
            client.generate([[5000]])
        assert client.get_weight_version() == 3


def test_the_client_refuses_other_numerics(server):
    with pytest.raises(NumericsError, match="contracts differ"):
        Client(server.url, "0" * 16)
    with Client(server.url) as client:
        with pytest.raises(NumericsError, match="dtype"):
            client.update_weights(exact_model(server.llm.path, "bfloat16"))
        good = exact_model(server.llm.path).state_dict()
        with pytest.raises(ServerError, match="unknown tensor 'odd'"):
            client.update_weights({**good, "odd": torch.zeros(3)})
        assert client.update_weights(good) == 1
