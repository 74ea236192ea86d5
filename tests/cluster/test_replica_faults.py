"""Replicas that die, hang or are cut off cost no request, and change no token."""

import gc
import os
import shutil
import subprocess
import sys
import tempfile
import time
import weakref

import psutil
import pytest

from samebits import LLM, SamplingParams
from samebits.engine import WorkerError
from samebits.engine.outputs import COUNTERS
from samebits.trainer import exact_model

from helpers import faults
from helpers.cluster_runs import PROMPTS, SMALL, bits, generate, run_and
from helpers.serving import wait_for


def test_a_dead_replicas_requests_go_on_with_the_same_tokens(pair, paths, expected, monkeypatch):
    # or pytest would keep errors in log records, and with them the frames of the client that raised them
    monkeypatch.setattr("samebits.cluster.replicated_engine.logger.disabled", True)
    pair.update_weights(paths[0])
    generate(pair)
    before = pair.stats()
    dead = weakref.ref(pair.engine.replicas[0].client)
    outputs = run_and(pair, lambda: faults.kill(pair.engine.replicas[0]))
    assert bits(outputs) == expected[0]
    assert all(getattr(pair.stats(), name) >= getattr(before, name) for name in COUNTERS), "a counter fell"
    wait_for(lambda: faults.serve(pair), 60)
    assert bits(generate(pair)) == expected[0]
    assert pair.weight_checksums(), "the new replica's weights are the others'"
    gc.collect()
    assert dead() is None, "something keeps all replicas that ever were"
    pair.sleep(2)
    pair.wake_up()
    assert bits(generate(pair)) == expected[0], "it knows where they are stored, too"


def test_a_replica_that_cant_be_admitted_is_started_again(pair, paths, expected, monkeypatch):
    pair.update_weights(paths[0])
    faults.before(monkeypatch, pair.engine, "_admit", faults.fail(RuntimeError("no room for it")), at=1)
    faults.kill(pair.engine.replicas[1])
    wait_for(lambda: not faults.serve(pair))
    wait_for(lambda: faults.serve(pair), 60)
    assert bits(generate(pair)) == expected[0]


@pytest.mark.slow
def test_replicas_that_die_together_cost_no_request(pair, paths, expected, monkeypatch):
    """A request isn't held to be the cause of a death that it was only sent to."""
    monkeypatch.setattr("samebits.cluster.dispatcher.MAX_DEATHS", 2)
    pair.update_weights(paths[0])
    victims = [faults.process_of(one) for one in pair.engine.replicas]
    outputs = run_and(pair, lambda: [victim.kill() for victim in victims])
    assert bits(outputs) == expected[0]
    wait_for(lambda: faults.serve(pair), 60)


def test_workers_leave_sigterm_to_their_parent(pair, paths, expected):
    """A service manager sends it to all processes of a server, which still has requests to finish."""
    pair.update_weights(paths[0])
    before = [one.client for one in pair.engine.replicas]
    processes = [faults.process_of(one) for one in before]
    outputs = run_and(pair, lambda: [process.terminate() for process in processes])
    assert bits(outputs) == expected[0] and [one.client for one in pair.engine.replicas] == before


@pytest.mark.slow
def test_a_replica_that_hangs_counts_as_dead(paths, expected, ray_cluster):
    """Its requests may draft tokens, as far as that pays by its clock, and go on elsewhere."""
    drafts = {"method": "suffix", "prompt_lookup_min": 1}
    llm = LLM(paths[0], replicas=2, kv_cache_memory_bytes=2**20, worker_timeout=3.0, speculative_config=drafts)
    try:
        start = time.monotonic()
        outputs = run_and(llm, lambda: faults.stop(llm.engine.replicas[1]))
        assert bits(outputs) == expected[0]
        assert time.monotonic() - start < 30
    finally:
        llm.close()


@pytest.mark.slow
def test_a_request_that_kills_replicas_is_given_up(paths, ray_cluster):
    llm = LLM(paths[0], replicas=2, **SMALL)
    try:
        llm.add_request(PROMPTS[0], SamplingParams(n=32, max_tokens=450, seed=0, ignore_eos=True))
        killed, output = None, None
        deadline = time.monotonic() + 90
        while llm.has_unfinished_requests() and time.monotonic() < deadline:
            output = ([output, *llm.step()])[-1]
            now = next((a.client for a in llm.engine.dispatcher.assigned.values() if a.received), None)
            if now is not None and now is not killed:
                killed = now
                faults.kill(now)
        assert output.completions[0].finish_reason == "error" and "replicas died" in output.completions[0].stop_reason
    finally:
        llm.close()


