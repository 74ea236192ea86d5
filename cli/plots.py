"""The pictures of a report: PNG, drawn by matplotlib."""

from __future__ import annotations

import io
from collections import defaultdict
from typing import Any

from ..correction.calibration import Assessment, Calibration
from ..correction.calibration.assess import CONTRIBUTION_EDGES
from ..correction.diagnose import predicted_chi2
from .mismatch import Report


def diagnosis(found: Report) -> bytes:
    """Sizes, by token probability, and what sequence weights would cost."""
    summary = found.summary
    plt, figure, axes = _figure(1, 3, (14, 3.8))
    edges, share = found.survival
    points = [(e, s) for e, s in zip(edges, share, strict=True) if s > 0]
    axes[0].set(xscale="log", yscale="log", xlabel="|d|", ylabel="share of tokens above", title="size")
    if points:
        axes[0].plot(*zip(*points, strict=True))
    rows = summary["by_probability"]
    axes[1].bar([r["bin"].split(" to ")[1] for r in rows], [r["mean_abs"] for r in rows])
    axes[1].set(xlabel="token probability, up to", ylabel="mean |d|", title="by token probability")
    axes[1].tick_params(axis="x", rotation=60)
    lengths = [2**i for i in range(4, 15)]
    predicted = [predicted_chi2(summary["k3"], length) for length in lengths]
    shown = [(t, c) for t, c in zip(lengths, predicted, strict=True) if 0 < c < 1e12]
    if shown:
        axes[2].plot(*zip(*shown, strict=True), label="exp(2 K3 T) - 1")
        axes[2].plot(summary["mean_length"], max(summary["chi2_sequence"], 1e-12), "o", label="measured")
        axes[2].set(xscale="log", yscale="log")
        axes[2].legend()
    axes[2].set(xlabel="tokens in a sequence", ylabel="chi2 of a sequence", title="feasibility of sequence weights")
    return _png(plt, figure)


def calibration(found: Calibration) -> bytes:
    """Alignment with the exact gradient; cosine and acceptance by threshold; bias against sample size; what is dropped,
    by length and by prompt; the zero-centred contribution C(r) by the advantage's sign."""
    plt, figure, axes = _figure(2, 4, (21, 9.5))
    _alignment(axes[0][0], found)
    _by_threshold(axes[0][1], axes[0][2], found)
    for family, members in _families(found).items():
        known = [(a.metrics["ess_sequence"], a.alignment.direction) for _, a in members if a.alignment]
        if known:
            axes[0][3].plot(*zip(*known, strict=True), "o", label=family)
    axes[0][3].set(xlabel="ESS / n", ylabel="direction bias", title="bias against sample size")
    rejecting = sorted(found.assessments, key=lambda a: a.metrics["rejected_sequences"])
    for a in [a for a in rejecting if a.metrics["rejected_sequences"] > 0.05][:8]:
        axes[1][0].plot([10 * (i + 1) for i in range(len(a.accepted_by_length))], a.accepted_by_length, label=a.name)
        axes[1][1].plot([10 * i for i in range(11)], a.accepted_by_group, label=a.name)
    for ax, what in ((axes[1][0], "length"), (axes[1][1], "prompt")):
        ax.set(xlabel=f"{what}, percentile", ylabel="share of sequences kept", ylim=(-0.05, 1.05))
        ax.set_title(f"acceptance by {what}")
    _contributions(axes[1][2], found, 0)
    _contributions(axes[1][3], found, 1)
    for ax in axes.flat:
        if ax.get_legend_handles_labels()[0]:
            ax.legend(fontsize=7)
    return _png(plt, figure)


def ranked(found: Calibration) -> list[Assessment]:
    """The assessments, best first: by expected cosine, or by intervention where there is none."""
    return sorted(found.assessments, key=lambda a: -(a.alignment.cosine if a.alignment else -a.intervention))


