"""The proof in small on every model that is loaded: schedules that must not change a bit, compared as bytes.

Two sequences of random tokens, packed, are the reference. An op can be exact and the model still depend on its batch,
where it moves data between tokens; and an engine's fused form can be another function than the model's own code.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..kernels import ops
from .layers import as_stage
from .linear import UnsupportedModelError
from .paged import group_size, hidden_states, new_kv_caches, plain_call, random_input

LENGTHS = (7, 37)  # the second is longer than a KV block on a CPU
CHUNK = 18


def _same_bytes(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


class SelfCheck:
    """Two packed sequences, the model's own result for them, and what must equal it.

    Each method raises UnsupportedModelError with the first schedule that changes a bit.
    """

    @torch.no_grad()
    def __init__(self, model: PreTrainedModel):
        self.model = model
        self.layout = self._layout(LENGTHS)
        self.given = random_input(model, sum(LENGTHS))
        self.hidden = hidden_states(model, self.given, self.layout)
        self.head: Any = model.get_output_embeddings()
        self.logits = None if self.head is None else self.head.logits(self.hidden)

    def _layout(self, lengths) -> ops.PagedLayout:
        return ops.packed_layout(list(lengths), group_size(self.model.config), self.model.device)

    def _compare(self, found: Tensor, expected: Tensor, what: str) -> None:
        if not _same_bytes(found, expected):
            raise UnsupportedModelError(f"{type(self.model).__name__} is not covered: {what}")

    @torch.no_grad()
    def batches(self) -> None:
        """Compare with another sequence beside, and with another token after."""
        changed = self.given.flip(0)
        second = slice(LENGTHS[0], sum(LENGTHS) - 1)
        changed[second] = self.given[second]
        other = hidden_states(self.model, changed, self.layout)
        what = "a sequence depends on the one beside it, or a token on one after it"
        self._compare(other[second], self.hidden[second], what)
        alone = hidden_states(self.model, self.given[: LENGTHS[0]], self._layout(LENGTHS[:1]))
        what = "a sequence alone differs from the same one beside another"
        self._compare(alone, self.hidden[: LENGTHS[0]], what)

    def _steps(self) -> Iterator[np.ndarray]:
        """Yield the tokens of each step: chunks of both sequences, and their last tokens."""
        ends = np.cumsum(LENGTHS)
        starts = ends - LENGTHS
        for step in range(0, max(LENGTHS) - 1, CHUNK):
            bounds = [(min(s + step, e - 1), min(s + step + CHUNK, e - 1)) for s, e in zip(starts, ends, strict=True)]
            yield np.concatenate([np.arange(*bound) for bound in bounds])
        yield ends - 1

    @torch.inference_mode()
    def prefill(self) -> None:
        """Run a sequence over a paged cache."""
        given = self.given[: LENGTHS[0]]
        layout = self._layout(LENGTHS[:1])
        hidden_states(self.model, given, layout, new_kv_caches(self.model, layout.num_blocks))

    @torch.no_grad()
    def paged(self) -> None:
        """Compare with chunks of prompts and single tokens over a paged cache, as an engine runs the model."""
        model = self.model
        whole = self.layout
        caches = new_kv_caches(model, whole.num_blocks)
        found = torch.empty_like(self.hidden)
        for rows in self._steps():
            owners = rows >= LENGTHS[0]
            lengths = [int((owners == owner).sum()) for owner in (False, True) if (owners == owner).any()]
            part = replace(
                whole,
                lengths=lengths,
                positions=whole.positions[rows],
                slot_mapping=whole.slot_mapping[rows],
                block_table_starts=whole.block_table_starts[np.unique(owners).astype(int)],
                items=ops.backend(model.device).work_items(lengths, group_size(model.config)),
                uploaded=None,
            )
            index = torch.from_numpy(rows).to(model.device)
            found[index] = hidden_states(model, self.given[index], part, caches)
        self._compare(found, self.hidden, "chunks and single tokens over the paged cache differ from the whole")
        if self.logits is not None:
            self._compare(self.head.logits(found), self.logits, "an engine's lm_head gives other logits")

    @torch.no_grad()
    def stages(self) -> None:
        """Compare with the model's layers one by one, as stages of a pipeline run them; raise what they raise."""
        hidden = self.given
        for number in range(self.model.config.num_hidden_layers):
            with as_stage(self.model, (number, number + 1)):
                hidden = hidden_states(self.model, hidden, self.layout)
        self._compare(hidden, self.hidden, "its layers one by one, as stages of a pipeline, differ from the whole")

    @torch.no_grad()
    def plain(self) -> None:
        """Compare with the logits of a plain call."""
        found = plain_call(self.model, self.given[: LENGTHS[0]]).logits[0]
        assert self.logits is not None
        what = "it changes logits after lm_head in a way that is not a number of its config times them"
        self._compare(found, self.logits[: LENGTHS[0]], what)
