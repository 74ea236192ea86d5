"""The trainer's side: the same model under FSDP2 and the log-probs of its tokens; `trainer.rl` has a loop."""

from ..model import exact_model
from .fsdp import shard
from .logprobs import check_same_bits, selective_log_softmax, token_logprobs
from .rescore import rescore
from .weight_sync import save_weights

__all__ = [
    "check_same_bits",
    "exact_model",
    "rescore",
    "save_weights",
    "selective_log_softmax",
    "shard",
    "token_logprobs",
]
