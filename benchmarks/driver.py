"""The driver's own time per submission and per step, by samples that wait: flat, whatever the length of the queue.

usage: python benchmarks/driver.py [--waiting 1024 8192 32768] [--out FILE]

No model runs: steps come back at once, with made-up tokens. One engine, and two replicas whose processes are stubs.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import statistics
import tempfile
import time
from concurrent.futures import Future
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

from rich.console import Console
from rich.table import Table
from transformers import LlamaConfig

from samebits.cluster.dispatcher import Dispatcher
from samebits.cluster.replicated_engine import ReplicatedEngine
from samebits.engine import EngineConfig, SamplingParams
from samebits.engine.core import EngineCore
from samebits.engine.executor import ModelInfo
from samebits.engine.input_processor import InputProcessor
from samebits.engine.model_runner import Plan
from samebits.engine.request import Request, SampledToken
from samebits.engine.weights import WeightTable

VOCAB = 32_000
SAMPLES = 8  # of each prompt
STEPS = 200


class NoModel:
    """An executor whose steps take no time."""

    is_local = True
    load_timeout = 1.0
    info = ModelInfo(None, (), WeightTable({}, {}), 10_000, 0, 0, 0)

    def submit(self, plan: Plan) -> Any:
        """Give every draw the same token."""
        tokens = [SampledToken(7, -1.0) for _ in plan.index]
        return SimpleNamespace(wait=lambda: tokens)


def requests(count: int) -> list[Request]:
    """Requests of `count` samples in all, with prompts of 64 tokens."""
    processor = InputProcessor(None, "", VOCAB, 2048, ())
    params = SamplingParams(n=SAMPLES, max_tokens=256, seed=0)
    prompts = ([(i * 64 + j) % VOCAB for j in range(64)] for i in range(count // SAMPLES))
    return [processor.process(prompt, params, str(i), True) for i, prompt in enumerate(prompts)]


def one_engine(path: pathlib.Path, waiting: int) -> tuple[float, float]:
    """Seconds per submission, and the median of a step's, with that many samples queued."""
    engine = EngineCore(path, EngineConfig(device="cpu"), NoModel())  # type: ignore[arg-type]
    queue = requests(waiting)
    start = time.perf_counter()
    for request in queue:
        engine.add_request(request)
    submission = (time.perf_counter() - start) / len(queue)
    times = []
    for _ in range(STEPS):
        start = time.perf_counter()
        engine.step()
        engine.outbox.clear()
        times.append(time.perf_counter() - start)
    return submission, statistics.median(times[STEPS // 2 :])


def two_replicas(waiting: int) -> float:
    """Seconds per submission to a replicated engine, without what the call to another process costs."""
    engine = ReplicatedEngine.__new__(ReplicatedEngine)
    super(ReplicatedEngine, engine).__init__()
    arrived: Future = Future()
    arrived.set_result(None)
    call = SimpleNamespace(ref=SimpleNamespace(future=lambda: arrived), result=lambda timeout: None)
    engine._events = SimpleQueue()
    engine.config = EngineConfig(replicas=2)
    engine.dispatcher = Dispatcher(engine, engine._events)
    for index in range(2):
        client: Any = SimpleNamespace(index=index, load=0, post=lambda *args: call)
        engine.dispatcher.serving.append(client)
    queue = requests(waiting)
    start = time.perf_counter()
    for request in queue:
        engine.add_request(request)
    return (time.perf_counter() - start) / len(queue)


def main() -> None:
    """Measure, print a table, and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--waiting", type=int, nargs="+", default=[1024, 8192, 32768])
    parser.add_argument("--out", type=pathlib.Path)
    args = parser.parse_args()
    table = Table("samples waiting", "submission (us)", "step (ms)", "submission to two replicas (us)")
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        LlamaConfig(num_hidden_layers=1, vocab_size=VOCAB).save_pretrained(folder)
        for waiting in args.waiting:
            submission, step = one_engine(pathlib.Path(folder), waiting)
            replicas = two_replicas(waiting)
            found[waiting] = {"submission_s": submission, "step_s": step, "replicas_submission_s": replicas}
            table.add_row(str(waiting), f"{1e6 * submission:.0f}", f"{1e3 * step:.2f}", f"{1e6 * replicas:.0f}")
    Console().print(table)
    if args.out:
        args.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
