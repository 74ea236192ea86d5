"""Simulated throughput of RL rollouts on 1 to 1,024 GPUs: pipeline stages x replicas, weight sync, stragglers, tails.

usage: python benchmarks/simulate_scale.py [--profile FILE | example-7b] [--gpus 1 8 64] [--stages 1 2 4]
                                           [--split 9 9 10] [--staleness 1] [--json FILE] [--plot FILE.png] ...

A profile holds measured stage times; `python benchmarks/scale.py --profile` writes one. `example-7b` is an ESTIMATE
from public hardware figures, to try things with. A row of the table is a layout: GPUs = replicas x stages.

What is simulated: every engine step of every replica. A step's batch goes through the stages in order; a stage serves
batches first come, first served; the driver takes the results, admits sequences and sends the batch around again.
    finish[s] = max(finish[s - 1] + link, when stage s is free) + seconds[s]
What is approximated:
- A stage's time is linear in its layers, tokens and context: memory and compute add up instead of overlapping. Decode
  rows read their context; the attention of prefill chunks belongs to `per_token`.
- A sequence stays with its batch; batches fill evenly, but what the tail leaves isn't dealt anew.
- A group's prompt is computed once per replica. KV memory limits sequences at prompt + mean response; no preemption.
- Lengths are independent log-normal, within a group too. The router doesn't know lengths or speeds: a group goes, as
  its RL step begins, to the replica with the fewest unfinished sequences.
- Messages between stages don't queue for the link. Training takes no time; the sync after each RL step does.
- The sequences of a replica that fails wait for it and go on from their tokens, all of them computed again. (The router
  would give them to other replicas at once.)
- With staleness k, the start and the last drain are in the figures; more --steps make them matter less.
"""

from __future__ import annotations

import argparse
import dataclasses
import heapq
import json
import math
import pathlib
from collections import namedtuple
from typing import Any, NamedTuple

import numpy as np
from numba import njit
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

PROFILE = pathlib.Path(__file__).parent / "results/stage_times.json"
USABLE = 0.9  # of a GPU's memory: weights and KV
MOST_FAILURES = 1_000  # of one replica


def option(default: Any, text: str, least: float = 0) -> Any:
    """A dataclass field that is a command-line option, too."""
    return dataclasses.field(default=default, metadata={"help": text, "least": least})


