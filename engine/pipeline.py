"""Stages of a pipeline: each holds a slice of the model's layers, and the KV cache of those layers alone.

The driver, which holds the first stage, decides; the others obey. A step's plan goes to every stage as one small
message, hidden states go from stage to stage over gloo (CPU) or nccl (GPU), tokens come back from the last. Several
batches are under way at once, so that stages work at the same time; each computes them in the order of their plans.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import pathlib
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np
import psutil
import torch
import torch.distributed as dist
from torch import Tensor

from ..kernels import ops
from ..kernels.contract import Contract
from ..model.exact import contract_of, eos_token_ids, exact_model, load_config
from ..model.stage import Layers, split_by_size, split_layers, stage_model
from .config import EngineConfig
from .distributed import ray_backend
from .distributed.fan_out import FanOut, UpdateMember
from .distributed.worker import LocalPeer, Peer, WorkerError, default_threads, gpus_of, launch, results, sharers_of
from .model_runner import Drawn, ModelRunner, Plan
from .request import SampledToken
from .transfer import TensorSpec, WeightGroup, free_port, new_backend
from .weights import WeightLoader, WeightTable, WeightUpdate

logger = logging.getLogger(__name__)

TRACE = 10_000  # steps
BALANCE_CONTEXT = 256  # tokens of each sequence when `balance` takes the time


@dataclass
class StageInfo:
    """What the driver needs to know of a stage. Bytes; capacity in KV blocks."""

    table: WeightTable
    contract: Contract | None
    weight_bytes: int
    block_bytes: int
    capacity: int
    eos_token_ids: tuple[int, ...]


class Stage(UpdateMember):
    """A slice of a model: its weights, KV and computation; in this process or, through a `Peer`, in another.

    rank, stages: its place in the pipeline. A single stage is the whole model.
    """

    update: WeightUpdate

    def __init__(self, path: str, config: EngineConfig, layers: Layers | None, rank: int = 0, stages: int = 1):
        self.config, self.rank, self.stages = config, rank, stages
        device = config.device or "cpu"
        if layers is None:
            self.model = exact_model(path, config.dtype, device, config.linear_route, config.exact)
        else:
            self.model = stage_model(path, config.dtype, device, layers, config.linear_route, config.exact)
        self.loader = WeightLoader(self.model, (layers or (0, 0))[0], layers is None)
        self.groups: dict[str, WeightGroup] = {}
        self.update = WeightUpdate(self.loader, self.groups)
        self.weight_bytes = sum(p.nbytes for p in self.model.parameters())
        self.runner: ModelRunner
        self._link: _Link | None = None
        self.trace: deque[tuple[float, float]] = deque(maxlen=TRACE)  # start and end of a step, on the machine's clock

    def describe(self, num_seqs_blocks: int, sharers: int) -> StageInfo:
        """num_seqs_blocks: more KV blocks than this are of no use. sharers: workers that share the memory."""
        block = ModelRunner.block_bytes(self.model)
        if self.config.kv_cache_memory_bytes is not None:
            capacity = self.config.kv_cache_memory_bytes // block
            if capacity < 1:
                raise ValueError(f"kv_cache_memory_bytes is less than one block of {block} bytes")
        else:
            capacity = min(self._memory_for_kv() // sharers // block, num_seqs_blocks)
            if capacity < 1:
                raise MemoryError(f"no memory for a single KV block of {block} bytes")
        contract = contract_of(self.model) if self.config.exact else None
        return StageInfo(self.loader.table, contract, self.weight_bytes, block, capacity, eos_token_ids(self.model))

    def _memory_for_kv(self) -> int:
        """Bytes. On a GPU, its share less what is taken and what a step needs; else a quarter of what is free."""
        device = self.model.device
        if device.type != "cuda":
            return psutil.virtual_memory().available // 4
        step = ModelRunner.peak_bytes(self.model, self.config.max_num_batched_tokens)
        torch.cuda.empty_cache()  # of what `balance` measured
        free, total = torch.cuda.mem_get_info(device)
        return int(free - (1 - self.config.gpu_memory_utilization) * total - step)

    def start(self, num_blocks: int) -> None:
        """Takes the KV memory and packs the weights."""
        graphs = ops.backend(self.model.device).GRAPHS and not self.config.enforce_eager
        longest = self.config.max_model_len or self.model.config.max_position_embeddings
        limits = self.config.max_num_seqs, self.config.max_num_batched_tokens, longest
        self.runner = ModelRunner(self.model, num_blocks, limits if graphs else None)

    def connect(self, address: str, port: int) -> None:
        """Joins the group over which hidden states go."""
        model, config = self.model, self.config
        count = config.num_batches if model.device.type == "cpu" else 1  # see `_Link.expect`
        shape = count, config.max_num_batched_tokens, model.config.hidden_size
        rooms = torch.empty(shape, dtype=model.dtype, device=model.device)
        # it says what it misses before the driver gives up on it
        self._link = _Link(address, port, self.rank, self.stages, 0.9 * config.worker_timeout, rooms)

    # --- steps ------------------------------------------------------------------------------------------------------

    def run(self, plan: Plan, hidden: Tensor | None = None) -> Tensor | Drawn | list[SampledToken] | None:
        """One step: tokens, from the last stage. Hidden states come and go over the link, where there is one; then
        tokens, too, are waited for."""
        if self._link is not None and self.rank > 0:
            hidden = self._link.receive(len(plan.token_ids))
        begin = time.time()
        out = self.runner.run(plan, hidden)
        tokens = out.wait() if self._link is not None and isinstance(out, Drawn) else out
        self.trace.append((begin, time.time()))
        if self._link is not None and isinstance(out, Tensor):
            self._link.send(out)
            return None
        return tokens

    def announce(self, method: str, args: tuple) -> None:
        """A step that has arrived, and has to wait for its turn: its hidden states may come meanwhile."""
        if method == "run" and self._link is not None:
            self._link.expect(len(args[0].token_ids))

    def take_trace(self) -> list[tuple[float, float]]:
        """Start and end of the last steps, seconds since the epoch; forgets them."""
        trace, self.trace = list(self.trace), deque(maxlen=TRACE)
        return trace

    # --- weights ----------------------------------------------------------------------------------------------------

    def begin_update(self) -> None:
        self.update = WeightUpdate(self.loader, self.groups)

    def commit_update(self) -> None:
        self.loader.switch(self.update)
        self.begin_update()

    def join_group(
        self, name: str, address: str, port: int | str, rank: int, world_size: int, backend: str, timeout: float
    ) -> None:
        self.leave_group(name)
        self.groups[name] = WeightGroup(address, port, rank, world_size, name, backend, timeout)

    def leave_group(self, name: str) -> bool:
        group = self.groups.pop(name, None)
        if group is not None:
            group.close()
        return group is not None

    def manifest(self) -> list[TensorSpec]:
        names = self.loader.slots
        return [TensorSpec(name, self.loader.table.shapes[name], self.loader.dtype) for name in names]

    def free_address(self) -> tuple[str, int]:
        """Where this stage could listen."""
        host = ray_backend.node_address() if self.config.backend == "ray" else "127.0.0.1"
        return host, free_port(host)

    def send_weights(self, address: str, port: int) -> None:
        """To the same stage of another replica, which does `take_weights` meanwhile; the address is this stage's."""
        with WeightGroup(address, port, 0, 2, "copy", timeout=self.config.worker_timeout) as group:
            group.send(self.loader.tensors(), self.manifest())

    def take_weights(self, address: str, port: int) -> None:
        with WeightGroup(address, port, 1, 2, "copy", timeout=self.config.worker_timeout) as group:
            self.update.load(group.receive(self.manifest()))

    def drop_weights(self) -> None:
        self.loader.drop()
        self.runner.release()

    def checksums(self) -> dict[str, str]:
        return self.loader.checksums()

    # --- memory -----------------------------------------------------------------------------------------------------

    def free_kv_cache(self) -> None:
        """And the memory that the next update would take."""
        self.loader.spare.clear()
        self.runner.free_kv_cache()

    def take_kv_cache(self) -> None:
        self.runner.take_kv_cache()


