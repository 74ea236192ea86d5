"""Weights as an engine's products read them."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from .dispatch import backend
from .modes import outside_modes


@dataclass
class PackedWeight:
    """A linear's weight [features, depth], or experts' [E, features, depth], in the layout that its backend's product
    reads fastest. Same tree, same bits.
    """

    panels: Tensor
    features: int

    def __post_init__(self) -> None:
        self.memory = backend(self.panels.device).storage(self.panels)  # as the kernels take it

    @classmethod
    def pack(cls, weight: Tensor, reuse: PackedWeight | None = None) -> PackedWeight:
        """Pack a weight.

        reuse: a packed weight of the same shape and dtype that nobody needs any more; its memory is taken.
        """
        kernels = backend(weight.device)
        pack = kernels.pack if weight.dim() == 2 else kernels.pack_experts
        panels = None if reuse is None else reuse.panels
        return cls(pack(weight.detach(), panels), weight.shape[-2])

    @outside_modes
    def rows(self, index: Tensor) -> Tensor:
        """Return rows of a linear's weight, [*index.shape, depth]; index int64."""
        return backend(self.panels.device).packed_rows(self.panels, index)
