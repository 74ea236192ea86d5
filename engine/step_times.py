"""How long a step takes by its number of rows, measured before the first request."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import islice

import numpy as np

from ..scheduler import Batch
from .executor import Executor
from .planner import Planner
from .request import Request, Sample
from .sampling_params import SamplingParams

ROWS = (1, 2, 4, 8, 12, 16, 32, 64, 128)
ROUNDS = 5
SECONDS = 2.0  # after the first round, in which kernels may compile: then no third or later one begins


def measure_step_seconds(executor: Executor, planner: Planner, sequences: int, tokens: int) -> Callable[[int], float]:
    """Return the seconds of a step as a function of its rows, from steps on an empty KV cache.

    sequences, tokens: as many as a step may have. Rows are sequences' single tokens, beyond that their drafts.
    Of several rounds the fastest counts: what a kernel's compilation or a busy machine adds is no cost of a row.
    Between the measured numbers it is linear, beyond them it rises as from the first to the last, and it never falls.
    """
    sequences = 1 << (sequences.bit_length() - 1)  # a power of two, as most of ROWS are
    rows = [n for n in ROWS if n <= min(tokens, sequences * planner.kernels.BLOCK) and n % min(n, sequences) == 0]
    rounds = [[_seconds(executor, planner, n, min(n, sequences)) for n in rows]]
    begin = time.perf_counter()
    while len(rounds) < 2 or (len(rounds) < ROUNDS and time.perf_counter() - begin < SECONDS):
        rounds.append([_seconds(executor, planner, n, min(n, sequences)) for n in rows])
    seconds = np.maximum.accumulate(np.min(rounds, axis=0))
    slope = float(seconds[-1] - seconds[0]) / max(1, rows[-1] - rows[0])
    known = np.interp(range(rows[-1] + 1), rows, seconds).tolist()

    def step_seconds(count: int) -> float:
        return known[count] if count <= rows[-1] else known[-1] + slope * (count - rows[-1])

    return step_seconds


def _seconds(executor: Executor, planner: Planner, rows: int, sequences: int) -> float:
    """Time one step of sequences of one token and a draft, each in a block of its own."""
    request = Request("", None, [0], SamplingParams(n=sequences), 0, (), 0)
    batch = Batch([Sample(request, index, 1, False) for index in range(sequences)])
    tokens = iter(n % planner.vocab_size for n in range(rows))  # all different: a mixture reads each one's experts
    for block, seq in enumerate(batch.sequences):
        seq.block_table = [block]
        seq.num_scheduled_tokens = rows // sequences
        seq.token_ids = [next(tokens)]
        seq.draft = [*islice(tokens, seq.num_scheduled_tokens - 1)]
    start = time.perf_counter()
    plan, _ = planner.plan(batch, [])
    executor.submit(plan).wait()
    return time.perf_counter() - start