class Options:
    """A dataclass of options, checked."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            if not (value := getattr(self, field.name)) >= (least := field.metadata["least"]):
                raise ValueError(f"{field.name} must be at least {least}, is {value}")


@dataclasses.dataclass(frozen=True)
class Profile:
    """Stage times of one model on one device, in seconds and bytes.

    layer_seconds: base + per_token x tokens + per_context_token x keys read by decode rows, for one layer and step.
    head_seconds: base + per_row x sampled rows, on the last stage. overhead_seconds: the driver's work for a step.
    estimate: what the figures assume; empty if they are measured.
    """

    model: str
    device: str
    layers: int
    layer_seconds: dict[str, float]
    head_seconds: dict[str, float]
    overhead_seconds: float
    hidden_bytes_per_token: int
    weight_bytes: int
    kv_bytes_per_token_layer: int
    estimate: str = ""

    @classmethod
    def load(cls, name: str) -> Profile:
        """The profile in the JSON file `name`, or the built-in `example-7b`. ValueError says what is missing."""
        if name == "example-7b":
            return example_7b()
        if not (file := pathlib.Path(name)).is_file():
            hint = "run `python benchmarks/scale.py --profile` first, or try --profile example-7b"
            raise ValueError(f"no stage times at {file}: {hint}")
        values = json.loads(file.read_text())
        try:
            profile = cls(**{f.name: values[f.name] for f in dataclasses.fields(cls) if f.name in values})
            constants(profile)  # raises where a table lacks a key
        except (KeyError, TypeError) as error:
            raise ValueError(
                f"{file} isn't a profile: {error!r}; `benchmarks/scale.py --profile` writes one"
            ) from error
        return profile


def example_7b() -> Profile:
    """A roofline of Qwen2.5-7B's shape in bf16 on an H100 SXM: 989 TFLOP/s dense, 3.35 TB/s (NVIDIA's data sheet).

    Assumed: 50% of the FLOP/s, 70% of the bandwidth, 1 ms of the driver a step. No measurement is in it.
    """
    flops, bandwidth = 0.5 * 989e12, 0.7 * 3.35e12
    hidden, kv, intermediate, vocab, layers = 3584, 512, 18944, 152064, 28
    layer = 2 * hidden * hidden + 2 * hidden * kv + 3 * hidden * intermediate  # parameters
    head = hidden * vocab
    times = {"base": 2 * layer / bandwidth, "per_token": 2 * layer / flops, "per_context_token": 4 * kv / bandwidth}
    return Profile(
        model="7B (Qwen2.5-7B's shape, bf16)", device="H100 SXM", layers=layers, layer_seconds=times,
        head_seconds={"base": 2 * head / bandwidth, "per_row": 2 * head / flops + 4 * vocab / bandwidth},
        overhead_seconds=1e-3, hidden_bytes_per_token=2 * hidden, weight_bytes=2 * (layers * layer + 2 * head),
        kv_bytes_per_token_layer=4 * kv,
        estimate="roofline of public figures: 50% of 989 TFLOP/s, 70% of 3.35 TB/s, 1 ms driver a step",
    )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Workload(Options):
    """The demand of an RL run: `steps` times `prompts` x `group` responses."""

    prompts: int = option(1024, "prompts of an RL step", 1)
    prompts_per_gpu: int = option(0, "instead of --prompts: so many for each GPU (weak scaling)")
    group: int = option(16, "samples per prompt", 1)
    prompt_tokens: int = option(512, "length of a prompt", 1)
    median: float = option(1024.0, "median response length, tokens", 1)
    sigma: float = option(0.8, "of the log of response lengths; 0: all equal")
    max_tokens: int = option(8192, "responses are cut here", 1)
    steps: int = option(3, "RL steps to simulate", 1)
    seed: int = option(0, "of lengths, stragglers and failures")

    def lengths(self, gpus: int = 1) -> np.ndarray:
        """[steps, prompts, group] response lengths in tokens, int64; of `gpus` only with prompts_per_gpu."""
        shape = self.steps, self.prompts_per_gpu * gpus or self.prompts, self.group
        drawn = np.random.default_rng([self.seed, 0]).lognormal(math.log(self.median), self.sigma, shape)
        return np.clip(np.rint(drawn), 1, self.max_tokens).astype(np.int64)


@dataclasses.dataclass(frozen=True)
class Engine(Options):
    """The limits of one replica."""

    max_num_seqs: int = option(256, "sequences that a replica runs at once, over all batches in flight", 1)
    max_num_seqs_per_gpu: int = option(0, "instead of --max-num-seqs: so many for each GPU of a replica")
    max_num_batched_tokens: int = option(8192, "tokens of one batch: decode rows first, then prefill chunks", 1)
    in_flight: int = option(0, "batches in a pipeline at once; 0: as many as stages")
    staleness: int = option(0, "RL steps that rollouts may run ahead of the weights; 0: synchronous")


@dataclasses.dataclass(frozen=True)
class Cluster(Options):
    """Links, weight sync and faults."""

    link_gbps: float = option(400.0, "Gbit/s of a GPU's link, between stages and for weights", 1e-3)
    link_latency_us: float = option(10.0, "microseconds of a message")
    load_gb_per_second: float = option(20.0, "GB/s at which a GPU takes received weights into use", 1e-3)
    gpu_memory_gb: float = option(80.0, f"GB of a GPU; {USABLE:.0%} are for weights and KV")
    straggler_sigma: float = option(0.0, "a GPU is slower by exp(sigma x |normal|)")
    failures_per_hour: float = option(0.0, "of one GPU; a failure stops its replica")
    restart_seconds: float = option(120.0, "until a failed replica works again")


@dataclasses.dataclass(frozen=True)
class Layout:
    """How a model lies on GPUs. split: layers of each stage; None is even, the first stages take what is left over."""

    gpus: int
    stages: int = 1
    split: tuple[int, ...] | None = None

    @property
    def replicas(self) -> int:
        if self.stages < 1 or self.gpus < 1 or self.gpus % self.stages:
            raise ValueError(f"{self.gpus} GPUs don't make replicas of {self.stages} stages")
        return self.gpus // self.stages

    def layers(self, total: int) -> np.ndarray:
        """[stages] layers of each stage, int64."""
        split = self.split or [total // self.stages + (s < total % self.stages) for s in range(self.stages)]
        if len(split) != self.stages or sum(split) != total or min(split) < 1:
            raise ValueError(f"{tuple(split)} doesn't split {total} layers into {self.stages} stages of at least one")
        return np.array(split, np.int64)


@dataclasses.dataclass(frozen=True)
class Result:
    """One layout's figures. The four shares are of all GPUs' time and add up to 1.

    seconds: of all RL steps, syncs included; sync_seconds: broadcast and load of one.
    bubble: 1 - busy / (stages x time with sequences running); ideal_bubble: that of full, equal batches.
    busy_share, bubble_share: while at least half of the slots that the replica's work can fill are taken.
    tail_share: the rest; waiting for other replicas and restarts are in it. sync_share: weights load, or they travel
    and the replica has nothing else to do.
    """

    gpus: int
    stages: int
    replicas: int
    slots: int
    tokens: int
    seconds: float
    tokens_per_second: float
    tokens_per_second_per_gpu: float
    bubble: float
    ideal_bubble: float
    busy_share: float
    bubble_share: float
    tail_share: float
    sync_share: float
    sync_seconds: float
    failures: int


def slots_that_fit(profile: Profile, layout: Layout, workload: Workload, engine: Engine, cluster: Cluster) -> int:
    """Sequences that a replica runs at once; 0 where the fullest stage can't hold weights and the longest sequence."""
    most = int(layout.layers(profile.layers).max())
    free = USABLE * cluster.gpu_memory_gb * 1e9 - profile.weight_bytes * most / profile.layers
    per_token = max(1, profile.kv_bytes_per_token_layer * most)
    if free < per_token * (workload.prompt_tokens + workload.max_tokens):
        return 0
    mean = workload.prompt_tokens + workload.lengths(layout.gpus).mean()
    return min(engine.max_num_seqs_per_gpu * layout.stages or engine.max_num_seqs, int(free / (per_token * mean)))


