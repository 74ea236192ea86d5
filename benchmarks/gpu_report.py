"""The findings of a GPU run as a page of Markdown, and its figures held against the project's bars."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Speed = dict[str, Any]


def _decode(speed: Speed, batches: Callable[[int], bool], key: str) -> float | None:
    """Return the worst of the decode rows at 1k context, of batches that the condition takes."""
    found = [row[key] for row in speed["decode"] if row["context"] <= 1024 and batches(row["batch"])]
    return min(found, default=None)


def _exactness_at(speed: Speed, batches: Callable[[int], bool]) -> float | None:
    """Return the share of a decode step that exactness costs, against cuBLAS and the fastest library's attention.

    The plain step has our attention: what the library's would save in each layer is taken off its time.
    """
    costs = []
    for row in speed["decode"]:
        if not batches(row["batch"]) or row["context"] > 1024:
            continue
        saved = 0.0
        for layer in speed.get("attention layer", []):
            same = (layer["batch"], layer["context"]) == (row["batch"], row["context"])
            if same and layer["us"] and layer["library_us"]:
                saved = max(saved, layer["layers"] * (layer["us"] - layer["library_us"]) / 1e3)
        costs.append(1 - (row["plain_ms"] - saved) / row["exact_ms"])
    return max(costs, default=None)


BARS: list[tuple[str, Callable[[Speed], float | None], str, float]] = [  # what, figure, relation, bound
    ("exactness costs of decode, batch >= 32", lambda s: _exactness_at(s, lambda b: b >= 32), "<=", 0.05),
    ("exactness costs of decode, batch <= 8", lambda s: _exactness_at(s, lambda b: b <= 8), "<=", 0.10),
    ("exactness costs of prefill", lambda s: max(1 - row["of_plain"] for row in s["prefill"]), "<=", 0.10),
    ("decode, batch 32, 1k, of the bandwidth bound", lambda s: _decode(s, lambda b: b == 32, "of_bound"), ">=", 0.60),
    ("decode, batch 256, 1k, of the bandwidth bound", lambda s: _decode(s, lambda b: b == 256, "of_bound"), ">=", 0.70),
    ("prefill, of the measured matrix rate", lambda s: max(row["of_matrix_rate"] for row in s["prefill"]), ">=", 0.60),
    ("trainer's forward + backward, of HF's with SDPA", lambda s: s["training"]["step_over_hf"], "<=", 1.25),
    ("output tok/s, 1.7B shape, batch 512", lambda s: s["large batch"]["output_tok_s"], ">=", 25_000),
    ("output tok/s, of HF's continuous batching", lambda s: s["hf continuous batching"]["over_hf"], ">=", 5.0),
    ("group of 8 on a 4k prompt, of no shared reading", lambda s: s["shared prompt"]["gain"], ">=", 1.5),
    ("experts layer, of grouped_mm", lambda s: min(r["of_grouped_mm"] for r in s["experts layer"]), "", 0),
]  # fmt: skip


def bars(speed: Speed) -> list[dict[str, Any]]:
    """Return each bar with its figure and whether it is met; both are None where the run has not measured it."""
    found = []
    for what, figure, relation, bound in BARS:
        try:
            value = figure(speed)
        except (KeyError, TypeError):  # a part that was skipped or failed
            value = None
        met = None
        if value is not None and relation:
            met = value <= bound if relation == "<=" else value >= bound
        found.append({"bar": what, "bound": f"{relation} {bound:g}" if relation else "", "figure": value, "met": met})
    return found


def markdown(result: dict[str, Any]) -> str:
    """Return the results as a page."""
    versions = result["versions"]
    lines = [f"# {versions.get('gpu', 'no GPU')}", "", ", ".join(f"{k} {v}" for k, v in versions.items()), ""]
    lines += _table(
        [{"bar": b["bar"], "bound": b["bound"], "figure": b["figure"], "met": b["met"]} for b in result["bars"]]
    )
    gates = [(name, gate) for group in ("probes", "bits") for name, gate in result[group].items() if gate]
    counted = [
        {"gate": name, "comparisons": gate.get("compared", gate.get("tokens", gate.get("skipped"))),
         "differ": len(gate.get("differ", []))}
        for name, gate in gates
    ]  # fmt: skip
    lines += ["", "## Bits", "", *_table(counted)]
    for name, part in result["speed"].items():
        rows = part if isinstance(part, list) else [part]
        rows = [{k: v for k, v in row.items() if not isinstance(v, dict | list)} for row in rows if row]
        lines += ["", f"## {name}", "", *_table(rows)]
    failed = [{"part": name, "error": e["kind"], "case": e.get("case", "")} for name, e in result["errors"].items()]
    failed += [{"part": f"{n} (a comparison)", "error": e["kind"], "case": ""} for n, e in result["skipped"].items()]
    if failed:
        lines += ["", "## Failed", "", *_table(failed)]
    return "\n".join(lines) + "\n"


def _table(rows: list[dict[str, Any]]) -> list[str]:
    if not rows:
        return []
    head = ["| " + " | ".join(rows[0]) + " |", "|" + "---|" * len(rows[0])]
    return head + ["| " + " | ".join(_cell(row.get(key)) for key in rows[0]) + " |" for row in rows]


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if not isinstance(value, float):
        return str(value).replace("|", "/").replace("\n", " ")
    return f"{value:.3g}" if abs(value) < 1e4 else f"{value:,.0f}"
