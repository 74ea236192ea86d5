"""The findings of `samebits diagnose` and `samebits calibrate` as a list of parts: the same facts on a console, in
markdown, as JSON, and (`page.py`) as HTML with figures."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import orjson
from rich.console import Console
from rich.markdown import Markdown

from ..correction.calibration import Assessment
from ..integrations.corrections import in_words
from . import plots
from .calibration import Calibrated
from .mismatch import Report
from .page import Part, Plot, Text, page

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
    "perplexity_above": "perplexity, {above}", "perplexity_below": "perplexity, {below}",
    "perplexity_ratio": "mean perplexity ratio", "argmax_flips": "argmax flips",
}  # fmt: skip
_BIN_COLUMNS = ("bin", "tokens", "mean_abs", "max_abs", "k1", "k3", "exact")


def diagnosis(found: Report, decode: Decode | None = None, null: Report | None = None) -> list[Part]:
    """Make the report of a diagnosis. decode: token ids -> text. null: of exact rollouts, shown beside."""
    columns = {"": found} if null is None else {"engine": found, "exact engine": null}
    summaries = [r.summary for r in columns.values()]
    known = [key for key in _HEADLINES if any(s[key] is not None for s in summaries)]
    above, below = found.summary["ratio"].split("/")
    titles = {key: title.format(above=above, below=below) for key, title in _HEADLINES.items()}
    rows = [[titles[key], *(number(s[key]) for s in summaries)] for key in known]
    for q in found.summary["quantiles"]:
        rows.append([f"|d| at quantile {q}", *(number(s["quantiles"][q]) for s in summaries)])
    if found.trainer_gap is not None:
        rows.append(["max |exact score - trainer's own|", *(number(r.trainer_gap) for r in columns.values())])
    parts: list[Part] = [_mismatch_verdict(found)]
    parts += [Text("Warning", _list(found.warnings))] if found.warnings else []
    parts.append(Text("Mismatch", _table((f"d = log-prob of {above} - of {below}", *columns), rows)))
    parts.append(Plot("How large are the differences?", "sizes", partial(plots.sizes, found)))
    parts.append(Plot("Which tokens differ?", "by_probability", partial(plots.by_probability, found)))
    parts.append(Plot("Could whole sequences be weighted?", "feasibility", partial(plots.feasibility, found)))
    if found.replay is not None:
        parts += _routing(found.replay)
    for key, name in (("by_probability", "token probability"), ("by_position", "position"), ("by_length", "length")):
        bins = [[number(row[c]) for c in _BIN_COLUMNS] for row in found.summary[key]]
        parts.append(Text(f"By {name}", _table(_BIN_COLUMNS, bins), detail=key != "by_probability"))
    worst: dict[tuple[int, ...], dict[str, Any]] = {}
    for w in found.worst:
        worst.setdefault((*w["context"], w["token_id"]), w)  # samples of one prompt share its start
    keys = ("abs", f"{below}_logprob", f"{above}_logprob", "position")
    rows = [[*(number(w[key]) for key in keys), _in_context(w, decode)] for w in worst.values()]
    header = ("|d|", below, above, "position", "token, in context")
    return [*parts, Text("Largest differences", _table(header, rows), detail=True)]


def _routing(s: dict[str, Any]) -> list[Part]:
    """Return the part on a mixture's experts and their share of the mismatch."""
    text = (
        f"The engine's experts differ from the model's in {s['sets_differ']:.2%} of all (token, layer) places, in some "
        f"layer of {s['tokens_differ']:.2%} of the tokens. Replaying the engine's (R3) would leave:"
    )
    rows = [[_HEADLINES[key], number(s["own"][key]), number(s["replayed"][key])] for key in s["own"]]
    table = _table(("d = log-prob of old - of rollout", "the model's own experts", "the engine's, replayed"), rows)
    columns = ("layer", "sets_differ", "overlap")
    layers = [[number(row[c]) for c in columns] for row in s["by_layer"]]
    return [Text("Experts", f"{text}\n\n{table}"), Text("Experts by layer", _table(columns, layers), detail=True)]