class _Link:
    """Hidden states from the stage before to the stage after.

    rooms [n, tokens, hidden]: where they come in, in turn: one for each batch under way, or a single one on a GPU,
    whose stream fills it when it has been read.
    """

    def __init__(self, address: str, port: int, rank: int, stages: int, timeout: float, rooms: Tensor):
        self._early = rooms.device.type == "cpu"
        where, kind = f"{address}:{port}", "gloo" if self._early else "nccl"
        self._group = new_backend(where, rank, stages, "pipeline", kind, timeout)
        self._rank, self._limit, self._rooms = rank, timedelta(seconds=timeout), itertools.cycle(rooms)
        self._coming: deque[tuple[dist.Work, Tensor]] = deque()
        self._sending: deque[tuple[dist.Work, Tensor]] = deque()

    def expect(self, tokens: int) -> None:
        """Lets the stage before send. Over gloo it sends nothing to who isn't ready, and may be slow to notice that he
        is, since it computes; over nccl a receive would hold a part of the GPU."""
        if self._early:
            with contextlib.suppress(RuntimeError):  # the other has died; `receive` says so
                self._post(tokens)

    def _post(self, tokens: int) -> None:
        room = next(self._rooms)[:tokens]
        self._coming.append((self._group.recv([room], self._rank - 1, 0), room))

    def receive(self, tokens: int) -> Tensor:
        """[tokens, hidden], the next in order."""
        if not self._coming:
            self._post(tokens)
        work, hidden = self._coming.popleft()
        try:
            work.wait(self._limit)
        except RuntimeError as error:
            limit, what = self._limit.total_seconds(), f"hidden states of stage {self._rank - 1}"
            raise WorkerError(f"{what} did not come within {limit:g} s, or its process died: {error}") from error
        return hidden

    def send(self, hidden: Tensor) -> None:
        """Returns at once; the stage after this one may still be busy."""
        while self._sending and self._sending[0][0].is_completed():
            self._sending.popleft()
        hidden = hidden.contiguous()
        self._sending.append((self._group.send([hidden], self._rank + 1, 0), hidden))


