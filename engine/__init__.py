"""The rollout engine."""

from .config import EngineConfig
from .llm import LLM
from .outputs import Completion, EngineStats, RequestOutput, VersionSpan
from .sampling_params import RequestOutputKind, SamplingParams
from .weights import WeightUpdate, WeightUpdateError

__all__ = [
    "LLM",
    "Completion",
    "EngineConfig",
    "EngineStats",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "VersionSpan",
    "WeightUpdate",
    "WeightUpdateError",
]
