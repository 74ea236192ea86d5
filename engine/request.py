"""A request's life between submission and output: its samples, when they stop, what they report."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from ..kernels import ops
from ..scheduler import Sequence
from .detokenizer import TextStream, Tokenizer
from .outputs import Completion, RequestOutput, VersionSpan
from .sampling_params import RequestOutputKind, SamplingParams
from .structured_outputs import Constraint


@dataclass(slots=True)
class SampledToken:
    """A token with its log-prob, and what more of its distribution was asked for. rank: from 1; 0 where unknown."""

    token_id: int
    logprob: float
    raw_logprob: float | None = None
    rank: int = 0
    top_logprobs: dict[int, float] | None = None


class Sample(Sequence):
    """A sequence and what was reported about its tokens."""

    def __init__(self, request: Request, index: int, max_tokens: int, use_prefix_cache: bool):
        super().__init__(-1, request.prompt_token_ids, max_tokens, index, use_prefix_cache)  # numbered when submitted
        self.request = request
        by = request.params
        drawn = request.seed, index, by.temperature, by.top_k, by.top_p, by.min_p
        self.random_key = drawn if by.temperature else ()  # nothing but the logits decides a greedy token
        self.sampled: list[SampledToken] = []
        self.versions: list[tuple[int, bool]] = []  # of each sampled token: weight version, stale KV
        self.finish_reason: str | None = None
        self.stop_reason: str | int | None = None
        self.text: str | None = None  # once finished
        self.stream: TextStream | None = None
        self.routed_experts: np.ndarray | None = None  # once finished, where they are asked for
        self.constraint: Constraint | None = None  # of structured_outputs, in the process where it was made
        self.needs_tokens = request.params.structured_outputs is not None
        if request.params.prompt_logprobs is not None and index == 0:
            self.token_cost = 2  # a token of the prompt costs a row of logits, too
        self.reported = 0  # tokens, characters and end, as far as deltas have reported
        self.reported_chars = 0
        self.reported_end = False

    def __getstate__(self) -> dict:
        """The state that goes to a replica: with the tokens, without KV, which is computed again there."""
        kept = (
            "token_ids",
            "cache_salt",
            "sampled",
            "versions",
            "finish_reason",
            "stop_reason",
            "text",
            "routed_experts",
        )
        fresh = Sample(self.request, self.sample_index, self.max_tokens, self.use_prefix_cache)
        fresh.reported = len(self.sampled)
        fresh.reported_end = self.finish_reason is not None
        return fresh.__dict__ | {name: self.__dict__[name] for name in kept}

    def append(self, token: SampledToken, version: int, stale_kv: bool = False) -> None:
        """Add a token, sampled under a weight version."""
        self.token_ids.append(token.token_id)
        self.sampled.append(token)
        self.versions.append((version, stale_kv))

    def begin_constraint(self, tokenizer: Tokenizer | None) -> None:
        """Make the constraint of structured_outputs, where the request has any and it wasn't made yet."""
        grammar = self.request.params.structured_outputs
        if grammar is not None and self.constraint is None:
            assert tokenizer is not None, "the input processor lets no grammar pass without one"
            self.constraint = Constraint(grammar, tokenizer, self.request.vocab_size, self.request.eos_token_ids)
            for token in self.completion_token_ids:  # sampled by another replica
                self.constraint.advance(token)

    def mask(self, position: int) -> np.ndarray | None:
        """Return the tokens that may become token number `position`, one bit each, u32 [ceil(V / 32)]; None: all."""
        if self.constraint is not None:  # then it is the next one
            return self.constraint.mask
        early = position - self.num_prompt_tokens < self.request.params.min_tokens
        return self.request.early_mask if early else None

    @property
    def unreported(self) -> bool:
        """True if tokens or the end have not been reported yet."""
        return len(self.sampled) > self.reported or (self.finish_reason is not None and not self.reported_end)

    def spans(self, start: int = 0) -> list[VersionSpan]:
        """The spans of weight versions of the tokens from `start` on."""
        kinds = self.versions
        end = len(self.versions)
        starts = [i for i in range(start, end) if i == start or kinds[i] != kinds[i - 1]]
        return [VersionSpan(kinds[a][0], a, b, kinds[a][1]) for a, b in zip(starts, [*starts[1:], end])]  # noqa: B905


