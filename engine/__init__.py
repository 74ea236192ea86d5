"""The rollout engine."""

from ..imports import quick_imports

with quick_imports():
    from .config import EngineConfig
    from .engine import Engine, WorkerEngine
    from .llm import LLM
    from .outputs import Completion, EngineStats, RequestOutput, VersionSpan
    from .sampling_params import RequestOutputKind, SamplingParams
    from .structured_outputs import StructuredOutputsParams
    from .weights import WeightUpdate, WeightUpdateError, WorkerError

__all__ = [
    "LLM",
    "Completion",
    "Engine",
    "EngineConfig",
    "EngineStats",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "StructuredOutputsParams",
    "VersionSpan",
    "WeightUpdate",
    "WeightUpdateError",
    "WorkerEngine",
    "WorkerError",
]
