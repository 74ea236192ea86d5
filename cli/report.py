"""What `samebits diagnose` and `samebits calibrate` found, as a list of parts; shown on a console, as a self-contained
HTML page with plots, or as markdown."""

from __future__ import annotations

import base64
import html
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from ..correction.calibration import Assessment, Calibration
from . import plots
from .mismatch import Report


@dataclass(frozen=True)
class Grid:
    """A table; brief: how many of its columns a console shows, None for all. chosen: first cell of a row to mark."""

    title: str
    header: Sequence[str]
    rows: list[list[str]]
    brief: int | None = None
    chosen: str | None = None


@dataclass(frozen=True)
class Lines:
    """A title and lines of text."""

    title: str
    lines: list[str]


@dataclass(frozen=True)
class Code:
    """A title and a block of code."""

    title: str
    text: str


@dataclass(frozen=True)
class Plot:
    """draw: -> PNG; not called for a console."""

    title: str
    name: str
    draw: Callable[[], bytes]


Part = Grid | Lines | Code | Plot
Decode = Callable[[list[int]], str]


def number(value: Any) -> str:
    """Short, and honest about exact zeros."""
    if value is None:
        return "-"
    if isinstance(value, str | int):
        return f"{value:,}" if isinstance(value, int) else value
    if value == 0:
        return "0"
    return f"{value:.4g}" if 1e-3 <= abs(value) < 1e5 else f"{value:.2e}"


# --- what is shown ---------------------------------------------------------------------------------------------------

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


def diagnosis(found: Report, decode: Decode | None = None, null: Report | None = None) -> list[Part]:
    """decode: token ids -> text. null: of exact rollouts, shown beside."""
    columns = {"": found} if null is None else {"engine": found, "exact engine": null}
    summaries = [r.summary for r in columns.values()]
    rows = [[label, *(number(s[key]) for s in summaries)] for key, label in _HEADLINES.items()]
    for q in found.summary["quantiles"]:
        rows.append([f"|d| at quantile {q}", *(number(s["quantiles"][q]) for s in summaries)])
    if found.trainer_gap is not None:
        rows.append(["max |exact score - trainer's own|", *(number(r.trainer_gap) for r in columns.values())])
    parts: list[Part] = [Lines("Warning", found.warnings)] if found.warnings else []
    parts.append(Grid("Mismatch", ("d = log-prob of the trainer - of the engine", *columns), rows))
    parts.append(Plot("How large, and where", "diagnosis", lambda: plots.diagnosis(found)))
    for key, name in (("by_probability", "token probability"), ("by_position", "position"), ("by_length", "length")):
        bins = [[number(row[c]) for c in _BIN_COLUMNS] for row in found.summary[key]]
        parts.append(Grid(f"By {name}", _BIN_COLUMNS, bins))
    worst = [
        [*(number(w[key]) for key in ("abs", "rollout_logprob", "trainer_logprob", "position")), _in_context(w, decode)]
        for w in found.worst
    ]
    header = ("|d|", "engine", "trainer", "position", "token, in context")
    return [*parts, Grid("Largest differences", header, worst)]


def _in_context(w: dict[str, Any], decode: Decode | None) -> str:
    if decode is None or w["token_id"] < 0:
        return f"... {' '.join(map(str, w['context'][-4:]))} [{w['token_id']}]"
    return f"{decode(w['context'])!r} -> {decode([w['token_id']])!r}"


_COLUMNS: dict[str, Callable[[Assessment], Any]] = {
    "candidate": lambda a: a.name,
    "expected cosine": lambda a: a.alignment and _interval(a.alignment.cosine, a.alignment.interval),
    "direction bias": lambda a: a.alignment and a.alignment.direction,
    "scale": lambda a: a.alignment and a.alignment.scale,
    "noise / signal": lambda a: a.alignment and a.alignment.noise,
    "sequences kept": lambda a: 1 - a.metrics["rejected_sequences"],
    "ESS / n": lambda a: a.metrics["ess_sequence"],
    "intervention": lambda a: a.intervention,
    "coefficient error": lambda a: a.coefficient_error,
    "exact sequences kept": lambda a: a.accepted_exact,
    "tokens kept": lambda a: 1 - a.metrics["rejected_tokens"],
    "A > 0 kept": lambda a: 1 - a.metrics["rejected_positive_tokens"],
    "A < 0 kept": lambda a: 1 - a.metrics["rejected_negative_tokens"],
    "|A| rejected": lambda a: a.metrics["rejected_advantage"],
    "kept in the worst prompt": lambda a: a.accepted_by_group[0],
    "prompts without A > 0": lambda a: a.groups_without_positives,
    "C(r), A > 0": lambda a: a.contribution_means[0],
    "C(r), A < 0": lambda a: a.contribution_means[1],
}
_BRIEF = 8


