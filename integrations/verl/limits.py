"""The settings of verl under which rollout and trainer could differ: each is refused by name, before anything is made.

This table is all of it. A setting that isn't here either changes no bit or is verl's own affair.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

NAME = "samebits"  # under which verl knows the engine, the vendor and the trainer mode


class Limit(NamedTuple):
    """One setting: its dotted name, the values that it may have, and why no others."""

    setting: str
    allowed: Sequence[Any]
    why: str


TEMPERATURE_ALONE = "verl's trainer scores with the temperature alone"
ONE_DEVICE = "an engine is one device; more devices make more replicas"
NO_LORA = "adapters are not supported under verl yet"
UNUSED = [{"attn_implementation": name} for name in ("sdpa", "eager", "flash_attention_2")]  # by an exact model
FULL_WEIGHTS = "weights are exact in float32, bfloat16 and float16 only"

ROLLOUT = (  # actor_rollout_ref.rollout
    Limit("top_p", (1.0,), TEMPERATURE_ALONE),
    Limit("top_k", (-1, 0), TEMPERATURE_ALONE),
    Limit("repetition_penalty", (1.0,), TEMPERATURE_ALONE),
    Limit("tensor_model_parallel_size", (1,), ONE_DEVICE),
    Limit("data_parallel_size", (1,), ONE_DEVICE),
    Limit("pipeline_model_parallel_size", (1,), ONE_DEVICE),
    Limit("expert_parallel_size", (1,), ONE_DEVICE),
    Limit("enable_rollout_routing_replay", (False,), "the trainer routes as exact rollouts did, without a replay"),
    Limit("quantization", (None,), FULL_WEIGHTS),
    Limit("quantization_config_file", (None,), FULL_WEIGHTS),
    Limit("logprobs_mode", ("processed_logprobs",), "log-probs are those of the distribution that was sampled from"),
    Limit(
        "checkpoint_engine.backend", ("naive",), "trainer and rollouts share their devices, where numerics are compared"
    ),
    Limit("mtp.enable_rollout", (False,), "multi-token prediction is not covered"),
)
MODEL = (  # actor_rollout_ref.model
    Limit("use_remove_padding", (True,), "sequences are scored packed, without padding"),
    Limit("use_liger", (False,), "other kernels have other bits"),
    Limit("use_fused_kernels", (False,), "other kernels have other bits"),
    Limit("tiled_mlp.enabled", (False,), "other kernels have other bits"),
    Limit("lora_rank", (0,), NO_LORA),
    Limit("lora.rank", (0, None), NO_LORA),
    Limit("lora_adapter_path", (None,), NO_LORA),
    Limit("mtp.enable", (False,), "multi-token prediction is not covered"),
    Limit("override_config", ({}, None, *UNUSED), "both sides read the model's own config.json"),
)
ENGINE = (  # actor_rollout_ref.{actor,ref}.fsdp_config
    Limit("strategy", ("fsdp2",), "FSDP2 alone wraps an exact model; set actor.strategy=fsdp2 and ref.strategy=fsdp2"),
    Limit("ulysses_sequence_parallel_size", (1,), "attention over parts of a sequence has other bits"),
    Limit("qat.enable", (False,), FULL_WEIGHTS),
    Limit("pad_to_length", (False,), "sequences are scored packed, without padding"),
)


def check(config: Any, limits: Sequence[Limit], section: str) -> None:
    """Raise ValueError, naming each setting of a section that has another value than it may have."""
    problems = []
    for limit in limits:
        value = _value(config, limit.setting.split("."))
        if value is not MISSING and value not in limit.allowed:
            problems.append(f"  {section}.{limit.setting}={value!r}: must be {limit.allowed[0]!r}; {limit.why}")
    if problems:
        raise ValueError("samebits can't keep rollout and trainer equal under these settings:\n" + "\n".join(problems))


MISSING = object()


def _value(config: Any, path: Sequence[str]) -> Any:
    """Return a setting of nested dataclasses or mappings, or MISSING."""
    for name in path:
        config = config.get(name, MISSING) if isinstance(config, Mapping) else getattr(config, name, MISSING)
        if config is MISSING:
            return MISSING
    return config
