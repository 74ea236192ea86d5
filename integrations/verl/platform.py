"""verl's platform for machines without an accelerator: `VERL_PLATFORM=cpu`.

A laptop and a CI job run the real `python -m verl.trainer.main_ppo` with it. verl places its workers by GPUs, so Ray
is told that there are as many as there shall be ranks: `+ray_kwargs.ray_init.num_gpus=1`.
"""

from __future__ import annotations

import os
import types
from typing import Any

import torch
from verl.plugin.platform.platform_cuda import PlatformCUDA
from verl.plugin.platform.platform_manager import PlatformRegistry
from verl.utils import distributed


def _device_module() -> types.ModuleType:
    """Return torch.cpu, with answers to what verl asks of every torch.<device>."""
    module = types.ModuleType("torch.cpu")
    module.__dict__.update({name: value for name, value in vars(torch.cpu).items() if not name.startswith("__")})
    for name in ("empty_cache", "ipc_collect", "reset_peak_memory_stats", "synchronize", "manual_seed", "set_device"):
        setattr(module, name, lambda *args, **kwargs: None)
    for name in ("memory_allocated", "memory_reserved", "max_memory_allocated", "max_memory_reserved"):
        setattr(module, name, lambda *args, **kwargs: 0)
    answers = {"current_device": "cpu", "get_device_name": "CPU", "is_available": True, "mem_get_info": (0, 0)}
    for name, answer in answers.items():
        setattr(module, name, lambda *args, answer=answer: answer)
    module.__dict__.update(get_rng_state=torch.get_rng_state, set_rng_state=torch.set_rng_state)
    return module


@PlatformRegistry.register(platform="cpu")
class CPUPlatform(PlatformCUDA):
    """CPUs as verl's devices, over gloo. To Ray they are GPUs, so that side is CUDA's.

    Its vendor's engine is the exact one, so VERL_ENGINE_VENDOR may stay unset.
    """

    device_name = "cpu"
    vendor_name = "samebits"
    device_module = _device_module()

    def is_available(self) -> bool:
        """True: every machine has a CPU."""
        return True

    def is_platform_available(self, use_smi_check: bool = False) -> bool:
        """False: verl takes this platform only where VERL_PLATFORM asks for it."""
        return False

    def is_ipc_supported(self) -> bool:
        """False: there is no memory of a device to share."""
        return False

    def current_device(self) -> str:
        """The device, as verl hands it to `Tensor.to`."""
        return "cpu"

    def device_count(self) -> int:
        """The one device of each process."""
        return 1

    def communication_backend_name(self) -> str:
        """The backend of torch.distributed."""
        return "gloo"

    def set_device(self, *args: Any) -> None:
        """Do nothing: what concerns accelerators alone."""

    synchronize = set_allocator_settings = set_device


def _over_gloo_alone() -> None:
    """Keep verl from the backend "cpu:gloo,<device>:<the device's>", which would name CPUs twice here."""
    init = distributed.initialize_global_process_group_ray

    def init_over_gloo(timeout_second: int | None = None, backend: str | None = None) -> None:
        init(timeout_second, backend or "gloo")

    distributed.initialize_global_process_group_ray = init_over_gloo


if os.environ.get("VERL_PLATFORM") == "cpu":
    _over_gloo_alone()