def _mismatch_verdict(found: Report) -> Text:
    """The answer in a sentence: is there a mismatch, and would whole sequences' weights work?"""
    s = found.summary
    what = "mismatch" if s["ratio"] == "old/rollout" else "difference"
    if s["max_abs"] == 0:
        return Text(f"No {what}", f"All {s['tokens']:,} tokens have the same log-probs on both sides.", verdict=True)
    ess = s["ess_sequence"]
    text = (
        f"Log-probs differ by {s['mean_abs']:.3g} nats on average and by {s['max_abs']:.3g} at most, over "
        f"{s['tokens']:,} tokens of {s['sequences']:,} sequences. Weighted by their ratios, sequences would count as "
        f"{ess:.0%} of their number. Whether that matters for training, and what to set, `samebits calibrate` says."
    )
    return Text(f"There is a {what}: K3 = {s['k3']:.3g} nats per token", text, verdict=True)


def _in_context(w: dict[str, Any], decode: Decode | None) -> str:
    if decode is None or w["token_id"] < 0:
        return f"... {' '.join(map(str, w['context'][-4:]))} [{w['token_id']}]"
    text = f"{decode(w['context'])!r} -> {decode([w['token_id']])!r}"
    return re.sub(r"([\\`*_<\[\]&])", r"\\\1", text)  # it may look like markdown


