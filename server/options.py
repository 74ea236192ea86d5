"""The server's settings, and what one call may ask for.

A reply's memory and a call's share of the server are bounded before any work is done.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from ..agents import tool_format
from ..engine import SamplingParams
from ..engine.expert_wire import EXPERTS_AS_LOGPROBS
from ..engine.request import Request
from ..engine.sampling_params import MAX_LOGPROBS

MAX_STOPS = 64  # stop strings
MAX_STOPPING = 1024  # characters of all of them, stop tokens
MAX_GRAMMAR = 2**16  # characters; the time to compile one may grow with their square


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """Settings of `create_app`."""

    max_waiting: int = 1024
    """Sequences that may wait, beyond those that run; more get 503, and a call that never fits 400."""
    max_logprobs: int = 20
    """Most alternatives that a request may ask for per token."""
    max_reply_logprobs: int = 2_097_152
    """Most log-probs that a reply may have, those of alternatives and of the prompt included: it bounds its memory.
    Experts of a token count as four."""
    transfer_timeout: float = 300.0
    """Seconds for the rendezvous and for each broadcast of a weight update."""
    tool_parser: str = "auto"
    """How chat answers write tool calls: a name of docs/agents.md, or a .json file with a format's fields; auto: as the
    chat template tells; off: they stay text."""
    kept_tokens: int = 4_194_304
    """Tokens of chat answers that are kept for their next turns; 0 is off."""
    pause_keep: Literal["stale", "recompute"] = "stale"
    """Whether requests that a pause keeps across a weight update keep the old weights' KV, too, or have it computed
    anew, which keeps their log-probs exact."""

    def __post_init__(self) -> None:
        for name in ("max_waiting", "max_logprobs", "max_reply_logprobs", "kept_tokens"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be at least 0, got {getattr(self, name)}")
        if self.pause_keep not in ("stale", "recompute"):
            raise ValueError(f"pause_keep must be stale or recompute, got {self.pause_keep!r}")
        if not self.transfer_timeout > 0:
            raise ValueError(f"transfer_timeout must be positive, got {self.transfer_timeout!r}")
        if self.max_logprobs > MAX_LOGPROBS:
            raise ValueError(f"max_logprobs must be at most {MAX_LOGPROBS}, got {self.max_logprobs}")
        tool_format(self.tool_parser, None)


@dataclass(frozen=True)
class Limits:
    """The most that a call may ask for, by default all; more is a ValueError with the option that raises the limit.

    sequences: prompts x n that may run and wait. logprobs: alternatives per token. values: log-probs of a reply, with
    those of alternatives.
    """

    sequences: int = 1 << 40
    logprobs: int = MAX_LOGPROBS
    values: int = 1 << 40

    def check_count(self, sequences: int) -> None:
        """Check how many prompts, or samples of them, a call has."""
        _check(sequences, self.sequences, "sequences (prompts x n)", "--max-waiting")

    def check_params(self, params: Sequence[SamplingParams]) -> None:
        """Check what is known before prompts are tokenised."""
        self.check_count(sum(p.n for p in params))
        most = max(max(p.logprobs or 0, p.prompt_logprobs or 0) for p in params)
        _check(most, self.logprobs, "log-probs per token", "--max-logprobs")
        for p in params:
            if p.structured_outputs is not None and len(p.structured_outputs.source[1]) > MAX_GRAMMAR:
                raise ValueError(f"a grammar, or a forced tool_choice's tools, may have {MAX_GRAMMAR} characters")
            if len(p.stop) > MAX_STOPS or len("".join(p.stop)) > MAX_STOPPING or len(p.stop_token_ids) > MAX_STOPPING:
                raise ValueError(
                    f"each token is compared with all stops: at most {MAX_STOPS} stop strings of {MAX_STOPPING} "
                    f"characters together, and {MAX_STOPPING} stop_token_ids"
                )

    def check_reply(self, requests: Sequence[Request]) -> None:
        """Check the reply's size, now that the prompts' lengths are known."""
        what = "log-probs of a reply (n x max_tokens x (1 + logprobs), the prompt's, and four for a token's experts)"
        _check(sum(map(reply_values, requests)), self.values, what, "--max-reply-logprobs")


def _check(asked: int, limit: int, what: str, option: str) -> None:
    if asked > limit:
        raise ValueError(
            f"{asked} {what} are more than the {limit} of this server: ask for less, or start it with {option} {asked}"
        )


def reply_values(request: Request) -> int:
    """The most log-probs that a request's reply has."""
    params = request.params
    sampled = params.n * request.samples[0].max_tokens * (1 + (params.logprobs or 0))
    scored = 0 if params.prompt_logprobs is None else len(request.prompt_token_ids) * (1 + params.prompt_logprobs)
    tokens = len(request.prompt_token_ids) + request.samples[0].max_tokens
    return sampled + scored + (EXPERTS_AS_LOGPROBS * params.n * tokens if params.routed_experts else 0)
