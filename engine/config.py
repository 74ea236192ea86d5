from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Engine settings, vLLM's names; none of them changes a bit of a result but `dtype`, `linear_route` and `exact`.

    dtype: "float32", "bfloat16" or "float16". max_model_len: tokens of prompt + completion (None: the model's limit).
    max_num_seqs: sequences a step may run. max_num_batched_tokens: tokens a step may compute (the chunk size).
    kv_cache_memory_bytes: size of the KV pool; None takes a quarter of the free memory, or less if less can be used.
    enable_prefix_caching: reuse KV across requests. skip_tokenizer_init: token ids only.
    linear_route, exact: see `samebits.model.exact_model`; exact=False is the control without the promise.
    """

    dtype: str = "float32"
    device: str | None = None
    max_model_len: int | None = None
    max_num_seqs: int = 128
    max_num_batched_tokens: int = 2048
    kv_cache_memory_bytes: int | None = None
    enable_prefix_caching: bool = True
    skip_tokenizer_init: bool = False
    linear_route: str = "fma"
    exact: bool = True

    def __post_init__(self) -> None:
        for name in ("enable_prefix_caching", "skip_tokenizer_init", "exact"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name} must be a bool, got {getattr(self, name)!r}")
        for name in ("max_model_len", "max_num_seqs", "max_num_batched_tokens", "kv_cache_memory_bytes"):
            value = getattr(self, name)
            if value is None and name in ("max_model_len", "kv_cache_memory_bytes"):
                continue
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"{name} must be an integer, got {value!r}")
            if value < 1:
                raise ValueError(f"{name} must be positive, got {value}")
