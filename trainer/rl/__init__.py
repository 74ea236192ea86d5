"""Reinforcement learning on exact rollouts: the loop, its tasks, losses and checkpoints."""

from .config import TrainConfig
from .loop import Trainer
from .losses import ALGORITHMS, advantages, reference_kl
from .packing import pack
from .tasks import Problem, Task, make_task

__all__ = [
    "ALGORITHMS",
    "Problem",
    "Task",
    "TrainConfig",
    "Trainer",
    "advantages",
    "make_task",
    "pack",
    "reference_kl",
]
