"""The rollout engine."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

_HOMES = {
    "LLM": "llm",
    "Completion": "outputs",
    "Engine": "engine",
    "EngineConfig": "config",
    "EngineStats": "outputs",
    "RequestOutput": "outputs",
    "RequestOutputKind": "sampling_params",
    "SamplingParams": "sampling_params",
    "VersionSpan": "outputs",
    "WeightUpdate": "weights",
    "WeightUpdateError": "weights",
    "WorkerEngine": "engine",
    "WorkerError": "executor",
}

if TYPE_CHECKING:
    from .config import EngineConfig
    from .engine import Engine, WorkerEngine
    from .executor import WorkerError
    from .llm import LLM
    from .outputs import Completion, EngineStats, RequestOutput, VersionSpan
    from .sampling_params import RequestOutputKind, SamplingParams
    from .weights import WeightUpdate, WeightUpdateError


def __getattr__(name: str):
    """Load a public name on first use, so that settings can be read without torch."""
    if name in _HOMES:
        return getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "LLM",
    "Completion",
    "Engine",
    "EngineConfig",
    "EngineStats",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "VersionSpan",
    "WeightUpdate",
    "WeightUpdateError",
    "WorkerEngine",
    "WorkerError",
]
