"""The engine of one verl replica: a Ray actor that takes token ids and returns tokens with the trainer's log-probs."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import uuid
from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import ray
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.rollout.replica import RolloutMode, TokenOutput

from ...engine import LLM, RequestOutput, SamplingParams, WeightUpdate
from ...engine.engine import MEMORY_TAGS
from ...engine.sampling_params import MAX_LOGPROBS, RequestOutputKind
from ...engine.weights import TensorSpec, WeightUpdateError
from ...engine.weights.spec import from_bytes
from ...kernels.contract import Contract, NumericsError
from ...server.async_engine import AsyncEngine, GenerateRequest
from ...server.options import Limits
from .limits import NAME

logger = logging.getLogger(__name__)
PREFIX = f"{NAME}_rollout_"  # of the names of all replicas' actors
NO_LIMITS = Limits(1 << 40, MAX_LOGPROBS, 1 << 40)  # verl sends a whole batch at once
SIZES = ("max_num_seqs", "max_num_batched_tokens", "gpu_memory_utilization")
SAME_NAMES = ("dtype", "enforce_eager", "enable_prefix_caching", *SIZES)  # settings that `EngineConfig` calls so, too


class Server:
    """Generates, sleeps, wakes up and takes new weights as verl asks; its methods are those of verl's own servers.

    config: verl's rollout section. device: where the engine computes. An actor that died and was started again gets
    the weights in force from another replica, so that its requests, which Ray sends again, draw the tokens that they
    would have drawn.
    """

    def __init__(self, config: Any, model_path: str, mode: RolloutMode, device: str):
        self.config = omega_conf_to_dataclass(config)
        self.mode = mode
        self.max_tokens = self.config.prompt_length + self.config.response_length  # of a whole sequence
        settings = {name: getattr(self.config, name) for name in SAME_NAMES}
        settings |= {"device": device, "max_model_len": self.config.max_model_len or self.max_tokens}
        settings |= self.config.engine_kwargs.get(NAME) or {}
        self.llm = LLM(model_path, skip_tokenizer_init=True, **settings)
        self.engine = AsyncEngine(self.llm, NO_LIMITS)
        self.global_steps: int | None = None  # verl's name for the weights in force
        self.versions: dict[int, int | None] = {}  # the engine's version -> verl's step
        self.update: WeightUpdate | None = None
        self.seen: Counter[int] = Counter()  # requests under these weights, by their seed
        self.open = asyncio.Event()  # cleared between an abort and its resume
        self.open.set()
        self._started: asyncio.Task | None = None

    async def start(self) -> str:
        """Start the engine's thread, once, and return the node's address."""
        if self._started is None:
            self._started = asyncio.create_task(self._start())
        await self._started
        return ray.util.get_node_ip_address()

    async def _start(self) -> None:
        """Start; after a death with a fellow's weights, or, where none has them, without any until the next update."""
        self.engine.start()
        context = ray.get_runtime_context()
        if not context.was_current_actor_reconstructed:
            return
        own = context.get_actor_name()
        actors = sorted(ray.util.list_named_actors())
        for name in [actor for actor in actors if actor.startswith(PREFIX) and actor != own]:
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
        workers = self.llm.worker_engine.workers
        (specs,) = workers.collective_rpc("weight_specs")
        read = partial(workers.collective_rpc, "read_weights", specs)
        steps, (data,) = await self.engine.call(lambda llm: (self.global_steps, read()))  # no update comes in between
        return steps, data, specs

    # --- generation -------------------------------------------------------------------------------------------------

    async def generate(
        self, prompt_ids: Sequence[int], sampling_params: dict[str, Any], request_id: str, **others: Any
    ) -> TokenOutput:
        """Sample one completion; its log-probs are the trainer's under the weights of `global_steps`.

        The seed is a hash of the configured one, the step and the request: a request that is sent again draws the
        same tokens, from whichever replica. ValueError for images, videos and parameters that aren't exact.
        """
        given = [name for name, value in others.items() if value]
        if given:
            raise ValueError(f"{', '.join(given)}: samebits generates from token ids alone")
        await self.start()
        await self.open.wait()
        prompt = [int(token) for token in prompt_ids]
        request = GenerateRequest(prompt, self._params(prompt, dict(sampling_params), request_id))
        generation = await self.engine.submit([request], f"{request_id}#{uuid.uuid4().hex}")  # verl may repeat an id
        (output,) = await generation.final()
        return self._token_output(output)

    def _params(self, prompt: list[int], given: dict[str, Any], request_id: str) -> SamplingParams:
        given.pop("logprobs", None)  # they are always there
        if given.pop("repetition_penalty", 1.0) != 1.0:
            raise ValueError("repetition_penalty must be 1.0: verl's trainer scores with the temperature alone")
        wanted = given.pop("max_tokens", None) or given.pop("max_new_tokens", None)
        if wanted is None:  # a prompt of several turns may be longer than `prompt_length`
            wanted = min(self.config.response_length, self.max_tokens - len(prompt))
        own = {"ignore_eos": self.config.ignore_eos, "seed": self._seed(prompt, request_id)}
        return SamplingParams(
            max_tokens=max(1, wanted),  # or as many as there is room for
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
            **(own | given),
        )

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
        return TokenOutput(
            token_ids=completion.token_ids,
            log_probs=completion.logprobs,
            stop_reason="aborted" if completion.finish_reason == "abort" else "completed",
            num_preempted=0,
            extra_fields={
                "global_steps": steps[-1],
                "min_global_steps": steps[0],
                "max_global_steps": steps[-1],
                "num_cached_tokens": output.num_cached_tokens,
                "weight_versions": spans,
            },
        )

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

    # --- memory -----------------------------------------------------------------------------------------------------

    async def sleep(self) -> None:
        """Wait for the requests, then free memory for the trainer: KV, and the weights where it sends new ones."""
        if self.config.free_cache_engine:
            await self.start()
            await self.engine.pause("wait", refuse=False)  # requests that come meanwhile wait for `wake_up`
            tags = MEMORY_TAGS if self.mode == RolloutMode.HYBRID else ["kv_cache"]
            await self.engine.call(lambda llm: llm.release_memory(tags))

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
        self.update = await self.engine.call(LLM.begin_weight_update)

    async def load_weights(self, data: list[np.ndarray], specs: list[TensorSpec]) -> None:
        """Stage tensors, given as their bytes."""
        update = self._open_update()
        pairs = [(spec.name, from_bytes(each.copy(), spec)) for each, spec in zip(data, specs, strict=True)]
        await asyncio.to_thread(update.load, pairs)  # of copies: Ray's shared memory is read-only

    async def commit_weights(self, global_steps: int | None) -> None:
        """Put the update in force, all of it or nothing, under verl's name for it."""
        update = self._open_update()
        self.update = None

        def commit(llm: LLM) -> None:
            version = llm.commit_weight_update(update)
            self.versions[version] = self.global_steps = global_steps
            self.seen.clear()

        await self.engine.call(commit)

    def _open_update(self) -> WeightUpdate:
        if self.update is None:
            raise WeightUpdateError("no update was begun: this replica died in the midst of one; resume the run")
        return self.update
