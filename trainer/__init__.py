"""The trainer's side: the same model under FSDP2, the log-probs of its tokens, and RL on exact rollouts."""

from ..correction import contribution, policy_loss
from ..model import exact_model
from .config import TrainConfig
from .fsdp import shard
from .logprobs import token_logprobs
from .loop import Trainer
from .losses import ALGORITHMS, advantages, reference_kl
from .packing import pack
from .rescore import gradient_sketch, rescore
from .tasks import Problem, Task, make_task
from .weight_sync import save_weights

__all__ = [
    "ALGORITHMS",
    "Problem",
    "Task",
    "TrainConfig",
    "Trainer",
    "advantages",
    "contribution",
    "exact_model",
    "gradient_sketch",
    "make_task",
    "pack",
    "policy_loss",
    "reference_kl",
    "rescore",
    "save_weights",
    "shard",
    "token_logprobs",
]
