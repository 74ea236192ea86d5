"""One workload on several engines, each in a process of its own, in turn; a table, ratios and JSON.

usage: python benchmarks/throughput.py [--model mixture] [--workload mixed grouped short] [--peers hf vllm]
           [--rounds 3] [--out FILE]
`--model mixture` is a random Qwen3-MoE of 110 M parameters: 8 layers of 32 experts, of which a token takes 4.
vLLM runs under the interpreter that VLLM_PYTHON names (an environment with its CPU build).
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import platform
import statistics
import subprocess
import sys
import tempfile
import time

import torch
import transformers
from rich.console import Console
from rich.table import Table
from routing import MIXTURE, make_model
from tqdm import tqdm
from transformers import AutoConfig

from samebits.cli.bench import WORKLOADS
from samebits.model import resolve

HERE = pathlib.Path(__file__).parent


def commands(job: str, peers: list[str]) -> dict[str, list[str]]:
    """Engine -> command line."""
    found = {
        "samebits": [sys.executable, str(HERE / "run_samebits.py"), job],
        "samebits, switches off": [sys.executable, str(HERE / "run_samebits.py"), job, "--off"],
    }
    if "hf" in peers:
        found["HF generate"] = [sys.executable, str(HERE / "run_hf.py"), job]
    if "vllm" in peers:
        if "VLLM_PYTHON" not in os.environ:
            sys.exit("set VLLM_PYTHON to the python of an environment with vLLM's CPU build")
        found["vLLM"] = [os.environ["VLLM_PYTHON"], str(HERE / "run_vllm.py"), job]
    return found


def product_rate() -> float:
    """Return the GFLOP/s of torch's fp32 product of two 1024 x 1024 matrices, which bounds what a CPU can show here."""
    a, b = torch.randn(2, 1024, 1024)
    seconds = []
    for _ in range(30):
        begin = time.perf_counter()
        a @ b
        seconds.append(time.perf_counter() - begin)
    return 2 * 1024**3 / statistics.median(seconds) / 1e9


def measure(model: str, workload: str, dtype: str, peers: list[str], rounds: int) -> dict:
    """Runs each engine once a round, in turn; the median of the rounds counts."""
    runs: dict[str, list[dict]] = {}
    with tempfile.TemporaryDirectory() as folder:
        job = pathlib.Path(folder) / "job.json"
        work = WORKLOADS[workload]()
        vocab = AutoConfig.from_pretrained(model).vocab_size
        work["prompts"] = [[token % vocab for token in prompt] for prompt in work["prompts"]]
        job.write_text(json.dumps({"model": model, "dtype": dtype, **work}))
        lines = commands(str(job), peers)
        with tqdm(total=rounds * len(lines), desc=workload, unit="run") as bar:
            for _ in range(rounds):
                for engine, command in lines.items():
                    done = subprocess.run(command, capture_output=True, text=True)
                    if done.returncode:
                        sys.exit(f"{engine} failed:\n{done.stderr[-2000:]}")
                    lines_of_json = [line for line in done.stdout.splitlines() if line.startswith("{")]  # among logs
                    runs.setdefault(engine, []).append(json.loads(lines_of_json[-1]))
                    bar.update()
    engines = {
        engine: {**each[-1], "output_tok_s": [round(r["output_tok_s"][0], 1) for r in each]}
        for engine, each in runs.items()
    }
    return {"workload": workload, "dtype": dtype, "engines": engines}


def show(result: dict, console: Console) -> None:
    table = Table(
        "engine", "output tok/s (median)", "runs", "samebits is", "start s", "resident MB", title=result["workload"]
    )
    ours = result["engines"]["samebits"]["output_tok_s"]
    for engine, r in result["engines"].items():
        rates = r["output_tok_s"]
        ratio = statistics.median(a / b for a, b in zip(ours, rates, strict=True))
        cells = [f"{statistics.median(rates):.0f}", " ".join(f"{x:.0f}" for x in rates), f"{ratio:.2f} x"]
        table.add_row(engine, *cells, str(r.get("start_seconds", "")), str(r.get("resident_mb", "")))
    console.print(table)
    samebits = result["engines"]["samebits"]
    overhead = samebits["resident_mb"] - samebits["weights_mb"] - samebits["kv_mb"]
    console.print(
        f"prompt tokens computed {samebits['prompt_tokens_computed']}; resident {samebits['resident_mb']} MB = weights "
        f"{samebits['weights_mb']} + KV pool {samebits['kv_mb']} {overhead:+}",
        highlight=False,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--workload", nargs="+", default=["mixed", "grouped"], choices=WORKLOADS)
    parser.add_argument("--peers", nargs="*", default=[], choices=["hf", "vllm"])
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", help="also write the results here, as JSON")
    args = parser.parse_args()
    console = Console(width=120)
    with tempfile.TemporaryDirectory() as folder:
        if args.model == "mixture":
            make_model(pathlib.Path(folder), **MIXTURE)
        model = folder if args.model == "mixture" else str(resolve(args.model))
        results = [measure(model, w, args.dtype, args.peers, args.rounds) for w in args.workload]
    for result in results:
        show(result, console)
    machine = {
        "cpu": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "fp32_gflops": round(product_rate()),
    }
    if args.out:
        pathlib.Path(args.out).write_text(json.dumps({"machine": machine, "results": results}, indent=1))


if __name__ == "__main__":
    main()
