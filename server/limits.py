"""What one call may ask for: its reply's memory, and its share of the server, are bounded before any work is done."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..engine import SamplingParams
from ..engine.request import Request


@dataclass(frozen=True)
class Limits:
    """The most that a call may ask for; ValueError, with the option that raises a limit, for more.

    sequences: prompts x n that may run and wait. logprobs: alternatives per token. values: log-probs of a reply, with
    those of alternatives.
    """

    sequences: int
    logprobs: int
    values: int

    def check_params(self, params: Sequence[SamplingParams]) -> None:
        """Check what is known before prompts are tokenised."""
        count = sum(p.n for p in params)
        if count > self.sequences:
            raise ValueError(
                f"{count} sequences (prompts x n) never fit: this server holds {self.sequences} at a time; send fewer "
                f"in a call, or start it with --max-waiting {count}"
            )
        most = max(max(p.logprobs or 0, p.prompt_logprobs or 0) for p in params)
        if most > self.logprobs:
            raise ValueError(
                f"{most} log-probs per token are more than this server's {self.logprobs}; "
                f"start it with --max-logprobs {most}"
            )

    def check_reply(self, requests: Sequence[Request]) -> None:
        """Check the reply's size, now that the prompts' lengths are known."""
        values = sum(map(reply_values, requests))
        if values > self.values:
            raise ValueError(
                f"this call may return {values} log-probs (n x max_tokens x (1 + logprobs), and the prompt's if asked "
                f"for), more than this server's {self.values}; ask for less, or start it with --max-reply-logprobs "
                f"{values}"
            )


def reply_values(request: Request) -> int:
    """The most log-probs that a request's reply has."""
    params = request.params
    sampled = params.n * request.samples[0].max_tokens * (1 + (params.logprobs or 0))
    scored = 0 if params.prompt_logprobs is None else len(request.prompt_token_ids) * (1 + params.prompt_logprobs)
    return sampled + scored
