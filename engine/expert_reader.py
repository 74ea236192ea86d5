"""The experts of a finished sample's tokens, read from where the workers noted them beside the KV cache."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from .executor import Executor, StepResult
from .request import Sample


class EndedSample(NamedTuple):
    """A sample that has ended, how many of its tokens want their experts, and the KV slots of those that have any."""

    sample: Sample
    wanted: int
    slots: np.ndarray


class ExpertReader:
    """The reader of the `routed_experts` of samples that end, where their requests ask for them."""

    def __init__(self, executor: Executor, block_size: int):
        self.executor = executor
        self.block_size = block_size
        self._ended: list[EndedSample] = []

    def lacks_rows(self, sample: Sample) -> bool:
        """Return True if a sample wants its experts, and lost them as it was preempted with a token under way."""
        if not sample.request.params.routed_experts or sample.block_table:
            return False
        owner = _owner(sample, len(sample.token_ids))
        return owner.finish_reason is None and owner.num_cached_tokens < len(sample.token_ids)

    def note_end(self, sample: Sample) -> None:
        """Note where the experts of a sample's tokens are: call it before the sample loses its blocks."""
        params = sample.request.params
        if not params.routed_experts:
            return
        start = params.routed_experts_prompt_start
        end = len(sample.token_ids) - 1  # nothing follows the last token
        owner = _owner(sample, end)
        positions = np.arange(start, max(start, min(end, owner.num_cached_tokens)))
        blocks = np.array(owner.block_table, np.int64)[positions // self.block_size]
        slots = blocks * self.block_size + positions % self.block_size
        known = (ended.slots for ended in self._ended if ended.sample is owner)
        wanted = max(0, end - start)
        self._ended.append(EndedSample(sample, wanted, next(known, slots)[:wanted]))

    def read(self, under_way: Iterable[StepResult] = ()) -> None:
        """Read the experts of all samples that have ended, before another step is scheduled, which may reuse blocks.

        under_way: steps that may compute some of their tokens; stages answer meanwhile, so they are waited for.
        """
        ended = self._ended
        self._ended = []
        if not ended:
            return
        for result in under_way:
            result.wait()
        stages = self.executor.collective_rpc("read_routed_experts", np.concatenate([e.slots for e in ended]))
        k = max(part.shape[2] for part in stages)  # 0 in a stage without experts
        found = np.concatenate([np.pad(part, [(0, 0), (0, 0), (0, k - part.shape[2])]) for part in stages], 1)
        dtype = np.uint8 if self.executor.info.num_experts <= 256 else np.uint16
        first = 0
        for sample, wanted, slots in ended:
            rows = found[first : first + len(slots)]
            first += len(slots)
            sample.routed_experts = rows.astype(dtype)
            if len(rows) < wanted:
                sample.routed_experts = np.full((wanted, *rows.shape[1:]), -1, np.int32)
                sample.routed_experts[: len(rows)] = rows


def _owner(sample: Sample, end: int) -> Sample:
    """Return the sample whose blocks hold the first `end` tokens: a sibling's first token comes of the first one's."""
    return sample if end > sample.num_prompt_tokens else sample.request.samples[0]
