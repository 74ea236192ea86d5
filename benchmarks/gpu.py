"""Proves the promise on this machine's GPU, then measures what it costs. Under eight minutes; results are kept under
benchmarks/results/, by the GPU's name.

usage: python benchmarks/gpu.py [--out FOLDER] [--seconds 460] [--only bits|speed] [--device cuda] [--tiny]
"""

from __future__ import annotations

import argparse
import functools
import json
import pathlib
import re
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from typing import Any

import torch
import transformers
import triton

import gpu_bits
import gpu_speed

RESULTS = pathlib.Path(__file__).with_name("results")


def versions(device: torch.device) -> dict[str, str]:
    found = {"torch": torch.__version__, "triton": triton.__version__, "transformers": transformers.__version__}
    if device.type != "cuda":
        return {"gpu": "none", **found}
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    driver = subprocess.run(query, capture_output=True, text=True, check=False).stdout.split("\n")[0].strip()
    major, minor = torch.cuda.get_device_capability(device)
    return {
        "gpu": torch.cuda.get_device_name(device), "compute capability": f"{major}.{minor}",
        "driver": driver, "cuda": str(torch.version.cuda), **found,
    }  # fmt: skip


def golden(report: dict[str, Any], kept: pathlib.Path, compiler: str) -> list[str]:
    """Hashes that differ from those kept of the same GPU type and compiler. Keeps new ones."""
    before = json.loads(kept.read_text()) if kept.exists() else {}
    now = {f"{part}: {name}": h for part, r in report.items() for name, h in r.get("hashes", {}).items()}
    mine = before.setdefault(compiler, {})
    changed = [name for name, found in now.items() if mine.get(name, found) != found]
    mine.update({name: found for name, found in now.items() if name not in changed})
    kept.write_text(json.dumps(before, indent=1, sort_keys=True) + "\n")
    return changed


def markdown(result: dict[str, Any]) -> str:
    """The results as a page."""
    lines = [f"# {result['versions']['gpu']}", "", ", ".join(f"{k} {v}" for k, v in result["versions"].items()), ""]
    lines += ["| gate | comparisons | differ |", "|---|---|---|"]
    for name, part in result.get("bits", {}).items():
        if part:
            lines.append(f"| {name} | {part.get('compared', part.get('schedules'))} | {len(part['differ'])} |")
    for name, part in result.get("speed", {}).items():
        rows = part if isinstance(part, list) else [part]
        rows = [{k: v for k, v in row.items() if not isinstance(v, dict | list)} for row in rows]
        if rows and rows[0]:
            lines += ["", f"## {name}", "", "| " + " | ".join(rows[0]) + " |", "|" + "---|" * len(rows[0])]
            lines += ["| " + " | ".join(_number(v) for v in row.values()) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def _number(value: Any) -> str:
    return (
        f"{value:.3g}"
        if isinstance(value, float) and abs(value) < 1e4
        else f"{value:,.0f}"
        if isinstance(value, float)
        else str(value)
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, default=RESULTS)
    parser.add_argument("--seconds", type=float, default=460, help="no further measurement starts after so long")
    parser.add_argument("--only", choices=("bits", "speed"))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="tiny shapes: checks this script, measures nothing")
    args = parser.parse_args()
    device = torch.device(args.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        sys.exit("torch sees no NVIDIA GPU (torch.cuda.is_available() is False): there is nothing to measure here")
    result: dict[str, Any] = {"versions": versions(device), "bits": {}, "speed": {}, "errors": {}}
    name = re.sub(r"\W+", "_", result["versions"]["gpu"].lower())
    args.out.mkdir(parents=True, exist_ok=True)
    begin = time.monotonic()

    def attempt(group: str, part: str, call: Callable[[], Any]) -> Any:
        """Keeps what it returns, or why it failed: the others are worth having."""
        if time.monotonic() - begin > args.seconds:
            result["errors"][part] = "no time left"
            return None
        try:
            result[group][part] = call()
        except Exception as error:
            result["errors"][part] = traceback.format_exc()
            print(f"{part}: {type(error).__name__}: {error}")
            del error
            gpu_speed.free(device)  # what it held
        print(f"{part}: {time.monotonic() - begin:.0f} s", flush=True)
        (args.out / f"gpu_{name}.json").write_text(json.dumps(result, indent=1) + "\n")
        return result[group].get(part)

    with tempfile.TemporaryDirectory() as folder:
        if args.only != "speed":
            for part, gate in gpu_bits.gates(device, folder, args.tiny):
                for line in (attempt("bits", part, gate) or {}).get("differ", [])[:10]:
                    print("  DIFFERS", line)
            compiler = f"triton {triton.__version__}" + (", tiny" if args.tiny else "")
            changed = golden(result["bits"], args.out / f"gpu_{name}_hashes.json", compiler)
            for line in changed:
                result["errors"][line] = "changed since the last run on such a GPU"
                print("  CHANGED since the last run on such a GPU:", line)
        if args.only != "bits":
            for part, measure in gpu_speed.parts(device, folder, args.tiny):
                attempt("speed", part, functools.partial(measure, result["speed"]))
    (args.out / f"gpu_{name}.json").write_text(json.dumps(result, indent=1) + "\n")
    page = markdown(result)
    (args.out / f"gpu_{name}.md").write_text(page)
    print(page)
    sys.exit(bool(result["errors"]) or any(part["differ"] for part in result["bits"].values()))


if __name__ == "__main__":
    main()
