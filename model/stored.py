"""The names that a model's tensors have in checkpoints and in other trainers' updates, where those are not its own.

transformers stacks a layer's experts in one parameter; on a hub each projection of each expert is a tensor.
"""

from __future__ import annotations

import bisect
import re
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion


class Piece(NamedTuple):
    """A stored tensor's place: `rows` rows of a model's tensor from row `start`; its last dimension is a row."""

    tensor: str
    start: int
    rows: int
    shape: tuple[int, ...]

    def of(self, whole: Tensor) -> Tensor:
        """Return this piece of the tensor, a view."""
        flat = whole.flatten(0, -2) if whole.dim() > 1 else whole
        return flat[self.start : self.start + self.rows].view(self.shape)


def stored_state(model: nn.Module) -> dict[str, Tensor]:
    """Return the parameters and buffers that a checkpoint has, tied ones once, under their first names."""
    state = model.state_dict(keep_vars=True)
    firsts = {id(tensor): name for name, tensor in reversed(state.items())}
    return {name: tensor for name, tensor in state.items() if firsts[id(tensor)] == name}


def loaded_dtypes(model: PreTrainedModel) -> dict[str, torch.dtype]:
    """Return the dtypes that `from_pretrained` gives what a checkpoint has, from a model without data in its dtype."""
    kept = "|".join(model._get_dtype_plan(model.dtype)).replace("*", ".*")  # in float32 whatever the model is
    state = stored_state(model).items()
    return {name: torch.float32 if kept and re.search(kept, name) else empty.dtype for name, empty in state}


def stored_pieces(model: PreTrainedModel) -> dict[str, Piece]:
    """Return the places of stored tensors by name, without those that have the name of the model's own tensor.

    transformers' own conversion says them, run on rows that hold their numbers in place of weights. A stored tensor
    that isn't a run of whole rows (a transposed or interleaved one) is left out, so that its name is unknown.
    """
    state = model.state_dict()
    marked, starts = _number_rows(state)
    bare = object.__new__(type(model))  # a copy, of FSDP2's classes, too
    vars(bare).update(vars(model))
    vars(bare).pop("_weight_conversions", None)  # what from_pretrained needed for its files, which may be stacked
    names = list(starts)
    firsts = list(starts.values())
    pieces = {}
    for stored, rows in revert_weight_conversion(bare, marked).items():
        if stored in state:
            continue
        numbers = rows if rows.dim() == 1 else rows[..., 0]
        first = int(numbers.flatten()[0])
        name = names[bisect.bisect_right(firsts, first) - 1]
        width = state[name].shape[-1:] if state[name].dim() > 1 else ()
        run = torch.arange(first, first + numbers.numel(), dtype=numbers.dtype).view(numbers.shape)
        if torch.equal(rows, run[..., None].expand_as(rows) if width else run):
            pieces[stored] = Piece(name, first - starts[name], numbers.numel(), (*numbers.shape, *width))
    return pieces


def by_tensor(pieces: Mapping[str, Piece]) -> dict[str, dict[str, Piece]]:
    """Return the pieces of each tensor that has some, by their names."""
    found: dict[str, dict[str, Piece]] = {}
    for name, piece in pieces.items():
        found.setdefault(piece.tensor, {})[name] = piece
    return found


def _number_rows(state: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, int]]:
    """Return the state's tensors, two wide, with each row's number in it instead of weights; and each one's first."""
    marked: dict[str, Tensor] = {}
    starts: dict[str, int] = {}
    total = 0
    for name, tensor in state.items():
        shape = tensor.shape[:-1] if tensor.dim() > 1 else tensor.shape
        numbers = torch.arange(total, total + shape.numel(), dtype=torch.int32).view(shape)
        marked[name] = numbers[..., None].expand(*shape, 2) if tensor.dim() > 1 else numbers
        starts[name] = total
        total += shape.numel()
    return marked, starts
