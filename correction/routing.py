"""The experts of a mixture that two engines chose for the same tokens, compared."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


class RoutingDiagnosis:
    """Accumulates batches of tokens. layers: the numbers of those that have experts, in the whole model."""

    def __init__(self, layers: Sequence[int]):
        self.layers = list(layers)
        self.tokens = 0
        self.tokens_differ = 0
        self.differ = torch.zeros(len(layers), dtype=torch.int64)  # sets of a token's experts, by layer
        self.common = torch.zeros(len(layers), dtype=torch.int64)  # experts in both sets
        self.k = 0

    def add(self, first: Tensor, second: Tensor) -> None:
        """Compare experts, integers [T, all layers, k] in any order. Tokens with an id below 0 are left out."""
        known = ((first >= 0) & (second >= 0)).flatten(1).all(1)
        a, b = (ids[known][:, self.layers].long().sort(-1).values for ids in (first, second))
        differ = (a != b).any(-1)
        self.k = first.shape[-1]
        self.tokens += len(differ)
        self.tokens_differ += int(differ.any(-1).sum())
        self.differ += differ.sum(0)
        self.common += (a[..., None] == b[..., None, :]).any(-1).sum((0, 2))

    def summary(self) -> dict[str, Any]:
        """The shares of (token, layer) sets and of tokens that differ, the mean overlap, and both shares by layer.

        Raises ValueError without tokens.
        """
        if not self.tokens:
            raise ValueError("no tokens whose experts are known")
        shares = (self.differ / self.tokens).tolist()
        overlaps = (self.common / (self.tokens * self.k)).tolist()
        rows = zip(self.layers, shares, overlaps, strict=True)
        return {
            "tokens": self.tokens,
            "sets_differ": sum(shares) / len(shares),
            "tokens_differ": self.tokens_differ / self.tokens,
            "overlap": sum(overlaps) / len(overlaps),
            "by_layer": [{"layer": n, "sets_differ": share, "overlap": overlap} for n, share, overlap in rows],
        }
