"""The tokens that each step computes, and the blocks of their KV. Without torch."""

from .block_manager import BlockManager
from .drafts import SpeculativeConfig, Speculator
from .scheduler import Batch, Scheduler, SchedulerStats
from .sequence import Sequence, SequenceStatus

__all__ = [
    "Batch",
    "BlockManager",
    "Scheduler",
    "SchedulerStats",
    "Sequence",
    "SequenceStatus",
    "SpeculativeConfig",
    "Speculator",
]
