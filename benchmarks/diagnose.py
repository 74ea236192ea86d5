"""Diagnosis of many tokens from a file: seconds and memory. usage: python benchmarks/diagnose.py [--tokens 10000000]"""

from __future__ import annotations

import argparse
import json
import resource
import tempfile
import time
from pathlib import Path

import numpy as np

from samebits.cli import mismatch
from samebits.integrations.rollouts import Rollout, write_rollouts

LENGTH = 1000


def synthetic(tokens: int):
    rng = np.random.default_rng(0)
    for _ in range(tokens // LENGTH):
        old = -rng.exponential(0.5, LENGTH).round(6)
        rollout = np.minimum(old + rng.normal(0, 1e-3, LENGTH), 0).round(6)
        yield Rollout(rng.integers(0, 49152, LENGTH), rollout, old=old)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=10_000_000)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rollouts.jsonl"
        write_rollouts(path, synthetic(args.tokens))
        size = path.stat().st_size
        begin = time.perf_counter()
        summary = mismatch.diagnose(path).summary
        seconds = time.perf_counter() - begin
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
    result = {
        "tokens": summary["tokens"],
        "file_mb": round(size / 1e6),
        "seconds": round(seconds, 2),
        "peak_mb": round(peak),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
