from __future__ import annotations

from torch.distributed.fsdp import fully_shard
from transformers import PreTrainedModel


def shard(model: PreTrainedModel, **kwargs) -> PreTrainedModel:
    """`fully_shard` (FSDP2) on each decoder layer and on the root; keywords go to every call. Needs a process group."""
    for layer in model.base_model.layers:
        fully_shard(layer, **kwargs)
    return fully_shard(model, **kwargs)
