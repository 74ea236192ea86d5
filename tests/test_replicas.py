"""Replicas behind a router, stages in processes: what dies, hangs or fails, and what the caller sees of it."""

import copy
import json
import os
import pathlib
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import Future
from dataclasses import replace
from types import SimpleNamespace

import psutil
import pytest
import torch

from samebits import LLM, SamplingParams
from samebits.engine import RequestOutputKind, WeightUpdateError, pipeline
from samebits.engine.config import EngineConfig
from samebits.engine.distributed import fan_out, ray_backend, replica, worker
from samebits.engine.distributed.fan_out import FanOut
from samebits.engine.distributed.worker import WorkerError
from samebits.engine.transfer import TransferError
from samebits.integrations import Client
from samebits.model.stage import split_by_size
from samebits.trainer import exact_model, token_logprobs

from models import make_checkpoint
from serving import Serving, in_background, wait_for

ROOT = pathlib.Path(__file__).parent.parent
SMALL = {"kv_cache_memory_bytes": 2**20, "worker_timeout": 20.0}
PROMPTS = [[5 + i, 7, 9, 11] * (3 + i) for i in range(12)]
PARAMS = SamplingParams(n=2, max_tokens=60, seed=1, ignore_eos=True)


def bits(outputs):
    return [(c.token_ids, c.logprobs) for o in outputs for c in o.completions]


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    """Two versions of a model's weights."""
    folder = tmp_path_factory.mktemp("versions")
    return [make_checkpoint(folder / str(seed), "llama", seed=seed, num_hidden_layers=4) for seed in (0, 1)]


@pytest.fixture(scope="module")
def expected(paths):
    """What each version returns, from one engine."""
    found = []
    for path in paths:
        found.append(bits(LLM(path, **SMALL).generate(PROMPTS, PARAMS, use_tqdm=False)))
    return found


@pytest.fixture(scope="module")
def pair(paths):
    """Two replicas, shared by the tests that leave them alive. Each test sets the version that it needs."""
    llm = LLM(paths[0], replicas=2, **SMALL)
    yield llm
    llm.close()


def generate(llm):
    return llm.generate(PROMPTS, PARAMS, use_tqdm=False)


def all_serve(llm, count: int = 2) -> bool:
    return llm.core.settled and len(llm.core.serving) == count


def workers_of(process) -> list:
    return psutil.Process(process.pid).children()


def run_and(llm, action, after: int = 40):
    """Generates; `action` is called when so many tokens have come."""
    ids = [llm.add_request(p, PARAMS) for p in PROMPTS]
    done, fired = {}, False
    deadline = time.monotonic() + 90
    while llm.has_unfinished_requests():
        assert time.monotonic() < deadline, "hangs"
        for out in llm.step():
            done[out.request_id] = out
        if not fired and sum(len(c.token_ids) for o in done.values() for c in o.completions) > after:
            fired = True
            action()
    assert fired
    return [done[i] for i in ids]


def test_replicas_share_the_work_and_change_no_bit(pair, paths, expected):
    pair.update_weights(paths[0])
    before = [h.stats.generation_tokens for h in pair.core.handles]
    outputs = generate(pair)
    assert bits(outputs) == expected[0]
    shares = [h.stats.generation_tokens - b for h, b in zip(pair.core.handles, before, strict=True)]
    assert sum(shares) == len(PROMPTS) * 2 * 60 and min(shares) == max(shares), "not the least loaded got the request"
    model = exact_model(paths[0])
    for prompt, out in zip(PROMPTS, outputs, strict=True):
        for c in out.completions:
            scored = token_logprobs(model, [prompt + c.token_ids], PARAMS)[0][len(prompt) :].detach()
            assert torch.equal(torch.tensor(c.logprobs), scored)


def test_a_prompts_start_goes_where_it_is_known(pair):
    long = [3 + i % 900 for i in range(200)]
    short = SamplingParams(max_tokens=2, seed=0, ignore_eos=True)
    first = pair.generate([long], short, use_tqdm=False)[0]
    again = pair.generate([[*long[:150], 4]], short, use_tqdm=False)[0]
    assert (first.num_cached_tokens, again.num_cached_tokens) == (0, 128)
    crowd = [[*long[:100], i] for i in range(40)]
    pair.generate(crowd, short, use_tqdm=False)
    assert all(h.stats.generation_tokens > 0 for h in pair.core.handles), "affinity went before the load"


