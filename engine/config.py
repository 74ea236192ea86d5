"""The engine's settings."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from ..model.adapter import Adapter
from ..scheduler import SpeculativeConfig

BACKENDS = ("ray", "inproc")
DTYPES = ("float32", "bfloat16", "float16")
KINDS: dict[str, Any] = {"bool": (bool,), "int": (int,), "float": (int, float)}
NOUNS = {"bool": "a bool", "int": "an integer", "float": "a number"}


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Engine settings, by vLLM's names. Only `dtype`, `device`, `exact` and the adapter's change a bit."""

    dtype: str = None  # type: ignore[assignment]  # chosen when the checkpoint is known
    """Number format of weights and activations: float32, bfloat16 or float16. Unset, float32 on a CPU, and the
    checkpoint's on a GPU."""
    adapter: Adapter | None = None
    """A LoRA adapter in PEFT's files, which becomes weight version 1; in Python also a LoraConfig, which begins with
    zeros, or a PEFT model."""
    adapter_dtype: str = "float32"
    """Number format that the adapter's weights are rounded to: float32, as PEFT keeps them, or that of a trainer which
    casts all its parameters (FSDP2's param_dtype)."""
    device: str | None = None
    """Where the model runs, such as cpu or cuda; unset, cpu."""
    max_model_len: int | None = None
    """Most tokens of prompt and completion together; unset, the model's limit."""
    max_num_seqs: int = 128
    """Most sequences that a step may run."""
    max_num_batched_tokens: int = None  # type: ignore[assignment]  # chosen below
    """Most tokens that a step may compute, the chunk size. Unset, 2048, on a GPU 8192, which smaller steps don't fill;
    in a pipeline, whose later stages wait for the first chunk, 256."""
    kv_cache_memory_bytes: int | None = None
    """Size of the KV pool in each stage and replica, taken at start. Unset, what `gpu_memory_utilization` leaves, on a
    CPU a quarter of the free memory, as it fills; divided among the workers of a machine, or less if less is of use."""
    gpu_memory_utilization: float = 0.9
    """Share of a GPU's memory that weights, KV and a step may take together; KV and a step take at most that share of
    what others leave free. KV leaves room for an update's new weights where it keeps as much itself."""
    enforce_eager: bool = False
    """Use no CUDA graphs."""
    async_scheduling: bool | None = None
    """Prepare a step while the one before it runs, without waiting for its tokens. Unset, where the model is in one
    stage on a GPU."""
    enable_prefix_caching: bool = True
    """Reuse KV across requests."""
    skip_tokenizer_init: bool = False
    """Load no tokenizer: prompts and outputs are token ids only."""
    speculative_config: dict[str, Any] | None = None
    """Draft tokens, as {"method": "suffix", "num_speculative_tokens": 8}; see `SpeculativeConfig`. Unset, none."""
    exact: bool = True
    """Compute with the exact ops. False: with torch's own, the control without the promise."""
    pipeline_parallel_size: int = 1
    """Stages of a replica, each with a slice of the layers and a process."""
    replicas: int = 1
    """Engines behind one queue."""
    backend: str = None  # type: ignore[assignment]  # chosen below
    """What runs stages and replicas: ray (actors of a Ray cluster, a local one where there is no other) or inproc (all
    stages in this process, one after the other). Unset, ray where there are several."""
    batches_in_flight: int | None = None
    """Steps under way in a pipeline; unset, as many as it has stages."""
    stage_layers: tuple[int, ...] | None = None
    """Layers of each stage, such as 17,13; unset, by their size."""
    worker_timeout: float = 60.0
    """Seconds until a worker that doesn't answer counts as dead."""
    start_timeout: float = 300.0
    """Seconds in which a worker must have loaded the model."""

    @property
    def num_workers(self) -> int:
        """The number of processes that compute."""
        return self.replicas * self.pipeline_parallel_size

    @property
    def num_batches(self) -> int:
        """Steps under way at a time."""
        return self.batches_in_flight or self.pipeline_parallel_size

    @property
    def speculation(self) -> SpeculativeConfig | None:
        """The settings of speculation, if there is any."""
        if self.speculative_config is None:
            return None
        if not isinstance(self.speculative_config, dict):
            raise TypeError(f"speculative_config is no dict as {{'method': 'suffix'}}: {self.speculative_config!r}")
        known = [each.name for each in fields(SpeculativeConfig)]
        if unknown := self.speculative_config.keys() - {*known}:
            raise ValueError(f"speculative_config has no {sorted(unknown)}; it has {', '.join(known)}")
        return SpeculativeConfig(**self.speculative_config)

    @property
    def overlaps(self) -> bool:
        """True if a step is prepared while the one before it runs."""
        if self.async_scheduling is None:
            return self.on_gpu and self._one_batch
        return self.async_scheduling

    @property
    def on_gpu(self) -> bool:
        """True if the model computes on a CUDA device."""
        return (self.device or "cpu").startswith("cuda")

    @property
    def _one_batch(self) -> bool:
        return self.pipeline_parallel_size == self.num_batches == 1

    def __post_init__(self) -> None:
        for name in ("device", "dtype"):  # torch's own objects, too
            if getattr(self, name) is not None:
                object.__setattr__(self, name, str(getattr(self, name)).removeprefix("torch."))
        self._check_types()
        if self.speculation is not None and self.max_num_batched_tokens == 1:
            raise ValueError(
                "drafts need room in a step: raise max_num_batched_tokens, or leave out speculative_config"
            )
        stages = self.pipeline_parallel_size
        if self.max_num_batched_tokens is None:
            tokens = 256 if stages > 1 else 8192 if self.on_gpu else 2048
            object.__setattr__(self, "max_num_batched_tokens", tokens)
        if self.backend is None:
            object.__setattr__(self, "backend", "ray" if self.num_workers > 1 else "inproc")
        if self.adapter is not None and not self.exact:
            raise ValueError("adapter: the control without the exact ops (exact=False) has none")
        if self.adapter_dtype not in DTYPES:
            raise ValueError(f"adapter_dtype {self.adapter_dtype!r}; choose one of {', '.join(DTYPES)}")
        if self.backend not in BACKENDS:
            raise ValueError(f"backend {self.backend!r}; choose one of {', '.join(BACKENDS)}")
        if self.backend == "ray" and self.num_workers == 1:
            raise ValueError("backend 'ray' places stages and replicas: set pipeline_parallel_size or replicas")
        if self.backend != "ray" and self.replicas > 1:
            raise ValueError(f"replicas are actors of a Ray cluster: backend 'ray', not {self.backend!r}")
        if self.async_scheduling and not self._one_batch:
            raise ValueError(
                "async_scheduling has all sequences in each step, of a model in one stage: leave out "
                "pipeline_parallel_size and batches_in_flight"
            )
        if self.gpu_memory_utilization > 1:
            raise ValueError(f"gpu_memory_utilization must be in (0, 1], got {self.gpu_memory_utilization!r}")
        if self.stage_layers is not None:
            if stages == 1:
                raise ValueError("stage_layers cuts a model into stages: set pipeline_parallel_size")
            counts = tuple(self.stage_layers)
            object.__setattr__(self, "stage_layers", counts)
            if len(counts) != stages or not all(isinstance(n, int) and n > 0 for n in counts):
                raise ValueError(f"stage_layers {counts}: expected a positive number for each of the {stages} stages")

    def _check_types(self) -> None:
        """Raise TypeError where a flag or number is something else, ValueError where a number isn't positive."""
        for field in fields(self):
            value: Any = getattr(self, field.name)
            kind = str(field.type).removesuffix(" | None")
            if kind not in KINDS or (value is None and field.default is None):
                continue
            flag = isinstance(value, bool)
            if flag != (kind == "bool") or not isinstance(value, KINDS[kind]):
                raise TypeError(f"{field.name} must be {NOUNS[kind]}, got {value!r}")
            if not flag and not float(value) > 0:
                raise ValueError(f"{field.name} must be positive, got {value!r}")
