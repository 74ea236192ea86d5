"""HF checkpoints -> the same model on both sides."""

from .checkpoint import CheckpointError, resolve
from .exact import UnsupportedModelError, exact_model, make_exact

__all__ = ["CheckpointError", "UnsupportedModelError", "exact_model", "make_exact", "resolve"]
