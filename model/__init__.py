"""HF checkpoints -> the same model on both sides."""

from ..garbage import without_collections

with without_collections():  # which take a fifth of a process's start, and find nothing
    from .checkpoint import CheckpointError, resolve
    from .exact import UnsupportedModelError, exact_model, make_exact

__all__ = ["CheckpointError", "UnsupportedModelError", "exact_model", "make_exact", "resolve"]
