"""vLLM's control plane, and what both dialects ask under one name."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Literal

from fastapi import APIRouter, Query
from pydantic import Field

from ..engine import LLM
from ..engine.engine import MEMORY_TAGS
from .protocol import Body, FastRoute, reply
from .service import LOGPROBS_MODE, Served, Service
from .sglang_control import InitGroupBody, Label, Manifest, done, init_weights_update_group
from .states import ConflictError

router = APIRouter(route_class=FastRoute, tags=["vLLM: information"])
control = APIRouter(route_class=FastRoute, tags=["vLLM: control"])

PauseMode = Literal["abort", "wait", "keep"]


class AbortRequestsBody(Body):
    """The requests to abort; none named: all."""

    request_ids: list[str] = Field(default_factory=list)


class InitTransferBody(Body):
    """The description of a trainer's process group."""

    init_info: InitGroupBody


class UpdateBody(Body):
    """An update by broadcast or from a directory."""

    update_info: Manifest | None = None
    weight_dir: str | None = Field(default=None, min_length=1)
    weight_version: Label | None = None


class VersionBody(Body):
    """A new label for the version in force."""

    new_version: Label
    abort_all_requests: bool = False


class CheckerBody(Body):
    """An action of the weight checker, and the checksums to compare with."""

    action: Literal["checksum", "reset", "compare"]
    baseline: dict[str, str] = Field(default_factory=dict)


class SnapshotBody(Body):
    """A step of SGLang's check of weights."""

    action: Literal["snapshot", "reset_tensors", "compare"]


# --- pausing ----------------------------------------------------------------------------------------------------------


@control.post("/pause")
async def pause(server: Served, mode: PauseMode = "abort", clear_cache: bool = True):
    """Stop between two steps. abort, wait: new requests get 503 until /resume; keep: they wait."""
    await server.engine.pause(mode, refuse=mode != "keep")
    return reply({"status": "paused"})


@control.post("/resume")
async def resume(server: Served):
    """Resume generation after a pause. 409 in the middle of a weight update."""
    await server.updates.resume()
    return reply({"status": "resumed"})


@router.get("/is_paused")
async def is_paused(server: Served):
    """Say whether generation is paused, and the state of the server."""
    state = server.engine.state
    return reply({"is_paused": state.paused.is_set(), "state": state.name})


@control.post("/inference/v1/abort_requests")
@control.post("/abort_requests")
async def abort_requests(server: Served, body: AbortRequestsBody | None = None):
    """End requests by their ids; an empty list ends all."""
    ids = (body or AbortRequestsBody()).request_ids
    return reply({"status": "aborted", "aborted": await server.engine.abort(ids or None)})


@control.post("/reset_prefix_cache")
async def reset_prefix_cache(server: Served, reset_running_requests: bool = False):
    """Forget all cached prefixes; on request, of running requests, too."""
    await server.engine.call(lambda llm: llm.reset_prefix_cache(reset_running_requests))
    return reply({"success": True})


# --- weights ----------------------------------------------------------------------------------------------------------


@control.post("/init_weight_transfer_engine")
async def init_weight_transfer_engine(body: InitTransferBody, server: Served):
    """Join a torch process group (`backend`: "gloo" or "nccl") whose rank 0 will send weights.

    vLLM's own group, NCCL without torch, is another protocol and not supported: name a backend of torch's.
    """
    info = body.init_info
    if "backend" not in info.model_fields_set:
        raise ValueError('only torch process groups are supported here: set init_info.backend to "gloo" or "nccl"')
    return await init_weights_update_group(info, server)


@control.post("/update_weights")
async def update_weights(body: UpdateBody, server: Served):
    """Receive tensors over the group, or load the checkpoint directory `weight_dir`."""
    updates = server.updates
    info = body.update_info
    if info is not None and body.weight_dir is None:
        message = await updates.receive(info.group_name, info.specs(), info.bucket_bytes, body.weight_version)
    elif info is None and body.weight_dir is not None:
        message = await updates.load(body.weight_dir, body.weight_version)
    else:
        raise ValueError("give either update_info or weight_dir")
    return done(message)


@control.post("/update_weight_version")
async def update_weight_version(body: VersionBody, server: Served):
    """Rename the version in force."""
    if body.abort_all_requests:
        await server.engine.abort()
    server.updates.relabel(body.new_version)
    return done("weight version renamed", new_version=body.new_version)


@router.get("/weight_info")
async def weight_info(server: Served):
    """The weight version's label, the number of updates, and the groups that could receive weights."""
    groups = [name for name in server.updates.groups if server.llm.worker_engine.workers.has_weight_group(name)]
    return reply({
        "weight_version": server.updates.label,
        "updates": server.llm.weight_version,
        "weight_groups": groups,  # that could receive weights now
    })  # fmt: skip


@router.get("/weight_version")
@router.get("/get_weight_version")
async def get_weight_version(server: Served):
    """The weight version's label, as slime and Miles ask for it."""
    return reply({"weight_version": server.updates.label})


