from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from transformers import PreTrainedModel


def shard(model: PreTrainedModel, **kwargs) -> PreTrainedModel:
    """`fully_shard` (FSDP2) on each decoder layer and on the root; keywords go to every call. Needs a process group."""
    base: Any = model.base_model
    for layer in base.layers:
        fully_shard(layer, **kwargs)
    fully_shard(model, **kwargs)
    return model


def init_process_group() -> None:
    """The default process group, over gloo: torchrun's, or one of this process alone."""
    if dist.is_initialized():
        return
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


@contextmanager
def together() -> Iterator[None]:
    """A block without collectives, on every rank: where one fails, all raise, and none waits for it."""
    failure: Exception | None = None
    try:
        yield
    except Exception as error:
        failure = error
    problems: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(problems, None if failure is None else f"{type(failure).__name__}: {failure}")
    if failure is not None:
        raise failure
    for rank, problem in enumerate(problems):
        if problem is not None:
            raise RuntimeError(f"rank {rank} failed: {problem}")
