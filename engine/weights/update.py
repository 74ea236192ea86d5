"""One weight update: from a source to a checked stream of tensors, to all workers, in force everywhere or nowhere."""

from __future__ import annotations

import logging
import os
import pathlib
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from ...kernels.contract import Contract
from ...model.adapter import WEIGHTS_FILE, describe, is_folder, load_adapter_config, resolve_placements
from ...model.checkpoint import CheckpointError, StoredWeights, manifest
from ...model.exact import check_same_numerics, load_config
from .spec import TensorSpec, full_tensors, gathering, specs_of
from .table import WeightSource, WeightTable, WeightUpdateError, check_contract, parts_of
from .workers import Workers

logger = logging.getLogger(__name__)


class WeightUpdate:
    """New weights in the making, beside those that serve.

    The verbs, in order: `load` or `receive`, in parts if you like, until nothing is `missing`; then
    `LLM.commit_weight_update`, which calls `prepare` first; or `abort`, as the end of a `with` block does by itself.
    Any thread may load while the engine computes. Several updates may be open, each is good for one commit; workers
    keep the newest few and forget older ones.

    model: the checkpoint that the engine has loaded. open: it was neither committed nor aborted. given: names of the
    tensors that all workers have. stored: the checkpoint directory that it is, if it is one.
    """

    def __init__(self, workers: Workers, table: WeightTable, model: pathlib.Path):
        self.id = uuid.uuid4().hex
        self.model = model
        self.workers = workers
        self.table = table
        self.open = True
        self.given: set[str] = set()
        self.stored: StoredWeights | None = None
        workers.collective_rpc("begin_update", self.id)

    @property
    def missing(self) -> list[str]:
        """Names of the tensors still to come."""
        return self.table.missing(self.given)

    def check(self, specs: Iterable[TensorSpec]) -> None:
        """Raise the WeightUpdateError that tensors of these specs would cause, before any of them comes."""
        fresh: set[str] = set()
        for spec in specs:
            self.table.check_new(spec.name, self.given)
            self.table.check_new(spec.name, fresh)
            self.table.check_spec(spec)
            fresh.add(spec.name)

    def load(self, source: WeightSource, contract: Contract | None = None) -> None:
        """Stage every tensor of a module (FSDP2 too: all ranks iterate it), (name, tensor) pairs or a state
        dict, or a directory.

        A PEFT model and a folder with PEFT's files bring the adapter alone.

        Raises WeightUpdateError when a tensor is missing (of a module or directory), unknown, given twice, of another
        shape, of an unsupported dtype, or not finite; CheckpointError for damaged files; NumericsError when a module's
        contract isn't `contract` (None: any module will do), or a directory's config.json asks for other numerics.
        """
        if isinstance(source, nn.Module):
            self._load_module(source, contract)
        elif is_folder(source):
            self._load_adapter(pathlib.Path(source))
        elif isinstance(source, str | os.PathLike):
            self._load_directory(pathlib.Path(source).absolute())
        else:
            pairs = source.items() if isinstance(source, Mapping) else source
            self.workers.send_tensors(self.id, self._checked(pairs))

    def _load_module(self, module: nn.Module, contract: Contract | None) -> None:
        if contract is not None:
            check_contract(module, contract)
        state = self.table.state_of(module)
        self.check(specs_of(state))
        self.table.check_complete(state.keys())
        with gathering(full_tensors(state)) as tensors:
            self.workers.send_tensors(self.id, self._checked(tensors))

    def _load_adapter(self, path: pathlib.Path) -> None:
        theirs = describe(resolve_placements(load_config(self.model), load_adapter_config(path)))
        if theirs != self.table.adapter:
            raise WeightUpdateError(f"{path}: the adapter is {theirs}; the engine's is {self.table.adapter}")
        try:
            tensors = load_file(path / WEIGHTS_FILE)
        except SafetensorError as error:
            raise CheckpointError(f"{path / WEIGHTS_FILE} is truncated, or not a safetensors file: {error}") from error
        self.workers.send_tensors(self.id, self._checked(tensors.items()))

    def _load_directory(self, path: pathlib.Path) -> None:
        """Workers read a directory by themselves."""
        stored = StoredWeights.at(path)
        entries = self.table.known(manifest(path))
        if (path / "config.json").is_file():
            check_same_numerics(load_config(self.model), load_config(path))
        names = set(self.given)
        for name, (shape, _) in entries.items():
            self.table.check_new(name, names)
            self.table.check_shape(name, shape)
            names.add(name)
        self.table.check_complete(entries.keys())
        self.workers.collective_rpc("load_directory", self.id, path, timeout=self.workers.load_timeout)
        if not stored.unchanged:
            raise WeightUpdateError(f"files in {path} changed while they were read; send the update again")
        self.given |= set(entries)
        self.stored = stored

    def _checked(self, pairs: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield the pairs, each checked; a name counts as given when the next pair is asked for."""
        self.stored = None
        for name, tensor in pairs:
            if not isinstance(tensor, Tensor):
                raise WeightUpdateError(f"{name!r} is a {type(tensor).__name__}, expected a tensor")
            if tensor.is_meta:
                raise WeightUpdateError(f"tensor {name!r} is on the meta device: it has no values")
            self.table.check_new(name, self.given)
            self.table.check_spec(TensorSpec.of(name, tensor))
            yield name, tensor
            self.given.add(name)

    def receive(self, group: str, specs: Sequence[TensorSpec], bucket_bytes: int | None = None) -> None:
        """Stage tensors that rank 0 of a weight group broadcasts now; each worker keeps what it needs.

        Raises the WeightUpdateError of `check`.
        """
        self.check(specs)
        self.workers.receive_tensors(self.id, group, list(specs), bucket_bytes)
        self.given |= {spec.name for spec in specs}
        self.stored = None

    @property
    def brings_base(self) -> bool:
        """True unless it is of an adapter alone."""
        return parts_of(self.given) != {True}

    def prepare(self) -> None:
        """Raise unless every worker has all of its tensors, and could put the update in force."""
        self.workers.collective_rpc("prepare_update", self.id, parts_of(self.given))

    def __enter__(self) -> WeightUpdate:
        return self

    def __exit__(self, *exc) -> None:
        if self.open:
            self.abort()

    def close(self) -> None:
        """Note that the update is over: it was committed or aborted."""
        self.open = False
        self.given = set()

    def abort(self) -> None:
        """Forget the update, and free what workers hold of it. Does nothing where they have none of it."""
        self.close()
        try:
            self.workers.collective_rpc("abort_update", self.id)
        except Exception as error:  # a worker that is gone holds nothing
            logger.info("weight update %s: %s", self.id, error)