def sync_times(profile: Profile, layout: Layout, cluster: Cluster) -> tuple[float, float]:
    """(broadcast, load) seconds of one weight update.

    One rank of the trainer sends all weights to every stage of every replica, by a binary tree: ceil(log2(stages in all
    + 1)) hops. Each keeps, and loads, its shard.
    """
    shard = profile.weight_bytes * int(layout.layers(profile.layers).max()) / profile.layers
    hop = profile.weight_bytes * 8e-9 / cluster.link_gbps + cluster.link_latency_us * 1e-6
    return math.ceil(math.log2(layout.gpus + 1)) * hop, shard * 1e-9 / cluster.load_gb_per_second


def ideal_bubble(stage_seconds: np.ndarray, around_seconds: float, in_flight: int) -> float:
    """Idle share of the stages when `in_flight` equal batches of `stage_seconds` [S] go around without end.

    A round takes as long as the slowest stage needs for all batches, or as one batch needs for the whole way, of which
    `around_seconds` are links and driver. Equal stages and no such time: max(0, 1 - in_flight / S).
    """
    total = float(stage_seconds.sum())
    period = max(in_flight * float(stage_seconds.max()), total + around_seconds)
    return 1 - in_flight * total / (len(stage_seconds) * period)


@njit(cache=True)
def _through(enter, seconds, link, free):
    """One batch through all stages: moves `free` [S], when each stage is free again; returns when the batch leaves."""
    t = enter
    for s in range(len(free)):
        t = max(t + link if s else t, free[s]) + seconds[s]
        free[s] = t
    return t


