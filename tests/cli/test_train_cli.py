"""`samebits train`: what a run leaves behind, how it resumes, what it refuses; and that it learns."""

import json
import os
import subprocess
import sys
import time

import pytest

from samebits import LLM
from samebits.cli.train import live_line, read_log

from helpers.commands import samebits


def train(*options, threads=1, timeout=300) -> subprocess.CompletedProcess:
    command = [sys.executable, "-c", "from samebits.cli.main import main; main()", "train", *map(str, options)]
    env = {**os.environ, "OMP_NUM_THREADS": str(threads), "COLUMNS": "300"} if threads else dict(os.environ)
    return subprocess.run(command, capture_output=True, text=True, env=env, timeout=timeout)


SMALL = (
    "--model", "tiny", "--task", "sorting", "--supervise-until", 0, "--groups-per-step", 4, "--group-size", 2,
    "--max-tokens", 8, "--evaluate-every", 2, "--save-every", 2, "--kv-cache-memory-bytes", 10 << 20,
)  # fmt: skip


def test_a_run_leaves_log_curves_and_model_and_goes_on_where_it_stopped(tmp_path):
    first = train(*SMALL, "--steps", 3, "--output-dir", tmp_path)
    assert first.returncode == 0, first.stderr[-2000:]
    assert "step    2" in first.stdout and "max|rollout - trainer| 0 " in first.stdout
    log = tmp_path / "log.jsonl"
    rows = read_log(log)
    assert [row["step"] for row in rows] == [0, 1, 2] and all(row["max_difference"] == 0 for row in rows)
    assert "validation" in rows[1] and "validation" in rows[2] and "validation" not in rows[0]
    with log.open("a") as file:
        file.write('{"step": 3, "rew')  # killed while it wrote
    drafts = ("--speculative-config", '{"method": "suffix"}')
    again = train(*SMALL, "--steps", 5, "--output-dir", tmp_path, *drafts)
    assert again.returncode == 0, again.stderr[-2000:]
    assert "resumed after step 3" in again.stdout
    assert [row["step"] for row in read_log(log)] == [0, 1, 2, 3, 4]
    assert (tmp_path / "curves.png").stat().st_size > 10_000
    assert LLM(tmp_path / "model", kv_cache_memory_bytes=2**20).generate("31>", use_tqdm=False)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--model", "tiny", "--task", "chess"), "choose arithmetic, sorting, brackets"),
        (("--model", "tiny", "--task", "sorting", "--algorithm", "a3c"), "choose one of grpo"),
        (("--model", "tiny", "--task", "lines.jsonl"), "--evaluate-every 0 trains without validation"),
        (("--model", "tiny", "--task", "lines.jsonl", "--evaluate-every", 0), "a tiny model is for the built-in tasks"),
        (("--model", "nowhere", "--task", "sorting"), "nowhere"),
        (("--model", "tiny", "--task", "sorting", "--device", "gpu"), "no kernels for device 'gpu'; supported: cpu"),
        (("--model", "tiny", "--task", "sorting", "--verifier", "exact"), "--verifier is for .jsonl tasks"),
        (("--model", "tiny", "--task", "lines.jsonl", "--num-problems", 5), "--num-problems is for built-in tasks"),
        (("--model", "smollm2", "--task", "sorting", "--sync-dir", "x"), "--sync-dir needs --engine-url"),
        (
            ("--model", "tiny", "--task", "sorting", "--speculative-config", '{"method": "medusa"}'),
            "speculative method 'medusa'; choose",
        ),
    ],
)
def test_a_mistake_is_one_clear_line(tmp_path, monkeypatch, options, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "lines.jsonl").write_text(json.dumps({"prompt": "p", "answer": "a"}) + "\n")
    run = samebits("train", *options, "--output-dir", tmp_path / "out")
    assert run.returncode == 2 and message in " ".join(run.stderr.split())


def test_a_step_that_compared_nothing_says_so():
    row = dict.fromkeys(("step", "version", "reward", "length", "grad_norm", "max_difference", "compared_tokens"), 0)
    row |= dict.fromkeys(("rollout_tokens_per_second", "train_tokens_per_second", "max_staleness"), 1)
    assert "not compared" in live_line(row | {"staleness": 1})
    assert "[green]max|rollout - trainer| 0[/green]" in live_line(row | {"compared_tokens": 5, "staleness": 1})


@pytest.mark.slow
def test_two_hundred_steps_learn_to_sort_within_a_quarter_of_an_hour(tmp_path):
    begin = time.monotonic()
    options = ("--model", "tiny", "--task", "sorting", "--max-tokens", 10, "--evaluate-every", 50)
    run = train(*options, "--output-dir", tmp_path, threads=None, timeout=1200)
    assert run.returncode == 0, run.stderr[-2000:]
    rows = read_log(tmp_path / "log.jsonl")
    assert len(rows) == 200 and all(row["max_difference"] == 0 and row["compared_tokens"] for row in rows)
    rewards = [row["reward"] for row in rows]
    assert rewards[0] < 0.3 and max(sum(rewards[i : i + 10]) / 10 for i in range(190)) > 0.8
    assert time.monotonic() - begin < 900


@pytest.mark.slow
def test_a_tiny_mixture_of_experts_learns(tmp_path):
    options = ("--model", "tiny-moe", "--task", "sorting", "--max-tokens", 10, "--steps", 32, "--evaluate-every", 0)
    run = train(*options, "--output-dir", tmp_path, threads=None, timeout=1200)
    assert run.returncode == 0, run.stderr[-2000:]
    rows = read_log(tmp_path / "log.jsonl")
    assert len(rows) == 32 and all(row["max_difference"] == 0 and row["compared_tokens"] for row in rows)
    rewards = [row["reward"] for row in rows]
    assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 0.05
