"""The control plane of both dialects: pausing, aborting, weights, memory."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request
from pydantic import AliasChoices, Field

from ..engine import LLM
from ..engine.engine import MEMORY_TAGS
from ..engine.weights import TensorSpec
from ..engine.weights.group import DEFAULT_GROUP_NAME, WHOLE
from ..engine.weights.spec import parse_specs
from .protocol import Body, FastRoute, Ids, Many, reply
from .service import Served
from .states import ConflictError


async def check_read(request: Request) -> None:
    """Raise ValueError for what the route would ignore: a body, or a query parameter that asks for something."""
    route = request.scope["route"]
    known = [str(field.alias) for field in route.dependant.query_params]
    unknown = [k for k, v in request.query_params.items() if k not in known and v not in ("", "false")]
    if unknown or (route.body_field is None and await request.body() not in (b"", b"{}", b"null")):
        what = f"query parameter {unknown[0][:100]!r}" if unknown else "body"
        raise ValueError(f"unknown {what}: {route.path} takes {', '.join(known) or 'nothing'} in its query")


vllm = APIRouter(route_class=FastRoute, tags=["vLLM: control"])
sglang = APIRouter(route_class=FastRoute, tags=["SGLang: control"])

PauseMode = Literal["abort", "wait", "keep"]
Label = Annotated[str, Field(strict=False, coerce_numbers_to_str=True, max_length=256)]


class AbortRequestsBody(Body):
    """The requests to abort; none named: all."""

    request_ids: Many[str] = Field(default_factory=list)


class AbortBody(Body):
    """The request to abort, or all."""

    rid: str | None = None
    abort_all: bool = False


class ResetBody(Body):
    """Whether running requests are to forget their prefixes, too."""

    reset_running_requests: bool = False


class PauseBody(Body):
    """A pause, and what it does with running requests."""

    mode: Literal["abort", "retract", "in_place"] = "abort"


class WholeUpdateBody(Body):
    """The label of the version that an update makes."""

    weight_version: Label | None = None


class _UpdateBody(WholeUpdateBody):
    abort_all_requests: bool | None = Field(default=False, description="End all requests once the weights are there.")


class FromDiskBody(_UpdateBody):
    """A checkpoint directory to load."""

    model_path: str = Field(min_length=1)
    load_format: Literal["auto", "safetensors"] | None = None


class GroupBody(Body):
    """The name of a process group."""

    group_name: str = DEFAULT_GROUP_NAME


class InitGroupBody(GroupBody):
    """A trainer's process group and this server's place in it."""

    master_address: str
    master_port: int = Field(ge=1, le=65535, strict=False)
    rank_offset: int = Field(ge=1)  # rank 0 sends
    world_size: int = Field(ge=2)
    backend: str = "nccl"


class InitTransferBody(Body):
    """The description of a trainer's process group."""

    init_info: InitGroupBody


class TensorListBody(GroupBody):
    """The tensors that a broadcast brings, in order; vLLM calls their dtypes dtype_names."""

    names: Many[str] = Field(min_length=1)
    dtypes: Many[str] = Field(validation_alias=AliasChoices("dtypes", "dtype_names"))
    shapes: Many[Ids]
    bucket_bytes: int | None = Field(default=None, ge=1, description="samebits' own: broadcasts of at most N bytes.")

    def specs(self) -> list[TensorSpec]:
        """The list as the engine takes it. Raises ValueError."""
        return parse_specs(self.names, self.dtypes, self.shapes)


class FromDistributedBody(TensorListBody, _UpdateBody):
    """A list of tensors, and how they are sent."""

    load_format: Literal["flattened_bucket"] | None = None


class UpdateBody(WholeUpdateBody):
    """An update by broadcast or from a directory."""

    update_info: TensorListBody | None = None
    weight_dir: str | None = Field(default=None, min_length=1)


class VersionBody(Body):
    """A new label for the version in force."""

    new_version: Label
    abort_all_requests: bool = False


class CheckerBody(Body):
    """A step of a check of weights, by SGLang's name or vLLM's, and the checksums to compare with."""

    action: Literal["checksum", "snapshot", "reset", "reset_tensors", "compare"]
    baseline: dict[str, str] | None = Field(default=None, description="None: those of the snapshot.")


class MemoryBody(Body):
    """The kinds of memory to release or to take back; none named: all."""

    tags: Many[Literal["weights", "kv_cache", "cuda_graph"]] | None = None


def done(message: str, **more: Any):
    """Return a reply of success in SGLang's form."""
    return reply({"success": True, "message": message, "status": "ok"} | more)


# --- pausing ----------------------------------------------------------------------------------------------------------


@vllm.post("/pause")
async def pause(server: Served, mode: PauseMode = "abort", clear_cache: bool | None = None):
    """Stop between two steps. abort, wait: new requests get 503 until /resume; keep: they wait.

    clear_cache: forget cached prefixes, too, and with keep have what runs computed anew; unset, all but keep do.
    """
    await server.engine.pause(mode, refuse=mode != "keep")
    if clear_cache or (clear_cache is None and mode != "keep"):
        await server.engine.call(lambda llm: llm.reset_prefix_cache(mode == "keep"))
    return reply({"status": "paused"})


