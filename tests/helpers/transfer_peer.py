"""The other process of tests of weight transfers: rank 0 of a group, which sends or dawdles as it is told."""

from __future__ import annotations

import datetime
import time

import torch
from torch import distributed as dist
from torch.distributed import distributed_c10d as c10d

from samebits.engine.weights import WeightGroup, specs_of


def tensors(count: int, seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    kinds = [torch.float32, torch.bfloat16, torch.uint8]
    shapes = [(3, 5), (7,), (), (2, 2, 3), (64, 33)]
    return {f"t{i}": torch.randint(0, 256, shapes[i % 5], generator=generator).to(kinds[i % 3]) for i in range(count)}


def send_as_sglang(port: int, world_size: int, name: str, state: dict[str, torch.Tensor]) -> None:
    """With torch's own helper, which the trainers of that dialect use."""
    store, rank, world_size = next(dist.rendezvous(f"tcp://127.0.0.1:{port}", 0, world_size))
    store = dist.PrefixStore(name, store)
    minute = datetime.timedelta(seconds=60)
    group, _ = c10d._new_process_group_helper(
        world_size, rank, [], dist.Backend("gloo"), store, group_name=name, timeout=minute
    )
    c10d._world.pg_group_ranks[group] = {i: i for i in range(world_size)}
    for tensor in state.values():
        dist.broadcast(tensor, src=0, group=group)


def send(port: int, world_size: int, name: str, act: str, options: dict) -> None:
    if act == "beside-default":  # the trainer has a default group of its own
        dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    if act == "sglang":
        return send_as_sglang(port, world_size, name, tensors(options["count"]))
    group = WeightGroup("127.0.0.1", port, 0, world_size, name, timeout=30)
    if act == "dawdle":
        time.sleep(3600)
    for round in range(options.get("rounds", 1)):
        state = tensors(options["count"], round)
        sent = list(state.items())[:: -1 if act == "wrong-order" else 1]
        group.send(sent, specs_of(state), options.get("bucket_bytes"))
    group.close()
