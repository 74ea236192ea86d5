"""verl's `rollout.name=samebits`: a replica in the driver, its engine in an actor, its adapter in a trainer's rank."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import uuid
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import numpy as np
import ray
import torch
from peft import LoraConfig
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from torch import Tensor
from verl.utils.fs import copy_to_local
from verl.utils.py_functional import convert_to_regular_types
from verl.workers.rollout.base import BaseRollout
from verl.workers.rollout.replica import RolloutMode, RolloutReplica, TokenOutput

from ...engine import LLM, RequestOutput, RequestOutputKind, SamplingParams, WeightUpdate, WeightUpdateError
from ...engine.engine import MEMORY_TAGS
from ...engine.weights.spec import TensorSpec, byte_buckets, from_bytes, gathering, specs_of, to_bytes
from ...kernels.contract import Contract, NumericsError
from ...server.async_engine import AsyncEngine, GenerateRequest
from . import limits
from .platform import get_platform

logger = logging.getLogger(__name__)
PREFIX = f"{limits.NAME}_rollout_"  # of the names of all replicas' actors
MAX_DEATHS = 3  # of one replica, after which its requests fail
MAX_BUCKET = 256  # megabytes of an update that are under way at a time
# Settings that `EngineConfig` calls so, too.
SAME_NAMES = "dtype enforce_eager enable_prefix_caching max_num_seqs max_num_batched_tokens gpu_memory_utilization"


class Replica(RolloutReplica):
    """verl's `rollout.name=samebits`: starts the actor of an engine, on the device of the trainer's worker beside it.

    Raises ValueError, naming them, for settings under which the promise can't be kept, and for models that don't learn.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        if self.is_reward_model or self.is_teacher_model:
            raise ValueError("samebits serves the policy alone: give reward and teacher models another rollout.name")
        limits.check(self.config, limits.ROLLOUT, "rollout")
        limits.check(self.model_config, limits.MODEL, "model")

    async def launch_servers(self) -> None:
        """Start the actor. Should it die, Ray starts it again, and repeats its calls."""
        platform = get_platform()
        resource = platform.ray_resource_name()

        def place(worker: Any) -> tuple[str, str]:
            context = ray.get_runtime_context()
            return context.get_node_id(), context.get_accelerator_ids()[resource][0]

        node, device = await self.workers[0].__ray_call__.remote(place)
        environment = {name: "1" for name in platform.ray_noset_envvars()} | platform.rollout_env_vars()
        environment[platform.visible_devices_envvar()] = device
        server: Any = ray.remote(Server).options(
            name=f"{PREFIX}{self.replica_rank}",
            scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
            runtime_env={"env_vars": environment},
            max_concurrency=self.max_concurrency,
            max_restarts=MAX_DEATHS,
            max_task_retries=-1,
            num_cpus=0,
        )
        path = getattr(self.model_config, "local_path", None) or self.model_config.path
        adapter = adapter_of(self.model_config)
        self._server_handle = server.remote(self.config, path, self.rollout_mode, platform.device_name, adapter)
        await self._server_handle.start.remote()
        self.servers = [self._server_handle]
        self._server_address = f"{PREFIX}{self.replica_rank}"  # by which verl tells replicas apart


def adapter_of(model_config: Any) -> Any:
    """Return the adapter that verl's trainer puts on its model: a `peft.LoraConfig`, a folder of PEFT's, or None.

    Raises ValueError for a folder without a rank, which verl's trainer passes over.
    """
    path = model_config.lora_adapter_path
    if not model_config.lora_rank:
        if path is not None:
            raise ValueError("model.lora_adapter_path needs model.lora_rank, that of the adapter, or verl trains none")
        return None
    if path is not None:
        return copy_to_local(path, use_shm=model_config.use_shm)
    places = {name: convert_to_regular_types(model_config[name]) for name in ("target_modules", "exclude_modules")}
    return LoraConfig(r=model_config.lora_rank, lora_alpha=model_config.lora_alpha, **places)


