"""A worker's side of an update: new tensors are staged beside those that serve, then switched all at once."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Iterable, Iterator, Set
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import PreTrainedModel

from ...kernels import ops
from ...model.adapter import is_adapter_tensor, tensor_name
from ...model.checkpoint import manifest
from ...model.exact import all_finite
from ...model.stage import shift_layer
from ...model.stored import Piece, stored_pieces
from .spec import TensorSpec, checksum
from .table import WeightTable, WeightUpdateError, parts_of


class WeightStore:
    """The tensors of a worker's model by their names in the whole model, and their replacement.

    model: before its weights are packed. first_layer: the number in the whole model of its layer 0. whole: False for a
    stage, which passes over tensors that are not its own. adapter: the contract's line on it; adapter_dtype: what its
    weights, fp32, are rounded to. absent: names of tensors that hold nothing, until an update brings them.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        first_layer: int = 0,
        whole: bool = True,
        adapter: str = "none",
        adapter_dtype: str = "float32",
    ):
        self.whole = whole
        self.adapter_dtype = getattr(torch, adapter_dtype)
        self.absent: set[str] = set()
        self.device = model.device
        self.recycled: dict[str, Any] = {}  # what the last update replaced: new memory costs as much as filling it
        # buffers that are stored are weights, too: a router's e_score_correction_bias
        state = {shift_layer(n, first_layer): p for n, p in model.state_dict(keep_vars=True).items()}
        self.dtypes = {name: p.dtype for name, p in state.items()}
        modules = {shift_layer(name + ".", first_layer)[:-1]: module for name, module in model.named_modules()}
        first_names = {id(p): name for name, p in reversed(state.items())}
        self.places: dict[
            str, list[tuple[Any, str]]
        ] = {}  # (module, attribute) of each use; under a tensor's first name
        for name, p in state.items():
            owner, _, leaf = name.rpartition(".")
            self.places.setdefault(first_names[id(p)], []).append((modules[owner], leaf))
        tied = {name: first_names[id(p)] for name, p in state.items() if first_names[id(p)] != name}
        pieces = {
            shift_layer(name, first_layer): piece._replace(tensor=shift_layer(piece.tensor, first_layer))
            for name, piece in stored_pieces(model).items()
        }
        ignored = r"rotary_emb\.inv_freq", *sorted(model._keys_to_ignore_on_load_unexpected or ())  # transformers' set
        self.table = WeightTable({name: tuple(p.shape) for name, p in state.items()}, tied, adapter, pieces, ignored)
        for name, module in modules.items():
            low_rank = getattr(module, "low_rank", None)
            for factor, leaf in (("A", "down"), ("B", "up")) if low_rank is not None else ():
                tensor = tensor_name(name, factor)
                self.places[tensor] = [(low_rank, leaf)]
                self.table.shapes[tensor] = tuple(getattr(low_rank, leaf).shape)
        if model.config.tie_word_embeddings and model.get_output_embeddings() is None:
            for second, name in model._tied_weights_keys.items():  # on another stage, and yet ours by either name
                if name in state:
                    self.table.tied[second] = name
                    self.table.shapes[second] = self.table.shapes[name]

    def owns(self, name: str) -> bool:
        """True if the tensor belongs here; a whole model owns all, so that unknown names are errors."""
        return self.whole or name in self.table.shapes or name in self.table.pieces

    def specs(self) -> list[TensorSpec]:
        """The specs of the tensors in force, tied ones once."""
        return [TensorSpec(name, self.table.shapes[name], self.storage_dtype(name)) for name in self.places]

    def storage_dtype(self, name: str) -> torch.dtype:
        """The dtype in which a tensor is kept."""
        return torch.float32 if is_adapter_tensor(name) else self.dtypes[self.table.tied.get(name, name)]

    def tensor(self, name: str) -> Tensor:
        """Return a tensor in force, by its first name."""
        parts = list(self._parts(name))
        return parts[0] if len(parts) == 1 else torch.cat(parts).view(self.table.shapes[name])

    def checksums(self) -> dict[str, str]:
        """A hash of each tensor's bytes; tied tensors under their first name."""
        return {name: checksum(self._parts(name)) for name in self.places}

    def _parts(self, name: str) -> Iterator[Tensor]:
        module, leaf = self.places[name][0]
        packed = packed_of(module, leaf)
        if packed is None:
            yield getattr(module, leaf).detach()
            return
        of_experts = len(self.table.shapes[name]) > 2
        for panels in packed.panels if of_experts else [packed.panels]:
            for rows in torch.arange(packed.features).split(1024):
                yield ops.backend(self.device).packed_rows(panels, rows)

    def switch(self, staged: StagedWeights) -> None:
        """Put staged tensors in place of the old ones, whose memory the next update takes. Nothing can fail here."""
        for name, new in staged.tensors.items():
            for module, leaf in self.places[name]:
                self._replace(name, module, leaf, new)
        for name in staged.tensors:
            owner, leaf = self.places[name][0]
            if leaf == "up":  # its other factor has come, too
                owner.pack()
        self.absent.difference_update(staged.tensors)
        staged.tensors = {}

    def _replace(self, name: str, module: Any, leaf: str, new: Tensor | ops.PackedWeight) -> None:
        old = packed_of(module, leaf) or getattr(module, leaf).data
        before, after = (each if isinstance(each, Tensor) else each.panels for each in (old, new))
        if self.device.type == "cuda" and before.shape == after.shape:
            before.copy_(after)  # CUDA graphs know the address
            return
        if before.shape == after.shape and before.data_ptr() != after.data_ptr():  # else a tied tensor brought it
            self.recycled[name] = old
        if isinstance(new, Tensor):
            getattr(module, leaf).data = new
        else:
            put_packed(module, leaf, new)

    def drop(self) -> None:
        """Free all weights but the adapter's, which are few; only an update brings them back."""
        self.recycled.clear()
        base = {name for name in self.places if not is_adapter_tensor(name)}
        self.absent |= base
        for name in base:
            for module, leaf in self.places[name]:
                packed = packed_of(module, leaf)
                if packed is not None:
                    put_packed(module, leaf, ops.PackedWeight(torch.empty(0, device=self.device), 0))
                else:
                    getattr(module, leaf).data = torch.empty(0, dtype=self.dtypes[name], device=self.device)

    def forget_adapter(self) -> None:
        """Count the adapter as absent."""
        self.absent.update(filter(is_adapter_tensor, self.places))


