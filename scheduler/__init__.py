"""Which tokens each step computes, and where their KV lives. Pure Python: no torch."""

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
