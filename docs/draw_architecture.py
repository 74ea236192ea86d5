"""Draws docs/architecture.png: the packages by floor, and the processes of two replicas of two stages."""

from __future__ import annotations

import pathlib

import matplotlib

matplotlib.use("agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

FLOORS = [  # as tests/test_structure.py has them, and `correction`, which imports nothing of ours, at the bottom
    ["cli"],
    ["integrations"],
    ["server"],
    ["trainer", "cluster", "agents"],
    ["engine"],
    ["scheduler", "model"],
    ["kernels", "correction"],
]
STEP = 1.4  # from a floor to the next
INK = "#22303c"
FILL = "#e8eef4"
FRAME = "#7a8b99"


def box(axes: Axes, x: float, y: float, width: float, height: float, text: str, fill: str = FILL) -> None:
    """Draw a room with its name."""
    axes.add_patch(plt.Rectangle((x, y), width, height, facecolor=fill, edgecolor=FRAME))
    axes.text(x + width / 2, y + height / 2, text, ha="center", va="center", size=9, color=INK)


def arrow(axes: Axes, start: tuple[float, float], end: tuple[float, float], text: str = "", dx: float = 0.0) -> None:
    """Draw an arrow and what goes along it."""
    axes.annotate("", end, start, arrowprops={"arrowstyle": "-|>", "color": FRAME})
    middle = (start[0] + end[0]) / 2 + dx, (start[1] + end[1]) / 2
    axes.text(*middle, text, ha="center", va="center", size=7.5, color=INK, backgroundcolor="white")


def packages(axes: Axes) -> None:
    """Draw the floors; each imports only those below it."""
    for number, floor in enumerate(FLOORS):
        width = 9.0 / len(floor)
        for i, name in enumerate(floor):
            box(axes, 0.5 + i * width + 0.1, 9 - STEP * number, width - 0.2, 0.9, name)
    for number in range(len(FLOORS) - 1):
        arrow(axes, (5, 9 - STEP * number), (5, 9.9 - STEP * (number + 1)))
    axes.set_title("packages: imports go down", size=10, color=INK)


def processes(axes: Axes) -> None:
    """Draw two replicas of two stages."""
    box(axes, 0.2, 8.0, 9.6, 2.0, "", "white")
    axes.text(5, 9.7, "driver: your process", ha="center", va="center", size=9, color=INK)
    box(axes, 0.5, 8.25, 2.4, 1.1, "LLM")
    box(axes, 3.6, 8.25, 5.9, 1.1, "ReplicatedEngine\nReplicaClient, ReplicaClient")
    arrow(axes, (2.9, 8.8), (3.6, 8.8))
    for number, x in enumerate((0.2, 5.2)):
        box(axes, x, 3.8, 4.6, 2.7, "", "white")
        axes.text(x + 2.3, 6.2, f"actor: replica {number}", ha="center", va="center", size=9, color=INK)
        box(axes, x + 0.2, 4.95, 4.2, 0.95, "EngineCore, Scheduler,\nPipelineExecutor")
        box(axes, x + 0.2, 4.0, 4.2, 0.75, "StageWorker: first layers")
        box(axes, x, 0.9, 4.6, 1.5, "", "white")
        axes.text(x + 2.3, 2.1, f"actor: replica {number}, stage 1", ha="center", va="center", size=9, color=INK)
        box(axes, x + 0.2, 1.05, 4.2, 0.75, "StageWorker: last layers")
        arrow(axes, (x + 1.1, 8.0), (x + 1.1, 6.5), "requests,\ncommands")
        arrow(axes, (x + 3.5, 6.5), (x + 3.5, 8.0), "reports")
        arrow(axes, (x + 0.7, 3.8), (x + 0.7, 2.4), "plans")
        arrow(axes, (x + 2.3, 3.8), (x + 2.3, 2.4), "hidden\nstates")
        arrow(axes, (x + 3.9, 2.4), (x + 3.9, 3.8), "tokens")
    axes.text(
        5,
        0.3,
        "hidden states: torch.distributed   weights: objects of Ray's, or a trainer's process group\n"
        "all else: calls of actors' methods",
        ha="center",
        va="center",
        size=8,
        color=INK,
    )
    axes.set_title("processes: LLM(model, replicas=2, pipeline_parallel_size=2)", size=10, color=INK)


def main() -> None:
    """Write the figure beside this file."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 5.2), layout="constrained")
    for axes in (left, right):
        axes.set_xlim(0, 10)
        axes.set_ylim(0, 10.4)
        axes.axis("off")
    packages(left)
    processes(right)
    figure.savefig(pathlib.Path(__file__).with_name("architecture.png"), dpi=110)


if __name__ == "__main__":
    main()
