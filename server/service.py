"""The service that the routes of all dialects work on."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Annotated

from fastapi import Depends, HTTPException, Request

from ..agents import KeptIds, tool_format
from ..engine import LLM
from ..engine.outputs import EngineStats
from .async_engine import AsyncEngine
from .auth import Guard
from .options import Limits, ServerOptions
from .updates import WeightUpdates

LOGPROBS_MODE = (
    "fp32 log-softmax of the distribution sampled from: logits / temperature, then top-k, top-p and min-p, "
    "renormalised; temperature 0 is greedy and reports temperature 1"
)


class Service:
    """One served model. `llm` is for reading, as `Engine` allows it; all else goes through `engine` and `updates`.

    weight_snapshot: the checksums, by name, that /weights_checker took.
    """

    def __init__(self, llm: LLM, model_name: str, guard: Guard, options: ServerOptions):
        template = getattr(llm.tokenizer, "chat_template", None)
        room = llm.config.max_num_seqs * llm.config.replicas + options.max_waiting
        self.llm = llm
        self.model_name = model_name
        self.guard = guard
        self.tool_format = tool_format(options.tool_parser, template if isinstance(template, str) else None)
        self.engine = AsyncEngine(llm, Limits(room, options.max_logprobs, options.max_reply_logprobs))
        self.updates = WeightUpdates(self.engine, options.transfer_timeout, options.pause_keep == "recompute")
        self.token = self.engine.tokenization.token  # the text of one token
        self.kept = KeptIds(options.kept_tokens)
        self.contract_hash = llm.contract.hash if llm.contract else None
        self.weight_snapshot: dict[str, str] | None = None
        self.started = int(time.time())

    def check_model(self, name: str | None) -> None:
        """Raise a 404 unless the name is the served model's."""
        if name is not None and name not in (self.model_name, "default"):
            raise HTTPException(404, f"the model {name!r} is not served here; this is {self.model_name!r}")

    def stats(self) -> EngineStats:
        """The numbers of what runs and waits, and of what it holds."""
        stats = self.llm.stats()
        waiting = max(0, self.engine.num_sequences - stats.num_running)  # also what the engine hasn't seen yet
        return replace(stats, num_waiting=waiting)


async def _service(request: Request) -> Service:
    return request.app.state.service


Served = Annotated[Service, Depends(_service)]  # the service of the application that got the request
