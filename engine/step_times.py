"""How long a step takes by its number of rows, measured before the first request."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from ..scheduler import Batch
from .executor import Executor
from .planner import Planner
from .request import Request, Sample
from .sampling_params import SamplingParams

ROWS = (1, 2, 4, 8, 16, 32, 64, 128)
ROUNDS = 3


def measure_step_seconds(executor: Executor, planner: Planner, num_blocks: int) -> Callable[[int], float]:
    """Return the seconds of a step as a function of its rows, from steps of single tokens on an empty KV cache.

    Between the measured numbers it is linear, beyond them it goes on as between the last two, and it never falls.
    """
    rows = [n for n in ROWS if n <= num_blocks] or [1]
    best = [min(_seconds(executor, planner, n) for _ in range(ROUNDS)) for n in rows]
    seconds = np.maximum.accumulate(best)
    slope = float(seconds[-1] - seconds[0]) / max(1, rows[-1] - rows[0])
    known = np.interp(range(rows[-1] + 1), rows, seconds).tolist()

    def step_seconds(count: int) -> float:
        return known[count] if count <= rows[-1] else known[-1] + slope * (count - rows[-1])

    return step_seconds


def _seconds(executor: Executor, planner: Planner, rows: int) -> float:
    """Time one step of sequences of one token, each in a block of its own."""
    request = Request("", None, [0], SamplingParams(n=rows), 0, (), 0)
    batch = Batch([Sample(request, index, 1, False) for index in range(rows)])
    for block, seq in enumerate(batch.sequences):
        seq.block_table = [block]
        seq.num_scheduled_tokens = 1
    plan, _ = planner.plan(batch, [])
    start = time.perf_counter()
    executor.submit(plan).wait()
    return time.perf_counter() - start
