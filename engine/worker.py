"""A worker: a slice of the model with its KV cache and its weights. What an engine asks of it, here or elsewhere."""

from __future__ import annotations

import ctypes
import pathlib
import sys
from collections import OrderedDict
from collections.abc import Iterable, Set
from contextlib import closing
from dataclasses import replace
from itertools import chain
from typing import NamedTuple

import numpy as np
import psutil
import torch
from torch import Tensor

from ..kernels import ops
from ..kernels.contract import Contract
from ..model.adapter import attach, describe, load_adapter_config, resolve_placements
from ..model.exact import contract_of, eos_token_ids, exact_model, load_config
from ..model.routing import expert_sizes
from ..model.stage import Layers, shift_layer, stage_model
from .config import EngineConfig
from .cuda_graphs import MOST_TOKENS
from .model_runner import ModelRunner
from .planner import Plan
from .sampler import SamplerOutput
from .weights.group import WeightGroup
from .weights.spec import TensorSpec, from_bytes, to_bytes
from .weights.store import StagedWeights, WeightStore
from .weights.table import WeightTable, WeightUpdateError

MAX_OPEN_UPDATES = 4  # whose tensors a worker holds at a time


class WorkerInfo(NamedTuple):
    """A worker's description. max_blocks: the KV blocks that it has room for; block_bytes: of one, in its layers.

    num_experts: the most of a layer; 0: there are none.
    """

    contract: Contract | None
    eos_token_ids: tuple[int, ...]
    table: WeightTable
    weight_bytes: int
    block_bytes: int
    max_blocks: int
    num_experts: int


