"""Weight updates: checked, then staged, then switched. An update that fails leaves the old weights serving."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from ..kernels import ops
from ..kernels.contract import NumericsError
from ..model.checkpoint import manifest
from ..model.exact import LMHead

Source = nn.Module | Iterable[tuple[str, Tensor]] | str | os.PathLike


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
        self.route = next(m.route for m in model.modules() if isinstance(m, LMHead))

    def update(self, source: Source) -> None:
        """Loads every tensor of `source`: a module (FSDP2 too: all ranks iterate it), (name, tensor) pairs, or a
        checkpoint directory. Raises WeightUpdateError and changes nothing when a tensor is missing, unknown, given
        twice, of another shape or dtype, or not finite.
        """
        staged: dict[str, Tensor | ops.PackedWeight] = {}
        given: dict[str, Tensor | None] = {}
        for name, tensor in self._tensors(source):
            if name in given:
                raise WeightUpdateError(f"tensor {name!r} was given twice")
            tensor = self._checked(name, tensor)
            first = self.tied.get(name, name)
            twin = next((t for n, t in given.items() if t is not None and self.tied.get(n, n) == first), None)
            if twin is not None and not torch.equal(twin, tensor):
                raise WeightUpdateError(f"tensor {name!r} differs from the one that the model ties it to")
            given[name] = tensor if first in self.tied.values() else None
            if twin is None:
                pack = any(getattr(module, "packed", None) is not None for module, _ in self.slots[first])
                staged[first] = ops.PackedWeight.pack(tensor) if pack else tensor.clone()
        self._check_complete(set(given))
        for name, new in staged.items():
            for module, leaf in self.slots[name]:
                if isinstance(new, ops.PackedWeight):
                    module.packed = new
                else:
                    getattr(module, leaf).data = new

    def _tensors(self, source: Source) -> Iterator[tuple[str, Tensor]]:
        if isinstance(source, nn.Module):
            return self._from_module(source)
        if isinstance(source, str | os.PathLike):
            return self._from_directory(pathlib.Path(source))
        return iter(source)

    def _from_module(self, module: nn.Module) -> Iterator[tuple[str, Tensor]]:
        heads = [m for m in module.modules() if isinstance(m, LMHead)]
        if heads and heads[0].route != self.route:
            raise NumericsError(f"linear_route differs: {self.route!r} here, {heads[0].route!r} in the trainer")
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
        if tensor.dtype not in (self.dtype, torch.float32):
            raise WeightUpdateError(
                f"tensor {name!r} is {tensor.dtype}, expected {self.dtype} (or torch.float32 to be rounded to it)"
            )
        if not torch.isfinite(tensor).all():
            raise WeightUpdateError(f"tensor {name!r} holds NaN or infinity")
        return tensor.detach().to(self.dtype)
