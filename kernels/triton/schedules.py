"""The tile for a product of each size: data per GPU type, found by `benchmarks/tune_linear.py`."""

from __future__ import annotations

import json
import pathlib
from dataclasses import asdict, dataclass
from functools import cache

import torch

TABLES = pathlib.Path(__file__).with_name("schedules.json")


@dataclass(frozen=True)
class Tile:
    """A tile of block_m x block_n outputs per program.

    split: the chunks of K by programs of their own; tma: by persistent programs fed by the copy engine (compute
    capability 9.0 and later), which don't split; library: by cuBLAS, blocks of rows for which it has proven itself;
    deep: in steps of twice as much of K, where it divides into such.
    """

    block_m: int
    block_n: int
    stages: int
    warps: int
    split: bool
    tma: bool = False
    library: bool = False
    deep: bool = False


@cache
def tables() -> dict:
    """Return GPU name -> storage dtype -> rows of (up to M rows, up to N features, tile); the first fit counts.

    Each GPU's "capability" is its compute capability, as in "9.0".
    """
    return json.loads(TABLES.read_text())


def add_table(gpu: str, capability: str, dtype: str, rows: list[tuple[int, int, Tile]]) -> None:
    """Keep a tuned table in the file."""
    found = tables()
    found.setdefault(gpu, {})["capability"] = capability
    found[gpu][dtype] = [[m, n, asdict(tile)] for m, n, tile in rows]
    TABLES.write_text(json.dumps(found, indent=1) + "\n")


def tuned_rows(gpu: str, capability: str, dtype: str) -> list[tuple[int, int, Tile]]:
    """Return the rows tuned on such a GPU, else on one of its compute capability, else the default's."""
    found = tables()
    alike = [table for table in found.values() if table.get("capability") == capability]
    rows = next(t[dtype] for t in (found.get(gpu, {}), *alike, found["default"]) if dtype in t)
    return [(m, n, Tile(**tile)) for m, n, tile in rows]


@cache
def _table(device: torch.device, dtype: torch.dtype) -> list[tuple[int, int, Tile]]:
    name = "float32" if dtype == torch.float32 else "16-bit"
    if device.type != "cuda":
        return tuned_rows("default", "none", name)
    gpu = torch.cuda.get_device_properties(device)
    return tuned_rows(gpu.name, f"{gpu.major}.{gpu.minor}", name)


def linear_tile(device: torch.device, dtype: torch.dtype, rows: int, features: int) -> Tile:
    """Return the tile for `rows` rows and `features` output features; the table's last for what is larger than all."""
    table = _table(device, dtype)
    return next((tile for m, n, tile in table if rows <= m and features <= n), table[-1][2])
