"""Weight updates: checked, then staged, then switched. An update that fails leaves the old weights serving."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import pathlib
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..kernels import ops
from ..kernels.contract import Contract, NumericsError
from ..model.checkpoint import StoredWeights, manifest
from ..model.exact import LMHead, all_finite, contract_of
from ..model.stage import shift_layer
from .transfer import TensorSpec, WeightGroup, gathering, manifest_of, split

Source = nn.Module | Iterable[tuple[str, Tensor]] | str | os.PathLike


class WeightUpdateError(ValueError):
    """An update was refused; the old weights serve on."""


@dataclass
class WeightTable:
    """The names and shapes of a model's tensors, and which of them are one (name -> the first of the twins)."""

    shapes: dict[str, tuple[int, ...]]
    tied: dict[str, str]

    @classmethod
    def joined(cls, tables: Iterable[WeightTable]) -> WeightTable:
        """Of a model whose parts have these."""
        whole = cls({}, {})
        for table in tables:
            whole.shapes |= table.shapes
            whole.tied |= table.tied
        return whole

    def check_shape(self, name: str, shape: tuple[int, ...]) -> None:
        if name not in self.shapes:
            raise WeightUpdateError(f"unknown tensor {name!r}; the model has none of this name")
        if shape != self.shapes[name]:
            raise WeightUpdateError(f"tensor {name!r} has shape {list(shape)}, expected {list(self.shapes[name])}")

    def check(self, manifest: Iterable[TensorSpec], given: Iterable[str] = ()) -> set[str]:
        """Raises the WeightUpdateError that tensors of this manifest would cause, after those that were given before.
        Returns all names that there are then."""
        names = set(given)
        for spec in manifest:
            if spec.name in names:
                raise WeightUpdateError(f"tensor {spec.name!r} was given twice")
            names.add(spec.name)
            self.check_shape(spec.name, spec.shape)
            check_dtype(spec.name, spec.dtype, "cpu")
        return names

    def state_of(self, module: nn.Module) -> dict[str, Tensor]:
        """A module's state dict, without second names of parameters that it ties as this model does."""
        parameters = dict(module.named_parameters(remove_duplicate=False))
        twins = {a for a, b in self.tied.items() if a in parameters and parameters[a] is parameters.get(b)}
        return {name: tensor for name, tensor in module.state_dict().items() if name not in twins}

    def missing(self, names: set[str]) -> list[str]:
        """The model's tensors that `names`, and what is tied to them, leave out."""
        tied = {a for a, b in self.tied.items() if b in names} | {self.tied[n] for n in names & set(self.tied)}
        return sorted(set(self.shapes) - names - tied)

    def check_complete(self, names: set[str]) -> None:
        if missing := self.missing(names):
            raise WeightUpdateError(f"{len(missing)} tensors are missing, first {missing[0]!r}")

    def check_directory(self, path: pathlib.Path) -> None:
        entries = manifest(path)
        for name, (_, shape, _) in entries.items():
            self.check_shape(name, shape)
        self.check_complete(set(entries))


def check_dtype(name: str, dtype: torch.dtype, device: str) -> None:
    if dtype not in (supported := ops.DTYPES[device]):
        raise WeightUpdateError(f"tensor {name!r} is {dtype}, expected one of {supported}")