@dataclass
class Request:
    """A prompt and its `params.n` samples."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    params: SamplingParams
    seed: int
    eos_token_ids: tuple[int, ...]  # empty when EOS is ignored
    vocab_size: int
    samples: list[Sample] = field(default_factory=list)
    prompt_scores: list[SampledToken] = field(default_factory=list)
    num_scores_due: int = 0  # prompt scores that are there or under way
    serial: int = 0  # of its assignment to a replica
    call: str = ""  # requests of one call take turns with other calls as one; by default a request is a call

    @property
    def finished(self) -> bool:
        """True once every sample has ended."""
        return all(s.finish_reason is not None for s in self.samples)

    def finish(self, reason: str, detail: str | None = None) -> list[Sample]:
        """Give all unfinished samples a finish_reason and its detail. Return these samples."""
        unfinished = [s for s in self.samples if s.finish_reason is None]
        for sample in unfinished:
            sample.finish_reason = reason
            sample.stop_reason = detail
        return unfinished

    @property
    def due(self) -> bool:
        """True if the request's progress is to be reported now."""
        return self.finished or self.params.output_kind is not RequestOutputKind.FINAL_ONLY

    @property
    def partly_scored(self) -> bool:
        """True while log-probs of the prompt are asked for and some are still to come."""
        wanted = self.params.prompt_logprobs is not None
        return wanted and len(self.prompt_scores) < len(self.prompt_token_ids) - 1

    @property
    def terminal_ids(self) -> list[int]:
        """Tokens that end a sample; masked before min_tokens."""
        return [*self.eos_token_ids, *self.params.stop_token_ids]

    @functools.cached_property
    def early_mask(self) -> np.ndarray:
        """The tokens that may come before min_tokens, as a mask."""
        return ops.mask_without(self.terminal_ids, self.vocab_size)

    def check_stop(self, sample: Sample, tokenizer: Tokenizer | None) -> None:
        """Set finish_reason after a token was appended, or what a grammar leaves for the next one."""
        token = sample.token_ids[-1]
        count = sample.num_completion_tokens
        if token in self.eos_token_ids:
            sample.finish_reason = "stop"
        elif token in self.params.stop_token_ids:
            sample.finish_reason = "stop"
            sample.stop_reason = token
        elif self.params.stop:
            self._check_stop_strings(sample, tokenizer)
        if sample.finish_reason is None and count >= sample.max_tokens:
            sample.finish_reason = "length"
        if sample.finish_reason is None and sample.constraint is not None:
            sample.constraint.advance(token)

    def _check_stop_strings(self, sample: Sample, tokenizer: Tokenizer | None) -> None:
        stream = _stream(sample, tokenizer)
        ids = sample.completion_token_ids
        stream.read(ids[:-1])  # known, unless the sample came from another replica
        before = len(stream.text)
        stream.read(ids)
        if sample.num_completion_tokens <= self.params.min_tokens:
            return
        ends = [(stream.text.find(s, max(0, before - len(s) + 1)), s) for s in self.params.stop]  # in the new text
        found = [end for end in ends if end[0] >= 0]
        if found:
            cut, string = min(found)
            cut += len(string) if self.params.include_stop_str_in_output else 0
            sample.finish_reason = "stop"
            sample.stop_reason = string
            sample.text = stream.text[:cut]

    def take_output(self, tokenizer: Tokenizer | None) -> RequestOutput:
        """Return a snapshot, or what is new since the last one, which then counts as reported."""
        delta = self.params.output_kind is RequestOutputKind.DELTA
        samples = [s for s in self.samples if not delta or s.unreported]
        scores = None if self.params.prompt_logprobs is None or self.partly_scored else self.prompt_scores
        if delta and all(s.reported for s in self.samples):  # reported before
            scores = None
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=self.prompt_token_ids if delta else list(self.prompt_token_ids),
            completions=[self._completion(s, tokenizer, delta) for s in samples],
            prompt_logprobs=None if scores is None else [0.0, *(s.logprob for s in scores)],
            finished=self.finished,
            prompt_top_logprobs=None if scores is None else [{}, *(s.top_logprobs or {} for s in scores)],
            prompt_ranks=None if scores is None else _ranks(scores, [0]),
            num_cached_tokens=self.samples[0].num_prefix_hit or 0,
            seed=self.seed,
        )

    def _text(self, sample: Sample, tokenizer: Tokenizer | None) -> str | None:
        params = self.params
        if sample.text is None and tokenizer is not None and params.detokenize:
            ids = sample.completion_token_ids
            if sample.finish_reason is None:
                stream = _stream(sample, tokenizer)
                stream.read(ids)
                return stream.shown(params.stop)
            ended_by_token = sample.finish_reason == "stop" and bool(ids) and ids[-1] in self.terminal_ids
            if ended_by_token and not params.include_stop_str_in_output:
                ids = ids[:-1]
            sample.text = tokenizer.decode(ids, skip_special_tokens=params.skip_special_tokens)
        return sample.text

    def _completion(self, sample: Sample, tokenizer: Tokenizer | None, delta: bool) -> Completion:
        params = self.params
        text = self._text(sample, tokenizer)
        start = sample.reported if delta else 0
        chars = sample.reported_chars if delta else 0
        sampled = sample.sampled[start:]
        if delta:
            sample.reported = len(sample.sampled)
            sample.reported_chars = len(text or "")
            sample.reported_end = sample.finish_reason is not None
        return Completion(
            index=sample.sample_index,
            token_ids=[s.token_id for s in sampled],
            logprobs=[s.logprob for s in sampled],
            finish_reason=sample.finish_reason,
            stop_reason=sample.stop_reason,
            weight_versions=sample.spans(start),
            text=None if text is None else text[chars:],
            top_logprobs=None if params.logprobs is None else [s.top_logprobs or {} for s in sampled],
            raw_logprobs=[s.raw_logprob for s in sampled] if params.raw_logprobs else None,  # type: ignore[misc]
            ranks=None if params.logprobs is None else _ranks(sampled),
            routed_experts=sample.routed_experts,
        )


def _ranks(tokens: list[SampledToken], before: Iterable[int] = ()) -> list[int] | None:
    """The tokens' ranks after those before them; None where a server elsewhere didn't say."""
    return [*before, *(t.rank for t in tokens)] if all(t.rank for t in tokens) else None


def _stream(sample: Sample, tokenizer: Tokenizer | None) -> TextStream:
    assert tokenizer is not None, "the input processor refuses stop strings without one"
    if sample.stream is None:
        sample.stream = TextStream(tokenizer, sample.request.params.skip_special_tokens)
    return sample.stream
