"""The pictures of a report and of a training run: PNG, drawn by matplotlib."""

from __future__ import annotations

import io
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

from ..correction.calibration import Assessment, Calibration
from ..correction.calibration.assess import CONTRIBUTION_EDGES
from ..correction.diagnose import predicted_chi2
from .mismatch import Report

BY_THRESHOLD: dict[str, Callable[[Assessment], float | None]] = {
    "expected cosine": lambda a: a.alignment.cosine if a.alignment else None,
    "direction bias": lambda a: a.alignment.direction if a.alignment else None,
    "sequences kept": lambda a: 1 - a.metrics["rejected_sequences"],
    "exact sequences kept": lambda a: a.accepted_exact,
}
BY_STEP = (
    ("reward", "validation"),
    ("max_difference",),
    ("length",),
    ("entropy",),
    ("grad_norm",),
    ("rollout_tokens_per_second", "train_tokens_per_second"),
)


def diagnosis(found: Report) -> bytes:
    """Sizes, by token probability, and what sequence weights would cost."""
    summary = found.summary
    figure, (size, probability, feasibility) = _figure(1, 3, (14, 3.8))
    scale = "log" if summary["max_abs"] else "linear"  # there is no logarithm of an exact engine's
    size.plot(*found.survival)
    size.set(xscale="log", yscale=scale, xlabel="|d|", ylabel="share of tokens above", title="size")
    rows = summary["by_probability"]
    probability.bar([r["bin"].split(" to ")[1] for r in rows], [r["mean_abs"] for r in rows])
    probability.set(xlabel="token probability, up to", ylabel="mean |d|", title="by token probability")
    probability.tick_params(axis="x", rotation=60)
    predicted = [(2**i, predicted_chi2(summary["k3"], 2**i)) for i in range(4, 15)]
    _line(feasibility, [(t, c) for t, c in predicted if c < 1e12], label="exp(2 K3 T) - 1")
    _line(feasibility, [(summary["mean_length"], summary["chi2_sequence"])], "o", label="measured")
    feasibility.set(xscale="log", yscale=scale, xlabel="tokens in a sequence", ylabel="chi2 of a sequence")
    feasibility.set_title("feasibility of sequence weights")
    feasibility.legend()
    return _png(figure)


def calibration(found: Calibration) -> bytes:
    """Alignment with the exact gradient and acceptance, by threshold; what is dropped, by length and by prompt; the
    zero-centred contribution C(r) by the advantage's sign. The band is exact rollouts against exact ones."""
    figure, axes = _figure(2, 4, (21, 9.5))
    for ax, (title, value) in zip(axes[0], BY_THRESHOLD.items(), strict=True):
        for family, members in _families(found).items():
            _line(ax, [(threshold, value(a)) for threshold, a in members], "o-", label=family)
        ax.set(xscale="log", xlabel="threshold", title=title)
    if found.null is not None:
        axes[0][0].axhspan(*found.null.interval, color="tab:gray", alpha=0.2, label="exact against exact")
    by_length, by_prompt, *by_sign = axes[1]
    rejecting = [a for a in found.assessments if a.metrics["rejected_sequences"] > 0.05]
    for a in sorted(rejecting, key=lambda a: a.metrics["rejected_sequences"])[:8]:
        _line(by_length, enumerate(a.accepted_by_length, 1), label=a.name)
        _line(by_prompt, enumerate(a.accepted_by_group), label=a.name)
    by_length.set(xlabel="length, decile", ylabel="share of sequences kept", title="acceptance by length")
    by_prompt.set(xlabel="prompt, decile", ylabel="share of sequences kept", title="acceptance by prompt")
    for side, ax in enumerate(by_sign):
        _contributions(ax, found, side)
    for ax in axes.flat:
        if ax.get_legend_handles_labels()[0]:
            ax.legend(fontsize=7)
    return _png(figure)


def curves(rows: list[dict[str, float]]) -> bytes:
    """The metrics of a training run's steps."""
    figure, axes = _figure(2, 3, (12, 6))
    for ax, names in zip(axes.flat, BY_STEP, strict=True):
        for name in names:
            _line(ax, [(row["step"], row.get(name)) for row in rows], ".-", label=name.replace("_", " "))
        ax.set_xlabel("step")
        ax.legend(frameon=False)
    return _png(figure)


def ranked(found: Calibration) -> list[Assessment]:
    """The assessments, best first: by expected cosine, or by intervention where there is none."""
    return sorted(found.assessments, key=lambda a: -(a.alignment.cosine if a.alignment else -a.intervention))


def _families(found: Calibration) -> dict[str, list[tuple[float, Assessment]]]:
    """Family -> its (threshold, assessment)."""
    families: dict[str, list[tuple[float, Assessment]]] = defaultdict(list)
    for a in found.assessments:
        family, _, threshold = a.name.partition("@")
        if threshold:
            families[family].append((float(threshold), a))
    return families


def _contributions(ax: Any, found: Calibration, side: int) -> None:
    """Before and after the best candidate, and of exact rollouts, whose C is 0 but for staleness."""
    best = found.verdict.recommended or ranked(found)[0].name
    shown = {a.name: a.contributions for a in found.assessments if a.name in ("none", best)}
    if found.exact_contributions is not None:
        shown["exact rollouts"] = found.exact_contributions
    starts = (2 * CONTRIBUTION_EDGES[0], *CONTRIBUTION_EDGES)  # of the bins; the first one has none
    for name, sides in shown.items():
        total = max(1, sum(sides[side]))
        ax.step(starts, [count / total for count in sides[side]], where="post", label=name)
    ax.set_xscale("symlog", linthresh=1e-4)
    ax.set(xlabel="C(r) = -(r - 1) A", ylabel="share of tokens", yscale="log")
    ax.set_title(f"zero-centred contribution, A {'><'[side]} 0")


def _line(ax: Any, points: Iterable[tuple[float, float | None]], style: str = "-", **how: Any) -> None:
    """Plot the points that are known, if any are."""
    known = [(x, y) for x, y in points if y is not None]
    if known:
        ax.plot(*zip(*known, strict=True), style, **how)


def _figure(rows: int, columns: int, size: tuple[float, float]) -> tuple[Any, Any]:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("plots need matplotlib: pip install 'samebits[report]'") from error
    figure = Figure(figsize=size, layout="constrained")
    return figure, figure.subplots(rows, columns)


def _png(figure: Any) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=100, bbox_inches="tight")
    return buffer.getvalue()