class Worker:
    """The whole model (layers=None), or the pipeline stage that holds its layers [from, to).

    sharers: workers that share the memory of this one's device. Steps run in one thread at a time; the methods named in
    `CONCURRENT` may run in others meanwhile.
    """

    CONCURRENT = frozenset({
        "begin_update", "load_tensors", "load_bucket", "load_directory", "receive_tensors", "prepare_update",
        "abort_update", "join_weight_group", "leave_weight_group", "weight_specs", "read_weights",
    })  # fmt: skip

    def __init__(self, path: pathlib.Path, config: EngineConfig, layers: Layers | None = None, sharers: int = 1):
        self.path = path
        self.config = config
        self.sharers = sharers
        device = config.device or "cpu"
        if layers is None:
            self.model = exact_model(path, config.dtype, device, config.exact)
        else:
            self.model = stage_model(path, config.dtype, device, layers, config.exact)
        first_layer = 0 if layers is None else layers[0]
        placed = {}
        if config.adapter is not None:
            placed = resolve_placements(load_config(path), load_adapter_config(config.adapter))
            attach(self.model, {shift_layer(name, -first_layer): place for name, place in placed.items()})
        self.adapter = describe(placed)
        self.store = WeightStore(self.model, first_layer, layers is None, self.adapter, config.adapter_dtype)
        self.weight_bytes = sum(spec.nbytes for spec in self.store.specs())
        self.runner: ModelRunner  # from `initialize_cache` on
        self._updates: OrderedDict[str, StagedWeights] = OrderedDict()
        self._groups: dict[str, WeightGroup] = {}

    def info(self) -> WorkerInfo:
        """Return the worker's description. ValueError or MemoryError where it has no room for KV."""
        block_bytes = ModelRunner.block_bytes(self.model)
        contract = contract_of(self.model) if self.config.exact else None
        if contract is not None and self.config.adapter is not None:
            contract = replace(contract, adapter=self.adapter, adapter_dtype=self.config.adapter_dtype)
        return WorkerInfo(
            contract=contract,
            eos_token_ids=eos_token_ids(self.model.config, self.model.generation_config),
            table=self.store.table,
            weight_bytes=self.weight_bytes,
            block_bytes=block_bytes,
            max_blocks=self._max_blocks(block_bytes),
            num_experts=expert_sizes(self.model)[1] if self.config.exact else 0,
        )

    def _max_blocks(self, block_bytes: int) -> int:
        if self.config.kv_cache_memory_bytes is not None:
            if self.config.kv_cache_memory_bytes < block_bytes:
                raise ValueError(f"kv_cache_memory_bytes is less than one block of {block_bytes} bytes")
            return self.config.kv_cache_memory_bytes // block_bytes
        fits = self._kv_memory() // block_bytes
        if fits < 1:
            raise MemoryError(f"no memory for a KV block of {block_bytes} bytes; on a GPU raise gpu_memory_utilization")
        blocks_per_sequence = -(-max_model_len(self.path, self.config) // ops.backend(self.model.device).BLOCK)
        return min(fits, blocks_per_sequence * self.config.max_num_seqs)  # more are of no use

    @property
    def _records(self) -> bool:
        return ops.backend(self.model.device).GRAPHS and not self.config.enforce_eager

    def _kv_memory(self) -> int:
        """The bytes for this worker's KV. On a GPU its share less the weights, or that share of what is free if others
        hold much, less what a step needs, and less the new weights of an update where KV keeps as much; else a quarter
        of what is free.
        """
        device = self.model.device
        if device.type != "cuda":
            return psutil.virtual_memory().available // 4 // self.sharers
        tokens = self.config.max_num_batched_tokens
        step = ModelRunner.peak_bytes(self.model, tokens)
        if self._records:  # graphs keep what theirs takes
            step += ModelRunner.peak_bytes(self.model, min(tokens, MOST_TOKENS))
        free, total = torch.cuda.mem_get_info(device)
        share = self.config.gpu_memory_utilization
        room = int(min(share * total - self.weight_bytes, share * free) - step) // self.sharers
        return room - self.weight_bytes if room >= 2 * self.weight_bytes else room

    def initialize_cache(self, num_blocks: int) -> None:
        """Take the KV memory and pack the weights."""
        limits = self.config.max_num_seqs, self.config.max_num_batched_tokens, max_model_len(self.path, self.config)
        self.runner = ModelRunner(self.model, num_blocks, limits if self._records else None)
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
        if trim is not None:  # glibc keeps what loading and packing have freed: of a mixture, up to half of its weights
            trim(0)
        if self.config.kv_cache_memory_bytes is not None and self.model.device.type == "cpu":
            for cache in chain.from_iterable(self.runner.kv_caches):
                cache.fill_(0)  # on all cores; what isn't there shows here, not in the middle of a rollout

    def execute_model(self, plan: Plan, hidden: Tensor | None = None) -> Tensor | SamplerOutput:
        """Compute a step: tokens from the last stage, [T, hidden] for the next one from others.

        hidden: what the stage before returned, if there is one.
        """
        return self.runner.run(plan, hidden)

    def read_routed_experts(self, slots: np.ndarray) -> np.ndarray:
        """Return the experts of the tokens in these KV slots, integers [slots, layers, k], in this worker's layers."""
        return self.runner.read_experts(slots)

    # --- weights ----------------------------------------------------------------------------------------------------

    def begin_update(self, update_id: str) -> None:
        """Open an update. The oldest one is forgotten when there are more than MAX_OPEN_UPDATES."""
        self._updates[update_id] = StagedWeights(self.store)
        while len(self._updates) > MAX_OPEN_UPDATES:
            self._updates.popitem(last=False)

    def _update(self, update_id: str) -> StagedWeights:
        try:
            return self._updates[update_id]
        except KeyError:
            raise WeightUpdateError(
                "this weight update is over: it was committed, aborted, or forgotten for newer ones; begin another"
            ) from None

    def load_tensors(self, update_id: str, pairs: Iterable[tuple[str, Tensor]]) -> None:
        """Stage (name, tensor) pairs."""
        self._update(update_id).load(pairs)

    def load_bucket(self, update_id: str, data: list[np.ndarray], specs: list[TensorSpec]) -> None:
        """Stage tensors from their bytes, uint8 each."""
        pairs = zip(specs, data, strict=True)
        self._update(update_id).load((spec.name, from_bytes(each, spec)) for spec, each in pairs)

    def load_directory(self, update_id: str, path: pathlib.Path) -> None:
        """Stage this worker's tensors of a checkpoint directory."""
        self._update(update_id).load_directory(path)

    def receive_tensors(self, update_id: str, group: str, specs: list[TensorSpec], bucket_bytes: int | None) -> None:
        """Stage what rank 0 of a weight group broadcasts now."""
        update = self._update(update_id)
        with closing(self._groups[group].receive(specs, bucket_bytes)) as tensors:
            update.load(tensors)

    def prepare_update(self, update_id: str, parts: Set[bool]) -> None:
        """Raise unless `commit_update` could put the update in force, which brings these parts (see `parts_of`)."""
        self._update(update_id).check_complete(parts)

    def commit_update(self, update_id: str) -> None:
        """Put the update in force."""
        update = self._update(update_id)
        del self._updates[update_id]
        self.store.switch(update)

    def abort_update(self, update_id: str) -> None:
        """Forget the update, if it is open."""
        self._updates.pop(update_id, None)

    def join_weight_group(
        self, name: str, address: str, port: int | str, rank: int, world_size: int, backend: str, timeout: float
    ) -> None:
        """Become a rank of a weight group; waits for all others."""
        self._groups[name] = WeightGroup(address, port, rank, world_size, name, backend, timeout)

    def leave_weight_group(self, name: str) -> None:
        """Leave a group, if it is in one of that name."""
        if name in self._groups:
            self._groups.pop(name).close()

    def weight_specs(self) -> list[TensorSpec]:
        """Return the specs of the weights in force, tied ones once."""
        return self.store.specs()

    def read_weights(self, specs: list[TensorSpec]) -> list[np.ndarray]:
        """Return the bytes of these weights in force, uint8 each."""
        return [to_bytes(self.store.tensor(spec.name)) for spec in specs]

    def weight_checksums(self) -> dict[str, str]:
        """A hash of each tensor's bytes, by name."""
        return self.store.checksums()

    def drop_weights(self) -> None:
        """Free all weights but an adapter's; only an update brings them back."""
        self.store.drop()
        self.runner.release()

    def forget_adapter(self) -> None:
        """Have the next update bring the adapter, too."""
        self.store.forget_adapter()

    # --- memory -----------------------------------------------------------------------------------------------------

    def free_kv_cache(self) -> None:
        """Free the KV memory, and that which the next update would take."""
        self.store.recycled.clear()
        self.runner.free_kv_cache()

    def take_kv_cache(self) -> None:
        """Take the KV memory again."""
        self.runner.take_kv_cache()


def max_model_len(path: pathlib.Path, config: EngineConfig) -> int:
    """Most tokens of a sequence; ValueError where the setting exceeds the model's positions."""
    limit = load_config(path).max_position_embeddings
    if (config.max_model_len or 0) > limit:
        raise ValueError(f"max_model_len {config.max_model_len} exceeds the model's {limit} positions")
    return config.max_model_len or limit