def _alignment(ax: Any, found: Calibration) -> None:
    rows = [(a.name, a.alignment) for a in ranked(found) if a.alignment is not None][:15][::-1]
    for row, (name, alignment) in enumerate(rows):
        color = "tab:green" if name == found.verdict.recommended else "tab:blue"
        ax.plot(alignment.interval, [row, row], color=color)
        ax.plot(alignment.cosine, row, "o", color=color)
    _null(ax.axvspan, found)
    ax.set_yticks(range(len(rows)), [name for name, _ in rows], fontsize=8)
    ax.set(xlabel="expected cosine with the exact gradient", title="alignment of one batch's update")


def _null(span: Any, found: Calibration) -> None:
    if found.null is not None:
        span(*found.null.interval, color="tab:gray", alpha=0.2, label="exact against exact")


def _families(found: Calibration) -> dict[str, list[tuple[float, Assessment]]]:
    """Family -> its (threshold, assessment), ascending."""
    families: dict[str, list[tuple[float, Assessment]]] = defaultdict(list)
    for a in found.assessments:
        family, _, threshold = a.name.partition("@")
        if threshold:
            families[family].append((float(threshold), a))
    return {family: sorted(members, key=lambda member: member[0]) for family, members in families.items()}


def _by_threshold(cosines: Any, kept: Any, found: Calibration) -> None:
    """The null: exact rollouts against exact ones, and the share of exact sequences that a gate keeps."""
    for i, (family, members) in enumerate(_families(found).items()):
        thresholds, style = [t for t, _ in members], {"color": f"C{i}"}
        known = [(t, a.alignment.cosine) for t, a in members if a.alignment is not None]
        if known:
            cosines.plot(*zip(*known, strict=True), "o-", ms=4, label=family, **style)
        if any(a.metrics["rejected_sequences"] for _, a in members):
            kept.plot(thresholds, [1 - a.metrics["rejected_sequences"] for _, a in members], "-", label=family, **style)
            for end, line in ((0, ":"), (-1, "--")):
                kept.plot(thresholds, [a.accepted_by_length[end] for _, a in members], line, **style)
            exact = [(t, a.accepted_exact) for t, a in members if a.accepted_exact is not None]
            if exact:
                kept.plot(*zip(*exact, strict=True), "x", **style)
    _null(cosines.axhspan, found)
    cosines.set(xscale="log", xlabel="threshold", ylabel="expected cosine", title="cosine by threshold")
    kept.set(xscale="log", xlabel="threshold", ylabel="share of sequences kept", ylim=(-0.05, 1.05))
    kept.set_title("acceptance: all -, shortest :, longest --, exact x")


def _contributions(ax: Any, found: Calibration, side: int) -> None:
    """Before and after the best candidate, and of exact rollouts, whose C is 0 but for staleness."""
    named = {a.name: a.contributions for a in found.assessments}
    best = found.verdict.recommended or ranked(found)[0].name
    shown = {name: named[name] for name in ("none", best) if name in named}
    if found.exact_contributions is not None:
        shown["exact rollouts"] = found.exact_contributions
    for name, sides in shown.items():
        total = max(1, sum(sides[side]))
        ax.step(range(len(sides[side])), [count / total for count in sides[side]], where="mid", label=name)
    middle = len(CONTRIBUTION_EDGES) // 2
    ticks = {middle + sign * (1 + 4 * i): f"{sign * 10.0 ** (i - 4):g}" for sign in (-1, 1) for i in range(1, 5)}
    ticks[middle] = "0"
    ax.set_xticks(list(ticks), list(ticks.values()), fontsize=7, rotation=60)
    ax.set(xlabel="C(r) = -(r - 1) A", ylabel="share of tokens", yscale="log")
    ax.set_title(f"zero-centred contribution, A {'><'[side]} 0")


def _figure(rows: int, columns: int, size: tuple[float, float]) -> tuple[Any, Any, Any]:
    try:
        import matplotlib
    except ImportError as error:
        raise ImportError("the HTML report needs matplotlib: pip install 'samebits[report]'") from error
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt, *plt.subplots(rows, columns, figsize=size, layout="constrained")


def _png(plt: Any, figure: Any) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=100, bbox_inches="tight")
    plt.close(figure)
    return buffer.getvalue()