@sglang.post("/pause_generation")
async def pause_generation(server: Served, body: PauseBody | None = None):
    """Stop between two steps. New requests wait until /continue_generation."""
    mode = body.mode if body else "abort"
    await server.engine.pause("keep" if mode == "in_place" else mode, refuse=False)
    return done(f"generation paused ({mode})")


@vllm.post("/resume")
async def resume(server: Served):
    """Resume generation after a pause. 409 in the middle of a weight update."""
    await server.updates.resume()
    return reply({"status": "resumed"})


@sglang.post("/continue_generation")
async def continue_generation(server: Served, body: Body | None = None):
    """Resume generation after a pause. 409 in the middle of a weight update."""
    await server.updates.resume()
    return done("generation continues")


@vllm.post("/inference/v1/abort_requests")
@vllm.post("/abort_requests")
async def abort_requests(server: Served, body: AbortRequestsBody | None = None):
    """End requests by their ids; an empty list ends all."""
    return reply({"status": "aborted", "aborted": await server.engine.abort(body.request_ids if body else [])})


@sglang.post("/abort_request")
async def abort_request(server: Served, body: AbortBody | None = None):
    """Abort one request or all."""
    if body is None or not (body.abort_all or body.rid):
        raise ValueError("give rid, or abort_all=true")
    count = await server.engine.abort([] if body.abort_all or not body.rid else [body.rid])
    return done(f"{count} requests aborted", aborted=count)


@vllm.post("/reset_prefix_cache")
async def reset_prefix_cache(server: Served, reset_running_requests: bool = False, body: ResetBody | None = None):
    """Forget all cached prefixes; on request, in the query or the body, of running requests, too."""
    reset = reset_running_requests or (body is not None and body.reset_running_requests)
    await server.engine.call(lambda llm: llm.reset_prefix_cache(reset))
    return reply({"success": True})


@sglang.get("/flush_cache")
@sglang.post("/flush_cache")
async def flush_cache(server: Served, timeout: float = 0.0):
    """Forget cached prefixes. 400 while requests run, also in `timeout` seconds; paused ones will be recomputed."""
    paused = server.engine.state.paused
    await server.engine.wait_idle(0.0 if paused else timeout)
    if server.engine.num_sequences and not paused:
        raise ValueError("requests are running; pause or finish them first")
    await server.engine.call(lambda llm: llm.reset_prefix_cache(reset_running_requests=paused))
    return done("cache flushed")


# --- weights ----------------------------------------------------------------------------------------------------------


@vllm.post("/init_weight_transfer_engine")
async def init_weight_transfer_engine(body: InitTransferBody, server: Served):
    """Join a torch process group (`backend`: "gloo" or "nccl") whose rank 0 will send weights.

    vLLM's own group, NCCL without torch, is another protocol and not supported: name a backend of torch's.
    """
    if "backend" not in body.init_info.model_fields_set:
        raise ValueError('only torch process groups are supported here: set init_info.backend to "gloo" or "nccl"')
    return await init_weights_update_group(body.init_info, server)


@sglang.post("/init_weights_update_group")
async def init_weights_update_group(body: InitGroupBody, server: Served):
    """Join a torch process group whose rank 0 will send weights."""
    where = (body.master_address, body.master_port, body.rank_offset, body.world_size, body.backend)
    await server.updates.join(body.group_name, *where)
    return done(f"joined weight group {body.group_name!r} as rank {body.rank_offset} of {body.world_size}")


@vllm.post("/shutdown_weight_transfer_engine")
@sglang.post("/destroy_weights_update_group")
async def destroy_weights_update_group(server: Served, body: GroupBody | None = None):
    """Leave a trainer's process group."""
    name = body.group_name if body else DEFAULT_GROUP_NAME
    left = await server.updates.leave(name)
    return done(f"left weight group {name!r}" if left else f"there was no weight group {name!r}")


@vllm.post("/start_weight_update")
@sglang.post("/begin_weight_update")
async def begin_weight_update(server: Served, body: WholeUpdateBody | None = None):
    """Begin an update: tensors that come from now on are put in force by /finish_weight_update or /end_weight_update,
    together.
    """
    await server.updates.begin(body.weight_version if body else None)
    return done("weight update begun")


@vllm.post("/update_weights")
async def update_weights(body: UpdateBody, server: Served):
    """Receive tensors over the group, or load the checkpoint directory `weight_dir`."""
    info = body.update_info
    label = body.weight_version
    if info and not body.weight_dir:
        return done(await server.updates.receive(info.group_name, info.specs(), info.bucket_bytes, label))
    if body.weight_dir and not info:
        return done(await server.updates.load(body.weight_dir, label))
    raise ValueError("give either update_info or weight_dir")


