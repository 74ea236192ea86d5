"""Many processes: replicas behind one queue, and their pipeline stages, as actors on Ray."""

from __future__ import annotations

import importlib.util
import pathlib

from ..engine.config import EngineConfig
from ..engine.engine import WorkerEngine
from ..engine.weights import WorkerError

__all__ = ["make_engine"]


def make_engine(path: pathlib.Path, config: EngineConfig) -> WorkerEngine:
    """Return the engine that a configuration of several processes asks for. WorkerError where Ray isn't installed."""
    if importlib.util.find_spec("ray") is None:
        raise WorkerError("replicas and backend 'ray' need Ray: pip install 'samebits[ray]'")
    from .replicated_engine import ReplicatedEngine  # whoever needs one process alone needs no Ray

    return ReplicatedEngine(path, config)
