"""The settings of verl under which rollout and trainer could differ: each is refused by name, before anything is made.

These tables are all of it: a reason -> the settings that it is for, by their dotted names -> the values that they may
have, the usual one first. A setting that isn't here either changes no bit or is verl's own affair.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import reduce
from typing import Any

NAME = "samebits"  # under which verl knows the engine, the vendor and the trainer mode
AllowedValues = Mapping[str, Mapping[str, Sequence[Any]]]

FULL_WEIGHTS = "weights are exact in float32, bfloat16 and float16 only"
ADAPTERS = "an adapter is what model.lora_rank and lora_adapter_path say, beside its base, on linears"
NO_MTP = "multi-token prediction is not covered"
PACKED = "sequences are scored packed, without padding"
UNUSED = [{"attn_implementation": name} for name in ("sdpa", "eager", "flash_attention_2")]  # by an exact model

ROLLOUT: AllowedValues = {  # actor_rollout_ref.rollout
    "verl's trainer scores with the temperature alone": {"top_p": [1.0], "top_k": [-1, 0], "repetition_penalty": [1.0]},
    "an engine is one device; more devices make more replicas": {
        **{f"{kind}_parallel_size": [1] for kind in ("tensor_model", "data", "pipeline_model", "expert")},
        **{f"engine_kwargs.{NAME}.{name}": [1] for name in ("pipeline_parallel_size", "replicas")},
    },
    "the adapter is the trainer's": {f"engine_kwargs.{NAME}.{name}": [None] for name in ("adapter", "adapter_dtype")},
    "the trainer routes as exact rollouts did, without a replay": {"enable_rollout_routing_replay": [False]},
    FULL_WEIGHTS: {"quantization": [None], "quantization_config_file": [None]},
    "log-probs are those of the distribution that was sampled from": {"logprobs_mode": ["processed_logprobs"]},
    "trainer and rollouts share their devices, where numerics are compared": {"checkpoint_engine.backend": ["naive"]},
    NO_MTP: {"mtp.enable_rollout": [False]},
}
MODEL: AllowedValues = {  # actor_rollout_ref.model
    PACKED: {"use_remove_padding": [True]},
    "other kernels have other bits": {"use_liger": [False], "use_fused_kernels": [False], "tiled_mlp.enabled": [False]},
    ADAPTERS: {"lora.rank": [0, None], "lora.merge": [False, None], "target_parameters": [None]},
    NO_MTP: {"mtp.enable": [False]},
    "both sides read the model's own config.json": {"override_config": [{}, None, *UNUSED], "hf_config_path": [None]},
}
ENGINE: AllowedValues = {  # actor_rollout_ref.{actor,ref}.fsdp_config
    "FSDP2 alone wraps an exact model; set actor.strategy=fsdp2 and ref.strategy=fsdp2": {"strategy": ["fsdp2"]},
    "attention over parts of a sequence has other bits": {"ulysses_sequence_parallel_size": [1]},
    FULL_WEIGHTS: {"qat.enable": [False]},
    PACKED: {"pad_to_length": [False]},
}


def check(config: Mapping[str, Any], limits: AllowedValues, section: str) -> None:
    """Raise ValueError, naming each setting that has another value than it may have.

    config: a section of verl's configuration, nested mappings as all of them are. section: its name.
    """
    problems = []
    for why, settings in limits.items():
        for setting, allowed in settings.items():
            *sections, name = setting.split(".")
            value = reduce(lambda part, each: part.get(each) or {}, sections, config).get(name, allowed[0])
            if value not in allowed and (name, value) != ("hf_config_path", config.get("path")):  # verl sets it so
                problems.append(f"  {section}.{setting}={value!r}: must be {allowed[0]!r}; {why}")
    if problems:
        raise ValueError("samebits can't keep rollout and trainer equal under these settings:\n" + "\n".join(problems))