@pytest.mark.slow
def test_a_stage_of_a_replica_dies(paths, expected, ray_cluster):
    """The whole replica is started again; its requests go on elsewhere."""
    llm = LLM(paths[0], pipeline_parallel_size=2, replicas=2, **SMALL)
    try:
        outputs = run_and(llm, lambda: faults.kill(llm.engine.replicas[0].client.actors[1]))
        assert bits(outputs) == expected[0]
        wait_for(lambda: faults.serve(llm), 90)
        llm.update_weights(exact_model(paths[1]))
        assert bits(generate(llm)) == expected[1]
    finally:
        llm.close()


@pytest.mark.slow
@pytest.mark.parametrize("replicas", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_workers_end_with_the_process_that_started_them(paths, tmp_path, replicas):
    """With SIGKILL, which lets nobody clean up: the workers, and a local Ray that was started for them."""
    program = f"""
import os, time
from samebits import LLM
os.environ["RAY_ADDRESS"] = ""
llm = LLM({str(paths[0])!r}, pipeline_parallel_size=2, replicas={replicas}, kv_cache_memory_bytes=2**20)
print("ready", flush=True)
time.sleep(100)
"""
    with tempfile.TemporaryDirectory(prefix="ray") as folder:  # or it would find the other tests' cluster
        environment = os.environ | {"RAY_TMPDIR": folder}
        process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, env=environment)
        while process.stdout.readline() != b"ready\n":
            assert process.poll() is None
        workers = [p for p in psutil.Process(process.pid).children(recursive=True) if "Agent" not in p.name()]
        assert len(workers) >= 2 * replicas  # Ray's own agents take a minute
        process.kill()
        process.wait()
        _, alive = psutil.wait_procs(workers, 30)
        assert not alive


@pytest.mark.slow
def test_a_stage_that_dies_in_idleness_ends_its_replica(paths, expected, ray_cluster):
    """Or every update would fail for ever."""
    llm = LLM(paths[0], pipeline_parallel_size=2, replicas=2, **SMALL)
    try:
        faults.kill(llm.engine.replicas[1].client.actors[1])
        wait_for(lambda: not faults.serve(llm))
        assert llm.update_weights(exact_model(paths[1])) == 1
        assert bits(generate(llm)) == expected[1]
    finally:
        llm.close()


@pytest.mark.slow
def test_replicas_that_start_no_more_are_an_error(paths, tmp_path, ray_cluster):
    """With the checkpoint gone; none comes back from where it has failed for good."""
    path = tmp_path / "model"
    shutil.copytree(paths[0], path)
    with LLM(path, replicas=2, **SMALL) as llm:
        shutil.rmtree(path)
        for one in llm.engine.replicas:
            faults.kill(one)
        with pytest.raises(WorkerError, match="no replica starts any more"):
            generate(llm)
        time.sleep(1)
        assert faults.serve(llm, 0)


def test_a_sleep_that_finds_a_dead_replica_puts_all_to_sleep(pair, paths, expected):
    pair.update_weights(paths[0])
    faults.kill(pair.engine.replicas[1])
    assert pair.sleep(1) > 0 and not pair.ready
    pair.wake_up()
    assert bits(generate(pair)) == expected[0]
    wait_for(lambda: faults.serve(pair), 60)
    assert bits(generate(pair)) == expected[0]


@pytest.mark.slow
@pytest.mark.parametrize("stages", [1, 2])
def test_each_stage_is_an_actor_in_its_replicas_placement_group(paths, ray_cluster, stages):
    with LLM(paths[0], replicas=2, pipeline_parallel_size=stages, **SMALL) as llm:
        actors = [actor for one in llm.engine.replicas for actor in one.client.actors]
        processes = {faults.process_of(actor) for actor in actors}
        assert len(processes) == 2 * stages, "each stage has one"
        assert {p.nice() for p in processes} == {os.nice(0)}, "they would wait for any other process"
        groups = [one.placement.group for one in llm.engine.replicas]
        assert [len(group.bundle_specs) for group in groups] == [stages, stages]
