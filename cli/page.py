"""A report as a self-contained HTML page: light and dark, wide and narrow, on screen and on paper."""

from __future__ import annotations

import functools
import html
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from markdown_it import MarkdownIt

_FOLDER = Path(__file__).parent


class Text(NamedTuple):
    """A title and markdown. detail: a console leaves it out, and a page folds it. verdict: it is what the reader came
    for.
    """

    title: str
    text: str
    detail: bool = False
    verdict: bool = False


class Plot(NamedTuple):
    """A figure that answers the question in its title. draw: a format, "svg" or "png", -> the file; not called for a
    console.
    """

    title: str
    name: str
    draw: Callable[[str], bytes]


Part = Text | Plot


@functools.cache
def _glossary() -> dict[str, str]:
    """A table's header or another term -> its meaning, in a sentence."""
    return json.loads((_FOLDER / "glossary.json").read_text())


def page(title: str, parts: list[Part]) -> str:
    """A self-contained HTML page."""
    name = html.escape(title)
    body = "\n".join(map(_section, parts))
    meanings = {html.escape(term): html.escape(meaning) for term, meaning in _glossary().items()}
    terms = "".join(f"<dt>{term}</dt><dd>{meaning}</dd>" for term, meaning in meanings.items() if term in body)
    glossary = f"<details><summary>Glossary</summary><dl>{terms}</dl></details>" if terms else ""
    style = (_FOLDER / "page.css").read_text()
    meta = '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
    head = f'<!doctype html><html lang="en"><head>{meta}<title>{name}</title><style>{style}</style></head>'
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
    meaning = _glossary().get(html.unescape(header[1]))
    if meaning is None:
        return header[0]
    return f'<th><abbr tabindex="0" title="{html.escape(meaning)}">{header[1]}</abbr></th>'


def _inline(plot: Plot) -> str:
    """The figure as SVG, without its prologue."""
    svg = plot.draw("svg").decode()
    return svg[svg.index("<svg") :]