def pipeline_times(stage_seconds: np.ndarray, link: float, in_flight: int) -> np.ndarray:
    """[B, S] times at which batch b leaves stage s, for `stage_seconds` [B, S]; all in seconds.

    A batch enters when the one `in_flight` before it has left the last stage. Stages that all take t, link 0 and
    in_flight >= S: (b + s + 1) t, so B batches leave stages idle for (S - 1) / (B + S - 1) of the time. A link adds
    s x link where no batch waits for one to return: in_flight >= S + (S - 1) link / t, or in_flight >= B.
    """
    if in_flight < 1:
        raise ValueError(f"in_flight must be at least 1, is {in_flight}")
    stage_seconds = np.asarray(stage_seconds, np.float64)
    finish, free = np.empty_like(stage_seconds), np.zeros(stage_seconds.shape[1])
    for b, seconds in enumerate(stage_seconds):
        _through(finish[b - in_flight, -1] if b >= in_flight else 0.0, seconds, float(link), free)
        finish[b] = free
    return finish


SECONDS = "base per_token per_context_token head_base head_per_row overhead latency link_per_token restart"
Constants = namedtuple("Constants", f"{SECONDS} budget prompt limit")  # the last three count tokens and sequences
SLOT = np.dtype([(name, "i8") for name in ("left", "wait", "length", "step")])
BATCH = np.dtype([("ready", "f8"), *((name, "i8") for name in ("count", "rows", "backlog", "context"))])
STATE = np.dtype(
    [(name, "f8") for name in ("driver", "since", "active", "tail", "sync", "busy", "busy_full")]
    + [(name, "i8") for name in ("head", "turn", "occupied", "filled", "short", "failures")]
)


class Replica(NamedTuple):
    """One pipeline with its driver: what it runs, what waits for it, where its time went. Compiled code changes it."""

    layers: np.ndarray  # [S]
    slowdown: np.ndarray  # [S]
    failures: np.ndarray  # [F] seconds at which it fails
    free: np.ndarray  # [S] seconds from which on a stage is free
    batches: np.ndarray  # [m] BATCH; rows: sequences that decode; backlog: tokens to prefill; context: of rows
    slots: np.ndarray  # [m, W] SLOT, a batch's `count` first are taken; wait: backlog until its own is prefilled
    pending: np.ndarray  # [steps] unfinished sequences of an RL step
    done: np.ndarray  # [steps] seconds at which the latest of them finished
    state: np.ndarray  # [1] STATE; turn: the batch whose result is next; short: under half of `filled` are occupied
    queue: np.ndarray  # [N, 3] length, prompt tokens to compute, RL step; `head` is the next to admit


def constants(
    profile: Profile, cluster: Cluster | None = None, budget: int = 0, prompt: int = 0, limit: int = 0
) -> Constants:
    """Return what stays the same through a simulation."""
    cluster, layer, head = cluster or Cluster(), profile.layer_seconds, profile.head_seconds
    seconds = layer["base"], layer["per_token"], layer["per_context_token"], head["base"], head["per_row"]
    link = cluster.link_latency_us * 1e-6, profile.hidden_bytes_per_token * 8e-9 / cluster.link_gbps
    floats = (float(x) for x in (*seconds, profile.overhead_seconds, *link, cluster.restart_seconds))
    return Constants(*floats, budget, prompt, limit)


@njit(cache=True)
def _stage_seconds(c, layers, slowdown, tokens, context, rows, seconds):
    """Fills `seconds` [S]: one step with so many tokens, keys read by decode rows, and sampled rows."""
    one = c.base + c.per_token * tokens + c.per_context_token * context
    for s in range(len(layers)):
        head = c.head_base + c.head_per_row * rows if s == len(layers) - 1 else 0.0
        seconds[s] = slowdown[s] * (layers[s] * one + head)


@njit(cache=True)
def _account(state, now):
    """Books the time since the last event."""
    state.active += now - state.since
    if state.short:
        state.tail += now - state.since
    state.since = now


