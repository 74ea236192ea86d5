"""SGLang's control routes: pausing, aborting, weights, memory; and vLLM's, where they do the same."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import APIRouter
from pydantic import AliasChoices, BeforeValidator, Field

from ..engine.weights import TensorSpec
from ..engine.weights.group import DEFAULT_GROUP_NAME, WHOLE
from ..engine.weights.spec import parse_specs
from .protocol import Body, FastRoute, reply
from .service import Served

Label = Annotated[
    str, BeforeValidator(lambda given: str(given) if type(given) is int else given), Field(max_length=256)
]
control = APIRouter(route_class=FastRoute, tags=["SGLang: control"])


class AbortBody(Body):
    """The request to abort, or all."""

    rid: str | None = None
    abort_all: bool = False


class PauseBody(Body):
    """A pause, and what it does with running requests."""

    mode: Literal["abort", "retract", "in_place"] = "abort"


class _UpdateBody(Body):
    flush_cache: bool | None = Field(default=True, description="No KV of other weights is ever used, flushed or not.")
    abort_all_requests: bool | None = False
    weight_version: Label | None = None


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


class Manifest(GroupBody):
    """The tensors that a broadcast brings, in order; vLLM calls their dtypes dtype_names."""

    names: list[str] = Field(min_length=1)
    dtypes: list[str] = Field(validation_alias=AliasChoices("dtypes", "dtype_names"))
    shapes: list[list[int]]
    bucket_bytes: int | None = Field(default=None, ge=1, description="samebits' own: broadcasts of at most N bytes.")

    def specs(self) -> list[TensorSpec]:
        """The manifest as the engine takes it. Raises ValueError."""
        return parse_specs(self.names, self.dtypes, self.shapes)


class FromDistributedBody(Manifest, _UpdateBody):
    """A manifest, and how its tensors are sent."""

    load_format: Literal["flattened_bucket"] | None = None


class WholeUpdateBody(Body):
    """The label of the version that an update makes."""

    weight_version: Label | None = None


class MemoryBody(Body):
    """The kinds of memory to release or to take back."""

    tags: list[Literal["weights", "kv_cache", "cuda_graph"]] | None = None

    @property
    def ours(self) -> list[str]:
        """Those of the kinds that there are here."""
        return ["weights", "kv_cache"] if self.tags is None else [t for t in self.tags if t != "cuda_graph"]


def done(message: str, **more) -> Any:
    """Return a reply of success in SGLang's form."""
    return reply({"success": True, "message": message, "status": "ok", **more})


@control.get("/flush_cache")
@control.post("/flush_cache")
async def flush_cache(server: Served):
    """Forget cached prefixes. 400 while requests run; while they are paused they are retracted and recomputed."""
    paused = server.engine.state.paused.is_set()
    if server.engine.num_sequences and not paused:
        raise ValueError("requests are running; pause or finish them first")
    await server.engine.call(lambda llm: llm.reset_prefix_cache(reset_running_requests=paused))
    return done("cache flushed")


@control.post("/abort_request")
async def abort_request(server: Served, body: AbortBody | None = None):
    """Abort one request or all."""
    body = body or AbortBody()
    if not body.abort_all and not body.rid:
        raise ValueError("give rid, or abort_all=true")
    count = await server.engine.abort(None if body.abort_all else [body.rid])  # type: ignore[list-item]
    return done(f"{count} requests aborted", aborted=count)


@control.post("/pause_generation")
async def pause_generation(server: Served, body: PauseBody | None = None):
    """Stop between two steps. New requests wait until /continue_generation."""
    mode = (body or PauseBody()).mode
    await server.engine.pause("keep" if mode == "in_place" else mode, refuse=False)
    return done(f"generation paused ({mode})")


@control.post("/continue_generation")
async def continue_generation(server: Served, body: Body | None = None):
    """Resume generation after a pause. 409 in the middle of a weight update."""
    await server.updates.resume()
    return done("generation continues")


@control.post("/update_weights_from_disk")
async def update_weights_from_disk(body: FromDiskBody, server: Served):
    """Load a checkpoint directory, checked whole before it is in force."""
    if body.abort_all_requests:
        await server.engine.abort()
    message = await server.updates.load(body.model_path, body.weight_version)
    return done(message, num_paused_requests=server.engine.num_sequences if server.engine.state.paused.is_set() else 0)


@control.post("/init_weights_update_group")
async def init_weights_update_group(body: InitGroupBody, server: Served):
    """Join a torch process group whose rank 0 will send weights."""
    where = (body.master_address, body.master_port, body.rank_offset, body.world_size, body.backend)
    await server.updates.join(body.group_name, *where)
    return done(f"joined weight group {body.group_name!r} as rank {body.rank_offset} of {body.world_size}")


@control.post("/shutdown_weight_transfer_engine")
@control.post("/destroy_weights_update_group")
async def destroy_weights_update_group(server: Served, body: GroupBody | None = None):
    """Leave a trainer's process group."""
    name = (body or GroupBody()).group_name
    left = await server.updates.leave(name)
    return done(f"left weight group {name!r}" if left else f"there was no weight group {name!r}")


@control.post("/update_weights_from_distributed")
async def update_weights_from_distributed(body: FromDistributedBody, server: Served):
    """Receive tensors over a group: all, or a bucket; the version moves when none is missing."""
    manifest = body.specs()
    if body.abort_all_requests:
        await server.engine.abort()
    bucket_bytes = WHOLE if body.load_format else body.bucket_bytes
    return done(await server.updates.receive(body.group_name, manifest, bucket_bytes, body.weight_version))


@control.post("/start_weight_update")
@control.post("/begin_weight_update")
async def begin_weight_update(server: Served, body: WholeUpdateBody | None = None):
    """Begin an update: tensors that come from now on are put in force by /finish_weight_update or /end_weight_update,
    together.
    """
    await server.updates.begin()
    return done("weight update begun")


@control.post("/finish_weight_update")
@control.post("/end_weight_update")
async def end_weight_update(server: Served, body: WholeUpdateBody | None = None):
    """Put the weights of the update that was begun into force."""
    updates = server.updates
    await updates.finish(body.weight_version if body else None)
    return done(f"version {updates.label!r} is in force", weight_version=updates.label)


@control.get("/release_memory_occupation")
@control.post("/release_memory_occupation")
async def release_memory_occupation(server: Served, body: MemoryBody | None = None):
    """Free memory; the header x-samebits-freed-bytes says how much. Requests wait."""
    tags = (body or MemoryBody()).ours
    freed = await server.engine.release_memory(tags)
    return reply(None, headers={"x-samebits-freed-bytes": str(freed)})


@control.get("/resume_memory_occupation")
@control.post("/resume_memory_occupation")
async def resume_memory_occupation(server: Served, body: MemoryBody | None = None):
    """Take the memory again. Weights come back from their checkpoint, or must be updated."""
    tags = (body or MemoryBody()).ours
    await server.engine.call(lambda llm: llm.wake_up(tags))
    return reply(None)
