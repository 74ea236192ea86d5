"""verl's platform for machines without an accelerator: `VERL_PLATFORM=cpu`.

A laptop and a CI job run the real `python -m verl.trainer.main_ppo` with it. verl places its workers by GPUs, so Ray
is told that there are as many as there shall be ranks: `+ray_kwargs.ray_init.num_gpus=1`.
"""

from __future__ import annotations

import os
from functools import partial
from types import SimpleNamespace

import torch
from verl.plugin.platform.platform_cuda import PlatformCUDA
from verl.plugin.platform.platform_manager import PlatformRegistry, get_platform  # noqa: F401 - as rollout.py does
from verl.utils import distributed

ANSWERS = {  # to what verl asks of every torch.<device> and torch.cpu doesn't know
    "get_device_name": "CPU",
    "mem_get_info": (0, 0),
    **dict.fromkeys(("memory_allocated", "memory_reserved", "max_memory_allocated", "max_memory_reserved"), 0),
    "empty_cache": None,
}
FUNCTIONS = {name: lambda *args, answer=answer, **kwargs: answer for name, answer in ANSWERS.items()}


@PlatformRegistry.register(platform="cpu")
class CPUPlatform(PlatformCUDA):
    """CPUs as verl's devices, over gloo. To Ray they are GPUs, so that side is CUDA's.

    Its vendor's engine is the exact one, so VERL_ENGINE_VENDOR may stay unset. verl takes it only where VERL_PLATFORM
    asks for it.
    """

    device_name = "cpu"
    vendor_name = "samebits"
    device_module = SimpleNamespace(**vars(torch.cpu) | FUNCTIONS, set_rng_state=torch.set_rng_state)

    def communication_backend_name(self) -> str:
        """The backend of torch.distributed."""
        return "gloo"

    def set_allocator_settings(self, settings: str) -> None:
        """Do nothing: what concerns accelerators alone."""


for name in ("is_available", "current_device", "device_count", "set_device", "synchronize"):
    setattr(CPUPlatform, name, staticmethod(getattr(torch.cpu, name)))
if os.environ.get("VERL_PLATFORM") == "cpu":  # or verl's "cpu:gloo,<device>:<its backend>" would name CPUs twice
    init = distributed.initialize_global_process_group_ray
    distributed.initialize_global_process_group_ray = partial(init, backend="gloo")
