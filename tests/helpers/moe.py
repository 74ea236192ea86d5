"""Tiny mixtures of experts of transformers' own classes."""

from __future__ import annotations

import torch
from transformers import (
    AutoModelForCausalLM,
    Ernie4_5_MoeConfig,
    Glm4MoeConfig,
    GraniteMoeConfig,
    MiniMaxM2Config,
    MixtralConfig,
    OlmoeConfig,
    Qwen2MoeConfig,
    Qwen3MoeConfig,
)

from samebits.model.stored import stored_pieces

from helpers.families import skip_if_newer

SIZES = {
    "vocab_size": 64, "hidden_size": 20, "intermediate_size": 28, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 8,
}  # fmt: skip
MOE = {
    "qwen3_moe": (Qwen3MoeConfig, {"num_experts": 5, "moe_intermediate_size": 12, "num_experts_per_tok": 2}),
    "mixtral": (MixtralConfig, {"num_local_experts": 3}),
    "granitemoe": (GraniteMoeConfig, {"num_local_experts": 3, "num_experts_per_tok": 2}),
    "qwen2_moe": (
        Qwen2MoeConfig,
        {"num_experts": 5, "moe_intermediate_size": 12, "num_experts_per_tok": 2, "shared_expert_intermediate_size": 12}
        | {"hidden_size": 16},
    ),
    "olmoe": (OlmoeConfig, {"num_experts": 5, "num_experts_per_tok": 2, "hidden_size": 16}),
    "minimax_m2": (MiniMaxM2Config, {"num_local_experts": 5, "num_experts_per_tok": 2, "rotary_dim": 4}),
    "ernie4_5_moe": (
        Ernie4_5_MoeConfig,
        {"moe_num_experts": 6, "moe_k": 2, "moe_intermediate_size": 12, "moe_layer_start_index": 1}
        | {"moe_num_shared_experts": 1, "tie_word_embeddings": False},
    ),
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


def stored(path):
    """A checkpoint's tensors under the names in it, experts one by one."""
    return stored_state(AutoModelForCausalLM.from_pretrained(path))


def stored_state(model):
    """A model's tensors under the names that a hub has."""
    state, pieces = model.state_dict(), stored_pieces(model)
    whole = {piece.tensor for piece in pieces.values()}
    return {k: v for k, v in state.items() if k not in whole} | {k: p.of(state[p.tensor]) for k, p in pieces.items()}
