"""Hooks of `make docs`: brings the laboratory's report, which a benchmark writes, into the site."""

from __future__ import annotations

import pathlib

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

BENCHMARKS = pathlib.Path(__file__).parent.parent / "benchmarks"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the report and its figures to the site's files, and return them."""
    for path in sorted((BENCHMARKS / "results/tim_lab").iterdir()):
        if path.suffix in (".md", ".png"):
            name = path.relative_to(BENCHMARKS).as_posix()
            files.append(File(name, str(BENCHMARKS), config.site_dir, config.use_directory_urls))
    return files


def on_page_markdown(markdown: str, **_: object) -> str:
    """Return a page with its links to the benchmarks' results as the site has them."""
    return markdown.replace("](../benchmarks/results/tim_lab/", "](results/tim_lab/")
