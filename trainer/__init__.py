"""The trainer's side: the same model under FSDP2, and the log-probs of its tokens."""

from ..model import exact_model
from .fsdp import shard
from .logprobs import token_logprobs
from .rescore import rescore

__all__ = ["exact_model", "rescore", "shard", "token_logprobs"]
