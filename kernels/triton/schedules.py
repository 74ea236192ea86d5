"""Which tile computes a product of which size: data per GPU type, found by `benchmarks/tune_linear.py`."""

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
    capability 9.0 and later), which don't split; library: by cuBLAS, blocks of rows for which it has proven itself.
    """

    block_m: int
    block_n: int
    stages: int
    warps: int
    split: bool
    tma: bool = False
    library: bool = False


@cache
def tables() -> dict:
    """Return GPU name -> storage dtype -> rows of (up to M rows, up to N features, tile); the first fit counts."""
    return json.loads(TABLES.read_text())


def add_table(gpu: str, dtype: str, rows: list[tuple[int, int, Tile]]) -> None:
    """Keep a tuned table in the file."""
    found = tables()
    found.setdefault(gpu, {})[dtype] = [[m, n, asdict(tile)] for m, n, tile in rows]
    TABLES.write_text(json.dumps(found, indent=1) + "\n")


@cache
def _table(device: torch.device, dtype: torch.dtype) -> list[tuple[int, int, Tile]]:
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else "default"
    found = tables().get(gpu, {}) or tables()["default"]
    name = "float32" if dtype == torch.float32 else "16-bit"
    rows = found.get(name) or tables()["default"][name]
    return [(m, n, Tile(**tile)) for m, n, tile in rows]


def linear_tile(device: torch.device, dtype: torch.dtype, rows: int, features: int) -> Tile:
    """Return the tile for `rows` rows and `features` output features; the table's last for what is larger than all."""
    table = _table(device, dtype)
    return next((tile for m, n, tile in table if rows <= m and features <= n), table[-1][2])
