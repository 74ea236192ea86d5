"""Figures and a table of the laboratory's runs. usage: python benchmarks/tim_lab/report.py [FOLDER]"""

from __future__ import annotations

import json
import math
import pathlib
import statistics
import sys
from collections import defaultdict

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

CURVES = {
    "reward": "reward", "validation": "validation reward (greedy)", "mean_difference": "mean |delta|",
    "max_difference": "max |delta|", "k1": "K1", "k3": "K3", "grad_norm": "gradient norm", "entropy": "entropy",
    "contribution_positive": "C(r), A > 0", "contribution_negative": "C(r), A < 0",
}  # fmt: skip
LOGARITHMIC = ("mean_difference", "max_difference", "k3")
Runs = dict[tuple[str, str, str, str], list[dict]]


def read(folder: pathlib.Path) -> Runs:
    """(engine, algorithm, mode, dtype) -> one log a seed."""
    found: Runs = defaultdict(list)
    for file in sorted(folder.glob("*.json")):
        log = json.loads(file.read_text())
        found[log["engine"], log["algorithm"], log["mode"], log["dtype"]].append(log)
    return found


def curve(logs: list[dict], name: str) -> tuple[list[float], list[float], list[float], list[float]]:
    """(steps, mean, lowest, highest) over seeds; the reward as a mean of ten steps."""
    series = [{row["step"]: row[name] for row in log["rows"] if name in row} for log in logs]
    steps = sorted(set.intersection(*(set(s) for s in series)))
    if name == "reward":
        series = [{t: statistics.fmean(s[u] for u in range(max(0, t - 9), t + 1)) for t in steps} for s in series]
    columns = [[s[t] for s in series] for t in steps]
    return steps, [statistics.fmean(c) for c in columns], [min(c) for c in columns], [max(c) for c in columns]


def figure(runs: Runs, keys: dict[str, tuple], title: str, target: pathlib.Path) -> None:
    """All curves of the runs `keys` (label -> key): the mean over seeds, and the band of all of them."""
    drawing, grid = plt.subplots(2, 5, figsize=(22, 8), layout="constrained")
    for axes, (name, label) in zip(grid.flat, CURVES.items(), strict=True):
        for color, (run, key) in enumerate(keys.items()):
            if key not in runs:
                continue
            steps, mean, low, high = curve(runs[key], name)
            if not steps:
                continue
            axes.plot(steps, mean, color=f"C{color}", label=run)
            axes.fill_between(steps, low, high, color=f"C{color}", alpha=0.15, linewidth=0)
        axes.set_title(label)
        axes.set_xlabel("step")
        if name in LOGARITHMIC:
            axes.set_yscale("symlog", linthresh=1e-9)
    grid.flat[0].legend(frameon=False, fontsize=9)
    drawing.suptitle(title)
    drawing.savefig(target, dpi=75)
    plt.close(drawing)


def table(runs: Runs) -> str:
    head = "| engine | algorithm | mode | trainer | seeds | reward, last 10 | validation | mean abs delta | max | K3 |"
    lines = [head, "|" + " --- |" * (head.count("|") - 1)]
    order = {name: i for i, name in enumerate(("grpo", "reinforce"))}
    for key in sorted(runs, key=lambda k: (order[k[1]], k[2] != "bypass", k[2], runs[k][0]["rows"][-1]["k3"])):
        logs = runs[key]
        last = [log["rows"][-10:] for log in logs]
        rewards = [statistics.fmean(row["reward"] for row in rows) for rows in last]
        validations = [[r["validation"] for r in log["rows"] if "validation" in r][-1] for log in logs]
        rows = [row for log in logs for row in log["rows"] if "k3" in row]
        cells = [
            *key, str(len(logs)), spread(rewards), spread(validations),
            f"{statistics.fmean(r['mean_difference'] for r in rows):.2g}",
            f"{max(r['max_difference'] for r in rows):.2g}", f"{statistics.fmean(r['k3'] for r in rows):.2g}",
        ]  # fmt: skip
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def spread(values: list[float]) -> str:
    """Mean and standard error over seeds."""
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan
    return f"{statistics.fmean(values):.3f} ± {error:.3f}"


def write(folder: pathlib.Path) -> None:
    runs = read(folder)
    engines = ("exact", "switches off", "vLLM", "bf16", "int8 weights", "noise 1", "noise 2")
    for algorithm in ("grpo", "reinforce"):
        keys = {e: (e, algorithm, "bypass", "float32") for e in engines}
        figure(runs, keys, f"{algorithm}, bypass: engines", folder / f"engines_{algorithm}.png")
    keys = {f"noise 2, {mode}": ("noise 2", "grpo", mode, "float32") for mode in ("bypass", "recompute", "decoupled")}
    keys = {"exact": ("exact", "grpo", "bypass", "float32"), **keys}
    figure(runs, keys, "grpo: what the loss does with the mismatch", folder / "modes.png")
    keys = {
        "fp32 | fp32": ("exact", "grpo", "bypass", "float32"),
        "bf16 | bf16": ("exact", "grpo", "bypass", "bfloat16"),
        "fp16 | fp16": ("exact", "grpo", "bypass", "float16"),
        "bf16 | fp32": ("bf16", "grpo", "bypass", "float32"),
        "fp16 | fp32": ("fp16", "grpo", "bypass", "float32"),
        "vLLM bf16 | bf16": ("vLLM", "grpo", "bypass", "bfloat16"),
        "vLLM fp16 | fp16": ("vLLM", "grpo", "bypass", "float16"),
    }
    figure(runs, keys, "grpo, bypass: precision of engine | trainer", folder / "precision.png")
    (folder / "report.md").write_text(table(runs) + "\n")
    print(table(runs))


if __name__ == "__main__":
    write(pathlib.Path(sys.argv[1]) if len(sys.argv) > 1 else pathlib.Path(__file__).parent.parent / "results/tim_lab")
