"""Many processes: replicas behind one queue, and their pipeline stages, as actors on Ray."""

from __future__ import annotations

import pathlib

from ..engine.config import EngineConfig
from ..engine.engine import WorkerEngine


def make_engine(path: pathlib.Path, config: EngineConfig) -> WorkerEngine:
    """Return the engine that a configuration of several processes asks for."""
    from .replicated_engine import ReplicatedEngine  # whoever needs one process alone needs no Ray

    return ReplicatedEngine(path, config)
