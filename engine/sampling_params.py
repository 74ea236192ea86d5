"""How a prompt is sampled."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from enum import Enum

from .structured_outputs import StructuredOutputsParams

MAX_N = 4096
MAX_LOGPROBS = 1000
MIN_TEMPERATURE = 1e-6  # below, fp32 logits / temperature overflow


def _integer(name: str, value, low: int, high: int | None = None) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an integer, got {value!r}")
    if value < low or (high is not None and value > high):
        raise ValueError(f"{name} must be at least {low}{f' and at most {high}' if high else ''}, got {value}")


def _number(name: str, value, low: float, high: float, open_low: bool = False) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} must be a number, got {value!r}")
    if not (math.isfinite(value) and (low < value if open_low else low <= value) and value <= high):
        raise ValueError(f"{name} must be in {'(' if open_low else '['}{low}, {high}], got {value}")


class RequestOutputKind(Enum):
    """The reports of a request by `LLM.step`: all of it so far each time, only what is new, or only its end.

    CUMULATIVE copies all tokens of a request at each step, some 10 ms per step at 256 long ones: a loop over many takes
    DELTA or FINAL_ONLY. `LLM.generate` takes FINAL_ONLY by itself.
    """

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """The sampling parameters of one prompt; the names are vLLM's.

    The distribution is softmax(logits / temperature), masked by top_k, top_p and min_p in this order, renormalised;
    log-probs are of exactly this distribution. Tokens that min_tokens or structured_outputs forbid are masked before
    all else. temperature=0 is greedy: filters are off and log-probs are those of temperature 1. A top_k of 0 or -1 is
    off. Tokens tied at a filter's edge stay in.
    """

    n: int = 1
    """Samples of the prompt."""
    temperature: float = 1.0
    """What logits are divided by; 0 is greedy."""
    top_p: float = 1.0
    """Nucleus sampling: keep the most probable tokens that together have this probability; 1 is off."""
    top_k: int = 0
    """Keep this many of the most probable tokens; 0 and -1 are off."""
    min_p: float = 0.0
    """Keep tokens that are at least this probable, relative to the most probable one; 0 is off."""
    max_tokens: int | None = 16
    """Most tokens of a completion; None is as many as the model allows."""
    min_tokens: int = 0
    """Tokens before which EOS and stop tokens have probability 0."""
    stop: str | Sequence[str] = ()
    """Strings that end the text. They are cut off from it; their tokens stay in token_ids."""
    stop_token_ids: Sequence[int] = ()
    """Token ids that end a completion."""
    ignore_eos: bool = False
    """Go on after EOS."""
    seed: int | None = None
    """Fixes the random numbers; unset, the OS draws one per request. Samples of one request never share theirs."""
    logprobs: int | None = None
    """Report this many most probable alternatives per token, and the token's rank."""
    prompt_logprobs: int | None = None
    """Score the prompt's tokens, too, with this many alternatives each. True is 0, False is None."""
    raw_logprobs: bool = False
    """Also report the sampled token's log-prob at temperature 1 without filters."""
    routed_experts: bool = False
    """Report the experts of each token, of a mixture of experts; see `Completion`."""
    routed_experts_prompt_start: int = 0
    """The prompt's first token whose experts are reported."""
    detokenize: bool = True
    """Make text of the tokens."""
    skip_special_tokens: bool = True
    """Leave special tokens out of the text."""
    include_stop_str_in_output: bool = False
    """Keep the stop string or token that ended the text."""
    structured_outputs: StructuredOutputsParams | None = None
    """A grammar that completions follow. What it forbids has probability 0, as with any other filter."""
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    """What `LLM.step` reports."""

    def per_prompt(self, count: int) -> list[SamplingParams]:
        """Parameters for each of `count` prompts, the seed, where there is one, another for each.

        Requests with equal seeds share their random numbers: the k-th samples of all prompts depend on each other.
        """
        if self.seed is None:
            return [self] * count
        return [replace(self, seed=random.Random(f"{self.seed}/{i}").getrandbits(64)) for i in range(count)]

    def __post_init__(self) -> None:
        _integer("n", self.n, 1, MAX_N)
        _number("temperature", self.temperature, 0.0, 1e4)
        if 0 < self.temperature < MIN_TEMPERATURE:
            raise ValueError(f"temperature must be 0 (greedy) or at least {MIN_TEMPERATURE}, got {self.temperature}")
        _number("top_p", self.top_p, 0.0, 1.0, open_low=True)
        _integer("top_k", self.top_k, -1, 2**63 - 1)
        _number("min_p", self.min_p, 0.0, 1.0)
        if self.max_tokens is not None:
            _integer("max_tokens", self.max_tokens, 1)
        _integer("min_tokens", self.min_tokens, 0, self.max_tokens)
        if self.seed is not None:
            _integer("seed", self.seed, -(2**63), 2**64 - 1)
        if isinstance(self.prompt_logprobs, bool):
            object.__setattr__(self, "prompt_logprobs", 0 if self.prompt_logprobs else None)
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _integer(name, getattr(self, name), 0, MAX_LOGPROBS)
        for field in fields(self):
            value = getattr(self, field.name)
            if field.type == "bool" and not isinstance(value, bool):
                raise TypeError(f"{field.name} must be a bool, got {value!r}")
        _integer("routed_experts_prompt_start", self.routed_experts_prompt_start, 0)
        if self.routed_experts_prompt_start and not self.routed_experts:
            raise ValueError("routed_experts_prompt_start says where routed_experts begin, which weren't asked for")
        if not isinstance(self.stop or (), Iterable):
            raise TypeError(f"stop must be a string or several, got {self.stop!r}")
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        if not all(isinstance(s, str) and s for s in stop):
            raise ValueError(f"stop must be non-empty strings, got {self.stop!r}")
        if stop and not self.detokenize:
            raise ValueError("stop strings are found in the text; they need detokenize=True")
        object.__setattr__(self, "stop", stop)
        ids = tuple(self.stop_token_ids or ())
        for token in ids:
            _integer("stop_token_ids", token, 0)
        object.__setattr__(self, "stop_token_ids", ids)
        if self.structured_outputs is not None:
            self._check_structured_outputs()
        if not isinstance(self.output_kind, RequestOutputKind):
            raise TypeError(f"output_kind must be a RequestOutputKind, got {self.output_kind!r}")

    def _check_structured_outputs(self) -> None:
        if not isinstance(self.structured_outputs, StructuredOutputsParams):
            raise TypeError(f"structured_outputs must be StructuredOutputsParams, got {self.structured_outputs!r}")
        if self.min_tokens or self.ignore_eos:
            raise ValueError("structured_outputs says where a completion ends: leave min_tokens and ignore_eos out")
