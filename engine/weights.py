"""Weight updates: checked, then staged, then switched. An update that fails leaves the old weights serving."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from ..kernels import ops
from ..kernels.contract import Contract, NumericsError
from ..model.checkpoint import manifest
from ..model.exact import LMHead, contract_of

Source = nn.Module | Iterable[tuple[str, Tensor]] | str | os.PathLike
Staged = dict[str, Tensor | ops.PackedWeight]


class WeightUpdateError(ValueError):
    """An update was refused; the old weights serve on."""


class WeightLoader:
    """Knows an engine model's tensors by name, and replaces them all at once."""

    def __init__(self, model: nn.Module):
        """`model` before its weights are packed."""
        parameters = dict(model.named_parameters(remove_duplicate=False))
        self.shapes = {name: tuple(p.shape) for name, p in parameters.items()}
        self.dtype = next(iter(parameters.values())).dtype
        modules = dict(model.named_modules())
        first = {id(p): name for name, p in reversed(parameters.items())}
        self.tied = {name: first[id(p)] for name, p in parameters.items() if first[id(p)] != name}
        self.slots: dict[str, list[tuple[Any, str]]] = {}  # where a tensor is used; under the first of tied names
        for name, p in parameters.items():
            owner, _, leaf = name.rpartition(".")
            self.slots.setdefault(first[id(p)], []).append((modules[owner], leaf))

    def stage(self, source: Source, contract: Contract | None) -> Staged:
        """Loads and checks every tensor of `source`: a module (FSDP2 too: all ranks iterate it), (name, tensor) pairs,
        or a checkpoint directory. Changes nothing yet: that is `switch`.

        Raises WeightUpdateError when a tensor is missing, unknown, given twice, of another shape, of an unsupported
        dtype, or not finite; NumericsError when a module's contract isn't `contract` (None: any module will do).
        """
        staged: Staged = {}
        given: dict[str, Tensor | None] = {}
        for name, tensor in self._tensors(source, contract):
            if name in given:
                raise WeightUpdateError(f"tensor {name!r} was given twice")
            tensor = self._checked(name, tensor)
            first = self.tied.get(name, name)
            twin = next((t for n, t in given.items() if t is not None and self.tied.get(n, n) == first), None)
            if twin is not None and not torch.equal(twin, tensor):
                raise WeightUpdateError(f"tensor {name!r} differs from the one that the model ties it to")
            given[name] = tensor if first in self.tied.values() else None
            if twin is None:
                slots = self.slots[first]
                pack = any(leaf == "weight" and getattr(module, "packed", None) is not None for module, leaf in slots)
                staged[first] = ops.PackedWeight.pack(tensor) if pack else tensor.clone()
        self._check_complete(set(given))
        return staged

    def switch(self, staged: Staged) -> None:
        """Puts staged tensors in the place of the old ones. Nothing can fail here."""
        for name, new in staged.items():
            for module, leaf in self.slots[name]:
                if isinstance(new, ops.PackedWeight):
                    module.packed = new
                else:
                    getattr(module, leaf).data = new

    def _tensors(self, source: Source, contract: Contract | None) -> Iterator[tuple[str, Tensor]]:
        if isinstance(source, nn.Module):
            if contract is not None:
                _check_contract(source, contract)
            return self._from_module(source)
        if isinstance(source, str | os.PathLike):
            return self._from_directory(pathlib.Path(source))
        return iter(source)

    def _from_module(self, module: nn.Module) -> Iterator[tuple[str, Tensor]]:
        state = module.state_dict()
        self._check_manifest({name: tuple(t.shape) for name, t in state.items()})
        for name, tensor in state.items():
            full = getattr(tensor, "full_tensor", None)  # DTensor: gathered one at a time
            yield name, (full() if full else tensor)

    def _from_directory(self, path: pathlib.Path) -> Iterator[tuple[str, Tensor]]:
        entries = manifest(path)
        self._check_manifest({name: shape for name, (_, shape, _) in entries.items()})
        for file in sorted({file for *_, file in entries.values()}):
            with safe_open(file, framework="pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118
                    yield name, tensors.get_tensor(name)

    def _check_manifest(self, shapes: dict[str, tuple[int, ...]]) -> None:
        for name, shape in shapes.items():
            self._check_shape(name, shape)
        self._check_complete(set(shapes))

    def _check_shape(self, name: str, shape: tuple[int, ...]) -> None:
        if name not in self.shapes:
            raise WeightUpdateError(f"unknown tensor {name!r}; the model has none of this name")
        if shape != self.shapes[name]:
            raise WeightUpdateError(f"tensor {name!r} has shape {list(shape)}, expected {list(self.shapes[name])}")

    def _check_complete(self, names: set[str]) -> None:
        covered = (
            names | {a for a, b in self.tied.items() if b in names} | {self.tied[n] for n in names & set(self.tied)}
        )
        if missing := sorted(set(self.shapes) - covered):
            raise WeightUpdateError(f"{len(missing)} tensors are missing, first {missing[0]!r}")

    def _checked(self, name: str, tensor: Tensor) -> Tensor:
        if not isinstance(tensor, Tensor):
            raise WeightUpdateError(f"{name!r} is a {type(tensor).__name__}, expected a tensor")
        self._check_shape(name, tuple(tensor.shape))
        if tensor.dtype not in (supported := ops.DTYPES[tensor.device.type]):
            raise WeightUpdateError(f"tensor {name!r} is {tensor.dtype}, expected one of {supported}")
        if not torch.isfinite(tensor).all():
            raise WeightUpdateError(f"tensor {name!r} holds NaN or infinity")
        return tensor.detach().to(self.dtype)


def _check_contract(module: nn.Module, contract: Contract) -> None:
    """The trainer's numerics must be the engine's; fp32 master weights may feed an engine of a lower dtype."""
    if not any(isinstance(m, LMHead) for m in module.modules()):
        raise NumericsError(
            f"{type(module).__name__} is not from samebits.trainer.exact_model, so its log-probs would differ from the "
            "rollouts'. To take its weights all the same, give module.state_dict().items()"
        )
    theirs = contract_of(module)  # type: ignore[arg-type]
    if theirs.dtype == "float32":
        theirs = replace(theirs, dtype=contract.dtype)
    contract.check(theirs)