@sglang.post("/update_weights_from_disk")
async def update_weights_from_disk(body: FromDiskBody, server: Served):
    """Load a checkpoint directory, checked whole before it is in force."""
    message = await server.updates.load(body.model_path, body.weight_version, bool(body.abort_all_requests))
    return done(message, num_paused_requests=server.engine.num_sequences if server.engine.state.paused else 0)


@sglang.post("/update_weights_from_distributed")
async def update_weights_from_distributed(body: FromDistributedBody, server: Served):
    """Receive tensors over a group: all, or a bucket; the version moves when none is missing."""
    bucket_bytes = WHOLE if body.load_format else body.bucket_bytes
    what = (body.group_name, body.specs(), bucket_bytes, body.weight_version, bool(body.abort_all_requests))
    return done(await server.updates.receive(*what))


@vllm.post("/finish_weight_update")
@sglang.post("/end_weight_update")
async def end_weight_update(server: Served, body: WholeUpdateBody | None = None):
    """Put the weights of the update that was begun into force."""
    await server.updates.finish(body.weight_version if body else None)
    return done(f"version {server.updates.label!r} is in force", weight_version=server.updates.label)


@vllm.post("/update_weight_version")
async def update_weight_version(body: VersionBody, server: Served):
    """Rename the version in force."""
    if body.abort_all_requests:
        await server.engine.abort()
    server.updates.relabel(body.new_version, server.llm.weight_version)
    return done("weight version renamed", new_version=body.new_version)


@vllm.post("/weight_checker")
@sglang.post("/weights_checker")
async def weight_checker(body: CheckerBody, server: Served):
    """Check weights by a hash of each tensor.

    checksum returns the hashes, snapshot keeps them here. reset and reset_tensors drop all weights, so that nothing is
    served before an update has brought them. compare says what differs from a baseline, or else from the snapshot,
    where a difference is a 400.
    """
    if body.action.startswith("reset"):
        await server.engine.release_memory(["weights"])
        return done("all weights are dropped; nothing is served before an update has brought them", status="reset")
    found = await server.engine.call(LLM.weight_checksums)
    if body.action == "checksum":
        return reply({"checksums": found})
    if body.action == "snapshot":
        server.weight_snapshot = found
        return done(f"took a snapshot of {len(found)} tensors")
    baseline = server.weight_snapshot if body.baseline is None else body.baseline
    if baseline is None:
        raise ConflictError('there is nothing to compare with; send {"action": "snapshot"} first')
    wrong = sorted(name for name in baseline.keys() | found.keys() if baseline.get(name) != found.get(name))
    if body.baseline is not None:
        return reply({"match": not wrong, "mismatches": wrong})
    if wrong:
        raise ValueError(f"{len(wrong)} of {len(found)} tensors differ from the snapshot, first {wrong[0]!r}")
    return done(f"all {len(found)} tensors are those of the snapshot")


# --- memory -----------------------------------------------------------------------------------------------------------


@vllm.post("/sleep")
async def sleep(server: Served, level: Annotated[int, Query(ge=0, le=2)] = 1, mode: PauseMode = "abort"):
    """Pause, then free the KV cache (level 1), and the weights (level 2); level 0 only pauses."""
    await server.engine.pause(mode, refuse=mode != "keep")
    freed = await server.engine.release_memory(MEMORY_TAGS[-level:]) if level else 0
    return reply({"status": "asleep" if level else "paused", "level": level, "freed_bytes": freed})


@vllm.post("/wake_up")
async def wake_up(server: Served, tags: Annotated[list[str] | None, Query()] = None):
    """Take back what the tags name (weights, kv_cache), or all; go on when nothing is missing and no update comes."""
    memory = [t for t in tags or MEMORY_TAGS if t != "scheduling"]
    await server.engine.call(lambda llm: llm.wake_up(memory))
    asleep = not server.llm.has_kv_cache or (tags is not None and not server.llm.has_weights)
    state = server.engine.state
    if not asleep and state.update is None and state.pending is None:
        await server.engine.resume()
    return reply({"status": "asleep in part" if asleep else "paused" if state.paused else "awake"})


@sglang.get("/release_memory_occupation")
@sglang.post("/release_memory_occupation")
async def release_memory_occupation(server: Served, body: MemoryBody | None = None):
    """Free memory; the header x-samebits-freed-bytes says how much. Requests wait."""
    freed = await server.engine.release_memory(_memory(body))
    return reply(None, headers={"x-samebits-freed-bytes": str(freed)})


@sglang.get("/resume_memory_occupation")
@sglang.post("/resume_memory_occupation")
async def resume_memory_occupation(server: Served, body: MemoryBody | None = None):
    """Take the memory again. Weights come back from their checkpoint, or must be updated."""
    await server.engine.call(lambda llm: llm.wake_up(_memory(body)))
    return reply(None)


def _memory(body: MemoryBody | None) -> list[str]:
    return [tag for tag in (body and body.tags) or MEMORY_TAGS if tag in MEMORY_TAGS]
