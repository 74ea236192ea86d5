"""Stages of a pipeline: one that dies, fails, hangs or is cut off takes its replica with it, and costs no request."""

import os
import pathlib
import subprocess
import sys
import tempfile
import time

import pytest
import ray

from samebits import LLM

from helpers import faults
from helpers.cluster_runs import SMALL, bits, generate, run_and
from helpers.models import make_checkpoint
from step_trace import start_trace, take_trace


@pytest.fixture(scope="module")
def stages(paths, ray_cluster):
    """One replica in two stages, shared by the tests that end with both alive."""
    with LLM(paths[0], pipeline_parallel_size=2, **SMALL) as llm:
        yield llm


@pytest.mark.parametrize("stage", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_a_dead_stage_costs_no_request(stages, paths, expected, stage):
    stages.update_weights(paths[0])
    outputs = run_and(stages, lambda: faults.kill(stages.engine.replicas[0].client.actors[stage]))
    assert bits(outputs) == expected[0]
    assert stages.failure is None


@pytest.mark.slow
def test_a_stage_that_dies_at_the_commit_comes_back_with_the_new_weights(stages, paths, expected, monkeypatch):
    """Its other stage has them, and no process has both: the whole replica starts again."""
    before = stages.update_weights(paths[0])
    replica = stages.engine.replicas[0]
    fault = faults.dies(replica.client.actors[1])
    faults.at(monkeypatch, replica, "switch_weights", fault)
    assert stages.update_weights(paths[1]) == before + 1
    outputs = generate(stages)
    assert bits(outputs) == expected[1]
    assert {c.weight_version for o in outputs for c in o.completions} == {before + 1}


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_an_error_in_a_stage_costs_no_request(stages, paths, expected, stage):
    """The other stage has the plan: it must not meet the next step's hidden states."""

    def break_runner(host) -> None:
        def fail(*args):
            raise MemoryError("out of it")

        host.worker.runner.run = fail

    stages.update_weights(paths[0])
    first = stages.engine.replicas[0].client
    ray.get(first.actors[stage].handle.__ray_call__.remote(break_runner))
    assert bits(generate(stages)) == expected[0]
    assert stages.engine.replicas[0].client is not first


@pytest.mark.slow
def test_a_stage_that_hangs_counts_as_dead(paths, expected, ray_cluster):
    with LLM(paths[0], pipeline_parallel_size=2, kv_cache_memory_bytes=2**20, worker_timeout=3.0) as llm:
        start = time.monotonic()
        outputs = run_and(llm, lambda: faults.stop(llm.engine.replicas[0].client.actors[1]))
        assert bits(outputs) == expected[0]
        assert time.monotonic() - start < 40


CUT_OFF = """
import os, subprocess, sys, time, psutil
from samebits import LLM, SamplingParams
from helpers import faults
from helpers.cluster_runs import bits, generate, run_and

def ip(command):
    subprocess.run(["ip", *command.split()], check=True)

def cut_off():  # its connections drop every packet from now on
    stage = faults.process_of(llm.engine.replicas[0].client.actors[-1])
    ip("rule add pref 2 lookup local")
    ip("rule del pref 0")
    for port in {c.laddr.port for c in stage.net_connections("tcp")}:
        for end in "sport", "dport":
            ip(f"rule add pref 1 ipproto tcp {end} {port} blackhole")

if __name__ == "__main__":
    ip("link set lo up")
    path, settings = sys.argv[1], {"kv_cache_memory_bytes": 2**20, "worker_timeout": 4.0}
    expected = bits(generate(LLM(path, **settings)))
    llm = LLM(path, **{sys.argv[2]: 2}, **settings)
    assert bits(generate(llm)) == expected
    start = time.monotonic()
    outputs = run_and(llm, cut_off)
    print(bits(outputs) == expected, time.monotonic() - start, sep="\\n")
    llm.close()
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["replicas", "pipeline_parallel_size"])
def test_a_network_that_drops_packets_costs_no_request(paths, kind, tmp_path):
    """Those of a replica, or of a stage, from one moment on; in a network namespace of its own."""
    if subprocess.run(["unshare", "-n", "ip", "link", "set", "lo", "up"], capture_output=True).returncode:
        pytest.skip("needs the right to make network namespaces")
    script = tmp_path / "cut_off.py"
    script.write_text(CUT_OFF)
    tests = pathlib.Path(__file__).parents[1]
    with tempfile.TemporaryDirectory(prefix="ray") as folder:  # or it would look for the other tests' cluster
        environment = os.environ | {
            "RAY_TMPDIR": folder,
            "RAY_ADDRESS": "",
            "PYTHONPATH": os.pathsep.join([str(tests), *sys.path]),
        }
        command = ["unshare", "-n", sys.executable, script, str(paths[0]), kind]
        done = subprocess.run(command, capture_output=True, text=True, timeout=150, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    same, seconds = done.stdout.split()[-2:]
    assert same == "True"
    assert float(seconds) < 40


@pytest.mark.slow
def test_stages_work_at_the_same_time(tmp_path):
    """Four batches in flight in two processes: while one stage computes a step, so does the other. One: never.

    The steps are long enough to overlap on a busy machine, too."""
    wide = {"hidden_size": 300, "intermediate_size": 1200, "num_hidden_layers": 8}
    path, settings = make_checkpoint(tmp_path, "llama", **wide), SMALL | {"kv_cache_memory_bytes": 2**22}
    shares = []
    for batches in (1, 4):
        with LLM(path, pipeline_parallel_size=2, batches_in_flight=batches, **settings) as llm:
            start_trace(llm)
            generate(llm)
            first, second = take_trace(llm)
        assert len(first) == len(second) >= 60 * batches
        both = sum(max(0.0, min(b, d) - max(a, c)) for a, b in first for c, d in second)
        shares.append(both / sum(b - a for a, b in second))
    assert shares[0] == 0 and shares[1] > 0.2
