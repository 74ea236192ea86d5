"""What `samebits diagnose` and `samebits calibrate` found, as a list of parts, and the markdown that shows them on a
console, in a file, or as a self-contained HTML page with plots."""

from __future__ import annotations

import base64
import html
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from markdown_it import MarkdownIt
from rich.console import Console
from rich.markdown import Markdown

from ..correction.calibration import Assessment, Calibration
from . import plots
from .mismatch import Report


@dataclass(frozen=True)
class Text:
    """A title and markdown. detail: a console leaves it out."""

    title: str
    text: str
    detail: bool = False


@dataclass(frozen=True)
class Plot:
    """A figure of a report. draw: -> PNG; not called for a console."""

    title: str
    name: str
    draw: Callable[[], bytes]


Part = Text | Plot
Decode = Callable[[list[int]], str]


def number(value: Any) -> str:
    """Four digits of a number: 0 is exactly zero."""
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) else str(value)


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
    """Make the report of a diagnosis. decode: token ids -> text. null: of exact rollouts, shown beside."""
    columns = {"": found} if null is None else {"engine": found, "exact engine": null}
    summaries = [r.summary for r in columns.values()]
    rows = [[label, *(number(s[key]) for s in summaries)] for key, label in _HEADLINES.items()]
    for q in found.summary["quantiles"]:
        rows.append([f"|d| at quantile {q}", *(number(s["quantiles"][q]) for s in summaries)])
    if found.trainer_gap is not None:
        rows.append(["max |exact score - trainer's own|", *(number(r.trainer_gap) for r in columns.values())])
    parts: list[Part] = [Text("Warning", _list(found.warnings))] if found.warnings else []
    parts.append(Text("Mismatch", _table(("d = log-prob of the trainer - of the engine", *columns), rows)))
    parts.append(Plot("How large, and where", "diagnosis", lambda: plots.diagnosis(found)))
    for key, name in (("by_probability", "token probability"), ("by_position", "position"), ("by_length", "length")):
        bins = [[number(row[c]) for c in _BIN_COLUMNS] for row in found.summary[key]]
        parts.append(Text(f"By {name}", _table(_BIN_COLUMNS, bins)))
    worst = [
        [*(number(w[key]) for key in ("abs", "rollout_logprob", "trainer_logprob", "position")), _in_context(w, decode)]
        for w in found.worst
    ]
    header = ("|d|", "engine", "trainer", "position", "token, in context")
    return [*parts, Text("Largest differences", _table(header, worst))]


def _in_context(w: dict[str, Any], decode: Decode | None) -> str:
    if decode is None or w["token_id"] < 0:
        return f"... {' '.join(map(str, w['context'][-4:]))} [{w['token_id']}]"
    text = f"{decode(w['context'])!r} -> {decode([w['token_id']])!r}"
    return re.sub(r"([\\`*_<\[\]&])", r"\\\1", text)  # it may look like markdown


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
_BRIEF = 8  # columns of the first table


def calibration(found: Calibration, snippets: dict[str, str]) -> list[Part]:
    """Make the report of a calibration. snippets: framework -> configuration text."""
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
    names = list(_COLUMNS)
    return [
        Text("Verdict", _list(lines)),
        Plot("Alignment, thresholds and what is dropped", "calibration", lambda: plots.calibration(found)),
        Text("Candidates", _candidates(found, names[:_BRIEF])),
        Text("Candidates, in detail", _candidates(found, [names[0], *names[_BRIEF:]]), detail=True),
        *(Text(framework, f"```\n{text}\n```") for framework, text in snippets.items()),
    ]


def _candidates(found: Calibration, names: list[str]) -> str:
    rows = [[number(_COLUMNS[name](a)) for name in names] for a in plots.ranked(found)]
    return _table(names, rows, found.verdict.recommended)


def _interval(value: float, interval: tuple[float, float]) -> str:
    cosines = [min(1.0, max(-1.0, v)) for v in (value, *interval)]  # the estimates may lie outside
    return "{:.3f} [{:.3f}, {:.3f}]".format(*cosines)


# --- how it is shown -------------------------------------------------------------------------------------------------


def _list(lines: list[str]) -> str:
    return "\n".join(f"- {line}" for line in lines)


def _table(header: Sequence[str], rows: list[list[str]], chosen: str | None = None) -> str:
    """A table. chosen: first cell of a row to mark."""
    marked = [[f"**{row[0]}**", *row[1:]] if row[0] == chosen else row for row in rows]
    return "\n".join(map(_row, [header, ["---"] * len(header), *marked]))


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def markdown(parts: list[Part], picture: Callable[[Plot], str] = lambda plot: f"{plot.name}.png") -> str:
    """The report as one text. picture: a plot -> its address, by default its name's PNG beside the text."""
    bodies = [part.text if isinstance(part, Text) else f"![{part.title}]({picture(part)})" for part in parts]
    return "\n\n".join(f"### {part.title}\n\n{body}" for part, body in zip(parts, bodies, strict=True)) + "\n"


def show(console: Console, parts: list[Part]) -> None:
    """Print a report's parts, without its plots, to a console."""
    shown: list[Part] = [part for part in parts if isinstance(part, Text) and not part.detail]
    console.print(Markdown(markdown(shown)))


def give(console: Console, title: str, parts: list[Part], target: Path | None, numbers: dict | None) -> None:
    """Write the page, if there is a target; print the numbers as JSON, or the report if there are none."""
    if target is not None:
        target.write_text(page(title, parts))
    if numbers is None:
        show(console, parts)
    else:
        print(json.dumps(numbers))


_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 72rem; margin: 2rem auto; padding: 0 1rem; color: #222 }
h1 { font-size: 1.5rem } h3 { font-size: 1.15rem; margin-top: 2rem } img { max-width: 100% }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .88rem }
table, pre { display: block; overflow-x: auto }
td, th { padding: .2rem .7rem; text-align: right; border-bottom: 1px solid #ddd }
td:first-child, th:first-child { text-align: left }
pre { background: #f5f5f5; padding: .7rem }
ul { border-left: 4px solid #3a7; padding: .3rem 2rem; background: #f4faf6 }
"""


def page(title: str, parts: list[Part]) -> str:
    """A self-contained HTML page."""
    name = html.escape(title)
    body = MarkdownIt("commonmark", {"html": False}).enable("table").render(markdown(parts, _embedded))
    head = f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{name}</title><style>{_STYLE}</style>'
    return f"{head}<body><h1>{name}</h1>{body}</body></html>"


def _embedded(plot: Plot) -> str:
    return f"data:image/png;base64,{base64.b64encode(plot.draw()).decode()}"
