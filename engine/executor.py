"""The border between the engine and its workers: in one process a method call; for more see `samebits.cluster`."""

from __future__ import annotations

import itertools
import pathlib
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from ..kernels.contract import Contract
from ..model.exact import load_config
from ..model.stage import Layers, split_by_size
from .config import EngineConfig
from .planner import Plan
from .request import SampledToken
from .sampler import SamplerOutput
from .weights import WeightTable, Workers
from .weights.workers import arguments_of
from .worker import Worker, WorkerInfo


class StepResult(Protocol):
    """The tokens of a step that is under way."""

    def wait(self) -> list[SampledToken]:
        """Return the tokens in the order of its rows of logits, as soon as they are there."""


class Executor(Workers):
    """The interface to the model of one replica on its workers: the whole model in one, or a pipeline stage in each.

    is_local: all workers are in this process, so that a step which fails leaves nothing behind elsewhere.
    """

    info: ModelInfo
    is_local: bool

    @abstractmethod
    def submit(self, plan: Plan) -> StepResult:
        """Start a step and return its tokens to come. Steps are computed in the order in which they are submitted."""


class ModelInfo(NamedTuple):
    """Sizes of the model that an engine's workers hold. Bytes are those of all workers together.

    stage_kv_bytes: the KV pool of the worker that has the largest. num_experts: the most of a layer; 0: there are none.
    """

    contract: Contract | None
    eos_token_ids: tuple[int, ...]
    table: WeightTable
    num_blocks: int
    weight_bytes: int
    kv_cache_bytes: int
    stage_kv_bytes: int
    num_experts: int

    @classmethod
    def of(cls, workers: Sequence[WorkerInfo]) -> ModelInfo:
        """Return what the workers of a replica say together. NumericsError where their contracts differ.

        The KV pool has as many blocks as the worker with the least room can hold.
        """
        contract = workers[0].contract
        for info in workers[1:]:
            if contract is not None and info.contract is not None:
                contract.check(info.contract)
        num_blocks = min(info.max_blocks for info in workers)
        return cls(
            contract=contract,
            eos_token_ids=workers[-1].eos_token_ids,
            table=WeightTable.union(info.table for info in workers),
            num_blocks=num_blocks,
            weight_bytes=sum(info.weight_bytes for info in workers),
            kv_cache_bytes=num_blocks * sum(info.block_bytes for info in workers),
            stage_kv_bytes=num_blocks * max(info.block_bytes for info in workers),
            num_experts=max(info.num_experts for info in workers),
        )


class LocalExecutor(Executor):
    """An `Executor` of workers in this process, one per pipeline stage, which compute one after the other."""

    is_local = True

    def __init__(self, path: pathlib.Path, config: EngineConfig):
        stages = stage_layers(path, config)
        self.workers = [Worker(path, config, layers, len(stages)) for layers in stages]
        super().__init__(len(self.workers), config.start_timeout)
        self.info = ModelInfo.of([worker.info() for worker in self.workers])
        self.collective_rpc("initialize_cache", self.info.num_blocks)

    def submit(self, plan: Plan) -> SamplerOutput:
        """Compute a step. On a GPU its tokens may be on their way when this returns."""
        out: Any = None
        for worker in self.workers:
            out = worker.execute_model(plan, out)
        return out

    def collective_rpc(self, method: str, *args: Any, timeout: float | None = None) -> list[Any]:
        """Call a method of every worker and return the results."""
        return [getattr(worker, method)(*arguments_of(i, args)) for i, worker in enumerate(self.workers)]


def stage_layers(path: pathlib.Path, config: EngineConfig) -> list[Layers | None]:
    """The layers [from, to) of each pipeline stage, as the configuration says or by size; None: the whole model."""
    if config.pipeline_parallel_size == 1:
        return [None]
    if config.stage_layers is None:
        return [*split_by_size(path, config.pipeline_parallel_size)]
    ends = [*itertools.accumulate(config.stage_layers)]
    count = load_config(path).num_hidden_layers
    if ends[-1] != count:
        raise ValueError(f"stage_layers {list(config.stage_layers)} add up to {ends[-1]}; the model has {count}")
    return [*zip([0, *ends[:-1]], ends, strict=True)]
