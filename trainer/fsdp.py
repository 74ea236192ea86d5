"""FSDP2 around an exact model."""

from __future__ import annotations

import atexit
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import PreTrainedModel

from ..model.casts import engine_dtypes, own_name


def shard(model: PreTrainedModel, **kwargs) -> PreTrainedModel:
    """`fully_shard` (FSDP2) on each decoder layer and on the root; keywords go to every call. Needs a process group.

    What transformers keeps in fp32 in an engine of 16 bits (some families' routers) gets a group of its own that isn't
    cast. A stored buffer that an engine has in 16 bits (the bias of MiniMax-M2's routers) is rounded for good, as FSDP2
    casts parameters alone: saved weights have it rounded. A layer's inputs aren't cast, whatever the `mp_policy` says:
    an engine's layers get them as they are.
    """
    if dist.get_world_size() > 1:
        atexit.unregister(_let_go)
        atexit.register(_let_go)
    policy = replace(kwargs.get("mp_policy", MixedPrecisionPolicy()), cast_forward_inputs=False)
    dtype = policy.param_dtype or model.dtype
    loaded = engine_dtypes(model.config, dtype)
    for name, buffer in model.named_buffers():
        buffer.data = buffer.to(loaded.get(own_name(name), buffer.dtype))
    done: set[str] = set()
    for prefix, module in model.named_modules():
        own = {own_name(name) for name, _ in module.named_parameters(prefix)} - done
        if own and all(loaded.get(name, dtype) != dtype for name in own):
            fully_shard(module, **kwargs | {"mp_policy": replace(policy, param_dtype=None, output_dtype=None)})
            done |= own
    for layer in model.get_decoder().layers:
        fully_shard(layer, **kwargs | {"mp_policy": policy})
    fully_shard(model, **kwargs)
    return model


def _let_go() -> None:
    """Gloo's threads drop the last collectives' tensors, for which they need the GIL: of an interpreter that ends they
    would not get it, but abort the process (pytorch issue 190489). FSDP keeps the group, and so them, alive."""
    time.sleep(0.1)


def init_process_group(device: str = "cpu") -> None:
    """The default process group, of torchrun's processes or of this one alone: gloo, on GPUs nccl for their tensors."""
    if dist.is_initialized():
        return
    backend = "gloo"
    if torch.device(device).type == "cuda":
        backend = "cpu:gloo,cuda:nccl"
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    if "RANK" in os.environ:
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)


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
