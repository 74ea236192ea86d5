"""What one call may ask for: its reply's memory, and its share of the server, are bounded before any work is done."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..engine import SamplingParams
from ..engine.request import Request

MAX_STOPS = 64  # stop strings
MAX_STOPPING = 1024  # characters of all of them, stop tokens


@dataclass(frozen=True)
class Limits:
    """The most that a call may ask for; more is a ValueError with the option that raises the limit.

    sequences: prompts x n that may run and wait. logprobs: alternatives per token. values: log-probs of a reply, with
    those of alternatives.
    """

    sequences: int
    logprobs: int
    values: int

    def check_count(self, sequences: int) -> None:
        """Check how many prompts, or samples of them, a call has."""
        _check(sequences, self.sequences, "sequences (prompts x n)", "--max-waiting")

    def check_params(self, params: Sequence[SamplingParams]) -> None:
        """Check what is known before prompts are tokenised."""
        self.check_count(sum(p.n for p in params))
        most = max(max(p.logprobs or 0, p.prompt_logprobs or 0) for p in params)
        _check(most, self.logprobs, "log-probs per token", "--max-logprobs")
        for p in params:
            if len(p.stop) > MAX_STOPS or len("".join(p.stop)) > MAX_STOPPING or len(p.stop_token_ids) > MAX_STOPPING:
                raise ValueError(
                    f"each token is compared with all stops: at most {MAX_STOPS} stop strings of {MAX_STOPPING} "
                    f"characters together, and {MAX_STOPPING} stop_token_ids"
                )

    def check_reply(self, requests: Sequence[Request]) -> None:
        """Check the reply's size, now that the prompts' lengths are known."""
        what = "log-probs of a reply (n x max_tokens x (1 + logprobs), and the prompt's where they are asked for)"
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
    return sampled + scored
