"""The simulation of many GPUs, and that the measurements of stages and replicas run."""

import json
import pathlib
import subprocess
import sys

import numpy as np
import pytest

import scale as measured
import simulate_scale as scale

ROOT = pathlib.Path(__file__).parents[2]


@pytest.fixture
def profile():
    return scale.Profile(
        "a", "b", 4, {"base": 1e-3, "per_token": 1e-5, "per_context_token": 0.0}, {"base": 2e-3, "per_row": 1e-5},
        3e-3, 1000, 10**9, 100,
    )  # fmt: skip


def test_pipeline_times_are_the_closed_form():
    for stages, batches in ((1, 5), (3, 7), (4, 4)):
        times = scale.pipeline_times(np.full((batches, stages), 0.5), 0.0, in_flight=stages)
        expected = 0.5 * (np.arange(batches)[:, None] + np.arange(stages)[None] + 1)
        assert np.allclose(times, expected)
    alone = scale.pipeline_times(np.full((4, 2), 0.5), 0.1, in_flight=1)
    assert np.allclose(alone[:, 1], [1.1 * n for n in (1, 2, 3, 4)]), "one batch in flight: no overlap"


def test_one_simulated_gpu_is_hand_arithmetic(profile):
    """8 samples of exactly 32 tokens: a prefill step and 31 decode steps, no sync but the load of the weights."""
    workload = scale.Workload(prompts=8, group=1, prompt_tokens=10, median=32, sigma=0.0, max_tokens=64, steps=1)
    found = scale.simulate(profile, scale.Layout(1), workload)
    head = 2e-3 + 8 * 1e-5
    prefill, decode = 4 * (1e-3 + 80 * 1e-5), 4 * (1e-3 + 8 * 1e-5)
    by_hand = prefill + 31 * decode + 32 * (head + 3e-3) + found.sync_seconds
    assert found.tokens == 256 and found.seconds == pytest.approx(by_hand, rel=1e-9)


def test_a_simulated_failure_costs_the_restart_and_the_kv(profile):
    """The same with a failure in the middle of the 12th step: its tokens stay, all 22 of a sequence are computed again,
    and sample the 13th."""
    workload = scale.Workload(prompts=8, group=1, prompt_tokens=10, median=32, sigma=0.0, max_tokens=64, steps=1)
    driver = 2e-3 + 8 * 1e-5 + 3e-3
    prefill, decode, again = (4 * (1e-3 + n * 1e-5) + driver for n in (80, 8, 8 * 22))
    failure = prefill + 10.5 * decode
    gaps = np.random.default_rng([0, 2]).exponential(1, 2)
    assert gaps[1] > 10 * gaps[0], "no second failure"
    cluster = scale.Cluster(failures_per_hour=3600 * gaps[0] / failure, restart_seconds=0.5)
    found = scale.simulate(profile, scale.Layout(1), workload, cluster=cluster)
    assert found.tokens == 256 and found.failures == 1
    assert found.seconds == pytest.approx(failure + 0.5 + again + 19 * decode + found.sync_seconds, rel=1e-9)


def test_simulated_tokens_dont_depend_on_the_layout_and_more_gpus_are_faster(profile):
    workload = scale.Workload(prompts=64, group=4, prompt_tokens=64, median=100, sigma=0.5, max_tokens=400, steps=1)
    found = [scale.simulate(profile, scale.Layout(gpus, stages), workload) for gpus, stages in
             ((1, 1), (2, 1), (2, 2), (4, 1), (8, 2), (16, 4))]  # fmt: skip
    assert len({r.tokens for r in found}) == 1
    alone = [r.tokens_per_second for r in found if r.stages == 1]
    assert alone == sorted(alone)
    for r in found:
        assert 0 <= r.bubble < 1 and r.busy_share + r.bubble_share + r.tail_share + r.sync_share == pytest.approx(1)
    assert found[2].bubble > found[1].bubble, "stages have bubbles, replicas don't"


def test_the_simulation_says_what_is_missing():
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "simulate_scale.py"), "--profile", "nowhere.json"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2 and "scale.py --profile" in done.stderr


@pytest.mark.slow
def test_a_layout_is_measured_and_the_figures_are_written(checkpoint, monkeypatch, tmp_path):
    arguments = ["--model", str(checkpoint("llama")), "--dtypes", "float32", "--starts", "1", "--rounds", "1"]
    monkeypatch.setattr(sys, "argv", ["scale.py", *arguments, "--only", "1 stage", "--out", str(tmp_path / "out.json")])
    measured.main()
    (rates,) = json.loads((tmp_path / "out.json").read_text())["dtypes"]["float32"]["output_tok_s"].values()
    assert len(rates) == 1 and rates[0] > 0


@pytest.mark.slow
def test_updates_are_measured_on_an_engine_here_and_on_two_replicas(checkpoint, ray_cluster, monkeypatch, one_thread):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # which the measurement sets, and which this puts back
    times = measured.update_seconds(str(checkpoint("llama")), "float32", repeats=2)
    assert set(times) == {1, 2} and all(len(each) == 2 and min(each) > 0 for each in times.values())


@pytest.mark.slow
def test_the_whole_measurement_runs(checkpoint, tmp_path):
    arguments = ["--model", str(checkpoint("llama")), "--dtypes", "float32", "--starts", "1", "--rounds", "1"]
    files = ["--out", str(tmp_path / "out.json"), "--trace", str(tmp_path / "trace.png")]
    command = [sys.executable, str(ROOT / "benchmarks" / "scale.py"), *arguments, *files]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "out.json").read_text())
    assert len(found["dtypes"]["float32"]["output_tok_s"]) == 3 and set(found["trace"]) >= {"busy", "both"}
    assert (tmp_path / "trace.png").stat().st_size > 0
