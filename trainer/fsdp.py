from __future__ import annotations

import os
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


def init_process_group(device: str = "cpu") -> None:
    """The default process group: torchrun's, or one of this process alone; gloo on CPUs, nccl on GPUs."""
    if dist.is_initialized():
        return
    backend = "nccl" if device.startswith("cuda") else "gloo"
    if "RANK" in os.environ:
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
