"""The driver's time does not grow with the samples that wait, and the benchmark that says so would see it."""

import json
import sys

import pytest

from samebits.scheduler import Scheduler

import driver
from helpers.invariants import waiting

FEW, MANY = 1024, 16384


@pytest.fixture(scope="module")
def path():
    with driver.tiny_model() as folder:
        yield folder


def growth(path, names, n):
    """How much longer each takes with many samples than with few, in the best of five tries: neighbours come and go.

    A try compares medians of many calls.
    """
    tries = []
    for _ in range(5):
        found = driver.measure(path, [FEW, MANY], n, rounds=1, quiet=True)
        tries.append({name: found[name][1] / found[name][0] for name in names})
        if max(tries[-1].values()) < 2:
            break
    return min(tries, key=lambda ratios: max(ratios.values()))


@pytest.mark.parametrize("n", [pytest.param(1, marks=pytest.mark.slow), 8])
def test_submissions_steps_and_aborts_take_as_long_behind_16384_samples_as_behind_1024(path, n):
    ratios = growth(path, ["submission", "step", "empty batch", "abort"], n)
    assert max(ratios.values()) < 2, ratios


def test_a_look_at_all_that_wait_would_be_seen(path, monkeypatch):
    schedule = Scheduler.schedule

    def scanning(self):
        assert any(seq.num_pending for seq in (*self.running, *waiting(self))) in (True, False)
        return schedule(self)

    monkeypatch.setattr(Scheduler, "schedule", scanning)
    few, many = (driver.empty_batches(path, size, 1)["empty batch"] for size in (FEW, MANY))
    assert many > 2 * few


def test_the_benchmark_writes_its_figures(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(
        sys, "argv", ["driver.py", "--waiting", "64", "128", "--rounds", "1", "--out", str(tmp_path / "driver.json")]
    )
    driver.main()
    assert "last / first" in capsys.readouterr().out
    found = json.loads((tmp_path / "driver.json").read_text())
    assert found["waiting"] == [64, 128]
    assert {"step, n=1", "submission, n=8", "abort, n=1"} < set(found["seconds"])
    assert all(len(row) == 2 and min(row) > 0 for row in found["seconds"].values())