class StagedWeights:
    """The new tensors of one update, in a worker's memory: checked, converted and packed as they come."""

    def __init__(self, store: WeightStore):
        self.store = store
        self.tensors: dict[str, Tensor | ops.PackedWeight] = {}  # by first names
        self.partial: dict[str, Tensor] = {}  # those whose pieces come
        self.given: set[str] = set()

    def load(self, pairs: Iterable[tuple[str, Tensor]]) -> None:
        """Stage (name, tensor) pairs. Raises WeightUpdateError; tensors of other stages are passed over."""
        for name, tensor in pairs:
            if self.store.owns(name):
                self._add(name, tensor)

    def load_directory(self, path: pathlib.Path) -> None:
        """Stage this worker's tensors of a checkpoint directory. Raises WeightUpdateError."""
        entries = self.store.table.known(manifest(path))
        for file in sorted({file for name, (_, file) in entries.items() if self.store.owns(name)}):
            with safe_open(file, framework="pt") as tensors:
                sums = json.loads((tensors.metadata() or {}).get("checksums", "{}"))
                for name in filter(self.store.owns, entries.keys() & tensors.keys()):
                    tensor = tensors.get_tensor(name)
                    if name in sums and sums[name] != checksum([tensor]):
                        raise WeightUpdateError(f"{file}: the bytes of tensor {name!r} are not those that were written")
                    self._add(name, tensor)

    def check_complete(self, parts: Set[bool]) -> None:
        """Raise WeightUpdateError where tensors of this worker are missing: of these parts, and those that are absent.

        A stage may have nothing of an adapter.
        """
        self.store.table.check_complete(self.given, parts | parts_of(self.store.absent))

    def _add(self, name: str, tensor: Tensor) -> None:
        store = self.store
        store.table.check_new(name, self.given)
        store.table.check_spec(TensorSpec.of(name, tensor))
        if not all_finite(tensor):
            raise WeightUpdateError(f"tensor {name!r} holds NaN or infinity")
        try:
            if name in store.table.pieces:
                self._stage_piece(name, store.table.pieces[name], tensor.detach())
            else:
                self._stage(name, tensor.detach())
        except torch.OutOfMemoryError as error:
            raise WeightUpdateError(
                "no memory for new weights beside the old ones and the KV cache; lower kv_cache_memory_bytes, or "
                f"update while the engine sleeps: {error}"
            ) from error
        self.given.add(name)

    def _stage_piece(self, name: str, piece: Piece, tensor: Tensor) -> None:
        """Stage a piece, and with the last one the whole tensor."""
        store = self.store
        whole = piece.tensor
        if whole not in self.partial:
            shape = store.table.shapes[whole]
            self.partial[whole] = torch.empty(shape, dtype=store.storage_dtype(whole), device=store.device)
        piece.of(self.partial[whole]).copy_(tensor)
        if all(part == name or part in self.given for part in store.table.pieces_of[whole]):
            self._stage(whole, self.partial.pop(whole))

    def _stage(self, name: str, tensor: Tensor) -> None:
        store = self.store
        if is_adapter_tensor(name):
            tensor = tensor.to(store.adapter_dtype)
        tensor = tensor.to(store.device, store.storage_dtype(name))
        first = store.table.tied.get(name, name)
        if first in self.tensors:
            self._check_tied(name, tensor, self.tensors[first])
            return
        memory = store.recycled.pop(first, None)
        packed: Any = next(filter(None, (packed_of(*place) for place in store.places[first])), None)
        if packed is not None:
            self.tensors[first] = packed.pack(tensor, memory)
        else:
            self.tensors[first] = tensor.clone() if memory is None else memory.copy_(tensor)

    def _check_tied(self, name: str, tensor: Tensor, staged: Tensor | ops.PackedWeight) -> None:
        if isinstance(staged, ops.PackedWeight):
            staged = staged.rows(torch.arange(staged.features, device=self.store.device))
        if not torch.equal(staged, tensor):
            raise WeightUpdateError(f"tensor {name!r} differs from the one that the model ties it to")


def packed_of(module: nn.Module, leaf: str) -> ops.PackedWeight | None:
    """Return what an engine keeps in place of a module's parameter, or None: a linear's `packed`, experts by name."""
    found = getattr(module, "packed" if leaf == "weight" else leaf, None)
    return found if isinstance(found, ops.PackedWeight) else None


def put_packed(module: nn.Module, leaf: str, packed: ops.PackedWeight) -> None:
    """Set what `packed_of` returns."""
    setattr(module, "packed" if leaf == "weight" else leaf, packed)
