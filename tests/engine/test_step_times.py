"""The seconds of a step by its rows: between what was measured, and whatever the clock said."""

from samebits.engine import step_times


def measured(monkeypatch, seconds, num_blocks=1000, clock=lambda: 0.0):
    """Measure an engine whose steps of some rows take `seconds(rows)`. Returns the result, and the rows that ran."""
    ran = []

    def step(executor, planner, rows):
        ran.append(rows)
        return seconds(rows)

    monkeypatch.setattr(step_times, "_seconds", step)
    monkeypatch.setattr(step_times.time, "perf_counter", clock)
    return step_times.measure_step_seconds(None, None, num_blocks), ran


def test_it_is_linear_between_measured_rows_and_beyond_them(monkeypatch):
    found, ran = measured(monkeypatch, lambda rows: 1.0 + rows)
    assert ran == [*step_times.ROWS] * step_times.ROUNDS
    assert [found(rows) for rows in (1, 3, 100, 128, 300)] == [2.0, 4.0, 101.0, 129.0, 301.0]


def test_it_never_falls_and_takes_the_fastest_of_several_rounds(monkeypatch):
    times = iter([9.0, 9.0, 9.0, *[3.0, 1.0, 5.0] * (step_times.ROUNDS - 1)])
    found, ran = measured(monkeypatch, lambda rows: next(times), num_blocks=4)
    assert set(ran) == {1, 2, 4}, "no more rows than blocks"
    assert [found(rows) for rows in (1, 2, 3, 4)] == [3.0, 3.0, 4.0, 5.0]


def test_no_round_begins_late(monkeypatch):
    now = iter(range(100))
    _, ran = measured(monkeypatch, lambda rows: 1.0, clock=lambda: 3.0 * next(now))
    assert len(ran) == 2 * len(step_times.ROWS)