def test_streams_aborts_and_errors_behave_as_in_one_engine(pair, monkeypatch):
    with pytest.raises(ValueError, match="out of range"):
        pair.generate([[10**6]], PARAMS)
    with monkeypatch.context() as patch:
        patch.setattr(pair.core, "room", 100)
        with pytest.raises(ValueError, match="can't fit the KV cache of 100 tokens"):
            pair.generate([[5] * 50], SamplingParams(n=1, max_tokens=60))
    request = pair.add_request(PROMPTS[0], SamplingParams(max_tokens=10**4 // 50, seed=0, ignore_eos=True))
    seen = 0
    while seen < 5:
        for out in pair.step():
            count = len(out.completions[0].token_ids)
            assert count > seen, "a report without news"
            seen = count
    assert pair.abort(request) and not pair.abort("nobody")
    (last,) = pair.step()
    assert last.completions[0].finish_reason == "abort" and len(last.completions[0].token_ids) >= seen
    assert not pair.has_unfinished_requests()
    wait_for(lambda: pair.core.settled and pair.stats().kv_blocks_used == 0)


def test_prompt_scores_and_details_come_from_replicas_too(pair, paths):
    pair.update_weights(paths[0])
    params = SamplingParams(
        n=2, max_tokens=8, seed=3, prompt_logprobs=2, logprobs=2, raw_logprobs=True, temperature=0.7
    )
    (ours,) = pair.generate([PROMPTS[3]], params, use_tqdm=False)
    (theirs,) = LLM(paths[0], **SMALL).generate([PROMPTS[3]], params, use_tqdm=False)
    for name in ("prompt_logprobs", "prompt_top_logprobs", "prompt_ranks"):
        assert getattr(ours, name) == getattr(theirs, name)
    for a, b in zip(ours.completions, theirs.completions, strict=True):
        assert (a.token_ids, a.logprobs, a.raw_logprobs, a.top_logprobs, a.ranks) == (
            b.token_ids, b.logprobs, b.raw_logprobs, b.top_logprobs, b.ranks)  # fmt: skip


@pytest.mark.parametrize("source", ["module", "tensors", "directory"])
def test_an_update_reaches_all_replicas(pair, paths, expected, source):
    old, new = (paths[0], paths[1]) if source != "tensors" else (paths[1], paths[0])
    pair.update_weights(old)
    model = exact_model(new)
    given = {"module": model, "tensors": model.state_dict().items(), "directory": new}[source]
    version = pair.update_weights(given)
    outputs = generate(pair)
    assert bits(outputs) == expected[paths.index(new)]
    assert {c.weight_version for o in outputs for c in o.completions} == {version}
    assert pair.weight_checksums() == LLM(new, **SMALL).weight_checksums()


def test_an_update_in_mid_flight_labels_each_token(pair, paths):
    version = pair.update_weights(paths[0])
    outputs = run_and(pair, lambda: pair.update_weights(paths[1]))
    models = {version: exact_model(paths[0]), version + 1: exact_model(paths[1])}
    both = 0
    for prompt, out in zip(PROMPTS, outputs, strict=True):
        for c in out.completions:
            both += len(c.weight_versions) == 2
            for span in c.weight_versions:
                scored = token_logprobs(models[span.version], [prompt + c.token_ids], PARAMS)[0][len(prompt) :].detach()
                assert c.logprobs[span.start : span.end] == scored[span.start : span.end].tolist()
    assert both


def broken(model, how):
    state = dict(model.state_dict())
    name = "model.layers.3.mlp.up_proj.weight"
    if how == "missing":
        del state[name]
    elif how == "shape":
        state[name] = state[name][:-1]
    elif how == "nan":
        state[name] = state[name].clone()
        state[name][0, 0] = float("nan")
    elif how == "unknown":
        state["another"] = state[name]
    return state.items()


@pytest.mark.parametrize("how", ["missing", "shape", "nan", "unknown"])
def test_a_bad_update_changes_no_replica(pair, paths, expected, how):
    version = pair.update_weights(paths[0])
    with pytest.raises((WeightUpdateError, TransferError)):
        pair.update_weights(broken(exact_model(paths[1]), how))
    assert pair.weight_version == version
    assert bits(generate(pair)) == expected[0]
    assert pair.update_weights(exact_model(paths[1])) == version + 1, "the next update goes through"
    assert bits(generate(pair)) == expected[1]


def test_sleep_and_wake_up_reach_all(pair, paths, expected):
    pair.update_weights(paths[0])
    assert pair.sleep(1) == pair.kv_cache_bytes and not pair.ready
    with pytest.raises(RuntimeError, match="sleeps"):
        pair.generate(PROMPTS[:1], PARAMS)
    pair.wake_up()
    assert pair.sleep(2) == pair.kv_cache_bytes + pair.weight_bytes
    pair.wake_up()
    assert bits(generate(pair)) == expected[0], "the checkpoint was read again"


# --- what dies --------------------------------------------------------------------------------------------------------


def test_a_dead_replicas_requests_go_on_with_the_same_tokens(pair, paths, expected):
    pair.update_weights(paths[0])
    victim = pair.core.handles[0].peer.process.process
    outputs = run_and(pair, lambda: os.kill(victim.pid, signal.SIGKILL))
    assert bits(outputs) == expected[0]
    wait_for(lambda: all_serve(pair), 60)
    assert bits(generate(pair)) == expected[0]
    assert pair.weight_checksums(), "the new replica's weights are the others'"
    pair.sleep(2)
    pair.wake_up()
    assert bits(generate(pair)) == expected[0], "it knows where they are stored, too"


def test_replicas_that_die_together_cost_no_request(pair, paths, expected, monkeypatch):
    """A request isn't held to be the cause of a death that it was only sent to."""
    monkeypatch.setattr("samebits.engine.distributed.router.MAX_MOVES", 2)
    pair.update_weights(paths[0])
    victims = [h.peer.process.process.pid for h in pair.core.handles]
    outputs = run_and(pair, lambda: [os.kill(pid, signal.SIGKILL) for pid in victims])
    assert bits(outputs) == expected[0]
    wait_for(lambda: all_serve(pair), 60)


def test_workers_leave_sigterm_to_their_parent(pair, paths, expected):
    """A service manager sends it to all processes of a server, which still has requests to finish."""
    pair.update_weights(paths[0])
    peers = [h.peer for h in pair.core.handles]
    outputs = run_and(pair, lambda: [os.kill(p.process.process.pid, signal.SIGTERM) for p in peers])
    assert bits(outputs) == expected[0] and [h.peer for h in pair.core.handles] == peers


def test_a_new_replica_gets_weights_that_only_others_have(pair, paths, expected):
    version = pair.update_weights(exact_model(paths[1]))  # from a trainer: no directory to read
    os.kill(pair.core.handles[1].peer.process.process.pid, signal.SIGKILL)
    wait_for(lambda: not all_serve(pair))
    assert bits(generate(pair)) == expected[1]
    wait_for(lambda: all_serve(pair), 60)
    outputs = generate(pair)
    assert bits(outputs) == expected[1]
    assert {c.weight_version for o in outputs for c in o.completions} == {version}
    assert pair.core.handles[1].stats.generation_tokens > 0


def test_a_replica_that_hangs_counts_as_dead(paths, expected):
    llm = LLM(paths[0], replicas=2, kv_cache_memory_bytes=2**20, worker_timeout=3.0)
    try:
        victim = llm.core.handles[1].peer.process.process
        start = time.monotonic()
        outputs = run_and(llm, lambda: os.kill(victim.pid, signal.SIGSTOP))
        assert bits(outputs) == expected[0]
        assert time.monotonic() - start < 30
    finally:
        llm.close()


def test_a_request_that_kills_replicas_is_given_up(paths):
    llm = LLM(paths[0], replicas=2, **SMALL)
    try:
        llm.add_request(PROMPTS[0], SamplingParams(n=32, max_tokens=450, seed=0, ignore_eos=True))
        owner, output = None, None
        deadline = time.monotonic() + 90
        while llm.has_unfinished_requests() and time.monotonic() < deadline:
            output = ([output, *llm.step()])[-1]
            now = next((h for h in llm.core.handles if h.received), None)
            if now is not None and (now, now.peer) != owner:
                owner = now, now.peer
                os.kill(now.peer.process.process.pid, signal.SIGKILL)
        assert output.completions[0].finish_reason == "error" and "replicas died" in output.completions[0].stop_reason
    finally:
        llm.close()


@pytest.mark.parametrize("phase", ["begin_update", "read_update", "join_group", "receive_update", "prepare_update"])
def test_a_replica_that_dies_before_the_commit_takes_the_update_with_it(pair, paths, expected, phase, monkeypatch):
    version = pair.update_weights(exact_model(paths[0]))
    if phase in ("join_group", "receive_update"):  # as between machines
        monkeypatch.setattr(fan_out, "_free_shared_memory", lambda: 0)
    pair.core.members().timeout = 5.0
    peer = pair.core.handles[1].peer
    call = peer.call

    def dying(method, *args):
        if method == phase:
            os.kill(peer.process.process.pid, signal.SIGKILL)
        return call(method, *args)

    peer.call = dying
    start = time.monotonic()
    with pytest.raises((WorkerError, TransferError, WeightUpdateError)):
        pair.update_weights(exact_model(paths[1]))
    assert pair.weight_version == version and time.monotonic() - start < 15
    assert bits(generate(pair)) == expected[0]
    wait_for(lambda: all_serve(pair), 60)
    assert pair.update_weights(exact_model(paths[1])) == version + 1
    assert bits(generate(pair)) == expected[1]


@pytest.mark.parametrize("how", ["dies", "fails"])
def test_a_replica_lost_at_the_commit_comes_back_with_the_new_version(pair, paths, expected, how):
    before = pair.update_weights(paths[0])
    peer = pair.core.handles[0].peer
    call = peer.call

    def failing(method, *args):
        if method == "commit_update" and how == "dies":
            os.kill(peer.process.process.pid, signal.SIGKILL)
            time.sleep(0.2)
        elif method == "commit_update":
            args = ()
        return call(method, *args)

    peer.call = failing
    version = pair.update_weights(exact_model(paths[1]))
    assert version == before + 1 and bits(generate(pair)) == expected[1]
    wait_for(lambda: all_serve(pair), 60)
    outputs = generate(pair)
    assert bits(outputs) == expected[1] and {c.weight_version for o in outputs for c in o.completions} == {version}
    assert min(h.stats.generation_tokens for h in pair.core.handles) > 0


@pytest.mark.parametrize("phase", ["transfer", "prepare"])
def test_a_replica_that_fails_before_the_commit_takes_the_update_with_it(pair, paths, expected, phase, monkeypatch):
    """And lives: it can't read a bucket, or finds in the end that it had not got one."""
    version = pair.update_weights(exact_model(paths[0]))
    peers = [h.peer for h in pair.core.handles]
    call = peers[1].call

    def failing(method, *args):
        if method != "read_update":
            return call(method, *args)
        if phase == "transfer":
            return call(method, "/nowhere", *args[1:])
        nothing = Future()
        nothing.set_result(None)
        return nothing

    with monkeypatch.context() as patch:
        patch.setattr(peers[1], "call", failing)
        with pytest.raises((FileNotFoundError, WeightUpdateError), match=r"nowhere|missing"):
            pair.update_weights(exact_model(paths[1]))
    assert pair.weight_version == version and bits(generate(pair)) == expected[0]
    assert [h.peer for h in pair.core.handles] == peers, "an error is no death"
    assert pair.update_weights(exact_model(paths[1])) == version + 1 and bits(generate(pair)) == expected[1]


@pytest.mark.slow
def test_a_replica_lends_its_weights_to_one_at_a_time(paths, expected):
    """Two of three come back together; then one whose donor dies, which is no reason to start it again."""
    with LLM(paths[0], replicas=3, kv_cache_memory_bytes=2**20, worker_timeout=5.0) as llm:
        llm.update_weights(exact_model(paths[1]))  # from a trainer: they can only come from another replica
        handles, donor = llm.core.handles, llm.core.handles[0].peer
        call, waited, started, start = donor.call, [], [], llm.core._start

        def lending(method, *args):
            if method == "send_weights" and not waited:
                wait_for(lambda: len(llm.core._newcomers) == 1, 60)
                waited.append(True)
            return call(method, *args)

        def dying(method, *args):
            if method == "send_weights":
                donor.process.kill()
            return call(method, *args)

        def kill_and_wait(*victims):
            for handle in victims:
                handle.peer.process.kill()
            wait_for(lambda: not all_serve(llm, 3))
            wait_for(lambda: all_serve(llm, 3), 60)

        donor.call = lending
        kill_and_wait(*handles[1:])
        assert handles[0].peer is donor and waited
        donor.call = dying
        llm.core._start = lambda handle: started.append(handle.index) or start(handle)
        kill_and_wait(handles[2])
        assert sorted(started) == [0, 2]
        assert bits(generate(llm)) == expected[1] and llm.weight_checksums()


def test_a_dead_stage_is_an_error_that_says_so(paths):
    llm = LLM(paths[0], pipeline_parallel_size=2, **SMALL)
    pid = llm.core.pipeline.remote[0].process.process.pid
    start = time.monotonic()
    with pytest.raises(WorkerError, match=r"stage 1|the pipeline's last stage"):
        run_and(llm, lambda: os.kill(pid, signal.SIGKILL))
    assert time.monotonic() - start < 30
    assert "stage" in llm.failure
    with pytest.raises(WorkerError, match="make a new engine"):
        llm.generate(PROMPTS[:1], PARAMS, use_tqdm=False)
    llm.close()


def test_a_stage_that_dies_at_the_commit_ends_the_engine(paths):
    """Its other stages have the new weights, and nobody has both."""
    llm = LLM(paths[0], pipeline_parallel_size=2, **SMALL)
    (stage,) = llm.core.pipeline.remote
    call = stage.call

    def dying(method, *args):
        if method == "commit_update":
            stage.process.kill()
        return call(method, *args)

    stage.call = dying
    with pytest.raises(WorkerError, match="stage 1"):
        llm.update_weights(exact_model(paths[1]))
    assert llm.weight_version == 0 and "stage 1" in llm.failure
    with pytest.raises(WorkerError, match="make a new engine"):
        llm.generate(PROMPTS[:1], PARAMS, use_tqdm=False)
    llm.close()


def test_a_stage_that_hangs_is_an_error_in_time(paths):
    llm = LLM(paths[0], pipeline_parallel_size=2, kv_cache_memory_bytes=2**20, worker_timeout=3.0)
    pid = llm.core.pipeline.remote[0].process.process.pid
    start = time.monotonic()
    with pytest.raises(WorkerError, match="did not answer within 3 s"):
        run_and(llm, lambda: os.kill(pid, signal.SIGSTOP))
    assert time.monotonic() - start < 20
    llm.close()


def test_a_stage_of_a_replica_dies(paths, expected):
    """The whole replica is started again; its requests go on elsewhere."""
    llm = LLM(paths[0], pipeline_parallel_size=2, replicas=2, balance=True, **SMALL)
    try:
        (stage,) = workers_of(llm.core.handles[0].peer.process.process)
        outputs = run_and(llm, stage.kill)
        assert bits(outputs) == expected[0]
        wait_for(lambda: all_serve(llm), 90)
        llm.update_weights(exact_model(paths[1]))
        assert bits(generate(llm)) == expected[1]
    finally:
        llm.close()


CUT_OFF = """
import subprocess, sys, time, psutil
from samebits import LLM, SamplingParams

def ip(command):
    subprocess.run(["ip", *command.split()], check=True)

ip("link set lo up")
llm = LLM(sys.argv[1], pipeline_parallel_size=2, kv_cache_memory_bytes=2**20, worker_timeout=4.0)
llm.add_request([5, 7, 9], SamplingParams(max_tokens=400, seed=0, ignore_eos=True))
for _ in range(10):
    llm.step()
if sys.argv[2] == "everything":
    ip("link set lo down")
else:  # all connections but the one that calls go over
    ip("rule add pref 2 lookup local")
    ip("rule del pref 0")
    calls = llm.core.pipeline.remote[0]._connection.fileno()
    found = psutil.Process().net_connections("tcp")
    for port in {c.laddr.port for c in found if c.status == "ESTABLISHED" and c.fd != calls}:
        for end in "sport", "dport":
            ip(f"rule add pref 1 ipproto tcp {end} {port} blackhole")
start = time.monotonic()
try:
    while True:
        llm.step()
except Exception as error:
    print(f"{type(error).__name__}: {error}", time.monotonic() - start, sep="\\n")
if sys.argv[2] != "everything":
    llm.close()
_, alive = psutil.wait_procs(psutil.Process().children(), 30)
print(len(alive), flush=True)
"""


@pytest.mark.parametrize("what", ["everything", "hidden states"])
def test_a_network_that_drops_packets_between_stages(paths, what):
    """In a network namespace of its own, from one moment on."""
    if subprocess.run(["unshare", "-n", "ip", "link", "set", "lo", "up"], capture_output=True).returncode:
        pytest.skip("needs the right to make network namespaces")
    command = ["unshare", "-n", sys.executable, "-c", CUT_OFF, str(paths[0]), what]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    error, seconds, alive = done.stdout.splitlines()
    assert "WorkerError" in error and ("within" in error or "died" in error)
    assert what == "everything" or "hidden states of stage 0 did not come within 3.6 s" in error
    assert float(seconds) < 8, "the stated timeout, and a little"
    assert alive == "0", "the stage waits for a driver that it can't reach"


def test_workers_end_with_the_process_that_started_them(paths, tmp_path):
    program = f"""
import time
from samebits import LLM
llm = LLM({str(paths[0])!r}, replicas=2, pipeline_parallel_size=2, kv_cache_memory_bytes=2**20)
print("ready", flush=True)
time.sleep(100)
"""
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
    assert process.stdout.readline() == b"ready\n"
    workers = psutil.Process(process.pid).children(recursive=True)
    assert len(workers) == 4
    process.kill()
    process.wait()
    _, alive = psutil.wait_procs(workers, 10)
    assert not alive


def test_a_stage_that_dies_in_idleness_ends_its_replica(paths, expected):
    """Or every update would fail for ever."""
    llm = LLM(paths[0], pipeline_parallel_size=2, replicas=2, **SMALL)
    try:
        (stage,) = workers_of(llm.core.handles[1].peer.process.process)
        stage.kill()
        wait_for(lambda: not all_serve(llm))
        assert llm.update_weights(exact_model(paths[1])) == 1
        assert bits(generate(llm)) == expected[1]
    finally:
        llm.close()


@pytest.mark.parametrize("source", ["directory", "module"])
def test_a_replica_that_comes_back_while_all_sleep_wakes_up_with_the_version_in_force(pair, paths, expected, source):
    new = paths[1] if source == "directory" else exact_model(paths[1])
    pair.update_weights(new)
    pair.sleep(2)
    os.kill(pair.core.handles[1].peer.process.process.pid, signal.SIGKILL)
    wait_for(lambda: not all_serve(pair))
    wait_for(lambda: all_serve(pair), 60)
    pair.wake_up()
    if source == "module":  # gone with the sleep, on all replicas: none may fall back to the first checkpoint
        assert not pair.ready
        with pytest.raises(RuntimeError, match="sleeps"):
            generate(pair)
        pair.update_weights(new)
    assert bits(generate(pair)) == expected[1]
    assert pair.weight_checksums()


def test_a_new_replica_takes_weights_from_another_not_from_files_that_changed(pair, paths, tmp_path, expected):
    """A trainer that writes each version over the last."""
    latest = tmp_path / "latest"
    shutil.copytree(paths[1], latest)
    pair.update_weights(latest)
    shutil.copy(paths[0] / "model.safetensors", latest)
    os.kill(pair.core.handles[0].peer.process.process.pid, signal.SIGKILL)
    wait_for(lambda: not all_serve(pair))
    wait_for(lambda: all_serve(pair), 60)
    assert bits(generate(pair)) == expected[1]


def test_weights_whose_files_changed_are_lost_with_the_last_replica(paths, tmp_path, expected):
    """A restart that read the files again would serve other weights under the old version."""
    path = tmp_path / "model"
    shutil.copytree(paths[0], path)
    with LLM(path, replicas=2, **SMALL) as llm:
        assert bits(generate(llm)) == expected[0]
        shutil.copytree(paths[1], path, dirs_exist_ok=True)
        for handle in llm.core.handles:
            handle.peer.process.kill()
        wait_for(lambda: all_serve(llm) and not llm.has_weights, 60)
        llm.update_weights(path)
        llm.wake_up()
        assert bits(generate(llm)) == expected[1]


def test_what_no_replica_can_do_is_an_error_and_ends_none(paths, tmp_path, expected):
    """Weights that slept and whose files have changed meanwhile."""
    path = tmp_path / "model"
    shutil.copytree(paths[0], path)
    with LLM(path, replicas=2, **SMALL) as llm:
        peers = [h.peer for h in llm.core.handles]
        llm.sleep(2)
        shutil.copytree(paths[1], path, dirs_exist_ok=True)
        with pytest.raises(WeightUpdateError, match="changed"):
            llm.wake_up()
        assert not llm.ready
        llm.update_weights(path)
        llm.wake_up()
        assert bits(generate(llm)) == expected[1]
        assert all_serve(llm) and [h.peer for h in llm.core.handles] == peers


def test_files_that_change_while_replicas_read_them_are_no_update(pair, paths, tmp_path, expected, monkeypatch):
    """Each reads a directory by itself: they might come to hold different weights."""
    pair.update_weights(paths[0])
    path = tmp_path / "model"
    shutil.copytree(paths[0], path)
    before = FanOut.all

    def read_and_write(self, method, *args, **options):
        found = before(self, method, *args, **options)
        if method == "load_update":
            shutil.copytree(paths[1], path, dirs_exist_ok=True)
        return found

    monkeypatch.setattr(FanOut, "all", read_and_write)
    with pytest.raises(WeightUpdateError, match="changed while they were read"):
        pair.update_weights(path)
    assert bits(generate(pair)) == expected[0]


def test_stages_work_at_the_same_time(tmp_path):
    """Four batches in flight in two processes: while one stage computes a step, so does the other. One: never.

    The steps are long enough to overlap on a busy machine, too."""
    wide = {"hidden_size": 300, "intermediate_size": 1200, "num_hidden_layers": 8}
    path, settings = make_checkpoint(tmp_path, "llama", **wide), SMALL | {"kv_cache_memory_bytes": 2**22}
    shares = []
    for batches in (1, 4):
        with LLM(path, pipeline_parallel_size=2, batches_in_flight=batches, **settings) as llm:
            llm.core.members().all("take_trace")
            generate(llm)
            first, second = llm.core.members().all("take_trace")
        assert len(first) == len(second) >= 60 * batches
        both = sum(max(0.0, min(b, d) - max(a, c)) for a, b in first for c, d in second)
        shares.append(both / sum(b - a for a, b in second))
    assert shares[0] == 0 and shares[1] > 0.2


@pytest.mark.slow
def test_replicas_that_start_no_more_are_an_error(paths, tmp_path):
    """With the checkpoint gone; none comes back from where it has failed for good."""
    path = tmp_path / "model"
    shutil.copytree(paths[0], path)
    with LLM(path, replicas=2, **SMALL) as llm:
        shutil.rmtree(path)
        for handle in llm.core.handles:
            handle.peer.process.kill()
        with pytest.raises(WorkerError, match="no replica starts any more"):
            generate(llm)
        time.sleep(1)
        assert llm.core.settled and not llm.core.serving


def test_a_sleep_that_finds_a_dead_replica_puts_all_to_sleep(pair, paths, expected):
    pair.update_weights(paths[0])
    os.kill(pair.core.handles[1].peer.process.process.pid, signal.SIGKILL)
    assert pair.sleep(1) > 0 and not pair.ready
    pair.wake_up()
    assert bits(generate(pair)) == expected[0]
    wait_for(lambda: all_serve(pair), 60)
    assert bits(generate(pair)) == expected[0]


def test_an_id_can_be_used_again_after_an_abort(pair, paths, expected):
    pair.update_weights(paths[0])
    for steps in (0, 3, 10):
        pair.add_request(PROMPTS[1], PARAMS, "again")
        for _ in range(steps):
            pair.step()
        pair.abort("again")
        pair.take_outputs()
        pair.add_request(PROMPTS[0], PARAMS, "again")
        reports = []
        while pair.has_unfinished_requests():
            reports += pair.step()
        assert bits(reports[-1:]) == expected[0][:2]


def test_news_that_nobody_waits_for_comes_seldom(paths, expected, monkeypatch):
    """Of requests whose end alone is asked for: when more or fewer run, after REPORT_STEPS, and at a pause."""
    far, llm = replica.Replica(str(paths[0]), EngineConfig(**SMALL), 1), LLM(paths[0], **SMALL)
    near = {}
    reports = []

    def report(event):
        reports.append(event)
        for progress in event[0]:
            progress.apply(near[progress.serial])

    def start(steps: int, *kinds: RequestOutputKind) -> None:
        monkeypatch.setattr(replica, "REPORT_STEPS", steps)
        reports.clear()
        for serial, kind in enumerate(kinds):
            near[serial] = llm.process(PROMPTS[serial], replace(PARAMS, output_kind=kind), str(serial))
            near[serial].serial = serial
            far.submit(copy.deepcopy(near[serial]))

    def finish() -> int:
        while far.working:
            far.tick(report)
        assert bits([r.output(None) for r in near.values()]) == expected[0][: 2 * len(near)]
        return len(reports)

    late, delta, whole = RequestOutputKind.FINAL_ONLY, RequestOutputKind.DELTA, RequestOutputKind.CUMULATIVE
    for steps, most in ((10**6, 8), (10, 15)):
        start(steps, late, late, late)
        assert finish() <= most
    for steps, second in ((10**6, delta), (10**6, whole), (1, late)):
        start(steps, late, second, late)
        assert finish() >= 60
    start(10**6, late, late, late)
    for _ in range(20):
        far.tick(report)
    told = [len(r.samples[0].sampled) for r in near.values()]
    far.pause(True)
    assert not far.tick(report)
    assert all(len(r.samples[0].sampled) >= n + 10 for r, n in zip(near.values(), told, strict=True))
    far.pause(False)
    assert finish() <= 10


def test_an_error_in_the_first_stage_breaks_the_pipeline(paths, monkeypatch):
    """The second stage has the plan: it must not meet the next step's hidden states."""
    llm = LLM(paths[0], pipeline_parallel_size=2, **SMALL)

    def fail(*args):
        raise MemoryError("out of it")

    monkeypatch.setattr(llm.core.runner, "run", fail)
    with pytest.raises(MemoryError):
        llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    monkeypatch.undo()
    with pytest.raises(WorkerError, match="out of it"):
        llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    llm.close()


def test_a_message_that_cant_be_read_is_an_answer_not_a_death(pair):
    class Private(SamplingParams):
        pass

    Private.__qualname__, Private.__module__ = "Private", __name__
    globals()["Private"] = Private  # so that it can be sent, to where it is unknown
    deaths = [h.peer for h in pair.core.handles]
    (out,) = pair.generate(PROMPTS[:1], Private(max_tokens=3), use_tqdm=False)
    assert out.completions[0].finish_reason == "error" and "No module" in out.completions[0].stop_reason
    assert [h.peer for h in pair.core.handles] == deaths


def test_strangers_at_the_door_are_sent_away(monkeypatch):
    near, far = socket.socketpair()
    start = time.monotonic()
    monkeypatch.setattr(worker, "_keep_alive", lambda *args: None)  # no TCP here
    assert worker._authenticated(near, "key", 1.0) is None and time.monotonic() - start < 5
    far.close()


# --- behind HTTP ------------------------------------------------------------------------------------------------------


def test_a_server_of_replicas_hides_the_death_of_one(paths, expected):
    with Serving(paths[0], llm={"replicas": 2, **SMALL}) as server, Client(server.url) as client:
        assert server.get("/get_world_size") == {"world_size": 2}
        info = server.get("/server_info")
        assert (info["dp_size"], info["pp_size"], info["max_running_requests"]) == (2, 1, 32)
        client.update_weights(exact_model(paths[1]))
        victim = server.llm.core.handles[0].peer.process.process
        threading.Timer(0.3, victim.kill).start()
        found = [bits(client.generate(PROMPTS, PARAMS)) for _ in range(4)]
        assert found == [expected[1]] * 4
        wait_for(lambda: len(server.llm.core.serving) == 2, 60)  # without any request that asks for it
        assert server.get("/health") == {"status": "ok"}
        assert client.update_weights(exact_model(paths[0])) == 2, "the group is made again, with the new replica"
        assert bits(client.generate(PROMPTS, PARAMS)) == expected[0]
        with in_background(client.generate, PROMPTS, PARAMS) as failed:
            wait_for(lambda: server.llm.stats().num_running > 0)
            server.kill_engine_thread()
        assert "SystemExit" in str(failed[0]), "a clear error, in time"
        assert bits(client.generate(PROMPTS, PARAMS)) == expected[0]
        server.idle()


def test_a_request_does_not_wait_for_news_of_busy_replicas(paths, expected, monkeypatch):
    """One replica is long in a step, nobody else has work: the engine's thread waits for its report."""
    monkeypatch.setattr("samebits.engine.distributed.router.POLL", 60.0)
    with Serving(paths[0], llm={"replicas": 2, **SMALL}) as server, Client(server.url) as client:
        busy, idle = server.llm.core.handles
        with in_background(client.generate, PROMPTS[:1], PARAMS) as late:
            wait_for(lambda: busy.received or idle.received)
            busy, idle = (busy, idle) if busy.received else (idle, busy)
            os.kill(busy.peer.process.process.pid, signal.SIGSTOP)
            try:
                start = time.monotonic()
                assert bits(client.generate(PROMPTS[1:2], PARAMS)) == expected[0][2:4]
                assert time.monotonic() - start < 10 and not late
            finally:
                os.kill(busy.peer.process.process.pid, signal.SIGCONT)
        assert bits(late[0]) == expected[0][:2]


def test_a_paused_server_makes_its_replicas_pause(paths, expected):
    with Serving(paths[0], llm={"replicas": 2, **SMALL}) as server, Client(server.url) as client:
        server.ok("/pause_generation", {"mode": "in_place"})
        with in_background(client.generate, PROMPTS, PARAMS) as found:
            time.sleep(1)
            assert server.llm.stats().generation_tokens == 0 and not found
            os.kill(server.llm.core.handles[0].peer.process.process.pid, signal.SIGKILL)
            wait_for(lambda: len(server.llm.core.serving) < 2)
            wait_for(lambda: len(server.llm.core.serving) == 2, 60)
            time.sleep(1)
            assert server.llm.stats().generation_tokens == 0, "a new replica pauses, too"
            server.ok("/continue_generation")
        assert bits(found[0]) == expected[0]


def test_a_server_of_two_stages_says_when_one_is_dead(paths, expected):
    with Serving(paths[0], llm={"pipeline_parallel_size": 2, **SMALL}) as server, Client(server.url) as client:
        assert server.get("/get_world_size") == {"world_size": 2}
        client.update_weights(exact_model(paths[1]))
        assert bits(client.generate(PROMPTS, PARAMS)) == expected[1]
        server.llm.core.pipeline.remote[0].process.kill()
        body = {"prompt": [5, 6, 7], "max_tokens": 20}
        codes = {server.post("/v1/completions", body).status_code for _ in range(2)}
        assert codes <= {500, 503} and 503 in codes
        health = server.http.get("/health")
        assert health.status_code == 503 and "stage" in health.text
    server.llm.close()


# --- bad input --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"pipeline_parallel_size": 5}, "the model has 4 layers"),
        ({"pipeline_parallel_size": 2, "stage_layers": (1, 2)}, "add up to 3; the model has 4"),
        ({"pipeline_parallel_size": 2, "stage_layers": (4,)}, "each of the 2 stages"),
        ({"backend": "threads"}, "choose one of mp, ray, inproc"),
        ({"replicas": 0}, "must be positive"),
        ({"replicas": 2, "backend": "inproc"}, "processes of their own"),
        ({"batches_in_flight": 0}, "must be positive"),
        ({"async_scheduling": True, "pipeline_parallel_size": 2}, "in one stage"),
        ({"async_scheduling": True, "batches_in_flight": 2}, "all sequences in each step"),
        ({"worker_timeout": 0}, "must be positive"),
        ({"balance": True}, "set pipeline_parallel_size"),
        ({"stage_layers": (4,)}, "set pipeline_parallel_size"),
        ({"backend": "ray"}, "set pipeline_parallel_size or replicas"),
    ],
)
def test_settings_that_make_no_sense(paths, settings, message):
    with pytest.raises(ValueError, match=message):
        LLM(paths[0], **settings)


