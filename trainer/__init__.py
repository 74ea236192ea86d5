"""The trainer's side: the same model under FSDP2, and the log-probs of its tokens."""

from ..model import exact_model
from .fsdp import shard
from .logprobs import token_logprobs
from .rescore import gradient_sketch, rescore

__all__ = ["exact_model", "gradient_sketch", "rescore", "shard", "token_logprobs"]
