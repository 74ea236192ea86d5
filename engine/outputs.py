"""The outputs of a request: token ids, log-probs, finish reasons and the spans of weight versions."""

from __future__ import annotations

from dataclasses import dataclass, field, fields

import numpy as np

from ..scheduler.scheduler import SchedulerStats

LOWEST_LOGPROB = -9999.0  # over HTTP, as JSON has no -infinity; vLLM's stand-in for it


@dataclass(frozen=True)
class VersionSpan:
    """Tokens [start, end) of a completion were sampled under this weight version.

    stale_kv: the KV of earlier tokens was an older version's (`LLM.update_weights(recompute_running=False)`), so that
    no single version gives these log-probs.
    """

    version: int
    start: int
    end: int
    stale_kv: bool = False


@dataclass(frozen=True)
class Completion:
    """One sample. `logprobs` are fp32 values, bit for bit those that the trainer computes.

    token_ids include the terminal EOS or stop token. finish_reason: "stop", "length", "abort", "error" or
    None (running); stop_reason: the stop string or token id, or what the error was. top_logprobs: per token
    {token id: log-prob} of the most probable ones; ranks: the token's own place among all, from 1. routed_experts, once
    finished: ids of the experts of each token of prompt and completion but the last, ascending, uint8 (uint16 where
    there are more than 256) [prompt + completion - 1, layers, k], zeros in layers without experts. They are those of
    the weights that the KV at the end was computed under. Where a request ended early, before its tokens had KV
    (again), int32 with rows of -1; None if it was aborted in a replica.

    With RequestOutputKind.DELTA the lists and the text hold what is new; spans count from the completion's start.
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
    ranks: list[int] | None = None
    routed_experts: np.ndarray | None = field(default=None, compare=False)

    @property
    def weight_version(self) -> int | None:
        """The version that the last token was sampled under."""
        return self.weight_versions[-1].version if self.weight_versions else None


@dataclass(frozen=True)
class RequestOutput:
    """A request and its samples so far (RequestOutputKind.DELTA: those with anything new).

    prompt_logprobs: one per prompt token; the first has no context: 0.0. prompt_top_logprobs and prompt_ranks: per
    prompt token, as for completions; {} and 0 for the first. num_cached_tokens: of the prompt, found in the cache.
    seed: the request's own, or the one that was drawn for it; with it, the same call gives the same tokens.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    completions: list[Completion]
    prompt_logprobs: list[float] | None
    finished: bool
    prompt_top_logprobs: list[dict[int, float]] | None = None
    prompt_ranks: list[int] | None = None
    num_cached_tokens: int = field(default=0, compare=False)  # depends on what ran before
    seed: int | None = field(default=None, compare=False)


COUNTERS = {"generation_tokens", "step_seconds", *(each.name for each in fields(SchedulerStats))}  # they only grow


@dataclass(frozen=True)
class EngineStats:
    """Counters since the start, and the load now. Memory in bytes."""

    num_running: int
    num_waiting: int
    kv_blocks_used: int
    kv_blocks_total: int
    kv_cache_bytes: int
    steps: int
    prompt_tokens_computed: int
    prefix_hit_tokens: int
    generation_tokens: int
    preemptions: int
    draft_tokens: int
    accepted_tokens: int
    step_seconds: float
    weight_version: int

    @property
    def tokens_per_step(self) -> float:
        """Tokens that a step gave, on average."""
        return self.generation_tokens / max(1, self.steps)
