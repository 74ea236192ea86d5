"""Settings, and where workers are put."""

import json
import os
import pathlib
import subprocess
import sys
import tempfile
from types import SimpleNamespace

import pytest

from samebits import LLM
from samebits.cluster import ray_cluster as placing
from samebits.engine import EngineConfig, WorkerError

from helpers.cluster_runs import SMALL


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"pipeline_parallel_size": 5}, "the model has 4 layers"),
        ({"pipeline_parallel_size": 2, "stage_layers": (1, 2)}, "add up to 3; the model has 4"),
        ({"pipeline_parallel_size": 2, "stage_layers": (4,)}, "each of the 2 stages"),
        ({"backend": "threads"}, "choose one of ray, inproc"),
        ({"replicas": 0}, "must be positive"),
        ({"replicas": 2, "backend": "inproc"}, "actors of a Ray cluster"),
        ({"replicas": 2, "backend": "mp"}, "choose one of ray, inproc"),
        ({"batches_in_flight": 0}, "must be positive"),
        ({"async_scheduling": True, "pipeline_parallel_size": 2}, "in one stage"),
        ({"async_scheduling": True, "batches_in_flight": 2}, "all sequences in each step"),
        ({"worker_timeout": 0}, "must be positive"),
        ({"stage_layers": (4,)}, "set pipeline_parallel_size"),
        ({"backend": "ray"}, "set pipeline_parallel_size or replicas"),
    ],
)
def test_settings_that_make_no_sense(paths, settings, message):
    with pytest.raises(ValueError, match=message):
        LLM(paths[0], **settings)


@pytest.mark.parametrize(
    "settings", [{"replicas": 2}, pytest.param({"pipeline_parallel_size": 2}, marks=pytest.mark.slow)]
)
def test_what_fails_while_a_worker_starts_reaches_the_caller(paths, ray_cluster, settings):
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
    monkeypatch.setattr(placing, "nodes", lambda: nodes)
    monkeypatch.setattr(
        placing, "ray", SimpleNamespace(available_resources=lambda: free, cluster_resources=lambda: free)
    )
    config = EngineConfig(replicas=workers, backend="ray", device=device)
    assert placing.threads_per_worker(config) == threads
    assert placing.sharers_of_memory(config, threads) == sharers
    monkeypatch.setenv("OMP_NUM_THREADS", "0")  # OpenMP's own choice
    assert placing.threads_per_worker(config) == threads
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert placing.threads_per_worker(config) == 3


def test_all_workers_share_the_memory_of_a_local_cluster(monkeypatch):
    resources = {"CPU": 2.0, placing.LOCAL: 1.0}
    monkeypatch.setattr(placing, "ray", SimpleNamespace(cluster_resources=lambda: resources))
    assert placing.sharers_of_memory(EngineConfig(replicas=4, backend="ray"), 1) == 4


def test_a_cluster_without_room_is_an_error_in_time(paths, ray_cluster, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "64")  # neither replica fits, or the other might be first to fail
    with pytest.raises(WorkerError, match=r"could not place 3 stage"):
        LLM(paths[0], replicas=2, pipeline_parallel_size=3, backend="ray", start_timeout=3.0, **SMALL)


@pytest.mark.slow
def test_a_node_of_the_cluster_goes_away_and_comes_back(paths):
    """Its replica waits for room, as long as it takes; meanwhile the other one works, and updates wait for none."""
    command = [sys.executable, pathlib.Path(__file__).parents[1] / "helpers" / "ray_nodes.py", *map(str, paths)]
    with tempfile.TemporaryDirectory(prefix="ray") as folder:  # or every `ray.init` here would look for this cluster
        environment = os.environ | {"RAY_TMPDIR": folder}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["both"] and found["in flight"] and found["again"]
    assert found["still"] == ["serving", "waiting"] and (found["version"], found["world size"]) == (1, 1)
    assert found["update waits"] < 10 and found["through"] == 2, "one that is under way goes through when it comes back"
    assert min(found["shares"]) > 0


SHUT_DOWN = """
import sys, ray
from samebits import LLM

llm = LLM(sys.argv[1], replicas=2, kv_cache_memory_bytes=2**20)
ray.shutdown()
try:
    llm.generate([[5, 6, 7]], use_tqdm=False)
except Exception as error:
    print(type(error).__name__, error)
llm.close()
print(ray.is_initialized())
"""


@pytest.mark.slow
def test_an_engine_whose_ray_was_shut_down_says_so_and_starts_no_other(paths):
    with tempfile.TemporaryDirectory(prefix="ray") as folder:
        environment = os.environ | {"RAY_TMPDIR": folder, "RAY_ADDRESS": ""}
        command = [sys.executable, "-c", SHUT_DOWN, str(paths[0])]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    said, again = done.stdout.splitlines()[-2:]
    assert said.startswith("WorkerError Ray was shut down") and again == "False"


TWO_ENGINES = """
import sys
from samebits import LLM, SamplingParams

engines = []
for stages in (1, 2):
    engines.append(LLM(sys.argv[1], replicas=2, pipeline_parallel_size=stages, kv_cache_memory_bytes=2**20))
for llm in engines:
    print(llm.generate([[5, 6, 7]], SamplingParams(seed=0, max_tokens=4), use_tqdm=False)[0].completions[0].token_ids)
    llm.close()
"""


@pytest.mark.slow
def test_a_second_larger_engine_starts_on_the_local_cluster_of_the_first(paths):
    """While the first one serves, whatever CPUs the machine has."""
    with tempfile.TemporaryDirectory(prefix="ray") as folder:
        environment = os.environ | {"RAY_TMPDIR": folder, "RAY_ADDRESS": ""}
        command = [sys.executable, "-c", TWO_ENGINES, str(paths[0])]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    small, large = done.stdout.splitlines()[-2:]
    assert small == large
