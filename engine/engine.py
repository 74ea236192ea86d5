"""The border between what asks for tokens and what computes them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from torch import nn

from ..kernels.contract import Contract
from .config import EngineConfig
from .executor import ModelInfo
from .outputs import EngineStats
from .request import Request
from .weights import WeightUpdate, Workers
from .weights.spec import full_tensors, gathering
from .weights.table import WeightSource

MEMORY_TAGS = ("weights", "kv_cache")


class Engine(ABC):
    """The interface for requests: to a replica (`EngineCore`), many (`samebits.cluster`) or a server (`RemoteEngine`).

    Requests go in by `add_request`. `step` puts each that got a token or ended into `outbox`, from which the caller
    takes it; nothing else carries results. What is wrong with a request ends that request alone; what breaks the engine
    is an exception of `step`, and stays in `failure`.

    One thread drives an engine. Others may read its attributes and properties, which only compute, and may call
    `check_fits`, `wake` and `stats`.

    contract: the numerics, None where they are not exact. max_model_len: tokens of a sequence. has_experts: it notes
    the experts of each token. requests: those that are unfinished. paused: whoever steps the engine stops until it is
    False again.
    """

    config: EngineConfig
    contract: Contract | None
    eos_token_ids: tuple[int, ...]
    max_model_len: int
    has_experts = True  # a server elsewhere says itself that it has none
    steps_by_itself = False  # `step` takes in what was computed, and computes nothing

    def __init__(self) -> None:
        self.requests: dict[str, Request] = {}
        self.outbox: dict[str, Request] = {}
        self.failure: str | None = None
        self.paused = False
        self.weight_version = 0
        self.has_weights = True
        self.has_kv_cache = True

    @property
    def ready(self) -> bool:
        """True if the engine can step: it has weights and KV memory, and is not broken."""
        return self.has_weights and self.has_kv_cache and self.failure is None

    def has_unfinished_requests(self) -> bool:
        """True if `step` has anything left to compute, or the caller anything to take."""
        return bool(self.requests or self.outbox)

    # --- requests ---------------------------------------------------------------------------------------------------

    @abstractmethod
    def check_fits(self, request: Request) -> None:
        """Raise ValueError where the KV cache could never hold one of the request's samples."""

    @abstractmethod
    def add_request(self, request: Request) -> None:
        """Queue a request. One that has tokens already goes on from them."""

    @abstractmethod
    def abort_request(self, request_id: str) -> bool:
        """End a request; its unfinished samples get finish_reason "abort". False if there is none of this id."""

    @abstractmethod
    def step(self) -> None:
        """Make progress: compute a step, or wait a little for those that do.

        Raises WorkerError when the engine is broken, RuntimeError while it sleeps.
        """

    def poll(self) -> None:  # noqa: B027 - most engines have nothing elsewhere
        """Take in what happened elsewhere, such as replicas that died or came back, without waiting for anything."""

    def wake(self) -> None:  # noqa: B027 - most engines wait for nothing
        """End a wait of `step` in another thread."""

    def pause(self, paused: bool) -> None:
        """Set `paused`, also for those that step by themselves."""
        self.paused = paused

    # --- weights ----------------------------------------------------------------------------------------------------

    @abstractmethod
    def update_weights(self, source: WeightSource, version: int | None = None, recompute_running: bool = True) -> int:
        """Replace all weights, all or nothing, and return the new version; see `LLM.update_weights`."""

    @abstractmethod
    def weight_checksums(self) -> dict[str, str]:
        """A hash of each tensor's bytes, by name; tied tensors under their first name."""

    # --- memory -----------------------------------------------------------------------------------------------------

    @abstractmethod
    def reset_prefix_cache(self, reset_running_requests: bool = False) -> None:
        """Forget all cached prefixes; recompute the running requests' KV, too, where that is asked for."""

    @abstractmethod
    def release_memory(self, tags: Sequence[str] = MEMORY_TAGS) -> int:
        """Free what the tags name and return the bytes freed. Requests stay; `wake_up` makes the engine ready again."""

    @abstractmethod
    def wake_up(self, tags: Sequence[str] = MEMORY_TAGS) -> None:
        """Take the memory again. Weights that were dropped are read again if their files are what they were."""

    @abstractmethod
    def stats(self) -> EngineStats:
        """Counters since the start, and the load now."""

    def close(self) -> None:  # noqa: B027 - most engines have none
        """End the processes that belong to the engine."""


class WorkerEngine(Engine):
    """An `Engine` whose workers this process reaches, so that an update may come in parts and from weight groups.

    Other threads may also call the methods of `workers` and of a `WeightUpdate`. table: the model's tensors. capacity:
    tokens of the KV cache. weight_bytes, kv_cache_bytes: of all workers together.
    """

    capacity: int

    def set_models(self, models: Sequence[ModelInfo]) -> None:
        """Take over what the models of all replicas say of themselves, which are alike."""
        self.contract = models[0].contract
        self.eos_token_ids = models[0].eos_token_ids
        self.has_experts = models[0].num_experts > 0
        self.table = models[0].table
        self.weight_bytes = sum(model.weight_bytes for model in models)
        self.kv_cache_bytes = sum(model.kv_cache_bytes for model in models)

    @property
    @abstractmethod
    def workers(self) -> Workers:
        """All workers that hold weights."""

    @abstractmethod
    def begin_weight_update(self) -> WeightUpdate:
        """Open an update and return it; any thread may load it while the engine goes on."""

    @abstractmethod
    def commit_weight_update(self, update: WeightUpdate, version: int, recompute_running: bool = True) -> None:
        """Put a complete update in force everywhere or nowhere.

        Raises WeightUpdateError with the old weights in force, or an error after which the engine is broken.
        """

    def next_version(self, version: int | None = None) -> int:
        """The version that an update gets: the one asked for, or the current one + 1. Raises ValueError."""
        if version is None:
            return self.weight_version + 1
        if not (isinstance(version, int) and not isinstance(version, bool) and self.weight_version < version < 2**63):
            raise ValueError(f"version must be an integer above {self.weight_version} and below 2^63, got {version!r}")
        return version

    def update_weights(self, source: WeightSource, version: int | None = None, recompute_running: bool = True) -> int:
        """Load an update from one source, put it in force and return its version."""
        version = self.next_version(version)
        try:
            update = self.begin_weight_update()
        except BaseException:
            if isinstance(source, nn.Module):  # other ranks gather, and none may wait for this one
                with gathering(full_tensors(self.table.state_of(source))):
                    pass
            raise
        with update:
            update.load(source, self.contract)
            self.commit_weight_update(update, version, recompute_running)
        return version