class WeightLoader:
    """Knows the tensors of an engine's model, or of a stage of it, by name, and replaces them all at once."""

    def __init__(self, model: PreTrainedModel, first_layer: int = 0, whole: bool = True):
        """`model` before its weights are packed. first_layer: the number in the whole model of its layer 0. A part
        (not whole) passes over tensors that are not its own."""
        self.whole = whole
        named = model.named_parameters(remove_duplicate=False)
        parameters = {shift_layer(name, first_layer): p for name, p in named}
        self.dtype, self.device = model.dtype, model.device
        self.spare: dict[str, Any] = {}  # what the last update replaced: new memory costs as much as filling it
        modules = {shift_layer(name + ".", first_layer)[:-1]: module for name, module in model.named_modules()}
        first = {id(p): name for name, p in reversed(parameters.items())}
        self.slots: dict[str, list[tuple[Any, str]]] = {}  # where a tensor is used; under the first of tied names
        for name, p in parameters.items():
            owner, _, leaf = name.rpartition(".")
            self.slots.setdefault(first[id(p)], []).append((modules[owner], leaf))
        tied = {name: first[id(p)] for name, p in parameters.items() if first[id(p)] != name}
        self.table = WeightTable({name: tuple(p.shape) for name, p in parameters.items()}, tied)
        if model.config.tie_word_embeddings and model.get_output_embeddings() is None:
            for twin, name in model._tied_weights_keys.items():  # on another stage, and yet ours by either name
                if name in parameters:
                    self.table.tied[twin], self.table.shapes[twin] = name, self.table.shapes[name]

    def owns(self, name: str) -> bool:
        return self.whole or name in self.table.shapes

    def switch(self, update: WeightUpdate) -> None:
        """Puts an update's tensors in the place of the old ones, whose memory the next update takes. Nothing can fail
        here."""
        for name, new in update.staged.items():
            for module, leaf in self.slots[name]:
                old = module.packed if isinstance(new, ops.PackedWeight) else getattr(module, leaf).data
                before, after = (w.panels if isinstance(w, ops.PackedWeight) else w for w in (old, new))
                if self.device.type == "cuda" and before.shape == after.shape:
                    before.copy_(after)  # CUDA graphs know the address
                    continue
                if before.shape == after.shape and before.data_ptr() != after.data_ptr():  # else a twin brought it
                    self.spare[name] = old
                if isinstance(new, ops.PackedWeight):
                    module.packed = new
                else:
                    getattr(module, leaf).data = new
        update.staged, update.given = {}, set()  # a second commit would bring memory that was taken since

    def drop(self) -> None:
        """Frees all weights; only an update brings any back."""
        self.spare.clear()
        for slots in self.slots.values():
            for module, leaf in slots:
                if packed(module, leaf):
                    module.packed = ops.PackedWeight(torch.empty(0, device=self.device), 0)
                else:
                    getattr(module, leaf).data = torch.empty(0, dtype=self.dtype, device=self.device)

    def checksums(self) -> dict[str, str]:
        hashes = {}
        for name, slots in self.slots.items():
            module, leaf = slots[0]
            if packed(module, leaf):
                parts = torch.arange(module.packed.features).split(1024)
                rows: Iterable[Tensor] = map(module.packed.rows, parts)
            else:
                rows = [getattr(module, leaf).detach()]
            hashes[name] = checksum(rows)
        return hashes

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """The weights in force, as an update takes them; tied ones once."""
        for name, slots in self.slots.items():
            module, leaf = slots[0]
            if packed(module, leaf):
                yield name, module.packed.rows(torch.arange(module.packed.features))
            else:
                yield name, getattr(module, leaf).detach()


