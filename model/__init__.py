"""HF checkpoints -> the same model on both sides."""

from ..imports import quick_imports

with quick_imports():
    from .checkpoint import CheckpointError, resolve
    from .exact import UnsupportedModelError, exact_model, make_exact

__all__ = ["CheckpointError", "UnsupportedModelError", "exact_model", "make_exact", "resolve"]
