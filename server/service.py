"""What the routes of all dialects work on."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from typing import Annotated

from fastapi import Depends, Request

from ..engine import LLM
from ..engine.outputs import EngineStats
from .async_engine import AsyncEngine
from .auth import Guard
from .kept_ids import KeptIds
from .tools import ToolFormat
from .updates import WeightUpdates

LOGPROBS_MODE = (
    "fp32 log-softmax of the distribution sampled from: logits / temperature, then top-k, top-p and min-p, "
    "renormalised; temperature 0 is greedy and reports temperature 1"
)


class ModelNotFoundError(LookupError):
    """The request names another model."""


@dataclass
class Service:
    """One served model. `llm` is for reading, as `Engine` allows it; all else goes through `engine` and `updates`."""

    engine: AsyncEngine
    updates: WeightUpdates
    model_name: str
    kept: KeptIds
    guard: Guard
    tool_format: ToolFormat | None = None
    weight_snapshot: dict[str, str] | None = None  # checksums, by name, that /weights_checker took
    started: int = field(default_factory=lambda: int(time.time()))

    @property
    def llm(self) -> LLM:
        """The engine thread's LLM."""
        return self.engine.llm

    @property
    def contract_hash(self) -> str | None:
        """The numerics contract's hash; None without the exact ops."""
        return self.llm.contract.hash if self.llm.contract else None

    def token(self, token_id: int) -> str:
        """The text of one token."""
        return self.engine.tokenization.token(token_id)

    def check_model(self, name: str | None) -> None:
        """Raise ModelNotFoundError unless the name is the served model's."""
        if name is not None and name not in (self.model_name, "default"):
            raise ModelNotFoundError(f"the model {name!r} is not served here; this is {self.model_name!r}")

    def load(self) -> EngineStats:
        """The numbers of what runs and waits, and of what it holds."""
        stats = self.llm.stats()
        waiting = max(0, self.engine.num_sequences - stats.num_running)  # also what the engine hasn't seen yet
        return replace(stats, num_waiting=waiting)


async def _service(request: Request) -> Service:
    return request.app.state.service


Served = Annotated[Service, Depends(_service)]  # the service of the application that got the request