class Pipeline:
    """The stages as one: submits plans and collects their tokens, oldest first.

    placement: a group on Ray that has room for them. sharers: workers that share a device's memory; None: see for it.
    """

    def __init__(
        self, path: pathlib.Path, config: EngineConfig, num_seqs_blocks: int, placement: Any, sharers: int | None
    ):
        self.config = config
        count = config.pipeline_parallel_size
        distant = 0 if config.backend == "inproc" else count - 1
        # a replica's group on Ray has room for its stages of as many threads as this process has
        threads = torch.get_num_threads() if placement is not None else default_threads(config)
        self.layers = layers = [*stage_layers(path, config, threads)] if count > 1 else [None]
        self.remote: list[Peer] = []
        try:
            if distant:
                torch.set_num_threads(min(threads, torch.get_num_threads()))  # the first stage is here
                names = [f"stage {rank}" for rank in range(1, count)]
                logger.info("starting %d stages with layers %s", count, layers)
                where = None if placement is None else (placement, 1)  # its first place has the first stage
                gpus = [gpus_of(config, rank, 1) or "" for rank in range(1, count)]
                self.remote = launch(names, config, threads, where, gpus if any(gpus) else None)
            made = [
                peer.call("make", Stage, str(path), config, layers[rank], rank, count)
                for rank, peer in enumerate(self.remote, 1)
            ]
            self.local = [Stage(str(path), config, layers[rank], rank, count) for rank in range(count - distant)]
            self.first = self.local[0]
            results([(p.name, f) for p, f in zip(self.remote, made, strict=True)], config.start_timeout)
            host = ray_backend.node_address() if distant and config.backend == "ray" else "127.0.0.1"
            peers: list[Peer | LocalPeer] = [*(LocalPeer(f"stage {s.rank}", s) for s in self.local), *self.remote]
            self.stages = FanOut(peers, 1, host, config.worker_timeout, config.start_timeout)
            known = num_seqs_blocks, sharers or sharers_of(config, threads)
            infos: list[StageInfo] = self.stages.all("describe", *known, timeout=config.start_timeout)
            for info in infos[1:]:
                if infos[0].contract is not None and info.contract is not None:
                    infos[0].contract.check(info.contract)
            self.num_blocks = min(i.capacity for i in infos)
            self.stages.all("start", self.num_blocks, timeout=config.start_timeout)
            if distant:
                self._connect(host)
        except BaseException:
            self.close()
            raise
        self.model_config = load_config(path)
        self.eos_token_ids = infos[-1].eos_token_ids
        self.contract = infos[0].contract
        self.table = WeightTable.joined(i.table for i in infos)
        self.weight_bytes = sum(i.weight_bytes for i in infos)
        self.kv_cache_bytes = self.num_blocks * sum(i.block_bytes for i in infos)
        self.stage_kv_bytes = self.num_blocks * max(i.block_bytes for i in infos)
        self._flights: deque[list[tuple[str, Future]]] = deque()

    def each(self, method: str, arguments: Sequence[tuple]) -> None:
        """Calls a method of every stage with arguments of its own."""
        pairs = zip(self.stages.members, arguments, strict=True)
        results([(m.name, m.call(method, *a)) for m, a in pairs], self.config.start_timeout)

    def _connect(self, host: str) -> None:
        port = free_port(host)
        calls = [(p.name, p.call("connect", host, port)) for p in self.remote]
        self.first.connect(host, port)
        results(calls, self.config.worker_timeout)

    def submit(self, plan: Plan) -> None:
        """Starts a step; the driver's own stage has computed it when this returns."""
        calls: list[tuple[str, Future]] = [("this process", Future())]
        if self.remote:
            calls = [(peer.name, peer.call("run", plan)) for peer in self.remote]
            self.first.run(plan)
        else:
            out: Any = None
            for stage in self.local:
                out = stage.run(plan, out)
            calls[0][1].set_result(out)
        self._flights.append(calls)

    def collect(self) -> list[SampledToken]:
        """The tokens of the oldest step under way."""
        limit, calls = self.config.worker_timeout, self._flights.popleft()
        _, late = wait([future for _, future in calls], limit, FIRST_EXCEPTION)
        for _, future in calls:
            if future not in late:
                future.result()
        if late:
            name = next(name for name, future in calls if future in late)
            raise WorkerError(f"{name} did not answer within {limit:g} s")
        tokens = calls[-1][1].result()
        return tokens.wait() if isinstance(tokens, Drawn) else tokens

    def close(self) -> None:
        """Ends the processes of other stages."""
        for peer in self.remote:
            peer.kill()


