"""Stages of a pipeline: what the caller sees when one dies, hangs or is cut off."""

import subprocess
import sys
import time

import pytest

from samebits import LLM
from samebits.engine import WorkerError
from samebits.trainer import exact_model

from helpers import faults
from helpers.cluster_runs import PARAMS, PROMPTS, SMALL, generate, run_and
from helpers.models import make_checkpoint


def test_a_dead_stage_is_an_error_that_says_so(paths):
    llm = LLM(paths[0], pipeline_parallel_size=2, **SMALL)
    start = time.monotonic()
    with pytest.raises(WorkerError, match="stage 1"):
        run_and(llm, lambda: faults.kill(llm.engine.executor.remote[0]))
    assert time.monotonic() - start < 30
    assert "stage" in llm.failure
    with pytest.raises(WorkerError, match="make a new engine"):
        llm.generate(PROMPTS[:1], PARAMS, use_tqdm=False)
    llm.close()


def test_a_stage_that_dies_at_the_commit_ends_the_engine(paths, monkeypatch):
    """Its other stages have the new weights, and nobody has both."""
    llm = LLM(paths[0], pipeline_parallel_size=2, **SMALL)
    (stage,) = llm.engine.executor.remote
    faults.at(monkeypatch, stage, "commit_update", faults.dies(stage))
    with pytest.raises(WorkerError, match="stage 1"):
        llm.update_weights(exact_model(paths[1]))
    assert llm.weight_version == 0 and "stage 1" in llm.failure
    with pytest.raises(WorkerError, match="make a new engine"):
        llm.generate(PROMPTS[:1], PARAMS, use_tqdm=False)
    llm.close()


def test_a_stage_that_hangs_is_an_error_in_time(paths):
    llm = LLM(paths[0], pipeline_parallel_size=2, kv_cache_memory_bytes=2**20, worker_timeout=3.0)
    start = time.monotonic()
    with pytest.raises(WorkerError, match="did not answer within 3 s"):
        run_and(llm, lambda: faults.stop(llm.engine.executor.remote[0]))
    assert time.monotonic() - start < 20
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
else:  # the last stage's connections: only calls, which go over pipes, still reach it
    ip("rule add pref 2 lookup local")
    ip("rule del pref 0")
    stage = psutil.Process(llm.engine.executor.remote[0].process.pid)
    for port in {c.laddr.port for c in stage.net_connections("tcp") if c.status == "ESTABLISHED"}:
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


@pytest.mark.parametrize("what", ["everything", "one stage"])
def test_a_network_that_drops_packets_between_stages(paths, what):
    """In a network namespace of its own, from one moment on."""
    if subprocess.run(["unshare", "-n", "ip", "link", "set", "lo", "up"], capture_output=True).returncode:
        pytest.skip("needs the right to make network namespaces")
    command = ["unshare", "-n", sys.executable, "-c", CUT_OFF, str(paths[0]), what]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    error, seconds, alive = done.stdout.splitlines()
    assert "WorkerError" in error and ("within" in error or "died" in error)
    assert float(seconds) < 8, "the stated timeout, and a little"
    assert alive == "0", "the stage waits for a driver that it can't reach"


def test_stages_work_at_the_same_time(tmp_path):
    """Four batches in flight in two processes: while one stage computes a step, so does the other. One: never.

    The steps are long enough to overlap on a busy machine, too."""
    wide = {"hidden_size": 300, "intermediate_size": 1200, "num_hidden_layers": 8}
    path, settings = make_checkpoint(tmp_path, "llama", **wide), SMALL | {"kv_cache_memory_bytes": 2**22}
    shares = []
    for batches in (1, 4):
        with LLM(path, pipeline_parallel_size=2, batches_in_flight=batches, **settings) as llm:
            llm.engine.executor.collective_rpc("take_trace")
            generate(llm)
            first, second = llm.engine.executor.collective_rpc("take_trace")
        assert len(first) == len(second) >= 60 * batches
        both = sum(max(0.0, min(b, d) - max(a, c)) for a, b in first for c, d in second)
        shares.append(both / sum(b - a for a, b in second))
    assert shares[0] == 0 and shares[1] > 0.2


def test_an_error_in_the_first_stage_breaks_the_pipeline(paths, monkeypatch):
    """The second stage has the plan: it must not meet the next step's hidden states."""
    llm = LLM(paths[0], pipeline_parallel_size=2, **SMALL)

    def fail(*args):
        raise MemoryError("out of it")

    monkeypatch.setattr(llm.engine.executor.first.runner, "run", fail)
    with pytest.raises(MemoryError):
        llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    monkeypatch.undo()
    with pytest.raises(WorkerError, match="out of it"):
        llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    llm.close()
