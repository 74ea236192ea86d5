"""Tiny mixtures of experts of transformers' own classes."""

from __future__ import annotations

import torch
from transformers import AutoModelForCausalLM, Glm4MoeConfig, GraniteMoeConfig, MixtralConfig, Qwen3MoeConfig

from helpers.families import skip_if_newer

SIZES = {
    "vocab_size": 64, "hidden_size": 20, "intermediate_size": 28, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 8,
}  # fmt: skip
MOE = {
    "qwen3_moe": (Qwen3MoeConfig, {"num_experts": 5, "moe_intermediate_size": 12, "num_experts_per_tok": 2}),
    "mixtral": (MixtralConfig, {"num_local_experts": 3}),
    "granitemoe": (GraniteMoeConfig, {"num_local_experts": 3, "num_experts_per_tok": 2}),
    "glm4_moe": (
        Glm4MoeConfig,
        {
            "n_routed_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 12,
            "first_k_dense_replace": 1,
            "n_group": 2,
            "topk_group": 1,
        },
    ),
}


def tiny_moe(family: str, seed: int = 0, dtype=torch.float32, **overrides):
    """A random model; a router's bias, a buffer that is a weight, isn't zero."""
    skip_if_newer(family)
    kind, extra = MOE[family]
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(kind(**{**SIZES, **extra, **overrides}), dtype=dtype)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            torch.nn.init.normal_(buffer, std=0.1)
    return model


def save_tiny_moe(folder, family: str, **settings):
    """Write a tiny model with texts that are far from flat, and return its folder."""
    tiny_moe(family, **{"initializer_range": 0.3, "max_position_embeddings": 512, **settings}).save_pretrained(folder)
    return folder