@pytest.mark.parametrize("settings", [{"replicas": 2}, {"pipeline_parallel_size": 2}])
def test_what_fails_while_a_worker_starts_reaches_the_caller(paths, settings):
    with pytest.raises(ValueError, match="less than one block"):
        LLM(paths[0], kv_cache_memory_bytes=10, **settings)


@pytest.mark.parametrize(
    ("nodes", "taken", "device", "workers", "threads", "sharers"),
    [
        ([(64, 0), (64, 0)], 0, "cpu", 4, 32, 2),
        ([(64, 0), (64, 0)], 1, "cpu", 4, 31, 2),  # a trainer's actor has one
        ([(64, 0), (64, 0)], 0, "cpu", 3, 32, 2),  # 42 each would be as many, but not on these nodes
        ([(0, 0), (8, 0)], 0, "cpu", 2, 4, 2),  # a head node that computes nothing
        ([(4, 0), (16, 0)], 0, "cpu", 5, 4, 4),
        ([(2, 0)], 0, "cpu", 4, 1, 2),
        ([(32, 0), (32, 8), (32, 8)], 0, "cuda", 16, 4, 1),  # only where the GPUs are
        ([(64, 0), (16, 8)], 0, "cuda", 8, 2, 1),
    ],
)
def test_rays_workers_share_nodes_not_one_machine(monkeypatch, nodes, taken, device, workers, threads, sharers):
    free = {"CPU": float(sum(cpus for cpus, _ in nodes) - taken)}
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(ray_backend, "nodes", lambda: nodes)
    monkeypatch.setattr(ray_backend, "ray", lambda: SimpleNamespace(available_resources=lambda: free))
    config = EngineConfig(replicas=workers, backend="ray", device=device)
    assert worker.default_threads(config) == threads and worker.sharers_of(config, threads) == sharers
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert worker.default_threads(config) == 3