class WeightUpdate:
    """New weights in the making, beside those that serve: checked, converted and packed as they come.

    Any thread may load while the engine computes; `LLM.commit_weight_update` puts them in force, all or nothing.
    """

    def __init__(self, loader: WeightLoader, groups: dict[str, WeightGroup]):
        self.loader = loader
        self.groups = groups
        self.stored: StoredWeights | None = None  # the checkpoint that it is, if it is one
        self._reading = threading.Lock()
        self.staged: dict[str, Tensor | ops.PackedWeight] = {}
        self.given: set[str] = set()

    @property
    def missing(self) -> list[str]:
        """Names still to come."""
        return self.loader.table.missing(set(self.given))

    def check(self, manifest: Iterable[TensorSpec], complete: bool = False) -> None:
        """Raises the WeightUpdateError that tensors of this manifest would cause, before any of them comes.

        complete: must they be all that is missing?
        """
        names = self.loader.table.check(manifest, self.given)
        if complete:
            self.loader.table.check_complete(names)

    def load(self, source: Source, contract: Contract | None = None) -> None:
        """Loads and checks every tensor of `source`: a module (FSDP2 too: all ranks iterate it), (name, tensor) pairs,
        or a checkpoint directory.

        Raises WeightUpdateError when a tensor is missing (of a module or directory), unknown, given twice, of another
        shape, of an unsupported dtype, or not finite; NumericsError when a module's contract isn't `contract` (None:
        any module will do).
        """
        if isinstance(source, nn.Module):
            if contract is not None:
                check_contract(source, contract)
            state = self.loader.table.state_of(source)
            self.check(manifest_of(state), complete=True)
            with gathering(state) as tensors:
                for name, tensor in tensors:
                    self._add(name, tensor)
            return
        stored = None
        if isinstance(source, str | os.PathLike):
            stored = StoredWeights.at(pathlib.Path(source))
            source = self._from_directory(stored.path)
        for name, tensor in source:
            self._add(name, tensor)
        self.stored = stored

    def receive(self, group: str, manifest: Sequence[TensorSpec], bucket_bytes: int | None = None) -> None:
        """Loads tensors that rank 0 of a weight group broadcasts now."""
        with contextlib.closing(self.groups[group].receive(manifest, bucket_bytes)) as tensors:
            self.load(tensors)

    def read(self, file: str, specs: Sequence[TensorSpec]) -> None:
        """Loads the tensors whose bytes are in a file, one after the other; files one at a time, whoever asks."""
        with self._reading:
            self.load(split(torch.from_numpy(np.memmap(file, np.uint8, mode="c")), list(specs)))

    def _add(self, name: str, tensor: Tensor) -> None:
        loader = self.loader
        if not loader.owns(name):
            return
        if name in self.given:
            raise WeightUpdateError(f"tensor {name!r} was given twice")
        if not isinstance(tensor, Tensor):
            raise WeightUpdateError(f"{name!r} is a {type(tensor).__name__}, expected a tensor")
        loader.table.check_shape(name, tuple(tensor.shape))
        check_dtype(name, tensor.dtype, tensor.device.type)
        if not all_finite(tensor):
            raise WeightUpdateError(f"tensor {name!r} holds NaN or infinity")
        tensor = tensor.detach().to(loader.device, loader.dtype)
        first = loader.table.tied.get(name, name)
        if (twin := self.staged.get(first)) is not None:
            if isinstance(twin, ops.PackedWeight):
                twin = twin.rows(torch.arange(twin.features, device=loader.device))
            if not torch.equal(twin, tensor):
                raise WeightUpdateError(f"tensor {name!r} differs from the one that the model ties it to")
        else:
            spare = loader.spare.pop(first, None)
            if any(packed(*slot) for slot in loader.slots[first]):
                self.staged[first] = ops.PackedWeight.pack(tensor, spare)
            else:
                self.staged[first] = tensor.clone() if spare is None else spare.copy_(tensor)
        self.given.add(name)

    def check_complete(self) -> None:
        self.loader.table.check_complete(set(self.given))

    def _from_directory(self, path: pathlib.Path) -> Iterator[tuple[str, Tensor]]:
        entries = manifest(path)
        if self.loader.whole:
            self.loader.table.check_directory(path)
        for file in sorted({file for name, (*_, file) in entries.items() if self.loader.owns(name)}):
            with safe_open(file, framework="pt") as tensors:
                sums = json.loads((tensors.metadata() or {}).get("checksums", "{}"))
                for name in filter(self.loader.owns, tensors.keys()):
                    tensor = tensors.get_tensor(name)
                    if name in sums and sums[name] != checksum([tensor]):
                        raise WeightUpdateError(f"{file}: the bytes of tensor {name!r} are not those that were written")
                    yield name, tensor


def checksum(parts: Iterable[Tensor]) -> str:
    """Of the bytes of a tensor's parts, one after the other."""
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        digest.update(part.contiguous().view(-1).view(torch.uint8).cpu().numpy().tobytes())
    return digest.hexdigest()


def packed(module: nn.Module, leaf: str) -> bool:
    return leaf == "weight" and getattr(module, "packed", None) is not None


def check_contract(module: nn.Module, contract: Contract) -> None:
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
