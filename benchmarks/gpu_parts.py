"""The work of one process of `gpu.py`: a probe, a gate or a measurement, by its name."""

from __future__ import annotations

import contextlib
import importlib
import os
import pathlib
import subprocess
import sys
from typing import Any

MODULES = {  # what the parts of a group need
    "probes": ("gpu_attention", "gpu_bits", "gpu_probes"),
    "bits": ("gpu_attention", "gpu_bits", "gpu_probes", "helpers.models", "helpers.schedules"),
    "speed": ("gpu_speed",),
}
TESTS = pathlib.Path(__file__).parents[1] / "tests"


def load(group: str, where: str) -> None:
    """Import what a part of the group needs: on a cold machine this takes longer than most parts."""
    sys.path.insert(0, str(TESTS))
    if where == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"  # before anything imports Triton
    for name in ("transformers.models.qwen3.modeling_qwen3", *MODULES[group]):
        importlib.import_module(name)


def run(group: str, name: str, where: str, folder: str, tiny: bool, known: dict[str, Any]) -> Any:
    """Return what the part finds, once `load` was called. On a CPU kernels are interpreted, but for timings.

    known: what the parts before it found.
    """
    interpreting: Any = contextlib.nullcontext()
    if where == "cpu" and group != "speed":
        from helpers.interpreter import interpreted

        interpreting = interpreted()
    import torch

    device = torch.device(where)
    if where != "cpu" and not torch.cuda.is_available():
        return {"stop": "torch sees no NVIDIA GPU (torch.cuda.is_available() is False): nothing to measure"}
    with interpreting:
        misses = _count_compilations()
        found = _part(group, name, device, folder, tiny)(known)
        if isinstance(found, dict) and group != "speed":
            found["compiled here"] = len(misses)
        return found


def _part(group: str, name: str, device: Any, folder: str, tiny: bool) -> Any:
    if name == "versions":
        return lambda known: versions(device)
    if group == "speed":
        import gpu_speed

        return dict(gpu_speed.parts(device, folder, tiny))[name]
    import gpu_attention
    import gpu_bits
    import gpu_probes

    gates = dict(gpu_probes.probes(device, tiny) + gpu_bits.gates(device, folder, tiny))
    gates["accuracy"] = lambda: gpu_attention.gate(device, tiny)
    gates["ops"] = lambda: gpu_probes.accuracy(device, tiny)
    return lambda known: gates[name]()


def _count_compilations() -> list[str]:
    """Return a list that grows by each kernel that Triton's cache doesn't have."""
    from triton import knobs

    misses: list[str] = []

    def listen(*, src: Any, cache_hit: bool, **_: Any) -> None:
        if not cache_hit:
            misses.append(src.name)

    knobs.compilation.listener = listen
    return misses


def versions(device: Any) -> dict[str, str]:
    """Return the GPU, its driver, and the libraries that decide a bit or a time."""
    import torch
    import transformers
    import triton

    from samebits.kernels.libraries import xformers_state

    found = {"torch": torch.__version__, "triton": triton.__version__, "transformers": transformers.__version__}
    found |= {"python": sys.version.split()[0], "xformers": xformers_state()}
    if device.type != "cuda":
        return {"gpu": "none", **found}
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    driver = subprocess.run(query, capture_output=True, text=True, check=False).stdout.split("\n")[0].strip()
    gpu = torch.cuda.get_device_properties(device)
    return {
        "gpu": gpu.name, "GPUs": str(torch.cuda.device_count()), "compute capability": f"{gpu.major}.{gpu.minor}",
        "multiprocessors": str(gpu.multi_processor_count), "driver": driver, "cuda": str(torch.version.cuda), **found,
    }  # fmt: skip
