from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class VersionSpan:
    """Tokens [start, end) of a completion were sampled under this weight version."""

    version: int
    start: int
    end: int


@dataclass(frozen=True)
class Completion:
    """One sample. `logprobs` are fp32 values, bit for bit those that the trainer computes.

    token_ids include the terminal EOS or stop token. finish_reason: "stop", "length", "abort", "error" or
    None (running); stop_reason: the stop string or token id, or what the error was. top_logprobs: per token
    {token id: log-prob} of the most probable ones.
    """

    index: int
    token_ids: list[int]
    logprobs: list[float]
    finish_reason: str | None
    stop_reason: str | int | None
    weight_versions: list[VersionSpan]
    text: str | None = None
    top_logprobs: list[dict[int, float]] | None = None
    raw_logprobs: list[float] | None = None

    @property
    def weight_version(self) -> int | None:
        """The version that the last token was sampled under."""
        return self.weight_versions[-1].version if self.weight_versions else None


@dataclass(frozen=True)
class RequestOutput:
    """A request and its samples so far. prompt_logprobs: one per prompt token; the first has no context: 0.0."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    completions: list[Completion]
    prompt_logprobs: list[float] | None
    finished: bool