_COLUMNS: dict[str, Callable[[Assessment], Any]] = {
    "candidate": lambda a: a.name,
    "expected cosine": lambda a: _interval(a.alignment.cosine, a.alignment.interval) if a.alignment else _lacking(a),
    "direction bias": lambda a: a.alignment and _bias(a.alignment.direction, a.alignment.direction_interval),
    "sequences kept": lambda a: f"{1 - a.metrics['rejected_sequences']:.1%}",
    "intervention": lambda a: f"{a.intervention:.1%}",
    "ESS / n": lambda a: a.metrics["ess_sequence"],
    "scale": lambda a: a.alignment and a.alignment.scale,
    "noise / signal": lambda a: a.alignment and a.alignment.noise,
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
_BRIEF = 5  # columns of the first table


def calibration(found: Calibrated, snippets: dict[str, str]) -> list[Part]:
    """Make the report of a calibration. snippets: framework -> configuration text."""
    result = found.result
    names = list(_COLUMNS)
    brief = [a.name for a in plots.shown_candidates(result)]
    parts: list[Part] = [Text(result.verdict.headline, _verdict(found), verdict=True)]
    parts += [Text("Warning", _list(found.warnings))] if found.warnings else []
    parts += [Text(f"What to set in {framework}", f"```\n{text}\n```") for framework, text in snippets.items()]
    if any(a.alignment for a in result.assessments):
        parts.append(Plot("How close is each to the exact gradient?", "cosines", partial(plots.cosines, result)))
        parts.append(Plot("Which turn its direction?", "directions", partial(plots.directions, result)))
    parts.append(Plot("What does each throw away?", "kept", partial(plots.kept, result)))
    if any(a.alignment for a in result.assessments):
        parts.append(Plot("How much does the threshold matter?", "thresholds", partial(plots.thresholds, result)))
    parts.append(Text("Candidates", _candidates(found, names[:_BRIEF], brief)))
    every = [a.name for a in result.assessments]
    parts.append(Text("All candidates", _candidates(found, names[:_BRIEF], every), detail=True))
    parts.append(Text("All candidates, in detail", _candidates(found, [names[0], *names[_BRIEF:]], every), detail=True))
    star = f"C* = sqrt(2 (1 + chi2)) = {result.optimal_truncation:.3g}"
    facts = [f"{name.replace('_', ' ')}: {number(value)}" for name, value in found.provenance.items()]
    facts.append(f"chi2 of a sequence's weight: {number(result.chi2_sequence)}; {star}")
    return [*parts, Text("What this was made from", _list(facts))]


def calibration_numbers(found: Calibrated, snippets: dict[str, str]) -> dict[str, Any]:
    """Return all facts of a calibration as plain data: the report's, and every candidate's exact settings."""
    numbers = asdict(found.result)
    for row in numbers["assessments"]:
        row["correction"] = asdict(found.candidates[row["name"]])
    numbers["verdict"] = {"headline": found.result.verdict.headline, **numbers["verdict"]}
    return numbers | {"provenance": found.provenance, "warnings": found.warnings, "configurations": snippets}


def _verdict(found: Calibrated) -> str:
    """Return the lines to read first: what to do, how sure that is, what would make it surer."""
    result = found.result
    verdict = result.verdict
    reason = verdict.reason[:1].upper() + verdict.reason[1:]
    lines = [f"{reason}."]
    if verdict.any_of:
        lines.append(f"Any of these will do, the data can't tell which: {', '.join(verdict.any_of)}.")
    for name in verdict.any_of or [a.name for a in result.assessments if a.name == verdict.recommended]:
        lines.append(f"{name} {in_words(found.candidates[name])}.")
    chosen = next((a for a in result.assessments if a.name == verdict.recommended), None)
    if chosen is not None and chosen.alignment is not None:
        low, high = (min(1.0, v) for v in chosen.alignment.interval)
        lines.append(f"How sure: the cosine lies between {low:.3f} and {high:.3f} (95 % interval).")
    if result.null is not None:
        most = _interval(result.null.cosine, result.null.interval)
        lines.append(f"The most that a correction can reach, as exact rollouts themselves do: {most}.")
    if verdict.needed_sequences and verdict.recommended:  # else the reason says it
        lines.append(
            f"Surer: about {verdict.needed_sequences:,} sequences of each kind, better more prompts than more samples."
        )
    lost = [a.name for a in result.assessments if a.unestimable]
    if lost:
        lines.append(f"Without a figure, as no interval would hold: {', '.join(lost)}.")
    return _list(lines)


def _candidates(found: Calibrated, names: list[str], shown: list[str]) -> str:
    rows = [[number(_COLUMNS[name](a)) for name in names] for a in plots.ranked(found.result) if a.name in shown]
    return _table(names, rows, found.result.verdict.recommended)


def _interval(value: float, interval: tuple[float, float]) -> str:
    cosines = [min(1.0, max(-1.0, v)) for v in (value, *interval)]  # the estimates may lie outside
    return "{:.3f} [{:.3f}, {:.3f}]".format(*cosines)


def _bias(value: float | None, interval: tuple[float, float] | None) -> str:
    if value is None or interval is None:
        return "-"
    low, high = interval
    return f"< {high:.3f}" if low == 0 else f"{value:.3f} [{low:.3f}, {high:.3f}]"


def _lacking(a: Assessment) -> str:
    return f"not estimable: {a.unestimable}" if a.unestimable else "-"


# --- how it is shown -------------------------------------------------------------------------------------------------


def _list(lines: list[str]) -> str:
    return "\n".join(f"- {line}" for line in lines)


def _table(header: Sequence[str], rows: list[list[str]], chosen: str | None = None) -> str:
    """A table. chosen: first cell of a row to mark."""
    marked = [[f"**{row[0]}**", *row[1:]] if row[0] == chosen else row for row in rows]
    return "\n".join(map(_row, [header, ["---"] * len(header), *marked]))


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def markdown(parts: list[Part]) -> str:
    """The report as one text, with pictures beside it."""
    bodies = [part.text if isinstance(part, Text) else f"![{part.title}]({part.name}.png)" for part in parts]
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
        print(strict_json(numbers))


def strict_json(numbers: dict[str, Any]) -> str:
    """JSON as RFC 8259 has it: null where a number is infinite or none."""
    return orjson.dumps(numbers, option=orjson.OPT_SERIALIZE_NUMPY).decode()


def check_target(target: Path | None) -> None:
    """ValueError if a page couldn't be written: before all the work."""
    if target is not None and not target.absolute().parent.is_dir():
        raise ValueError(f"{target}: no such folder; make it first")
