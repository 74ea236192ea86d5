"""The figures of a report and of a training run, drawn by matplotlib: one for each question."""

from __future__ import annotations

import contextlib
import io
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from ..correction.calibration import Assessment, Calibration
from ..correction.diagnose import predicted_chi2
from .mismatch import Report

BY_STEP = (
    ("reward", "validation"),
    ("max_difference",),
    ("length",),
    ("entropy",),
    ("grad_norm",),
    ("rollout_tokens_per_second", "train_tokens_per_second"),
)
_SHOWN = 12  # candidates in a figure
_CHOSEN = "#1f9d5c"
_OTHERS = "#4a7fb5"
_INK = "#123123"  # stands for the page's text colour
_FAMILIES = 8


def sizes(found: Report, format: str = "png") -> bytes:
    """The share of tokens that differ by more than each amount."""
    figure, ax = _figure((5.2, 3.2))
    ax.plot(*found.survival, color=_OTHERS)
    scale = "log" if found.summary["max_abs"] else "linear"  # there is no logarithm of an exact engine's
    ax.set(xscale="log", yscale=scale, xlabel="|d|, nats", ylabel="share of tokens above")
    return _bytes(figure, format)


def by_probability(found: Report, format: str = "png") -> bytes:
    """The mean difference by the token's probability, and the envelope of logits that are off by one amount."""
    figure, ax = _figure((5.2, 3.4))
    rows = found.summary["by_probability"]
    edges = [tuple(map(float, row["bin"].split(" to "))) for row in rows]
    ax.bar(range(len(rows)), [row["mean_abs"] for row in rows], color=_OTHERS, label="measured")
    if found.summary["max_abs"]:
        shape = [1 - (low + high) / 2 for low, high in edges]  # of `envelope`
        size = max(row["mean_abs"] for row in rows) / max(shape)
        envelope = [size * share for share in shape]
        ax.plot(range(len(rows)), envelope, "o-", color=_CHOSEN, label="shape 1 - p of equal logit errors")
        _legend(ax)
    ax.set_xticks(range(len(rows)), [f"{high:g}" for _, high in edges], rotation=60)
    ax.set(xlabel="token probability, up to", ylabel="mean |d|, nats")
    return _bytes(figure, format)


def feasibility(found: Report, format: str = "png") -> bytes:
    """Plot the cost of weighting whole sequences, by length."""
    summary = found.summary
    figure, ax = _figure((5.2, 3.2))
    predicted = [(2 ** (i / 4), predicted_chi2(summary["k3"], 2 ** (i / 4))) for i in range(61)]
    _line(ax, [(t, c) for t, c in predicted if 0 < c < 1e6], color=_OTHERS, label="exp(2 K3 T) - 1")
    measured = [(summary["mean_length"], summary["chi2_sequence"] or None)]
    _line(ax, measured, "o", color=_CHOSEN, label="measured")
    ax.set(xscale="log", xlabel="tokens in a sequence", ylabel="chi2 of its weight")
    if ax.get_legend_handles_labels()[0]:
        ax.set_yscale("log")
        ax.axhline(1, color=_INK, linewidth=0.6, linestyle=":")
        _legend(ax)
    return _bytes(figure, format)


def cosines(found: Calibration, format: str = "png") -> bytes:
    """Plot each candidate's expected cosine with its interval; the band is exact rollouts against exact ones."""
    figure, ax, shown = _rows(found)
    for y, a in enumerate(shown):
        if a.alignment is not None:
            _interval(ax, y, a.alignment.cosine, a.alignment.interval, _colour(a, found), most=1.0)
    if found.null is not None:
        ax.axvspan(*found.null.interval, color="#888888", alpha=0.25, label="exact rollouts themselves", linewidth=0)
        _legend(ax, above=True)
    ax.set_xlabel("expected cosine with the exact gradient")
    return _bytes(figure, format)


def directions(found: Calibration, format: str = "png") -> bytes:
    """Plot each candidate's direction bias with its interval."""
    figure, ax, shown = _rows(found)
    for y, a in enumerate(shown):
        if a.alignment is None or a.alignment.direction_interval is None:
            ax.text(0, y, " lost in the noise", va="center", alpha=0.6, fontsize=8)
        else:
            _interval(ax, y, a.alignment.direction or 0.0, a.alignment.direction_interval, _colour(a, found))
    ax.set_xlabel("direction bias, in lengths of the gradient")
    return _bytes(figure, format)


def kept(found: Calibration, format: str = "png") -> bytes:
    """The share of sequences that each candidate keeps, and its effective sample size."""
    figure, ax, shown = _rows(found)
    for y, a in enumerate(shown):
        ax.barh(y, 1 - a.metrics["rejected_sequences"], color=_colour(a, found), alpha=0.35, height=0.7)
        ax.barh(y, a.metrics["ess_sequence"], color=_colour(a, found), height=0.3)
    ax.set(xlim=(0, 1.02), xlabel="share of n: kept (wide), effective (narrow)")
    return _bytes(figure, format)


