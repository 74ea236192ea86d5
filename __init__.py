"""samebits: a small rollout engine whose log-probabilities are, bit for bit, the trainer's."""

from __future__ import annotations

import importlib
import os
import sys
from typing import TYPE_CHECKING

__version__ = "0.1.0"

# OpenMP threads that wait by spinning for long starve each other when another process wants a core: measured on two
# cores beside one busy process, 10 times slower. Too short a wait costs 10 % on a quiet machine, and far more where
# other threads have OpenMP's, too, as gloo's in a trainer: the second setting is how long they spin then. libgomp reads
# both once, when torch loads it.
os.environ.setdefault("GOMP_SPINCOUNT", "10000")
if sys.platform == "linux":  # elsewhere OpenMP is another library, which would spin for ever
    os.environ.setdefault("OMP_WAIT_POLICY", "ACTIVE")

_HOMES = {
    "LLM": "engine",
    "SamplingParams": "engine",
    "RequestOutput": "engine",
    "Completion": "engine",
    "WeightUpdateError": "engine",
    "CheckpointError": "model",
    "UnsupportedModelError": "model",
    "NumericsError": "kernels.contract",
}

if TYPE_CHECKING:
    from .engine import LLM, Completion, RequestOutput, SamplingParams, WeightUpdateError
    from .kernels.contract import NumericsError
    from .model import CheckpointError, UnsupportedModelError


def __getattr__(name: str):
    """Public names load on first use, so that `samebits.scheduler` and the CLI's help need no torch."""
    if name in _HOMES:
        return getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__


__all__ = [
    "LLM",
    "CheckpointError",
    "Completion",
    "NumericsError",
    "RequestOutput",
    "SamplingParams",
    "UnsupportedModelError",
    "WeightUpdateError",
    "__version__",
]