def calibration(found: Calibration, snippets: dict[str, str]) -> list[Part]:
    """snippets: framework -> configuration text."""
    verdict = found.verdict
    lines = [f"recommended: {verdict.recommended}" if verdict.recommended else "no recommendation", verdict.reason]
    if verdict.runner_up:
        lines.append(f"runner-up: {verdict.runner_up}")
    if found.null is not None:
        halves = _interval(found.null.cosine, found.null.interval)
        lines.append(f"expected cosine of exact rollouts themselves, one half against the other: {halves}")
    star = f"C* = sqrt(2 (1 + chi2)) = {found.optimal_truncation:.3g}"
    lines.append(f"chi2 of a sequence: {number(found.chi2_sequence)}; {star}")
    for family, (best, low, high) in (found.optima or {}).items():
        lines.append(f"{family}: best threshold {best}, 90 % of resamples within [{low}, {high}]")
    rows = [[_cell(column(a)) for column in _COLUMNS.values()] for a in plots.ranked(found)]
    return [
        Lines("Verdict", lines),
        Plot("Alignment, thresholds and what is dropped", "calibration", lambda: plots.calibration(found)),
        Grid("Candidates", tuple(_COLUMNS), rows, _BRIEF, verdict.recommended),
        *(Code(framework, text) for framework, text in snippets.items()),
    ]


def _cell(value: Any) -> str:
    return "-" if value is None else value if isinstance(value, str) else f"{value:.3f}"


def _interval(value: float, interval: tuple[float, float]) -> str:
    value, low, high = (min(1.0, max(-1.0, v)) for v in (value, *interval))  # as cosines; the estimates may lie outside
    return f"{value:.3f} [{low:.3f}, {high:.3f}]"


# --- how it is shown -------------------------------------------------------------------------------------------------


def show(console: Console, parts: list[Part]) -> None:
    """Print a report's parts to a console."""
    for part in parts:
        match part:
            case Grid(title, header, rows, brief, chosen):
                table = Table(*header[:brief], title=title)
                for row in rows:
                    table.add_row(*row[:brief], style="bold green" if row[0] == chosen else None)
                console.print(table)
            case Lines(title, lines):
                console.print(f"\n[bold]{title}[/bold]")
                console.print("\n".join(lines), highlight=False, markup=False)
            case Code(title, text):
                console.print(f"\n[bold]{title}[/bold]")
                console.print(text, highlight=False, markup=False)


_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 72rem; margin: 2rem auto; padding: 0 1rem; color: #222 }
h1 { font-size: 1.5rem } h2 { font-size: 1.15rem; margin-top: 2rem } div { overflow-x: auto }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .88rem }
td, th { padding: .2rem .7rem; text-align: right; border-bottom: 1px solid #ddd }
td:first-child, th:first-child { text-align: left }
tr.chosen { background: #e8f4e8 } img { max-width: 100% } pre { background: #f5f5f5; padding: .7rem; overflow-x: auto }
p { border-left: 4px solid #3a7; padding: .3rem 1rem; background: #f4faf6 }
"""


def page(title: str, parts: list[Part]) -> str:
    """A self-contained HTML page."""
    head = f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{html.escape(title)}</title>'
    body = "".join(f"<h2>{html.escape(part.title)}</h2>{_html(part)}" for part in parts)
    return f"{head}<style>{_STYLE}</style><body><h1>{html.escape(title)}</h1>{body}</body></html>"


def _html(part: Part) -> str:
    def row(cells: Sequence[str], tag: str, kind: str = "") -> str:
        return f"<tr{kind}>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells) + "</tr>"

    match part:
        case Grid(_, header, rows, _, chosen):
            body = "".join(row(cells, "td", " class=chosen" if cells[0] == chosen else "") for cells in rows)
            return f"<div><table>{row(header, 'th')}{body}</table></div>"
        case Lines(_, lines):
            return f"<p>{'<br>'.join(map(html.escape, lines))}</p>"
        case Code(_, text):
            return f"<pre>{html.escape(text)}</pre>"
        case Plot(title, _, draw):
            png = base64.b64encode(draw()).decode()
            return f'<img alt="{html.escape(title)}" src="data:image/png;base64,{png}">'


def markdown(parts: list[Part]) -> str:
    """Pictures are expected beside it, named after their plots."""
    return "\n\n".join(f"### {part.title}\n\n{_markdown(part)}" for part in parts) + "\n"


def _markdown(part: Part) -> str:
    match part:
        case Grid(_, header, rows):
            lines = [header, ["---"] * len(header), *rows]
            return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
        case Lines(_, lines):
            return "\n".join(f"- {line}" for line in lines)
        case Code(_, text):
            return f"```\n{text}\n```"
        case Plot(title, name):
            return f"![{title}]({name}.png)"
