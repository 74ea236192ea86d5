"""Ranks of a trainer without torchrun: forked from a process that has the imports behind it, which cost seconds."""

import multiprocessing
import os
import time

import torch
from torch.distributed import TCPStore


def run_ranks(world: int, main, *args: str, timeout: float = 300.0) -> None:
    """Call main(*args) in each of `world` processes; raise what the first one raised that failed."""
    multiprocessing.set_forkserver_preload(["samebits.trainer", "torch.distributed.fsdp"])
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # here, so that nobody takes its port
    ranks = torch.multiprocessing.start_processes(
        _run_rank, (world, store.port, main, args), world, join=False, start_method="forkserver"
    )
    end = time.monotonic() + timeout
    while not ranks.join(timeout=1.0):
        if time.monotonic() > end:
            for process in ranks.processes:
                process.kill()
            raise TimeoutError(f"ranks still run after {timeout:g} s")


def _run_rank(rank: int, world: int, port: int, main, args: tuple[str, ...]) -> None:
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    place |= {"TORCHELASTIC_USE_AGENT_STORE": True, "TORCHELASTIC_RESTART_COUNT": 0}  # as torchrun has it
    os.environ.update({name: str(value) for name, value in place.items()})
    main(*args)
