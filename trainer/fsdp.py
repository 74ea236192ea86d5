from __future__ import annotations

from typing import Any

from torch.distributed.fsdp import fully_shard
from transformers import PreTrainedModel


def shard(model: PreTrainedModel, **kwargs) -> PreTrainedModel:
    """`fully_shard` (FSDP2) on each decoder layer and on the root; keywords go to every call. Needs a process group."""
    base: Any = model.base_model
    for layer in base.layers:
        fully_shard(layer, **kwargs)
    fully_shard(model, **kwargs)
    return model
