"""A request's life between submission and output: its samples, when they stop, what they report."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..scheduler import Sequence
from .detokenizer import TextStream
from .outputs import Completion, RequestOutput, VersionSpan
from .sampling_params import SamplingParams


@dataclass
class SampledToken:
    token_id: int
    logprob: float
    raw_logprob: float | None = None
    top_logprobs: dict[int, float] | None = None


class Sample(Sequence):
    """A sequence and what was reported about its tokens."""

    def __init__(self, seq_id: int, request: Request, index: int, max_tokens: int, use_prefix_cache: bool):
        super().__init__(seq_id, request.prompt_token_ids, max_tokens, index, use_prefix_cache)
        self.request = request
        self.sampled: list[SampledToken] = []
        self.versions: list[int] = []  # weight version of each sampled token
        self.finish_reason: str | None = None
        self.stop_reason: str | int | None = None
        self.text: str | None = None  # once finished
        self.stream: TextStream | None = None

    def append(self, token: SampledToken, version: int) -> None:
        self.token_ids.append(token.token_id)
        self.sampled.append(token)
        self.versions.append(version)

    def spans(self) -> list[VersionSpan]:
        starts = [i for i, v in enumerate(self.versions) if i == 0 or v != self.versions[i - 1]]
        return [VersionSpan(self.versions[a], a, b) for a, b in zip(starts, [*starts[1:], len(self.versions)])]  # noqa: B905


@dataclass
class Request:
    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    params: SamplingParams
    seed: int
    eos_token_ids: tuple[int, ...]  # empty when EOS is ignored
    samples: list[Sample] = field(default_factory=list)
    prompt_logprobs: list[float] = field(default_factory=list)

    @property
    def finished(self) -> bool:
        return all(s.finish_reason is not None for s in self.samples)

    def forget_partial_scores(self) -> None:
        """New weights came while the prompt was being scored: its scores must be of one version."""
        if len(self.prompt_logprobs) < len(self.prompt_token_ids) - 1:
            self.prompt_logprobs = []

    @property
    def terminal_ids(self) -> list[int]:
        """Tokens that end a sample; banned before min_tokens."""
        return [*self.eos_token_ids, *self.params.stop_token_ids]

    def check_stop(self, sample: Sample, tokenizer) -> None:
        """Sets finish_reason after a token was appended."""
        token, count = sample.token_ids[-1], sample.num_completion_tokens
        if token in self.eos_token_ids:
            sample.finish_reason = "stop"
        elif token in self.params.stop_token_ids:
            sample.finish_reason, sample.stop_reason = "stop", token
        elif self.params.stop:
            self._check_stop_strings(sample, tokenizer)
        if sample.finish_reason is None and count >= sample.max_tokens:
            sample.finish_reason = "length"

    def _check_stop_strings(self, sample: Sample, tokenizer) -> None:
        stream = _stream(sample, tokenizer)
        before = len(stream.text)
        stream.read(sample.completion_token_ids)
        if sample.num_completion_tokens <= self.params.min_tokens:
            return
        ends = [(stream.text.find(s, max(0, before - len(s) + 1)), s) for s in self.params.stop]  # in the new text
        found = [end for end in ends if end[0] >= 0]
        if found:
            cut, string = min(found)
            sample.finish_reason, sample.stop_reason, sample.text = "stop", string, stream.text[:cut]

    def output(self, tokenizer) -> RequestOutput:
        """A snapshot."""
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=list(self.prompt_token_ids),
            completions=[self._completion(s, tokenizer) for s in self.samples],
            prompt_logprobs=[0.0, *self.prompt_logprobs] if self.params.prompt_logprobs else None,
            finished=self.finished,
        )

    def _text(self, sample: Sample, tokenizer) -> str | None:
        if sample.text is None and tokenizer is not None:
            if sample.finish_reason is None:
                stream = _stream(sample, tokenizer)
                stream.read(sample.completion_token_ids)
                return stream.shown(self.params.stop)
            sample.text = tokenizer.decode(sample.completion_token_ids, skip_special_tokens=True)
        return sample.text

    def _completion(self, sample: Sample, tokenizer) -> Completion:
        sampled, params = sample.sampled, self.params
        return Completion(
            index=sample.sample_index,
            token_ids=sample.completion_token_ids,
            logprobs=[s.logprob for s in sampled],
            finish_reason=sample.finish_reason,
            stop_reason=sample.stop_reason,
            weight_versions=sample.spans(),
            text=self._text(sample, tokenizer),
            top_logprobs=None if params.logprobs is None else [s.top_logprobs or {} for s in sampled],
            raw_logprobs=[s.raw_logprob for s in sampled] if params.raw_logprobs else None,  # type: ignore[misc]
        )


def _stream(sample: Sample, tokenizer) -> TextStream:
    if sample.stream is None:
        sample.stream = TextStream(tokenizer)
    return sample.stream
