"""What `samebits diagnose` and `samebits calibrate` show: rich tables, and a self-contained HTML page with plots."""

from __future__ import annotations

import base64
import html
import io
from typing import Any

from rich.console import Console
from rich.table import Table

from ..correction import Calibration
from ..correction.theory import predicted_chi2

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; color: #222 }
h1 { font-size: 1.5rem } h2 { font-size: 1.15rem; margin-top: 2rem }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .88rem }
td, th { padding: .2rem .7rem; text-align: right; border-bottom: 1px solid #ddd }
td:first-child, th:first-child { text-align: left }
tr.chosen { background: #e8f4e8 } img { max-width: 100% } pre { background: #f5f5f5; padding: .7rem; overflow-x: auto }
.verdict { border-left: 4px solid #3a7; padding: .3rem 1rem; background: #f4faf6 }
"""


def number(value: Any) -> str:
    """Short, and honest about exact zeros."""
    if value is None:
        return "-"
    if isinstance(value, str | int):
        return f"{value:,}" if isinstance(value, int) else value
    if value == 0:
        return "0"
    return f"{value:.4g}" if 1e-3 <= abs(value) < 1e5 else f"{value:.2e}"


# --- diagnose -------------------------------------------------------------------------------------------------------

_HEADLINES = {
    "tokens": "tokens", "sequences": "sequences", "mean_length": "mean length", "mean_abs": "mean |d|",
    "max_abs": "max |d|", "exact": "share of tokens exactly equal", "k1": "K1 = E[-d]", "k2": "K2", "k3": "K3",
    "mean_probability_gap": "mean |difference of probabilities|", "chi2_token": "chi2 of a token",
    "chi2_sequence": "chi2 of a sequence", "chi2_sequence_predicted": "predicted: exp(2 K3 T) - 1",
    "ess_token": "ESS / n, token weights", "ess_sequence": "ESS / n, sequence weights",
    "perplexity_above": "perplexity, trainer", "perplexity_below": "perplexity, engine",
    "perplexity_ratio": "mean perplexity ratio", "argmax_flips": "argmax flips",
}  # fmt: skip
_BIN_COLUMNS = ("bin", "tokens", "mean_abs", "max_abs", "k1", "k3", "exact")


def headline_rows(summary: dict[str, Any]) -> list[tuple[str, str]]:
    rows = [(label, number(summary[key])) for key, label in _HEADLINES.items()]
    return rows + [(f"|d| at quantile {q}", number(v)) for q, v in summary["quantiles"].items()]


def print_diagnosis(console: Console, report, decode) -> None:
    """report: see `mismatch.Report`; decode: token ids -> text, or None."""
    summary = report.summary
    table = Table("d = log-prob of the trainer - of the engine", "")
    for label, value in headline_rows(summary):
        table.add_row(label, value)
    if report.trainer_gap is not None:
        table.add_row("max |exact score - trainer's own|", number(report.trainer_gap))
    console.print(table)
    for key, title in (("by_probability", "token probability"), ("by_position", "position"), ("by_length", "length")):
        bins = Table(*_BIN_COLUMNS, title=f"by {title}")
        for row in summary[key]:
            bins.add_row(*(number(row[c]) for c in _BIN_COLUMNS))
        console.print(bins)
    worst = Table("|d|", "engine", "trainer", "position", "token, in context", title="largest differences")
    for w in report.worst[:10]:
        cells = [number(w["abs"]), number(w["rollout_logprob"]), number(w["trainer_logprob"]), str(w["position"])]
        worst.add_row(*cells, _in_context(w, decode))
    console.print(worst)


def _in_context(w: dict[str, Any], decode) -> str:
    if decode is None or w["token_id"] < 0:
        return f"... {' '.join(map(str, w['context'][-4:]))} [{w['token_id']}]"
    return f"{decode(w['context'])!r} -> {decode([w['token_id']])!r}"


def diagnosis_page(report, title: str, decode) -> str:
    """A self-contained HTML page."""
    summary = report.summary
    parts = [
        f"<h1>{html.escape(title)}</h1>",
        _html_table(("d = log-prob of the trainer - of the engine", ""), headline_rows(summary)),
    ]
    if report.trainer_gap is not None:
        parts.append(
            f"<p>Largest difference of the exact scores from the trainer's own: {number(report.trainer_gap)}.</p>"
        )
    parts += ["<h2>How large, and where</h2>", _image(diagnosis_plot(report))]
    for key, name in (("by_probability", "token probability"), ("by_position", "position"), ("by_length", "length")):
        rows = [[number(row[c]) for c in _BIN_COLUMNS] for row in summary[key]]
        parts += [f"<h2>By {name}</h2>", _html_table(_BIN_COLUMNS, rows)]
    rows = [
        [
            number(w["abs"]),
            number(w["rollout_logprob"]),
            number(w["trainer_logprob"]),
            str(w["position"]),
            _in_context(w, decode),
        ]
        for w in report.worst
    ]
    parts += [
        "<h2>Largest differences</h2>",
        _html_table(("|d|", "engine", "trainer", "position", "token, in context"), rows),
    ]
    return _page(title, parts)


def diagnosis_plot(report) -> bytes:
    """PNG: sizes, by token probability, and what sequence weights would cost."""
    summary = report.summary
    plt = _pyplot()
    figure, axes = plt.subplots(1, 3, figsize=(14, 3.8))
    edges, share = report.survival
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


# --- calibrate ------------------------------------------------------------------------------------------------------

_COLUMNS = {
    "cosine": "expected cosine", "direction": "direction bias", "scale": "scale", "noise": "noise / signal",
    "coefficient_error": "coefficient error", "accepted_sequences": "sequences kept", "accepted_tokens": "tokens kept",
    "accepted_positive": "A > 0 kept", "accepted_negative": "A < 0 kept", "rejected_advantage": "|A| rejected",
    "ess_sequence": "ESS / n", "intervention": "intervention", "contribution_positive": "C(r), A > 0",
    "contribution_negative": "C(r), A < 0",
}  # fmt: skip


def _rows(calibration: Calibration) -> list[tuple[str, list[str]]]:
    ranked = sorted(calibration.assessments, key=lambda a: -(a.cosine if a.cosine is not None else -a.intervention))
    return [(a.name, [_cell(a, key) for key in _COLUMNS]) for a in ranked]


def _cell(assessment, key: str) -> str:
    value = getattr(assessment, key)
    if key == "cosine" and assessment.interval is not None:
        return f"{value:.3f} [{assessment.interval[0]:.3f}, {assessment.interval[1]:.3f}]"
    return "-" if value is None else f"{value:.3f}"


def _verdict(calibration: Calibration) -> list[str]:
    verdict = calibration.verdict
    lines = [f"recommended: {verdict.recommended}" if verdict.recommended else "no recommendation", verdict.reason]
    if verdict.runner_up:
        lines.append(f"runner-up: {verdict.runner_up}")
    star = f"C* = sqrt(2 (1 + chi2)) = {calibration.optimal_truncation:.3g}"
    lines.append(f"chi2 of a sequence: {number(calibration.chi2_sequence)}; {star}")
    for family, (best, low, high) in (calibration.optima or {}).items():
        lines.append(f"{family}: best threshold {best}, 90 % of resamples within [{low}, {high}]")
    return lines


def print_calibration(console: Console, calibration: Calibration) -> None:
    table = Table("candidate", *_COLUMNS.values())
    for name, cells in _rows(calibration):
        table.add_row(name, *cells, style="bold green" if name == calibration.verdict.recommended else None)
    console.print(table)
    for line in _verdict(calibration):
        console.print(line, highlight=False, markup=False)


def calibration_page(calibration: Calibration, title: str, snippets: dict[str, str]) -> str:
    """A self-contained HTML page. snippets: framework -> configuration text."""
    verdict = "<br>".join(map(html.escape, _verdict(calibration)))
    rows = [[name, *cells] for name, cells in _rows(calibration)]
    parts = [
        f"<h1>{html.escape(title)}</h1>", f'<p class="verdict">{verdict}</p>', _image(calibration_plot(calibration)),
        "<h2>Candidates</h2>", _html_table(("candidate", *_COLUMNS.values()), rows, calibration.verdict.recommended),
    ]  # fmt: skip
    for framework, text in snippets.items():
        parts += [f"<h2>{html.escape(framework)}</h2>", f"<pre>{html.escape(text)}</pre>"]
    return _page(title, parts)


def calibration_plot(calibration: Calibration) -> bytes:
    """PNG: alignment with the exact gradient, acceptance by length, bias against sample size."""
    plt = _pyplot()
    figure, axes = plt.subplots(1, 3, figsize=(14, 5), layout="constrained")
    known = [a for a in calibration.assessments if a.cosine is not None]
    ranked = [(a.name, a.cosine, a.interval) for a in known if a.cosine is not None and a.interval is not None]
    for row, (_, cosine, (low, high)) in enumerate(ranked := sorted(ranked, key=lambda r: r[1])[-15:]):
        axes[0].plot([low, high], [row, row], color="tab:blue")
        axes[0].plot(cosine, row, "o", color="tab:blue")
    axes[0].set_yticks(range(len(ranked)), [name for name, *_ in ranked], fontsize=8)
    axes[0].set(xlabel="expected cosine with the exact gradient", title="alignment of one batch's update")
    rejecting = [a for a in calibration.assessments if a.accepted_sequences < 0.95]
    for a in sorted(rejecting, key=lambda a: -a.accepted_sequences)[:8]:
        axes[1].plot([10 * (i + 1) for i in range(len(a.accepted_by_length))], a.accepted_by_length, label=a.name)
    if rejecting:
        axes[1].legend(fontsize=7)
    axes[1].set(
        xlabel="length, percentile", ylabel="share of sequences kept", ylim=(-0.05, 1.05), title="acceptance by length"
    )
    if known:
        axes[2].scatter([a.ess_sequence for a in known], [a.direction for a in known])
        axes[2].set(xlabel="ESS / n", ylabel="direction bias", title="bias against sample size")
    else:
        axes[2].scatter(
            [a.contribution_positive for a in calibration.assessments],
            [a.contribution_negative for a in calibration.assessments],
        )
        axes[2].set(xlabel="mean C(r), A > 0", ylabel="mean C(r), A < 0", title="zero-centred contribution")
    return _png(plt, figure)


def markdown(found, null, calibration: Calibration, snippets: dict[str, str], decode) -> str:
    """A short report; found and null: diagnoses of the engine's and of the exact rollouts. Pictures beside it."""

    def table(header, rows) -> str:
        lines = [header, ["---"] * len(header), *rows]
        return "\n".join("| " + " | ".join(c.replace("|", "\\|") for c in line) + " |" for line in lines)

    labels = headline_rows(null.summary)
    rows = [
        [label, value, zero] for (label, value), (_, zero) in zip(headline_rows(found.summary), labels, strict=True)
    ]
    worst = [
        [number(w["abs"]), number(w["rollout_logprob"]), number(w["trainer_logprob"]), _in_context(w, decode)]
        for w in found.worst
    ]
    parts = [
        "## Diagnosis", table(["d = log-prob of the trainer - of the engine", "engine", "exact engine"], rows),
        "![sizes, token probability, feasibility](diagnosis.png)",
        "### By token probability",
        table(list(_BIN_COLUMNS), [[number(r[c]) for c in _BIN_COLUMNS] for r in found.summary["by_probability"]]),
        "### Largest differences", table(["|d|", "engine", "trainer", "token, in context"], worst[:8]),
        "## Calibration", "\n".join(f"- {line}" for line in _verdict(calibration)),
        "![alignment, acceptance by length, bias](calibration.png)",
        table(["candidate", *_COLUMNS.values()], [[name, *cells] for name, cells in _rows(calibration)]),
    ]  # fmt: skip
    parts += [f"### {name}\n\n```\n{text}\n```" for name, text in snippets.items()]
    return "\n\n".join(parts) + "\n"


# --- pages ----------------------------------------------------------------------------------------------------------


def _pyplot():
    try:
        import matplotlib
    except ImportError as error:
        raise ImportError("the HTML report needs matplotlib: pip install 'samebits[report]'") from error
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt


def _png(plt, figure) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=110, bbox_inches="tight")
    plt.close(figure)
    return buffer.getvalue()


def _image(png: bytes) -> str:
    return f'<img alt="plots" src="data:image/png;base64,{base64.b64encode(png).decode()}">'


def _html_table(header, rows, chosen: str | None = None) -> str:
    head = "".join(f"<th>{html.escape(h)}</th>" for h in header)
    body = "".join(
        f"<tr{' class=chosen' if chosen is not None and row[0] == chosen else ''}>"
        + "".join(f"<td>{html.escape(c)}</td>" for c in row)
        + "</tr>"
        for row in rows
    )
    return f"<table><tr>{head}</tr>{body}</table>"


def _page(title: str, parts: list[str]) -> str:
    head = f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{html.escape(title)}</title>'
    return f"{head}<style>{_STYLE}</style><body>{''.join(parts)}</body></html>"