class Server:
    """An engine that generates, sleeps and takes new weights as verl asks, by the methods of verl's own servers.

    config: verl's rollout section. device: where the engine computes. adapter: the policy's, if it has one. An actor
    that died and was started again gets the weights in force from another replica, so that its requests, which Ray
    sends again, draw the tokens that they would have drawn.
    """

    def __init__(self, config: Any, model_path: str, mode: RolloutMode, device: str, adapter: Any = None):
        self.config = config
        # What sleep frees. Weights stay where updates don't bring them all: other modes, and adapters.
        self.tags = MEMORY_TAGS if mode == RolloutMode.HYBRID and adapter is None else ["kv_cache"]
        self.max_tokens = self.config.prompt_length + self.config.response_length  # of a whole sequence
        settings = {name: getattr(self.config, name) for name in SAME_NAMES.split()}
        settings |= {"device": device, "max_model_len": self.config.max_model_len or self.max_tokens}
        settings |= self.config.engine_kwargs.get(limits.NAME) or {}
        settings |= {"adapter": adapter, "adapter_dtype": settings["dtype"]}  # FSDP2 casts the adapter, too
        self.llm = LLM(model_path, skip_tokenizer_init=True, **settings)
        self.engine = AsyncEngine(self.llm)  # without limits: verl sends a whole batch at once
        self.global_steps: int | None = None  # verl's name for the weights in force
        self.versions: dict[int, int | None] = {}  # the engine's version -> verl's step
        self.update: WeightUpdate | None = None
        self.seen: Counter[int] = Counter()  # requests under these weights, by their seed
        self.open = asyncio.Event()  # cleared between an abort and its resume
        self.open.set()
        self._started: asyncio.Task | None = None

    async def start(self) -> None:
        """Start the engine's thread, once."""
        if self._started is None:
            self._started = asyncio.create_task(self._start())
        await self._started

    async def _start(self) -> None:
        """Start; after a death with a fellow's weights, or, where none has them, without any until the next update."""
        self.engine.start()
        context = ray.get_runtime_context()
        if not context.was_current_actor_reconstructed:
            return
        own = context.get_actor_name()
        for name in sorted(each for each in ray.util.list_named_actors() if each.startswith(PREFIX) and each != own):
            try:
                steps, data, specs = await ray.get_actor(name).weights.remote()
            except (ray.exceptions.RayError, ValueError) as error:
                logger.warning("%s has no weights for %s: %s", name, own, error)
                continue
            self.update = await self.engine.call(LLM.begin_weight_update)
            await self.load_weights(data, specs)
            await self.commit_weights(steps)
            logger.warning("%s was started again, with the weights of step %s from %s", own, steps, name)
            return
        logger.error("%s was started again, and no other replica has its weights: its requests will fail", own)
        await self.engine.call(lambda llm: llm.release_memory(["weights"]))

    async def weights(self) -> tuple[int | None, list[np.ndarray], list[TensorSpec]]:
        """The step, bytes and specs of the weights in force. ValueError where there are none of a step."""
        if self.global_steps is None or not self.llm.has_weights:
            raise ValueError("this replica has no weights in force")

        def read(llm: LLM) -> tuple[int | None, list[tuple[str, Tensor]]]:
            return self.global_steps, [*llm.worker_engine.workers.weights()]

        steps, pairs = await self.engine.call(read)  # between two of the engine's steps, as are updates
        return steps, [to_bytes(tensor) for _, tensor in pairs], specs_of(dict(pairs))

    # --- generation -------------------------------------------------------------------------------------------------

    async def generate(
        self, prompt_ids: Sequence[int], sampling_params: dict[str, Any], request_id: str, **others: Any
    ) -> TokenOutput:
        """Sample one completion; its log-probs are the trainer's under the weights of `global_steps`.

        The seed is a hash of the configured one, the step and the request: a request that is sent again draws the
        same tokens, from whichever replica. ValueError for images, videos and parameters that aren't exact.
        """
        if given := [name for name, value in others.items() if value]:
            raise ValueError(f"{', '.join(given)}: samebits generates from token ids alone")
        await self.start()
        await self.open.wait()
        prompt = [int(token) for token in prompt_ids]
        request = GenerateRequest(prompt, self._params(prompt, dict(sampling_params), request_id))
        generation = await self.engine.submit([request], f"{request_id}#{uuid.uuid4().hex}")  # verl may repeat an id
        return self._token_output(*await generation.final())

    def _params(self, prompt: list[int], given: dict[str, Any], request_id: str) -> SamplingParams:
        given.pop("logprobs", None)  # they are always there
        if given.pop("repetition_penalty", 1.0) != 1.0:
            raise ValueError("repetition_penalty must be 1.0: verl's trainer scores with the temperature alone")
        # A prompt of several turns may be longer than `prompt_length`.
        room = min(self.config.response_length, self.max_tokens - len(prompt))
        wanted = given.pop("max_tokens", None) or given.pop("max_new_tokens", None) or room
        own = {"ignore_eos": self.config.ignore_eos, "seed": self._seed(prompt, request_id)}
        fixed: dict[str, Any] = {"detokenize": False, "output_kind": RequestOutputKind.FINAL_ONLY}
        return SamplingParams(max_tokens=max(1, wanted), **(own | given), **fixed)  # or as many as there is room for

    def _seed(self, prompt: list[int], request_id: str) -> int:
        """Return a hash of all that tells requests apart; equal ones, which verl may make of a group, are counted."""
        text = f"{self.config.seed}/{self.global_steps}/{request_id}/{prompt}"
        seed = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")
        self.seen[seed] += 1
        return (seed + self.seen[seed] - 1) % 2**64

    def _token_output(self, output: RequestOutput) -> TokenOutput:
        (completion,) = output.completions
        spans = [(self.versions.get(s.version), s.start, s.end) for s in completion.weight_versions]
        steps = [step for step, _, _ in spans] or [self.global_steps]
        fields: dict[str, Any] = {"num_cached_tokens": output.num_cached_tokens, "weight_versions": spans}
        fields |= {"global_steps": steps[-1], "min_global_steps": steps[0], "max_global_steps": steps[-1]}
        reason = "aborted" if completion.finish_reason == "abort" else "completed"
        found: dict[str, Any] = {"token_ids": completion.token_ids, "log_probs": completion.logprobs}
        return TokenOutput(**found, stop_reason=reason, num_preempted=0, extra_fields=fields)

    async def abort_all_requests(self, reset_prefix_cache: bool = True, reject_request: bool = False) -> dict[str, Any]:
        """End all requests with what they have; later ones wait for `resume_generation`.

        reset_prefix_cache: changes nothing, as cached KV is of one version of the weights. ValueError for
        reject_request.
        """
        if reject_request:
            raise ValueError("reject_request: requests wait for resume_generation here, and are never rejected")
        self.open.clear()
        ids = [name.rpartition("#")[0] for name in self.engine.generations]
        return {"aborted_count": await self.engine.abort(), "request_ids": ids}

    async def resume_generation(self) -> None:
        """Take requests again after `abort_all_requests`."""
        self.open.set()

    async def start_profile(self, **_: Any) -> None:
        """Do nothing: what verl profiles here is the trainer."""

    stop_profile = start_profile

    # --- memory -----------------------------------------------------------------------------------------------------

    async def sleep(self) -> None:
        """Wait for the requests, then free memory for the trainer: KV, and the weights where it sends all of them."""
        if self.config.free_cache_engine:
            await self.start()
            await self.engine.pause("wait", refuse=False)  # requests that come meanwhile wait for `wake_up`
            await self.engine.call(lambda llm: llm.release_memory(self.tags))

    async def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Take the memory of these tags again (None: all), and run requests.

        The tag "weights" alone does nothing: verl says so before an update, which brings them.
        """
        wanted = MEMORY_TAGS if tags is None else [tag for tag in tags if tag == "kv_cache"]
        if wanted:
            await self.start()
            await self.engine.call(lambda llm: llm.wake_up(wanted))
            await self.engine.resume()

    async def clear_kv_cache(self) -> None:
        """Do nothing: cached KV is of one version of the weights, and is never used with another."""

    # --- weights ----------------------------------------------------------------------------------------------------

    async def begin_weights(self, contract: Contract | None) -> None:
        """Open an update from a trainer with this contract (None: it is not exact).

        Raises NumericsError where that isn't the engine's own, before a tensor moves.
        """
        await self.start()
        if contract is None:
            logger.warning("the trainer's engine is verl's own (VERL_ENGINE_VENDOR=samebits): log-probs will differ")
        elif self.llm.contract is None:
            raise NumericsError("the trainer is exact, and the engine is not: leave out engine_kwargs.samebits.exact")
        else:
            self.llm.contract.check(contract)
        await self._abort_update()
        self.update = await self.engine.call(LLM.begin_weight_update)

    async def load_weights(self, data: list[np.ndarray], specs: list[TensorSpec]) -> None:
        """Stage tensors, given as their bytes."""
        pairs = [(spec.name, from_bytes(each.copy(), spec)) for each, spec in zip(data, specs, strict=True)]
        try:
            await asyncio.to_thread(self._open_update().load, pairs)  # of copies: Ray's shared memory is read-only
        except BaseException:
            await self._abort_update()
            raise

    async def commit_weights(self, global_steps: int | None) -> None:
        """Put the update in force, all of it or nothing, under verl's name for it."""
        update = self._open_update()

        def commit(llm: LLM) -> None:
            version = llm.commit_weight_update(update)
            self.versions[version] = self.global_steps = global_steps
            self.seen.clear()

        try:
            await self.engine.call(commit)
        finally:
            await self._abort_update()

    async def _abort_update(self) -> None:
        update = self.update
        self.update = None
        if update is not None and update.open:
            await asyncio.to_thread(update.abort)

    def _open_update(self) -> WeightUpdate:
        if self.update is None:
            raise WeightUpdateError(
                "no update is open: it failed, or the replica died in the midst of it; resume the run"
            )
        return self.update