def stage_layers(path: pathlib.Path, config: EngineConfig, threads: int) -> list[Layers]:
    """The layers of each stage: as the configuration says, by measured time (`balance`), or by the stages' size.

    threads: that a stage will have.
    """
    if config.stage_layers is not None:
        ends = [*itertools.accumulate(config.stage_layers)]
        if ends[-1] != (count := load_config(path).num_hidden_layers):
            raise ValueError(f"stage_layers {list(config.stage_layers)} add up to {ends[-1]}; the model has {count}")
        return list(zip([0, *ends[:-1]], ends, strict=True))
    if config.balance:
        return _measured_split(path, config, threads)
    return split_by_size(path, config.pipeline_parallel_size)


def _measured_split(path: pathlib.Path, config: EngineConfig, threads: int) -> list[Layers]:
    """By the time of a decode step through one layer, and through the head. Of a quarter of the sequences that a batch
    may have: it isn't full for long, and prompts, which hardly need the head, want their time, too."""
    seqs = -(-config.max_num_seqs // (4 * config.num_batches))
    count = load_config(path).num_hidden_layers
    where, numerics = (config.dtype, config.device or "cpu"), (config.linear_route, config.exact)
    pages = seqs * (BALANCE_CONTEXT // ops.backend(torch.device(config.device or "cpu")).BLOCK + 1)
    times, before = [], torch.get_num_threads()
    torch.set_num_threads(min(before, threads))
    try:
        for layers in ((count // 2, count // 2 + 1), (count - 1, count)):
            runner = ModelRunner(stage_model(path, *where, layers, *numerics), pages)
            times.append(decode_seconds(runner, seqs, BALANCE_CONTEXT))
    finally:
        torch.set_num_threads(before)
    layer, end = times
    return split_layers([layer] * count, max(0.0, end - layer), config.pipeline_parallel_size)


def decode_seconds(runner: ModelRunner, seqs: int, context: int, repeats: int = 7) -> float:
    """Median time of a decode step of `seqs` sequences, of `context` tokens each, in a stage that isn't the first."""
    model, config, kernels = runner.model, runner.model.config, ops.backend(runner.model.device)
    pages = context // kernels.BLOCK + 1
    positions = np.full(seqs, context, np.int32)
    tables = np.arange(seqs * pages, dtype=np.int32)
    starts = tables[::pages].copy()
    slots = tables[starts + context // kernels.BLOCK] * np.int32(kernels.BLOCK) + positions % np.int32(kernels.BLOCK)
    items = kernels.work_items([1] * seqs, config.num_attention_heads // config.num_key_value_heads)
    layout = ops.PagedLayout([1] * seqs, positions, slots, tables, starts, items)
    none = np.zeros(seqs, np.int64)
    plan = Plan(
        none, layout, [], list(range(seqs)), np.arange(seqs), none - 1, none.astype(np.uint64), none, none,
        ops.RowParams.repeat(seqs), [-1] * seqs, [False] * seqs,
    )  # fmt: skip
    hidden = torch.randn(seqs, config.hidden_size).to(model.device, model.dtype)
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        out = runner.run(plan, hidden)
        if isinstance(out, Drawn):
            out.wait()
        times.append(time.perf_counter() - start)
    return sorted(times)[repeats // 2]
