"""The experts that routers choose: noted where an engine keeps KV, or given by whoever replays a rollout.

They come as an argument of the router's decoder layer, as positions and layouts do: a layer that activation
checkpointing runs again meets the same ones.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..kernels import ops
from .coverage import is_router


@dataclass
class RoutedExperts:
    """The choices of routers in a packed batch of T tokens: given, or noted.

    given: int64 [T, layers, k], ids in any order that take the place of a router's own; a row of -1 leaves it its own.
    noted: [rows, layers, k], where the own choices of routers go, ascending; at: int64 [T], the row of each token.
    """

    given: Tensor | None = None
    noted: Tensor | None = None
    at: Tensor | None = None

    @classmethod
    def of_batch(
        cls,
        model: PreTrainedModel,
        lengths: Sequence[int],
        given: Sequence[np.ndarray | Tensor | None] | None,
        device: torch.device,
        note: bool = False,
    ) -> RoutedExperts:
        """Return what is given for sequences of these lengths; see `checked_ids`.

        device: where the model computes. note: note the routers' own choices, too. ValueError for a model without
        experts.
        """
        layers, experts, k = expert_sizes(model)
        if not experts:
            raise ValueError(f"routed_experts: {type(model).__name__} is no mixture of experts")
        ids = None if given is None else checked_ids(model, given, lengths).to(device)
        if not note:
            return cls(ids)
        count = sum(lengths)
        noted = torch.zeros(count, layers, k, dtype=torch.int64, device=device)
        return cls(ids, noted, torch.arange(count, device=device))

    def note(self, first: int, own: Tensor) -> None:
        """Note the choices of the routers of a layer and those after it, int64 [T, layers, k], if they are wanted."""
        if self.noted is not None:
            self.noted[self.at, first : first + own.shape[1], : own.shape[2]] = own.to(self.noted.dtype)

    def choose(self, layer: int, own: Tensor) -> Tensor | None:
        """Note a router's own choice, sorted. Return ids to use instead, int64 [T, k]; None where none are given."""
        self.note(layer, own[:, None])
        if self.given is None:
            return None
        ids = self.given[:, layer, : own.shape[1]]
        return torch.where(ids < 0, own, ids)


def routers(model: Any) -> dict[int, Any]:
    """Return the router of each decoder layer that has one, by the layer's number in this model."""
    layers = model.get_decoder().layers
    return {i: m for i, layer in enumerate(layers) for m in layer.modules() if is_router(m)}


class RoutingLayer(nn.Module):
    """A decoder layer that hands `routed_experts` to its router: mixed into its class.

    It is an argument of `forward`, not a hook's, since activation checkpointing runs no hook again.
    """

    router: tuple[int, Any]  # the layer's number, and its router or None; no submodule of its own

    def forward(self, *args, routed_experts: RoutedExperts | None = None, **kwargs):
        """Return what the layer's own forward does."""
        with routing_by(self, routed_experts):
            return super().forward(*args, **kwargs)


@contextmanager
def routing_by(layer: nn.Module, routed: RoutedExperts | None) -> Iterator[None]:
    """Have a layer's router note its choices, or use those that are given, until the block ends.

    By an attribute of the router, since the code between layer and router, transformers', takes no argument for it: one
    thread runs a model at a time.
    """
    number, router = layer.router if isinstance(layer, RoutingLayer) else (0, None)
    if router is None or routed is None:
        yield
        return
    own = router.routing
    router.routing = replace(own, choose=functools.partial(routed.choose, number))
    try:
        yield
    finally:
        router.routing = own


def connect_routers(model: PreTrainedModel) -> None:
    """Have the layers of a mixture of experts take `routed_experts`, an argument of the model's forward."""
    found = routers(model)
    layers: Any = model.get_decoder().layers
    for number, layer in enumerate(layers if found else []):
        layer.__class__ = type(type(layer).__name__, (RoutingLayer, type(layer)), {})
        layer.router = (number, found.get(number))


