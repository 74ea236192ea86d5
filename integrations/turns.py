"""Turns of an agent, joined to the sequences that a trainer scores, with a mask for what the environment wrote."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from ..engine import Completion


@dataclass(frozen=True)
class Turn:
    """One call of a model: token ids in, token ids out, and the log-prob of each token that came out."""

    prompt_token_ids: Sequence[int]
    token_ids: Sequence[int]
    logprobs: Sequence[float]

    @classmethod
    def of(cls, prompt_token_ids: Sequence[int], completion: Completion) -> Turn:
        """Return the turn that an engine's completion is."""
        return cls(prompt_token_ids, completion.token_ids, completion.logprobs)

    def __post_init__(self) -> None:
        if not self.prompt_token_ids or len(self.token_ids) != len(self.logprobs):
            raise ValueError(
                f"a turn needs a prompt, and a log-prob per token; got {len(self.prompt_token_ids)} prompt tokens, "
                f"{len(self.token_ids)} tokens and {len(self.logprobs)} log-probs"
            )


@dataclass
class Trace:
    """A sequence that several turns made.

    mask: per token, True where the policy sampled it; False in the first prompt and in what the environment wrote.
    logprobs: the rollout's, per token; 0 where the mask is False. num_prompt_tokens: of the first prompt.
    """

    num_prompt_tokens: int
    token_ids: list[int] = field(default_factory=list)
    mask: list[bool] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)

    def add(self, turn: Turn) -> None:
        """Append a turn whose prompt begins with this trace."""
        given = turn.prompt_token_ids[len(self.token_ids) :]
        self.token_ids += [*given, *turn.token_ids]
        self.mask += [False] * len(given) + [True] * len(turn.token_ids)
        self.logprobs += [0.0] * len(given) + [*turn.logprobs]


def join_turns(turns: Iterable[Turn]) -> list[Trace]:
    """Return the traces of an agent's turns in order: one, as long as each prompt begins with all tokens before it.

    Where a prompt does not (its text was encoded again, or its history cut), a new trace begins, so that each token is
    in the context that it was sampled in. `token_logprobs(model, [t.token_ids], params, prompt_lens=
    [t.num_prompt_tokens])` gives a trace's log-probs, as bits, where the mask is True. What depends on a completion's
    start (min_tokens, structured_outputs) needs its turns scored one by one.
    """
    traces: list[Trace] = []
    for turn in turns:
        known = traces[-1].token_ids if traces else []
        if not traces or [*turn.prompt_token_ids[: len(known)]] != known:
            traces.append(Trace(len(turn.prompt_token_ids)))
        traces[-1].add(turn)
    return traces