@njit(cache=True)
def _admit(c, r, state, batch, slots):
    """Fills a batch from the queue, up to its part of what runs and waits."""
    even = -(-min(c.limit, state.occupied + len(r.queue) - state.head) // len(r.batches))
    while batch.count < even and state.occupied < c.limit and state.head < len(r.queue):
        length, prompt, step = r.queue[state.head]
        batch.backlog += prompt
        slot = slots[batch.count]
        slot.left, slot.length, slot.wait, slot.step = length, length, batch.backlog, step
        if slot.wait == 0:
            batch.rows += 1
            batch.context += c.prompt
        batch.count += 1
        state.head += 1
        state.occupied += 1
    state.short = 2 * state.occupied < state.filled


@njit(cache=True)
def _sample(c, r, state, batch, slots, chunk, now):
    """A token for each sequence whose prompt is computed, after `chunk` prompt tokens; finished ones leave at `now`."""
    batch.backlog -= chunk
    for j in range(batch.count - 1, -1, -1):
        slot = slots[j]
        if slot.wait > chunk:
            slot.wait -= chunk
            continue
        if slot.wait > 0:
            slot.wait = 0
            batch.rows += 1
            batch.context += c.prompt + slot.length - slot.left
        slot.left -= 1
        batch.context += 1
        if slot.left == 0:
            batch.context -= c.prompt + slot.length
            batch.rows -= 1
            batch.count -= 1
            state.occupied -= 1
            r.pending[slot.step] -= 1
            r.done[slot.step] = now
            slots[j] = slots[batch.count]


@njit(cache=True)
def _restart(c, r, state, failure):
    """Unfinished sequences go on when the replica is back, without their KV; an idle one loses only time."""
    back = failure + c.restart
    state.failures += 1
    state.driver = max(state.driver, back)
    if state.occupied:
        _account(state, max(state.since, failure))
        state.tail += max(0.0, back - state.since)
        state.since = max(state.since, back)
        r.free[:] = back
        for i in range(len(r.batches)):
            batch = r.batches[i]
            batch.ready, batch.rows, batch.context, batch.backlog = back, 0, 0, 0
            for j in range(batch.count):
                slot = r.slots[i, j]
                batch.backlog += c.prompt + slot.length - slot.left
                slot.wait = batch.backlog


@njit(cache=True)
def _advance(c, r, until, step):
    """Runs a replica until its next event is at `until` or later, its part of RL step `step` (if >= 0) is done, or
    there is nothing to do."""
    state, seconds = r.state[0], np.empty(len(r.layers))
    while (step < 0 or r.pending[step] > 0) and (state.occupied > 0 or state.head < len(r.queue)):
        batch, slots = r.batches[state.turn], r.slots[state.turn]
        if batch.count > 0 or state.head < len(r.queue):
            now = max(batch.ready, state.driver)
            failure = r.failures[state.failures] if state.failures < len(r.failures) else np.inf
            if min(now, failure) >= until:
                return
            if failure <= now:
                _restart(c, r, state, failure)
                continue
            _account(state, now)
            _admit(c, r, state, batch, slots)
            chunk = min(batch.backlog, max(c.budget - batch.rows, 0))
            sampled = batch.rows
            for j in range(batch.count if chunk else 0):
                sampled += 0 < slots[j].wait <= chunk
            tokens = batch.rows + chunk
            _stage_seconds(c, r.layers, r.slowdown, tokens, batch.context, sampled, seconds)
            state.driver = now + c.overhead
            batch.ready = _through(state.driver, seconds, c.latency + c.link_per_token * tokens, r.free)
            if len(r.layers) > 1:
                batch.ready += c.latency  # the sampled tokens' way back
            state.busy += seconds.sum()
            state.busy_full += 0.0 if state.short else seconds.sum()
            _sample(c, r, state, batch, slots, chunk, batch.ready)
        state.turn = (state.turn + 1) % len(r.batches)


@njit(cache=True)
def _publish(r, gate, broadcast, load):
    """New weights, sent for `broadcast` seconds, have arrived at `gate`; the replica pauses for `load` seconds."""
    state = r.state[0]
    now = max(gate, state.driver)
    if r.pending.sum() == 0:
        _account(state, max(state.since, min(r.batches.ready.max(), now)))
        idle = now - state.since
        state.sync += min(idle, broadcast)
        state.tail += max(0.0, idle - broadcast)
    else:
        _account(state, now)
    state.sync += load
    state.driver = state.since = now + load


def route(c: Constants, groups: np.ndarray, replicas: list[Replica], step: int) -> None:
    """Deals whole groups [prompts, group] of response lengths, each to the replica with the fewest unfinished.

    The first of a group computes the prompt.
    """
    heap = [(int(replica.pending.sum()), i) for i, replica in enumerate(replicas)]
    heapq.heapify(heap)
    dealt: list[list[np.ndarray]] = [[] for _ in replicas]
    for group in groups:
        load, i = heap[0]
        dealt[i].append(np.stack([group, c.prompt * (np.arange(len(group)) == 0), np.full_like(group, step)], axis=1))
        heapq.heapreplace(heap, (load + len(group), i))
    for i, rows in enumerate(dealt):
        state = replicas[i].state[0]
        replicas[i] = replicas[i]._replace(queue=np.concatenate([replicas[i].queue[state["head"] :], *rows]))
        replicas[i].pending[step] = sum(map(len, rows))
        state["head"], state["filled"] = 0, min(c.limit, replicas[i].pending.sum())


def start(
    layout: Layout, layers: np.ndarray, limit: int, workload: Workload, engine: Engine, cluster: Cluster
) -> list[Replica]:
    """The layout's replicas, idle. Draws are the same for the first replicas of any number."""
    normal = np.random.default_rng([workload.seed, 1]).standard_normal((layout.replicas, layout.stages))
    slowdown = np.exp(cluster.straggler_sigma * np.abs(normal))
    m, rate = min(engine.in_flight or layout.stages, limit), cluster.failures_per_hour * layout.stages / 3600
    gaps = np.random.default_rng([workload.seed, 2]).exponential(1, (layout.replicas, MOST_FAILURES if rate else 0))
    return [
        Replica(
            layers, slowdown[i], np.cumsum(gaps[i]) / (rate or 1), np.zeros(layout.stages), np.zeros(m, BATCH),
            np.zeros((m, -(-limit // m)), SLOT), np.zeros(workload.steps, np.int64), np.zeros(workload.steps),
            np.zeros(1, STATE), np.zeros((0, 3), np.int64),
        )
        for i in range(layout.replicas)
    ]  # fmt: skip


def simulate(
    profile: Profile, layout: Layout, workload: Workload, engine: Engine | None = None, cluster: Cluster | None = None
) -> Result:
    """One layout under one workload. ValueError if it doesn't fit; ask `slots_that_fit` first.

    The weights are on their way anew when all rollouts of an RL step are done; step i starts when those made from step
    i - staleness - 1 have arrived.
    """
    engine, cluster = engine or Engine(), cluster or Cluster()
    limit, layers = slots_that_fit(profile, layout, workload, engine, cluster), layout.layers(profile.layers)
    if limit < 1:
        raise ValueError(f"a stage of {layers.max()} layers and one sequence don't fit {cluster.gpu_memory_gb:g} GB")
    in_flight, lengths = engine.in_flight or layout.stages, workload.lengths(layout.gpus)
    if engine.max_num_batched_tokens <= -(-limit // in_flight):
        raise ValueError(f"max_num_batched_tokens must exceed the {-(-limit // in_flight)} decode rows of a batch")
    c = constants(profile, cluster, engine.max_num_batched_tokens, workload.prompt_tokens, limit)
    replicas = start(layout, layers, limit, workload, engine, cluster)
    broadcast, load = sync_times(profile, layout, cluster)
    for step in range(min(engine.staleness + 1, workload.steps)):
        route(c, lengths[step], replicas, step)
    gate = 0.0
    for step in range(workload.steps):
        for replica in replicas:
            _advance(c, replica, math.inf, step)
        gate = max(gate, *(replica.done[step] for replica in replicas)) + broadcast
        for replica in replicas:
            _advance(c, replica, gate, -1)
            _publish(replica, gate, broadcast, load)
        if (following := step + 1 + engine.staleness) < workload.steps:
            route(c, lengths[following], replicas, following)
    state = np.concatenate([replica.state for replica in replicas])
    if state["failures"].max() == MOST_FAILURES:
        raise ValueError(f"{MOST_FAILURES} failures of one replica; lower failures_per_hour or the restart_seconds")
    rows = max(1, min(limit, lengths[0].size // layout.replicas) // in_flight)
    context = int(rows * (workload.prompt_tokens + lengths.mean() / 2))
    _stage_seconds(c, layers, np.ones(layout.stages), rows, context, rows, full := np.empty(layout.stages))
    hops = layout.stages * c.latency + (layout.stages - 1) * c.link_per_token * rows if layout.stages > 1 else 0.0
    tokens, seconds = int(lengths.sum()), float(state["since"].max())
    shares = {name: float(state[name].sum() / seconds / layout.replicas) for name in ("busy_full", "tail", "sync")}
    busy = shares["busy_full"] / layout.stages
    return Result(
        layout.gpus, layout.stages, layout.replicas, limit, tokens, seconds, tokens / seconds,
        tokens / seconds / layout.gpus, bubble=float(1 - state["busy"].sum() / (layout.stages * state["active"].sum())),
        ideal_bubble=ideal_bubble(full, c.overhead + hops, in_flight), busy_share=busy,
        bubble_share=max(0.0, 1 - busy - shares["tail"] - shares["sync"]), tail_share=shares["tail"],
        sync_share=shares["sync"], sync_seconds=broadcast + load, failures=int(state["failures"].sum()),
    )  # fmt: skip


def efficiency(results: list[Result]) -> list[float]:
    """Tokens a second and GPU over those of the best layout on the fewest GPUs."""
    fewest = min(r.gpus for r in results)
    best = max(r.tokens_per_second_per_gpu for r in results if r.gpus == fewest)
    return [r.tokens_per_second_per_gpu / best for r in results]


def title(profile: Profile) -> str:
    origin = f"ESTIMATE, not measured ({profile.estimate})" if profile.estimate else "from measured stage times"
    return f"simulated: {profile.model} on {profile.device}; {origin}"


def show(profile: Profile, results: list[Result], console: Console) -> None:
    table = Table(title=title(profile))
    columns = "GPUs", "stages", "replicas", "slots", "tok/s", "per GPU", "efficiency", "bubble (ideal)", "tail", "sync"
    for name in columns:
        table.add_column(name, justify="right")
    for r, share in zip(results, efficiency(results), strict=True):
        rates = r.tokens_per_second, r.tokens_per_second_per_gpu
        numbers = (f"{x:,.0f}" for x in (r.gpus, r.stages, r.replicas, r.slots, *rates))
        bubble = f"{r.bubble:.1%} ({r.ideal_bubble:.1%})"
        table.add_row(*numbers, f"{share:.1%}", bubble, f"{r.tail_share:.1%}", f"{r.sync_share:.1%}")
    console.print(table)


def plot(profile: Profile, results: list[Result], target: pathlib.Path) -> None:
    """Two panels: throughput against GPUs with the ideal line, and where the GPUs' time went."""
    import matplotlib.pyplot as plt

    drawing, (left, right) = plt.subplots(1, 2, figsize=(17, 6), layout="constrained", width_ratios=(2, 3))
    gpus, stages = sorted({r.gpus for r in results}), sorted({r.stages for r in results})
    for s in stages:
        points = [(r.gpus, r.tokens_per_second) for r in results if r.stages == s]
        left.plot(*zip(*points, strict=True), marker="o", label=f"{s} stage{'s' * (s > 1)}")
    first = results[0].tokens_per_second_per_gpu / efficiency(results)[0]
    left.plot(gpus, [first * n for n in gpus], color="black", linestyle=":", label="ideal")
    left.set(xscale="log", yscale="log", xlabel="GPUs", ylabel="tokens a second", xticks=gpus, xticklabels=gpus)
    left.minorticks_off()
    left.legend(frameon=False)
    width, base = 0.85 / len(stages), np.zeros(len(results))
    own = {n: [r.stages for r in results if r.gpus == n] for n in gpus}
    places = [gpus.index(r.gpus) + (own[r.gpus].index(r.stages) - (len(own[r.gpus]) - 1) / 2) * width for r in results]
    for name, color in {"busy": "C0", "bubble": "C1", "tail": "C3", "sync": "C2"}.items():
        share = np.array([getattr(r, f"{name}_share") for r in results])
        right.bar(places, share, width * 0.9, bottom=base, color=color, label=name)
        base += share
    right.set(xlabel=f"GPUs; bars: {', '.join(map(str, stages))} stages", ylabel="share of GPU time", ylim=(0, 1))
    right.set_xticks(range(len(gpus)), [str(n) for n in gpus])
    right.legend(frameon=False, ncols=4, loc="lower center", bbox_to_anchor=(0.5, 1))
    drawing.suptitle(title(profile))
    drawing.savefig(target, dpi=80)
    plt.close(drawing)


def sweep(profile: Profile, arguments: argparse.Namespace) -> tuple[dict[str, Any], list[Result], list[str]]:
    """(settings, results of the layouts that fit, those that don't)."""
    kinds, split = (Workload, Engine, Cluster), tuple(arguments.split or ())
    given = [kind(**{f.name: getattr(arguments, f.name) for f in dataclasses.fields(kind)}) for kind in kinds]
    if split and len(split) not in arguments.stages:
        raise ValueError(f"--split names {len(split)} stages, --stages {arguments.stages}")
    pairs = [(n, s) for n in sorted(arguments.gpus) for s in sorted(arguments.stages) if n % s == 0]
    layouts = [Layout(n, s, split if len(split) == s else None) for n, s in pairs if s <= profile.layers]
    fit = [each for each in layouts if slots_that_fit(profile, each, *given)]
    if not fit:
        raise ValueError(f"no layout fits {arguments.gpu_memory_gb:g} GB per GPU; allow more stages, GPUs or memory")
    settings = {type(each).__name__.lower(): dataclasses.asdict(each) for each in (profile, *given)}
    results = [simulate(profile, each, *given) for each in tqdm(fit, unit="layout", leave=False)]
    return settings, results, [f"{each.gpus} x {each.stages}" for each in layouts if each not in fit]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--profile", default=str(PROFILE), help="JSON file of stage times, or example-7b")
    parser.add_argument("--gpus", type=int, nargs="+", default=[2**n for n in range(11)])
    parser.add_argument("--stages", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--split", type=int, nargs="+", help="layers of each stage, for layouts of so many stages")
    for kind in (Workload, Engine, Cluster):
        group = parser.add_argument_group(kind.__name__.lower())
        for field in dataclasses.fields(kind):
            text = f"{field.metadata['help']} (default: {field.default})".replace("%", "%%")
            name = "--" + field.name.replace("_", "-")
            group.add_argument(name, default=field.default, type=type(field.default), help=text)
    parser.add_argument("--json", type=pathlib.Path, help="also write settings and results here")
    parser.add_argument("--plot", type=pathlib.Path, help="draw throughput and shares of time into this PNG")
    arguments = parser.parse_args()
    try:
        profile = Profile.load(arguments.profile)
        settings, results, left_out = sweep(profile, arguments)
    except ValueError as error:
        parser.exit(2, f"{error}\n")
    show(profile, results, console := Console(width=120))
    if left_out:
        console.print(f"GPUs x stages that don't fit {arguments.gpu_memory_gb:g} GB per GPU: {', '.join(left_out)}")
    if arguments.json:
        rows = [dataclasses.asdict(r) | {"efficiency": e} for r, e in zip(results, efficiency(results), strict=True)]
        arguments.json.write_text(json.dumps({"simulated": True, **settings, "results": rows}, indent=1) + "\n")
    if arguments.plot:
        plot(profile, results, arguments.plot)


if __name__ == "__main__":
    main()
