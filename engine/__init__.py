"""The rollout engine."""

from ..garbage import without_collections

with without_collections():  # which take a fifth of a process's start, and find nothing
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
