"""The server's settings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ..engine.sampling_params import MAX_LOGPROBS


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """Settings of `create_app`."""

    max_waiting: int = 1024
    """Sequences that may wait, beyond those that run; more get 503, and a call that never fits 400."""
    max_logprobs: int = 20
    """Most alternatives that a request may ask for per token."""
    max_reply_logprobs: int = 2_097_152
    """Most log-probs that a reply may have, those of alternatives and of the prompt included: it bounds its memory."""
    transfer_timeout: float = 300.0
    """Seconds for the rendezvous and for each broadcast of a weight update."""
    tool_parser: Literal["auto", "off", "hermes", "llama3_json", "mistral", "mistral-args"] = "auto"
    """How chat answers write tool calls; auto: as the chat template tells."""
    kept_tokens: int = 4_194_304
    """Tokens of chat answers that are kept for their next turns; 0 is off."""
    pause_keep: Literal["stale", "recompute"] = "stale"
    """Whether requests that a pause keeps across a weight update keep the old weights' KV, too, or have it computed
    anew, which keeps their log-probs exact."""

    def __post_init__(self) -> None:
        for name in ("max_waiting", "max_logprobs", "max_reply_logprobs", "kept_tokens"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be at least 0, got {getattr(self, name)}")
        if self.max_logprobs > MAX_LOGPROBS:
            raise ValueError(f"max_logprobs must be at most {MAX_LOGPROBS}, got {self.max_logprobs}")
