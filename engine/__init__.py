"""The rollout engine."""

from .config import EngineConfig
from .llm import LLM, EngineStats
from .outputs import Completion, RequestOutput, VersionSpan
from .sampling_params import SamplingParams
from .weights import WeightUpdateError

__all__ = [
    "LLM",
    "Completion",
    "EngineConfig",
    "EngineStats",
    "RequestOutput",
    "SamplingParams",
    "VersionSpan",
    "WeightUpdateError",
]