def thresholds(found: Calibration, format: str = "png") -> bytes:
    """Plot the expected cosine by threshold, a line per family: the chosen one's and those with the best cosines."""
    figure, ax = _figure((5.2, 4.0))
    chosen = {name.partition("@")[0] for name in (found.verdict.recommended or "", *found.verdict.any_of)}
    every = sorted(_families(found).items(), key=lambda item: -max(c for _, c in item[1]))
    families = sorted(every, key=lambda item: item[0] not in chosen)[:_FAMILIES]
    for family, members in families:
        _line(ax, members, "o-", label=family, markersize=3)
    ax.set(xscale="log", xlabel="threshold", ylabel="expected cosine")
    if families:
        _legend(ax, above=True, ncols=2, fontsize=8)
    return _bytes(figure, format)


def curves(rows: list[dict[str, float]]) -> bytes:
    """The metrics of a training run's steps."""
    figure, axes = _figure((12, 6), 2, 3)
    for ax, names in zip(axes.flat, BY_STEP, strict=True):
        for name in names:
            _line(ax, [(row["step"], row.get(name)) for row in rows], ".-", label=name.replace("_", " "))
        ax.set_xlabel("step")
        ax.legend(frameon=False)
    return _bytes(figure, "png")


def ranked(found: Calibration) -> list[Assessment]:
    """The assessments, best first: by expected cosine, those without one last, by intervention."""
    return sorted(
        found.assessments,
        key=lambda a: (a.alignment is None, -(a.alignment.cosine if a.alignment else -a.intervention), a.name),
    )


def shown_candidates(found: Calibration) -> list[Assessment]:
    """The best candidates, with the recommended one and "none" always among them; best first."""
    order = ranked(found)
    always = {found.verdict.recommended, *found.verdict.any_of, "none"}
    forced = [a for a in order if a.name in always]
    rest = [a for a in order if a.name not in always][: max(0, _SHOWN - len(forced))]
    return [a for a in order if a in forced or a in rest]


def _families(found: Calibration) -> dict[str, list[tuple[float, float]]]:
    """Family -> its (threshold, expected cosine)."""
    families: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for a in found.assessments:
        family, _, threshold = a.name.partition("@")
        with contextlib.suppress(ValueError):  # no number
            if a.alignment is not None and float(threshold) > 0:
                families[family].append((float(threshold), a.alignment.cosine))
    return families


def _colour(a: Assessment, found: Calibration) -> str:
    return _CHOSEN if a.name in (found.verdict.recommended, *found.verdict.any_of) else _OTHERS


def _rows(found: Calibration) -> tuple[Any, Any, list[Assessment]]:
    """A figure with a row for each of the candidates to show, the best at the top; and these."""
    shown = shown_candidates(found)
    figure, ax = _figure((5.2, 1.2 + 0.27 * len(shown)))
    labels = [f"{a.name} (not estimable)" if a.unestimable else a.name for a in shown]
    ax.set_yticks(range(len(shown)), labels)
    for label, a in zip(ax.get_yticklabels(), shown, strict=True):
        if a.name == found.verdict.recommended:
            label.set(fontweight="bold", color=_CHOSEN)
    ax.set_ylim(len(shown) - 0.4, -0.6)
    ax.grid(axis="x", alpha=0.25)
    return figure, ax, shown


def _interval(ax: Any, y: float, value: float, ends: tuple[float, float], colour: str, most: float = 1e9) -> None:
    value, low, high = (min(v, most) for v in (value, *ends))
    ax.plot([low, high], [y, y], color=colour, linewidth=2, solid_capstyle="round")
    ax.plot([value], [y], "o", color=colour)


def _legend(ax: Any, above: bool = False, **how: Any) -> None:
    place = {"loc": "lower left", "bbox_to_anchor": (0, 1)} if above else {}
    ax.legend(frameon=False, labelcolor=_INK, **place, **how)


def _line(ax: Any, points: Iterable[tuple[float, float | None]], style: str = "-", **how: Any) -> None:
    """Plot the points that are known, if any are."""
    known = [(x, y) for x, y in points if y is not None]
    if known:
        ax.plot(*zip(*known, strict=True), style, **how)


def _figure(size: tuple[float, float], rows: int = 1, columns: int = 1) -> tuple[Any, Any]:
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("plots need matplotlib: pip install 'samebits[report]'") from error
    ink = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color", "axes.titlecolor")
    style: Any = dict.fromkeys(ink, _INK) | {"font.size": 9.5, "axes.spines.top": False, "axes.spines.right": False}
    with matplotlib.rc_context(style):
        figure = Figure(figsize=size, layout="constrained")
        return figure, figure.subplots(rows, columns)


def _bytes(figure: Any, format: str) -> bytes:
    """The file. SVG has its text as text, in the colour of the page around it, and is the same bytes every time."""
    import matplotlib

    buffer = io.BytesIO()
    if format == "png":
        figure.savefig(buffer, format="png", dpi=130)
        return buffer.getvalue()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "samebits"}):
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    return buffer.getvalue().replace(_INK.encode(), b"currentColor")