def expert_sizes(model: Any) -> tuple[int, int, int]:
    """Return the layers of a model, the most experts that a router of it has, and the most that it chooses; 0: none."""
    found = [router.routing for router in routers(model).values()]
    experts = max((routing.num_experts for routing in found), default=0)
    return len(model.get_decoder().layers), experts, max((routing.top_k for routing in found), default=0)


def load_balancing_loss_of(model: nn.Module) -> Callable[..., Tensor] | None:
    """Return the function by which transformers' code of this model computes the loss; None where it has none."""
    modules = (sys.modules[kind.__module__] for kind in type(model).__mro__)
    return next(filter(None, (getattr(module, "load_balancing_loss_func", None) for module in modules)), None)


def load_balancing_loss(model: nn.Module, logits: Sequence[Tensor]) -> Tensor:
    """Return the auxiliary loss that keeps experts equally busy (Switch Transformers, arXiv 2101.03961, eq. 4 to 6), as
    transformers computes it for this model. ValueError where it doesn't.

    logits: of each layer's router, [T, experts].
    """
    compute = load_balancing_loss_of(model)
    if compute is None:
        raise ValueError(f"{type(model).__name__} has no load-balancing loss in transformers")
    _, experts, k = expert_sizes(model)
    return compute(tuple(logits), experts, k)


def new_routing_cache(model: PreTrainedModel, num_blocks: int) -> Tensor | None:
    """Return where an engine notes experts beside its KV, [blocks + 1, BLOCK, layers, k], uint8, or int16 where there
    are more than 256; the last block is for rows without a token. None for a model without experts.
    """
    layers, experts, k = expert_sizes(model)
    if not experts:
        return None
    shape = num_blocks + 1, ops.backend(model.device).BLOCK, layers, k
    return torch.zeros(shape, dtype=torch.uint8 if experts <= 256 else torch.int16, device=model.device)


def checked_ids(model: PreTrainedModel, given: Sequence[np.ndarray | Tensor | None], lengths: Sequence[int]) -> Tensor:
    """Return ids to replay for sequences of these lengths, int64 [sum of lengths, layers, k].

    given: of each sequence int [length or length - 1, layers, k], with -1 where a router is to choose by itself, or
    None. The last token needs no row: nothing follows it. ValueError, naming what is wrong, for other shapes, ids out
    of range, and rows that hold an expert twice or are -1 in part.
    """
    layers, _, k = expert_sizes(model)
    if len(given) != len(lengths):
        raise ValueError(f"routed_experts has {len(given)} entries for {len(lengths)} sequences")
    choosing = routers(model)
    found = torch.full((sum(lengths), layers, k), -1)
    start = 0
    for number, (ids, length) in enumerate(zip(given, lengths, strict=True)):
        if ids is not None:
            name = f"routed_experts[{number}]"
            array = ids.numpy(force=True) if isinstance(ids, Tensor) else np.asarray(ids)
            if array.dtype.kind not in "iu":
                raise ValueError(f"{name} holds {array.dtype}, expected integers")
            ids = torch.from_numpy(array.astype(np.int64))
            if ids.shape not in ((length, layers, k), (length - 1, layers, k)):
                raise ValueError(
                    f"{name} has shape {list(ids.shape)}, expected {[length - 1, layers, k]}: tokens, but the last one "
                    "needs none; layers; experts of a token"
                )
            _check(name, ids, choosing)
            found[start : start + len(ids)] = ids
        start += length
    return found


def _check(name: str, ids: Tensor, choosing: dict[int, Any]) -> None:
    for layer, router in choosing.items():
        count = router.routing.num_experts
        k = router.routing.top_k
        rows = ids[:, layer, :k].sort(-1).values
        own = (rows == -1).all(-1)
        problems = {
            f"an expert of {count} that isn't there": ((rows < 0) | (rows >= count)).any(-1) & ~own,
            "an expert twice": (rows.diff(dim=-1) == 0).any(-1) & ~own,
        }
        for problem, wrong in problems.items():
            if wrong.any():
                token = int(wrong.nonzero()[0, 0])
                raise ValueError(f"{name}: token {token} has {problem} in layer {layer}: {ids[token, layer].tolist()}")
