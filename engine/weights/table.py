"""The tensors that a model has, by name, and what is wrong with those that an update brings."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor, nn

from ...kernels import ops
from ...kernels.contract import Contract, NumericsError
from ...model.adapter import adapter_state, is_adapted, is_adapter_tensor
from ...model.casts import is_sharded
from ...model.exact import LMHead, contract_of
from ...model.stored import Piece, by_tensor
from .spec import TensorSpec

WeightSource = nn.Module | Mapping[str, Tensor] | Iterable[tuple[str, Tensor]] | str | os.PathLike


class WeightUpdateError(ValueError):
    """An update was refused; the old weights serve on."""


@dataclass
class WeightTable:
    """The names and shapes of a model's tensors. tied: name -> the first name of the same tensor.

    adapter: what it has beside the base model, as the contract says it. An adapter's tensors have their names in PEFT's
    files. An update brings all of the adapter, all of the base, or both. pieces: what else a checkpoint may call a
    tensor, or its parts (`stored_pieces`); an update brings each tensor under its own name or in all of its pieces.
    ignored: patterns of names in checkpoints that the family passes over, such as layers which predict further tokens.
    """

    shapes: dict[str, tuple[int, ...]]
    tied: dict[str, str]
    adapter: str = "none"
    pieces: dict[str, Piece] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()

    @functools.cached_property
    def pieces_of(self) -> dict[str, dict[str, Piece]]:
        """The pieces of each tensor that has some."""
        return by_tensor(self.pieces)

    @classmethod
    def union(cls, tables: Iterable[WeightTable]) -> WeightTable:
        """Return the table of a model whose parts have these tables."""
        whole = cls({}, {})
        for table in tables:
            whole.shapes |= table.shapes
            whole.tied |= table.tied
            whole.pieces |= table.pieces
            whole.adapter = table.adapter
            whole.ignored = table.ignored
        return whole

    def known(self, entries: Mapping[str, Any]) -> dict[str, Any]:
        """Return the entries of a checkpoint that are the model's."""
        return {name: each for name, each in entries.items() if not any(re.search(p, name) for p in self.ignored)}

    def check_shape(self, name: str, shape: tuple[int, ...]) -> None:
        """Raise WeightUpdateError unless the model has a tensor of this name and shape."""
        expected = self.pieces[name].shape if name in self.pieces else self.shapes.get(name)
        if expected is None:
            raise WeightUpdateError(f"unknown tensor {name!r}; the model has none of this name")
        if shape != expected:
            raise WeightUpdateError(f"tensor {name!r} has shape {list(shape)}, expected {list(expected)}")

    def check_new(self, name: str, given: Set[str]) -> None:
        """Raise WeightUpdateError if a tensor was given before: under this name, or in a whole or a piece of it."""
        same = [self.pieces[name].tensor] if name in self.pieces else self.pieces_of.get(name, {})
        for other in (name, *same):
            if other in given:
                under = "" if other == name else f": it came as {other!r}, too"
                raise WeightUpdateError(f"tensor {name!r} was given twice{under}")

    def check_spec(self, spec: TensorSpec) -> None:
        """Raise WeightUpdateError where the model has no place for such a tensor."""
        self.check_shape(spec.name, spec.shape)
        if spec.dtype not in ops.DTYPES:
            raise WeightUpdateError(f"tensor {spec.name!r} is {spec.dtype}, expected one of {ops.DTYPES}")

    def state_of(self, module: nn.Module) -> dict[str, Tensor]:
        """Return a module's state dict, without the second names of parameters that it ties as this model does.

        Of a model with an adapter, return the adapter alone.
        """
        if is_adapted(module):
            return adapter_state(module)
        parameters = dict(module.named_parameters(remove_duplicate=False))
        seconds = {a for a, b in self.tied.items() if a in parameters and parameters[a] is parameters.get(b)}
        return {name: tensor for name, tensor in module.state_dict().items() if name not in seconds}

    def missing(self, names: Set[str], parts: Set[bool] = frozenset()) -> list[str]:
        """Return the tensors that `names`, and what is tied to them, leave out of the model's parts.

        parts: True for the adapter, False for the base; unset, those that the names are of, or else both.
        """
        parts = parts or parts_of(names or self.shapes)
        missing = {name for name in self.shapes if is_adapter_tensor(name) in parts} - names
        for name in missing & self.pieces_of.keys():
            lacking = self.pieces_of[name].keys() - names
            if len(lacking) < len(self.pieces_of[name]):
                missing.remove(name)
                missing.update(lacking)
        missing -= {second for second, first in self.tied.items() if first not in missing}
        missing -= {first for second, first in self.tied.items() if second not in missing}
        missing -= self.tied.keys()  # where both are, the first stands for them
        return sorted(missing)

    def check_complete(self, names: Set[str], parts: Set[bool] = frozenset()) -> None:
        """Raise WeightUpdateError where tensors are missing; see `missing`."""
        if missing := self.missing(names, parts):
            raise WeightUpdateError(f"{len(missing)} tensors are missing, first {missing[0]!r}")


def parts_of(names: Iterable[str]) -> set[bool]:
    """Return which parts of a model tensors of these names are of: True for the adapter, False for the base."""
    return {is_adapter_tensor(name) for name in names}


def check_contract(module: nn.Module, contract: Contract) -> None:
    """Raise NumericsError unless a trainer's numerics are the engine's.

    Master weights in fp32 that FSDP2 doesn't wrap may feed an engine of a lower dtype.
    """
    if not isinstance(getattr(module, "get_output_embeddings", lambda: None)(), LMHead):
        raise NumericsError(
            f"{type(module).__name__} is not from samebits.trainer.exact_model, so its log-probs would differ from the "
            "rollouts'. To take its weights all the same, give module.state_dict().items()"
        )
    found = contract_of(module)  # type: ignore[arg-type]
    if found.dtype == "float32" and not is_sharded(module):
        found = replace(found, dtype=contract.dtype)
    contract.check(found)
