"""The driver's own time by samples that wait: per submission, per step of `LLM.generate`, per abort.

usage: python benchmarks/driver.py [--waiting 1024 8192 32768] [--rounds 3] [--replicas] [--out FILE]

No model runs: an executor answers each step at once with made-up tokens, so what is left is what the driver does. CPU
time, in rows:

submission      `LLM.add_request`, behind that many samples
step            one turn of `LLM.generate`'s loop, which finishes sequences and admits others, with its progress bar
empty batch     the same where a step under way has all sequences that may run, so that each second batch is empty
abort           `LLM.abort` of the newest requests, one after the other
Ctrl-C          what it takes `LLM.generate` to abort its requests, each

of requests of one sample and of groups of 8. --replicas: also two replicas on a local Ray, of a tiny model: submission
while they are paused, and the CPU time of the driver's process in `LLM.generate`, per sample.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import itertools
import json
import pathlib
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from tqdm import tqdm
from transformers import AutoModelForCausalLM, LlamaConfig

from samebits import LLM, SamplingParams
from samebits.engine import EngineConfig
from samebits.engine.core import EngineCore
from samebits.engine.executor import Executor, ModelInfo
from samebits.engine.planner import Plan
from samebits.engine.request import SampledToken
from samebits.engine.weights import WeightTable

RESULTS = pathlib.Path(__file__).parent / "results"
VOCAB = 1000
PROMPT = 64  # tokens
LENGTHS = range(8, 25)  # of samples, in turn: each step some end and others start
WARM_UP, STEPS = 30, 60  # of a run of `generate`
CHUNK, CHUNKS = 64, 8  # submissions, and aborts, that are timed as one

clock = time.thread_time  # CPU time: what neighbours take is not the driver's


class EnoughError(Exception):
    """Ends a run of `generate` whose steps were timed."""


@dataclass
class Tokens:
    """A step's tokens, which are there."""

    tokens: list[SampledToken]

    def wait(self) -> list[SampledToken]:
        """Return them."""
        return self.tokens


class NoModel(Executor):
    """An executor without a model; notes when it got each step, and raises EnoughError at number `limit`."""

    is_local = True

    def __init__(self) -> None:
        super().__init__(world_size=1, load_timeout=1.0)
        self.info = ModelInfo(None, (), WeightTable({}, {}), 20_000, 0, 0, 0, 0)
        self.times: list[float] = []
        self.limit = 10**9

    def submit(self, plan: Plan) -> Tokens:
        """Give every draw the same token."""
        self.times.append(clock())
        if len(self.times) > self.limit:
            raise EnoughError
        return Tokens([SampledToken(7, -1.0) for _ in plan.sampling.tokens])

    def collective_rpc(self, method: str, *args: Any, timeout: float | None = None) -> list[Any]:
        """There is nobody to call."""
        raise NotImplementedError(method)


@contextlib.contextmanager
def tiny_model() -> Iterator[pathlib.Path]:
    """A folder with a model that takes no time, or little."""
    config = LlamaConfig(vocab_size=VOCAB, hidden_size=32, intermediate_size=32, num_hidden_layers=1,
                         num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=512)  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
        yield pathlib.Path(folder)


def driver(path: pathlib.Path, **settings: Any) -> tuple[LLM, NoModel]:
    """An `LLM` whose engine has no model."""
    config = EngineConfig(skip_tokenizer_init=True, kv_cache_memory_bytes=1, **settings)
    executor = NoModel()
    return LLM(path, engine=EngineCore(path, config, executor)), executor