def test_a_cluster_without_room_is_an_error_in_time(paths, ray_cluster, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "6")
    with pytest.raises(WorkerError, match=r"no room for 3 stage"):
        LLM(paths[0], replicas=2, pipeline_parallel_size=3, backend="ray", start_timeout=3.0, **SMALL)


@pytest.mark.slow
def test_a_node_of_the_cluster_goes_away_and_comes_back(paths):
    """Its replica waits for room, as long as it takes; meanwhile the other one works, and updates wait for none."""
    command = [sys.executable, ROOT / "tests" / "ray_nodes.py", *map(str, paths)]
    with tempfile.TemporaryDirectory(prefix="ray") as folder:  # or every `ray.init` here would look for this cluster
        environment = os.environ | {"RAY_TMPDIR": folder}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["both"] and found["in flight"] and found["again"]
    assert found["still"] == ["serving", "waiting"] and (found["version"], found["world size"]) == (1, 1)
    assert found["update waits"] < 10 and found["through"] == 2, "one that is under way goes through when it comes back"
    assert min(found["shares"]) > 0


def test_a_split_by_measured_time_changes_no_bit(paths, expected, monkeypatch):
    measure, times = pipeline.decode_seconds, iter([1.0, 1.0])  # a layer, and one with a head that costs nothing
    monkeypatch.setattr(pipeline, "decode_seconds", lambda *of: measure(*of, repeats=1) and next(times))
    llm = LLM(paths[0], pipeline_parallel_size=2, balance=True, backend="inproc", **SMALL)
    assert llm.core.pipeline.layers == [(0, 2), (2, 4)] != split_by_size(paths[0], 2)
    assert bits(generate(llm)) == expected[0]


@pytest.mark.parametrize("stages", [1, 2])
def test_replicas_on_ray_survive_the_death_of_one(paths, expected, ray_cluster, stages):
    """Each with a placement group and an actor a stage."""

    def actors():
        return {p for p in psutil.Process().children(recursive=True) if "ray::Actor" in p.name()}

    before = actors()
    llm = LLM(paths[0], replicas=2, pipeline_parallel_size=stages, balance=stages > 1, backend="ray", **SMALL)
    try:
        own = actors() - before
        assert len(own) == 2 * stages, "each stage has one"
        assert {p.nice() for p in own} == {os.nice(0)}, "they would wait for any other process"
        victim = llm.core.handles[0].peer if stages == 1 else max(own, key=psutil.Process.create_time)  # some stage
        outputs = run_and(llm, lambda: threading.Thread(target=victim.kill).start())
        assert bits(outputs) == expected[0]
        llm.update_weights(exact_model(paths[1]))
        assert bits(generate(llm)) == expected[1]
    finally:
        llm.close()
