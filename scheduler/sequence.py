"""A sequence: its tokens, its blocks and the counters that say how much of it is computed."""

from __future__ import annotations

from collections.abc import Hashable
from enum import Enum, auto


class SequenceStatus(Enum):
    """The place where a sequence stands: in a queue of the scheduler, or done."""

    WAITING = auto()
    RUNNING = auto()
    FINISHED = auto()


class Sequence:
    """One sample being generated. Three counters say what is to be computed; there are no phases:

        0 ........ num_cached_tokens ........ + num_scheduled_tokens ........ num_tokens
        | KV exists                 | computed by this step         | still to compute  |

    Prefix hit, chunk, decode and recompute all mean "compute `num_scheduled_tokens` from `num_cached_tokens` on".
    The step that reaches `num_tokens` samples the next token; it may compute a `draft` beyond it, which no counter but
    `num_scheduled_tokens` has until its tokens are sampled. With several steps under way, `num_tokens` counts the
    `num_pending` tokens that they sample, though their ids are not known yet.
    """

    def __init__(
        self,
        seq_id: int,
        prompt_token_ids: list[int],
        max_tokens: int,
        sample_index: int = 0,
        use_prefix_cache: bool = True,
    ):
        self.seq_id = seq_id  # ascending with arrival: the order of every queue
        self.call: Hashable = seq_id  # sequences of one call share its turns
        self.token_ids = list(prompt_token_ids)
        self.num_prompt_tokens = len(prompt_token_ids)
        self.max_tokens = max_tokens
        self.sample_index = sample_index
        self.use_prefix_cache = use_prefix_cache
        self.status = SequenceStatus.WAITING
        self.num_cached_tokens = 0
        self.num_scheduled_tokens = 0
        self.block_table: list[int] = []
        self.block_hashes: list[bytes] = []  # chained, one per published block
        self.cache_salt = b""  # sequences share KV only with those of the same salt
        self.num_prefix_hit: int | None = None  # tokens, when it was first admitted
        self.stale_kv = False  # older weights computed some of its KV: not to be shared
        self.siblings: list[Sequence] = []  # other samples of this prompt, started when its KV exists
        self.needs_tokens = False  # no step of it may be scheduled before its last token is known
        self.token_cost = 1  # what each of its tokens takes of a step's budget
        self.random_key: Hashable = None  # sequences of equal keys draw by the same rule and the same random numbers
        self.draft: list[int] = []  # tokens after the last one, computed with it in case that they are sampled
        self.num_pending = 0  # tokens that steps under way sample; num_tokens counts them
        self.pending_row = 0  # the newest one's place among the step's rows of logits

    @property
    def num_tokens(self) -> int:
        """Tokens of prompt and completion, those under way included."""
        return len(self.token_ids) + self.num_pending

    @property
    def num_completion_tokens(self) -> int:
        """Tokens sampled and known."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def tokens_to_come(self) -> int:
        """The most tokens that it may still sample, besides those known."""
        return self.max_tokens - self.num_completion_tokens

    @property
    def completion_token_ids(self) -> list[int]:
        """The tokens sampled and known."""
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def scheduled_token_ids(self) -> list[int]:
        """The tokens that this step computes; one that the step before samples from row i of its logits is -1 - i."""
        end = self.num_cached_tokens + self.num_scheduled_tokens
        known = self.token_ids[self.num_cached_tokens : end]
        if self.samples_now:
            return [*known, *([-1 - self.pending_row] if self.num_pending else self.draft)]
        return known

    @property
    def samples_now(self) -> bool:
        """True if the scheduled step reaches the last token, so that the next one is sampled."""
        return self.num_cached_tokens + self.num_scheduled_tokens >= self.num_tokens

    def check_fits(self, capacity: int) -> None:
        """Raise ValueError if the sequence could ever outgrow a KV cache of `capacity` tokens."""
        if self.num_prompt_tokens + self.max_tokens - 1 > capacity:  # the last token's KV is never needed
            raise ValueError(
                f"prompt of {self.num_prompt_tokens} tokens + max_tokens {self.max_tokens} can't fit the KV cache of "
                f"{capacity} tokens; lower max_tokens or raise kv_cache_memory_bytes"
            )

    def __repr__(self) -> str:
        counters = f"{self.num_cached_tokens}+{self.num_scheduled_tokens}/{self.num_tokens}"
        return f"Sequence({self.seq_id}, {self.status.name.lower()}, {counters})"
