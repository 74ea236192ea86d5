"""The seconds of a step by its rows: between what was measured, and whatever the clock said."""

from types import SimpleNamespace

import pytest

from samebits import LLM
from samebits.engine import step_times
from samebits.engine.executor import LocalExecutor

PLANNER = SimpleNamespace(kernels=SimpleNamespace(BLOCK=16))


def measured(monkeypatch, seconds, sequences=1000, tokens=2048, clock=lambda: 0.0):
    """Measure an engine whose steps of some rows take `seconds(rows)`. Returns the result, and the rows that ran."""
    ran = []

    def step(executor, planner, rows, sequences):
        ran.append((rows, sequences))
        return seconds(rows)

    monkeypatch.setattr(step_times, "_seconds", step)
    monkeypatch.setattr(step_times.time, "perf_counter", clock)
    return step_times.measure_step_seconds(None, PLANNER, sequences, tokens), ran


def test_it_is_linear_between_measured_rows_and_beyond_them(monkeypatch):
    found, ran = measured(monkeypatch, lambda rows: 1.0 + rows)
    assert ran == [(rows, rows) for rows in step_times.ROWS] * step_times.ROUNDS
    assert [found(rows) for rows in (1, 3, 100, 128, 300)] == [2.0, 4.0, 101.0, 129.0, 301.0]


def test_it_never_falls_and_takes_the_fastest_of_several_rounds(monkeypatch):
    times = iter([9.0, 9.0, 9.0, *[3.0, 1.0, 5.0] * (step_times.ROUNDS - 1)])
    found, ran = measured(monkeypatch, lambda rows: next(times), tokens=4)
    assert {rows for rows, _ in ran} == {1, 2, 4}, "no more rows than a step may have"
    assert [found(rows) for rows in (1, 2, 3, 4)] == [3.0, 3.0, 4.0, 5.0]


def test_no_round_begins_late(monkeypatch):
    now = iter(range(100))
    _, ran = measured(monkeypatch, lambda rows: 1.0, clock=lambda: 3.0 * next(now))
    assert len(ran) == 2 * len(step_times.ROWS)


@pytest.mark.parametrize("limit", [1, 3, 100])
def test_rows_beyond_the_sequences_that_may_run_are_their_drafts(monkeypatch, limit):
    _, ran = measured(monkeypatch, lambda rows: 1.0, sequences=limit)
    most = {1: 1, 3: 2, 100: 64}[limit]
    assert ran[: len(ran) // step_times.ROUNDS] == [
        (rows, min(rows, most)) for rows in step_times.ROWS if rows <= 16 * most
    ]


def test_no_step_that_is_measured_has_more_than_the_engines_limits(monkeypatch, checkpoint):
    """CUDA graphs have room for no more."""
    plans = []
    submit = LocalExecutor.submit

    def watch(self, plan):
        plans.append((len(plan.layout.lengths), len(plan.token_ids)))
        return submit(self, plan)

    monkeypatch.setattr(LocalExecutor, "submit", watch)
    settings = {"kv_cache_memory_bytes": 2**21, "speculative_config": {"method": "ngram"}}
    LLM(checkpoint("llama"), max_num_seqs=3, max_num_batched_tokens=16, **settings)
    assert {sequences for sequences, _ in plans} == {1, 2}
    assert {rows for _, rows in plans} == {1, 2, 4, 8, 12, 16}
