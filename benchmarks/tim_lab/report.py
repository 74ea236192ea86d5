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
PICTURES = ("engines_grpo", "engines_reinforce", "modes_grpo", "modes_reinforce", "precision")
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


COLUMNS = (
    "engine", "algorithm", "mode", "trainer", "reward, last 10", "validation, last 3", "mean abs delta", "max", "K1",
    "K3", "gradient norm", "entropy", "C(r), A > 0", "C(r), A < 0",
)  # fmt: skip


def table(runs: Runs) -> str:
    """A line a variant: the end of training as mean ± standard error over seeds, the rest as means over all steps."""
    lines = ["| " + " | ".join(COLUMNS) + " |", "|" + " --- |" * len(COLUMNS)]
    for key in sorted(runs, key=lambda k: (k[1], k[2] != "bypass", k[2], runs[k][0]["rows"][-1]["k3"])):
        logs = runs[key]
        rows = [row for log in logs for row in log["rows"] if "k3" in row]
        means = ("k1", "k3", "grad_norm", "entropy", "contribution_positive", "contribution_negative")
        cells = [
            *key, spread(final_rewards(logs)), spread(final_validations(logs)),
            f"{statistics.fmean(r['mean_difference'] for r in rows):.2g}",
            f"{max(r['max_difference'] for r in rows):.2g}",
            *(f"{statistics.fmean(r[name] for r in rows):.2g}" for name in means),
        ]  # fmt: skip
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def final_rewards(logs: list[dict]) -> list[float]:
    return [statistics.fmean(row["reward"] for row in log["rows"][-10:]) for log in logs]


def final_validations(logs: list[dict]) -> list[float]:
    """Return each run's mean of its last three validations: the exact engine's greedy answers, which compare."""
    return [statistics.fmean([r["validation"] for r in log["rows"] if "validation" in r][-3:]) for log in logs]


def spread(values: list[float]) -> str:
    return f"{statistics.fmean(values):.3f} ± {standard_error(values):.3f}"


def standard_error(values: list[float]) -> float:
    return statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan


def verdict(runs: Runs) -> str:
    """Each variant against the exact run of its algorithm in fp32, by validation; the difference in standard errors."""
    exact = [row for key, logs in runs.items() if key[0] == "exact" for log in logs for row in log["rows"]]
    worst = max(row["max_difference"] for row in exact)
    lines = [f"- exact: max |delta| over the {len(exact)} steps of all exact runs is {worst:g}"]
    for key, logs in sorted(runs.items(), key=lambda item: item[1][0]["rows"][-1]["k3"]):
        baseline = runs.get(("exact", key[1], "bypass", "float32"))
        if baseline is None or baseline is logs or len(logs) < 2:
            continue
        a, b = final_validations(logs), final_validations(baseline)
        gap, error = statistics.fmean(a) - statistics.fmean(b), math.hypot(standard_error(a), standard_error(b))
        word = "within two standard errors" if abs(gap) < 2 * error else "higher" if gap > 0 else "lower"
        lines.append(f"- {', '.join(key)}: {gap:+.3f} ± {error:.3f} against exact, {word}")
    return "\n".join(lines)


def write(folder: pathlib.Path) -> None:
    runs = read(folder)
    engines = ("exact", "switches off", "vLLM", "bf16", "int8 weights", "noise 1", "noise 2")
    for algorithm in ("grpo", "reinforce"):
        keys = {e: (e, algorithm, "bypass", "float32") for e in engines}
        figure(runs, keys, f"{algorithm}, bypass: engines", folder / f"engines_{algorithm}.png")
    keys = {f"noise 2, {mode}": ("noise 2", "grpo", mode, "float32") for mode in ("bypass", "recompute", "decoupled")}
    keys = {"exact": ("exact", "grpo", "bypass", "float32"), **keys}
    figure(runs, keys, "grpo: what the loss does with the mismatch", folder / "modes_grpo.png")
    keys = {
        "exact": ("exact", "reinforce", "bypass", "float32"),
        "noise 2": ("noise 2", "reinforce", "bypass", "float32"),
        "noise 2, token-TIS": ("noise 2", "reinforce", "decoupled", "float32"),
    }
    figure(runs, keys, "reinforce: what a correction does with the mismatch", folder / "modes_reinforce.png")
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
    pictures = "\n\n".join(f"![{name}]({name}.png)" for name in PICTURES)
    text = f"# Runs\n\n{table(runs)}\n\n{verdict(runs)}\n\n{pictures}\n"
    (folder / "report.md").write_text(text)
    print(text)


if __name__ == "__main__":
    write(pathlib.Path(sys.argv[1]) if len(sys.argv) > 1 else pathlib.Path(__file__).parent.parent / "results/tim_lab")