@control.post("/weights_checker")
async def weights_checker(body: SnapshotBody, server: Served):
    """Check weights in SGLang's three steps: take a snapshot (of hashes), drop all weights, compare what came since."""
    if body.action == "reset_tensors":
        await server.engine.release_memory(["weights"])
        return done("all weights are dropped; nothing is served before an update has brought them")
    found = await _checksums(server)
    if body.action == "snapshot":
        server.weight_snapshot = found
        return done(f"took a snapshot of {len(found)} tensors")
    if server.weight_snapshot is None:
        raise ConflictError('there is nothing to compare with; send {"action": "snapshot"} first')
    if wrong := _mismatches(server.weight_snapshot, found):
        raise ValueError(f"{len(wrong)} of {len(found)} tensors differ from the snapshot, first {wrong[0]!r}")
    return done(f"all {len(found)} tensors are those of the snapshot")


@control.post("/weight_checker")
async def weight_checker(body: CheckerBody, server: Served):
    """Check weights. checksum: a hash of each tensor. compare: those that differ from a baseline of such hashes. reset:
    drops the weights, so that nothing can be served before an update has brought all of them.
    """
    if body.action == "reset":
        await server.engine.release_memory(["weights"])
        return reply({"status": "reset"})
    found = await _checksums(server)
    if body.action == "checksum":
        return reply({"checksums": found})
    mismatches = _mismatches(body.baseline, found)
    return reply({"match": not mismatches, "mismatches": mismatches})


async def _checksums(server: Service) -> dict[str, str]:
    if not server.llm.has_weights:
        raise ValueError("the weights are dropped: wake the engine up, or update them")
    return await server.engine.call(LLM.weight_checksums)


def _mismatches(baseline: dict[str, str], found: dict[str, str]) -> list[str]:
    return sorted(name for name in baseline.keys() | found.keys() if baseline.get(name) != found.get(name))


# --- memory -----------------------------------------------------------------------------------------------------------


@control.post("/sleep")
async def sleep(server: Served, level: Annotated[int, Query(ge=0, le=2)] = 1, mode: PauseMode = "abort"):
    """Pause, then free the KV cache (level 1), and the weights (level 2); level 0 only pauses."""
    await server.engine.pause(mode, refuse=mode != "keep")
    freed = await server.engine.release_memory(MEMORY_TAGS[-level:]) if level else 0
    return reply({"status": "asleep", "level": level, "freed_bytes": freed})


@control.post("/wake_up")
async def wake_up(server: Served, tags: Annotated[list[str] | None, Query()] = None):
    """Take back what the tags name (weights, kv_cache), or all; go on when nothing is missing and no update comes."""
    memory = [t for t in tags or MEMORY_TAGS if t != "scheduling"]
    await server.engine.call(lambda llm: llm.wake_up(memory))
    asleep = not server.llm.has_kv_cache or (tags is not None and not server.llm.has_weights)
    if not asleep and server.engine.state.update is None:
        await server.engine.resume()
    return reply({"status": "asleep in part" if asleep else "awake"})


@router.get("/is_sleeping")
async def is_sleeping(server: Served):
    """Say whether weights or KV cache are released."""
    return reply({"is_sleeping": not server.llm.ready})


# --- information ------------------------------------------------------------------------------------------------------


@router.get("/get_world_size")
async def get_world_size(server: Served, include_dp: bool = True):
    """Ranks that this server takes in a weight group; without include_dp, those of one replica."""
    llm = server.llm
    return reply({"world_size": llm.world_size if include_dp else llm.config.pipeline_parallel_size})


@router.get("/get_server_info")
@router.get("/server_info")
async def server_info(server: Served, config_format: Literal["text", "json"] = "text"):
    """Both dialects' server information, and what log-probs mean here."""
    llm = server.llm
    config = llm.config
    load = server.load()
    limits = {"max_num_seqs": config.max_num_seqs, "max_num_batched_tokens": config.max_num_batched_tokens}
    vllm_config = {
        "model_config": {
            "model": server.model_name,
            "dtype": config.dtype,
            "max_model_len": llm.max_model_len,
            "logprobs_mode": "processed_logprobs",  # vLLM's word for log-probs of the distribution sampled from
        },
        "cache_config": {"enable_prefix_caching": config.enable_prefix_caching, "num_blocks": load.kv_blocks_total},
        "scheduler_config": limits,
        "weight_transfer_config": {"backend": "gloo"},
    }
    return reply({
        "vllm_config": vllm_config,
        "model_path": str(llm.path),
        "tokenizer_path": str(llm.path),
        "served_model_name": server.model_name,
        "tp_size": 1,
        "pp_size": config.pipeline_parallel_size,
        "dp_size": config.replicas,
        "enable_memory_saver": False,  # slime's external engines must say so
        "enable_return_routed_experts": llm.engine.has_experts,
        "max_total_num_tokens": llm.engine.capacity,
        "max_running_requests": config.max_num_seqs * config.replicas,
        "context_length": llm.max_model_len,
        "weight_version": server.updates.label,
        "logprobs_mode": LOGPROBS_MODE,
        "contract": server.contract_hash,
        "engine": "samebits",
        "control_port": server.guard.control_port,
        "limits": asdict(server.engine.limits),
        "stats": asdict(load),
    })  # fmt: skip
