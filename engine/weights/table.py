"""The tensors that a model has, by name, and what is wrong with those that an update brings."""

from __future__ import annotations

import os
from collections.abc import Iterable, Set
from dataclasses import dataclass, replace

from torch import Tensor, nn

from ...kernels import ops
from ...kernels.contract import Contract, NumericsError
from ...model.adapter import adapter_state, is_adapted, is_adapter_tensor
from ...model.exact import LMHead, contract_of
from .spec import TensorSpec

Source = nn.Module | Iterable[tuple[str, Tensor]] | str | os.PathLike


class WeightUpdateError(ValueError):
    """An update was refused; the old weights serve on."""


@dataclass
class WeightTable:
    """The names and shapes of a model's tensors. tied: name -> the first name of the same tensor.

    adapter: what it has beside the base model, as the contract says it. An adapter's tensors have their names in PEFT's
    files. An update brings all of the adapter, all of the base, or both.
    """

    shapes: dict[str, tuple[int, ...]]
    tied: dict[str, str]
    adapter: str = "none"

    @classmethod
    def union(cls, tables: Iterable[WeightTable]) -> WeightTable:
        """Return the table of a model whose parts have these tables."""
        whole = cls({}, {})
        for table in tables:
            whole.shapes |= table.shapes
            whole.tied |= table.tied
            whole.adapter = table.adapter
        return whole

    def check_shape(self, name: str, shape: tuple[int, ...]) -> None:
        """Raise WeightUpdateError unless the model has a tensor of this name and shape."""
        if name not in self.shapes:
            raise WeightUpdateError(f"unknown tensor {name!r}; the model has none of this name")
        if shape != self.shapes[name]:
            raise WeightUpdateError(f"tensor {name!r} has shape {list(shape)}, expected {list(self.shapes[name])}")

    def check_spec(self, spec: TensorSpec, device: str = "cpu") -> None:
        """Raise WeightUpdateError where the model has no place for such a tensor. device: the type of its device."""
        self.check_shape(spec.name, spec.shape)
        supported = ops.DTYPES[device]
        if spec.dtype not in supported:
            raise WeightUpdateError(f"tensor {spec.name!r} is {spec.dtype}, expected one of {supported}")

    def state_of(self, module: nn.Module) -> dict[str, Tensor]:
        """Return a module's state dict, without the second names of parameters that it ties as this model does.

        Of a model with an adapter, return the adapter alone.
        """
        if is_adapted(module):
            return adapter_state(module)
        parameters = dict(module.named_parameters(remove_duplicate=False))
        seconds = {a for a, b in self.tied.items() if a in parameters and parameters[a] is parameters.get(b)}
        return {name: tensor for name, tensor in module.state_dict().items() if name not in seconds}

    def missing(self, names: set[str], parts: Set[bool] = frozenset()) -> list[str]:
        """Return the tensors that `names`, and what is tied to them, leave out of the model's parts.

        parts: True for the adapter, False for the base; unset, those that the names are of, or else both.
        """
        parts = parts or parts_of(names or self.shapes)
        wanted = {name for name in self.shapes if is_adapter_tensor(name) in parts}
        given_by_first = {second for second, first in self.tied.items() if first in names}
        given_by_second = {first for second, first in self.tied.items() if second in names}
        return sorted(wanted - names - given_by_first - given_by_second)

    def check_complete(self, names: set[str], parts: Set[bool] = frozenset()) -> None:
        """Raise WeightUpdateError where tensors are missing; see `missing`."""
        if missing := self.missing(names, parts):
            raise WeightUpdateError(f"{len(missing)} tensors are missing, first {missing[0]!r}")


def parts_of(names: Iterable[str]) -> set[bool]:
    """Return which parts of a model tensors of these names are of: True for the adapter, False for the base."""
    return {is_adapter_tensor(name) for name in names}


def check_contract(module: nn.Module, contract: Contract) -> None:
    """Raise NumericsError unless a trainer's numerics are the engine's.

    Master weights in fp32 may feed an engine of a lower dtype.
    """
    if not any(isinstance(m, LMHead) for m in module.modules()):
        raise NumericsError(
            f"{type(module).__name__} is not from samebits.trainer.exact_model, so its log-probs would differ from the "
            "rollouts'. To take its weights all the same, give module.state_dict().items()"
        )
    theirs = contract_of(module)  # type: ignore[arg-type]
    if theirs.dtype == "float32":
        theirs = replace(theirs, dtype=contract.dtype)
    contract.check(theirs)
