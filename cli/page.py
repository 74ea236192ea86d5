"""A report as a self-contained HTML page: light and dark, wide and narrow, on screen and on paper."""

from __future__ import annotations

import html
import re
from collections.abc import Callable
from dataclasses import dataclass

from markdown_it import MarkdownIt

GLOSSARY = {  # a table's header or a term -> what it is, in a sentence
    "expected cosine": (
        "How well the update of one training batch agrees with the exact gradient: 1 is perfect. The batch's noise and "
        "bias of the correction both count. In brackets, the 95 % interval."
    ),
    "direction bias": (
        "How far the mean update points away from the exact gradient, relative to its length. No learning rate and no "
        "batch size mends it. In brackets, the 95 % interval."
    ),
    "sequences kept": "The share of sequences that the correction lets into the update.",
    "ESS / n": "Effective sample size: as how many equally weighted sequences the weighted ones count, as a share.",
    "intervention": "How much the correction changes the update's coefficients, relative to leaving them alone.",
    "scale": "How long the mean update is, relative to the exact gradient. A learning rate undoes it.",
    "noise / signal": "The random part of one batch's update, relative to its mean.",
    "coefficient error": "How far the mean coefficients are from those of exact rollouts, by token probability.",
    "exact sequences kept": "The share of exact sequences that pass: below 1, staleness is taken for mismatch.",
    "|A| rejected": "The share of the advantages' total size that is dropped.",
    "kept in the worst prompt": "The smallest share of a prompt's samples that passes.",
    "prompts without A > 0": "The share of prompts that lose all samples with a positive advantage.",
    "C(r), A > 0": "The mean of -(r - 1) A, a token's zero-centred share in the loss, where A > 0. 0 without mismatch.",
    "C(r), A < 0": "The mean of -(r - 1) A, a token's zero-centred share in the loss, where A < 0. Without mismatch 0.",
    "mean_abs": "The mean of |d|, in nats.",
    "max_abs": "The largest |d|, in nats.",
    "k1": "The mean of -d: an estimate of the KL divergence of engine and trainer, in nats per token.",
    "k3": "The mean of exp(d) - 1 - d: an estimate of the KL divergence that is never negative, in nats per token.",
    "exact": "The share of tokens whose log-probs are equal, bit for bit.",
}


@dataclass(frozen=True)
class Text:
    """A title and markdown. detail: a console leaves it out, and a page folds it. verdict: it is what the reader came
    for.
    """

    title: str
    text: str
    detail: bool = False
    verdict: bool = False


@dataclass(frozen=True)
class Plot:
    """A figure that answers the question in its title. draw: a format, "svg" or "png", -> the file; not called for a
    console.
    """

    title: str
    name: str
    draw: Callable[[str], bytes]


Part = Text | Plot

_STYLE = """
:root { color-scheme: light dark; --ink: #1c2024; --soft: #5b646d; --paper: #fff; --line: #d9dee3; --box: #eef6f1;
  --accent: #1a7f4b; --code: #f4f5f7 }
@media (prefers-color-scheme: dark) { :root { --ink: #e4e7ea; --soft: #a3adb6; --paper: #15181b; --line: #363c42;
  --box: #16271e; --accent: #5fc793; --code: #1f2428 } }
* { box-sizing: border-box }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 0 auto; padding: 1.5rem 1rem 4rem;
  color: var(--ink); background: var(--paper) }
h1 { font-size: 1.3rem; color: var(--soft); font-weight: 600; overflow-wrap: anywhere }
h2 { font-size: 1.15rem; margin: 2.2rem 0 .6rem }
.verdict { border-left: 5px solid var(--accent); background: var(--box); padding: .8rem 1.2rem; border-radius: 4px }
.verdict h2 { font-size: 1.6rem; margin: .2rem 0 .5rem; color: var(--accent) }
figure { margin: 0 } figure svg { width: 100%; max-width: 40rem; height: auto; color: var(--ink); display: block }
.table { overflow-x: auto } table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .86rem }
td, th { padding: .25rem .6rem; text-align: right; border-bottom: 1px solid var(--line); vertical-align: top }
td:first-child, th:first-child { text-align: left; overflow-wrap: break-word; padding-left: 0 }
tr:has(strong) { background: var(--box) }
abbr { text-decoration: underline dotted var(--soft); cursor: help }
pre { background: var(--code); padding: .7rem; overflow-x: auto; font-size: .84rem; border-radius: 4px;
  white-space: pre-wrap; overflow-wrap: anywhere }
summary { cursor: pointer; font-weight: 600; margin-top: 1.4rem } dt { font-weight: 600; margin-top: .5rem }
dd { margin-left: 1rem } li { overflow-wrap: anywhere }
@media (max-width: 30rem) { body { padding: 1rem .8rem } td, th { padding: .25rem .2rem; font-size: .69rem }
  th { font-size: .6rem } .verdict, ul { padding-left: 1rem } .verdict ul { padding-left: .8rem } }
@page wide { size: landscape }
@media print { :root { color-scheme: light; --ink: #000; --soft: #444; --paper: #fff; --line: #bbb; --box: #f3f3f3;
  --accent: #064; --code: #f5f5f5 } h2, summary { break-after: avoid } section:has(figure), tr, .verdict {
  break-inside: avoid } body { max-width: none } figure svg { max-width: 30rem }
  .table { overflow: visible } details:has(table) { page: wide }
  details::details-content { content-visibility: visible; display: block } details td, details th { font-size: .6rem;
  padding: .15rem .25rem } details td:first-child, details th:first-child { min-width: 7rem } }
"""


def page(title: str, parts: list[Part]) -> str:
    """A self-contained HTML page."""
    name = html.escape(title)
    body = "\n".join(map(_section, parts))
    terms = "".join(f"<dt>{html.escape(k)}</dt><dd>{html.escape(v)}</dd>" for k, v in GLOSSARY.items() if k in body)
    glossary = f"<details><summary>Glossary</summary><dl>{terms}</dl></details>" if terms else ""
    meta = '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
    head = f'<!doctype html><html lang="en"><head>{meta}<title>{name}</title><style>{_STYLE}</style></head>'
    return f"{head}<body><h1>{name}</h1>\n{body}\n{glossary}</body></html>"


def _section(part: Part) -> str:
    title = html.escape(part.title)
    if isinstance(part, Plot):
        return f"<section><h2>{title}</h2><figure role=img aria-label='{title}'>{_inline(part)}</figure></section>"
    body = MarkdownIt("commonmark", {"html": False}).enable("table").render(part.text).replace("@", "<wbr>@")
    body = re.sub(r"<th>(.*?)</th>", _explained, body)
    body = body.replace("<table>", '<div class="table"><table>').replace("</table>", "</table></div>")
    if part.verdict:
        return f'<section class="verdict"><h2>{title}</h2>{body}</section>'
    if part.detail:
        return f"<details><summary>{title}</summary>{body}</details>"
    return f"<section><h2>{title}</h2>{body}</section>"


def _explained(header: re.Match[str]) -> str:
    meaning = GLOSSARY.get(html.unescape(header[1]))
    if meaning is None:
        return header[0]
    return f'<th><abbr tabindex="0" title="{html.escape(meaning)}">{header[1]}</abbr></th>'


def _inline(plot: Plot) -> str:
    """The figure as SVG, without its prologue."""
    svg = plot.draw("svg").decode()
    return svg[svg.index("<svg") :]
