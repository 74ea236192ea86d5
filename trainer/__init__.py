"""The trainer's side: the same model under FSDP2, and the log-probs of its tokens."""

from ..model import exact_model
from .fsdp import shard
from .logprobs import token_logprobs

__all__ = ["exact_model", "shard", "token_logprobs"]