def prompt(number: int) -> list[int]:
    """Tokens that no other number has."""
    return [number // VOCAB, number % VOCAB] * (PROMPT // 2)


def params(number: int, n: int) -> SamplingParams:
    """Return the parameters of request `number`."""
    return SamplingParams(n=n, max_tokens=LENGTHS[number % len(LENGTHS)], seed=0)


def submit(llm: LLM, samples: int, n: int) -> None:
    """Queue requests of so many samples, n in each."""
    for i in range(samples // n):
        llm.add_request(prompt(i), params(i, n))


def timed(calls: list[Callable[[], Any]]) -> tuple[float, list[Any]]:
    """The median of the chunks' mean seconds per call, and what the calls returned."""
    found, results = [], []
    for start in range(0, len(calls), CHUNK):
        part = calls[start : start + CHUNK]
        begin = clock()
        results += [call() for call in part]
        found.append((clock() - begin) / len(part))
    return statistics.median(found), results


def more(llm: LLM, first: int, n: int) -> list[Callable[[], str]]:
    """Submissions to be timed."""
    return [partial(llm.add_request, prompt(first + i), params(i, n)) for i in range(CHUNK * CHUNKS)]


def submissions_and_aborts(path: pathlib.Path, waiting: int, n: int) -> dict[str, float]:
    """Seconds per submission behind so many samples, and per abort from the newest back."""
    llm, _ = driver(path)
    submit(llm, waiting, n)
    submission, ids = timed(more(llm, waiting, n))
    abort, aborted = timed([partial(llm.abort, name) for name in reversed(ids)])
    assert all(aborted)
    return {"submission": submission, "abort": abort}


def steps(path: pathlib.Path, waiting: int, n: int) -> dict[str, float]:
    """Seconds per step of `generate`, and per request for aborting all of them at the end; so many samples, or a few
    more, wait while steps are timed."""
    llm, executor = driver(path)
    executor.limit = WARM_UP + STEPS
    ended = len(LENGTHS) * 128 // sum(LENGTHS)  # samples of each step
    count = (waiting + 128 + executor.limit * (ended + 1)) // n
    each = [params(i, n) for i in range(count)]
    with contextlib.suppress(EnoughError):
        llm.generate([prompt(i) for i in range(count)], each)
    end = clock()
    assert not llm.has_unfinished_requests()
    assert llm.stats().generation_tokens > 100 * STEPS, "steps did little"
    times = executor.times[WARM_UP:]
    between = statistics.median(b - a for a, b in itertools.pairwise(times))
    return {"step": between, "Ctrl-C": (end - executor.times[-1]) / count}


def empty_batches(path: pathlib.Path, waiting: int, n: int) -> dict[str, float]:
    """Seconds per step of `generate` where the sequences that may run all await their last token."""
    llm, executor = driver(path, async_scheduling=True, max_num_seqs=4)
    executor.limit = WARM_UP + STEPS
    count = waiting // n + 4 * executor.limit
    with contextlib.suppress(EnoughError):
        llm.generate([prompt(i) for i in range(count)], SamplingParams(n=n, max_tokens=1, seed=0))
    times = executor.times[WARM_UP:]
    return {"empty batch": statistics.median(b - a for a, b in itertools.pairwise(times))}


def measure(path: pathlib.Path, sizes: list[int], n: int, rounds: int, quiet: bool = False) -> dict[str, list[float]]:
    """Return the seconds of each measure for each size: the median of the rounds, in which the sizes take turns."""
    found: dict[str, dict[int, list[float]]] = {}
    for _ in tqdm(range(rounds), desc=f"n={n}", unit="round", disable=quiet):
        for size in sizes:
            for each in (submissions_and_aborts, steps, empty_batches):
                gc.collect()
                gc.freeze()  # nor count what the last one left
                for name, seconds in each(path, size, n).items():
                    found.setdefault(name, {}).setdefault(size, []).append(seconds)
                gc.unfreeze()
    return {name: [statistics.median(by_size[size]) for size in sizes] for name, by_size in found.items()}


def replicas(path: pathlib.Path, sizes: list[int]) -> dict[str, list[float]]:
    """Seconds per submission to two paused replicas, and of the driver's CPU per sample that they generate."""
    found: dict[str, list[float]] = {"2 replicas: submission": [], "2 replicas: CPU per sample": []}
    for size in tqdm(sizes, desc="2 replicas", unit="size"):
        with LLM(path, replicas=2, kv_cache_memory_bytes=2**24, skip_tokenizer_init=True) as llm:
            llm.engine.pause(True)
            submit(llm, size, 1)
            found["2 replicas: submission"].append(timed(more(llm, size, 1))[0])
        with LLM(path, replicas=2, kv_cache_memory_bytes=2**24, skip_tokenizer_init=True) as llm:
            begin = time.process_time()
            short = SamplingParams(max_tokens=4, seed=0)
            llm.generate([prompt(i)[:8] for i in range(size)], short)
            found["2 replicas: CPU per sample"].append((time.process_time() - begin) / size)
    return found


def main() -> None:
    """Measure, print a table, and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--waiting", type=int, nargs="+", default=[1024, 8192, 32768])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--replicas", action="store_true")
    parser.add_argument("--out", type=pathlib.Path, default=RESULTS / "driver.json")
    args = parser.parse_args()
    rows: dict[str, list[float]] = {}
    with tiny_model() as path:
        for n in (1, 8):
            rows |= {f"{name}, n={n}": seconds for name, seconds in measure(path, args.waiting, n, args.rounds).items()}
        if args.replicas:
            rows |= replicas(path, args.waiting)
    table = Table("microseconds, samples waiting", *map(str, args.waiting), "last / first")
    for name, seconds in rows.items():
        table.add_row(name, *(f"{1e6 * s:.0f}" for s in seconds), f"{seconds[-1] / seconds[0]:.2f} x")
    Console().print(table)
    found = {"cpu": platform.processor() or platform.machine(), "python": platform.python_version(),
             "waiting": args.waiting, "rounds": args.rounds, "seconds": rows}  # fmt: skip
    args.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