class ServerAdapter(BaseRollout):
    """A trainer rank's end: sends the weights to the rank's replica, and puts that to sleep and wakes it up.

    contract: of the exact engine in this process, None where there is none. trained_steps: the step whose weights that
    engine holds, which its rollouts were sampled under; None once it has moved on.
    """

    contract: ClassVar[Contract | None] = None
    trained_steps: ClassVar[int | None] = None

    def _call(self, method: str, *args: Any) -> Any:
        return getattr(ray.get_actor(f"{PREFIX}{os.environ['RANK']}"), method).remote(*args)

    async def resume(self, tags: Sequence[str]) -> None:
        """Wake the replica up."""
        await self._call("wake_up", tags)

    async def release(self) -> None:
        """Put the replica to sleep."""
        await self._call("sleep")

    @torch.no_grad()
    async def update_weights(self, weights: Iterator[tuple[str, Tensor]], **others: Any) -> None:
        """Send weights, and put them in force, all or nothing. All ranks iterate `weights`, which gathers them.

        Of a policy with an adapter they are the adapter's, as PEFT names them, or its base's, which verl sends once.
        Raises NumericsError where trainer and engine have other numerics.
        """
        weights = ((name.replace(".base_layer.", "."), tensor) for name, tensor in weights)  # vLLM's names of a base
        with gathering(weights):
            await self._call("begin_weights", ServerAdapter.contract)
            megabytes = min(self.config.checkpoint_engine.update_weights_bucket_megabytes, MAX_BUCKET)
            for data, specs in byte_buckets(weights, megabytes << 20):
                await self._call("load_weights", data, specs)
        await self._call("commit_weights", others.get("global_steps"))
        ServerAdapter.trained_steps = others.get("global_steps")
