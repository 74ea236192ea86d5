"""A tiny config of each tested family, and of families that are refused, with awkward sizes."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

BEFORE_5_13 = Version(transformers.__version__) < Version("5.13")
NEWER = {"granitemoe"} if BEFORE_5_13 else set()  # families whose exact form came with 5.13

SIZES: dict[str, Any] = {
    "vocab_size": 1001, "hidden_size": 44, "intermediate_size": 76, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 12, "max_position_embeddings": 512, "bos_token_id": 1, "eos_token_id": 2,
    "pad_token_id": 0, "initializer_range": 0.25, "attention_dropout": 0.0,
}  # fmt: skip
PLAIN_HEADS = {"head_dim": None, "hidden_size": 48}  # of families whose head_dim is hidden_size / heads
EXPERTS = {
    "num_experts": 7, "num_local_experts": 7, "n_routed_experts": 7, "num_experts_per_tok": 3,
    "moe_intermediate_size": 20,
}  # fmt: skip
SHARED = EXPERTS | {
    "num_experts": 6, "num_local_experts": 6, "n_routed_experts": 6, "n_shared_experts": 1, "first_k_dense_replace": 1,
    "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2, "routed_scaling_factor": 1.7,
}  # fmt: skip
MULTIPLIERS = {
    "embedding_multiplier": 7.3,
    "residual_multiplier": 0.22,
    "attention_multiplier": 0.3,
    "logits_scaling": 3.7,
}
WINDOW = {"sliding_window": 10}
MIXED = WINDOW | {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": True},
    "mistral": WINDOW,
    "ministral3": {},
    "qwen2": {"use_sliding_window": True, "max_window_layers": 1} | MIXED | PLAIN_HEADS,
    "qwen3": {},
    "phi3": PLAIN_HEADS,
    "smollm3": {"no_rope_layers": [1, 0, 1], "tie_word_embeddings": True} | PLAIN_HEADS,
    "olmo2": PLAIN_HEADS,
    "olmo3": MIXED | PLAIN_HEADS,
    "granite": MULTIPLIERS | PLAIN_HEADS | {"tie_word_embeddings": True},
    "glm4": {"partial_rotary_factor": 0.5},
    "cohere": {"logit_scale": 0.31, "use_qk_norm": False} | PLAIN_HEADS,
    "cohere2": {"logit_scale": 0.31} | MIXED,
    "exaone4": MIXED,
    "seed_oss": {"residual_dropout": 0.0},
    "hunyuan_v1_dense": {},
    "ernie4_5": {"use_bias": True},
    "gemma3_text": {"query_pre_attn_scalar": 12, "tie_word_embeddings": True} | MIXED,
    "arcee": {},
    "qwen3_moe": EXPERTS | {"norm_topk_prob": True, "mlp_only_layers": [1]},
    "qwen2_moe": EXPERTS | PLAIN_HEADS | {"shared_expert_intermediate_size": 28, "decoder_sparse_step": 1},
    "mixtral": EXPERTS | WINDOW,
    "olmoe": EXPERTS | PLAIN_HEADS | {"clip_qkv": 1.5, "norm_topk_prob": False},
    "flex_olmo": EXPERTS | PLAIN_HEADS,
    "granitemoe": EXPERTS | MULTIPLIERS | PLAIN_HEADS,
    "glm4_moe": SHARED | {"norm_topk_prob": True, "use_qk_norm": True},
    "dots1": SHARED,
    "ernie4_5_moe": SHARED
    | {"moe_num_experts": 6, "moe_k": 2, "moe_layer_start_index": 1, "moe_num_shared_experts": 1},
    "minimax_m2": EXPERTS | {"rotary_dim": 6},
    "hy_v3": SHARED,
    "solar_open": SHARED,
}

OTHERS: dict[str, dict[str, Any]] = {  # load, with a line in the log
    "hunyuan_v1_moe": EXPERTS | {"num_experts": 6, "moe_topk": 2},
}

REFUSED: dict[str, tuple[dict[str, Any], str]] = {  # and what the refusal says
    "gpt2": ({}, r"GPT2Model has no list `layers`"),
    "starcoder2": ({}, r"input_layernorm \(LayerNorm\).*layer_norm has no exact form"),
    "gemma2": ({"query_pre_attn_scalar": 12}, r"self_attn \(Gemma2Attention\) takes 'softcap'"),
    "gemma4_text": (
        {"num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 1001},
        r"rope type 'proportional'",
    ),
    "gpt_oss": (EXPERTS, r"GptOssExperts\) have transposed weights, biases, interleaved gate and up"),
    "deepseek_v3": (
        SHARED | {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16,
                  "v_head_dim": 16, "num_key_value_heads": 4, "head_dim": None},
        r"DeepseekV3Attention\) has values of 16 numbers and keys of 24",
    ),
    "glm4_moe_lite": (
        SHARED | {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
                  "v_head_dim": 16, "num_key_value_heads": 4, "head_dim": None},
        r"Glm4MoeLiteAttention\) has 4 KV heads of 16 numbers, unlike its config",
    ),
    "qwen3_next": (
        EXPERTS | {"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 16,
                   "linear_value_head_dim": 16, "linear_conv_kernel_dim": 4, "shared_expert_intermediate_size": 28},
        # the module itself calls the function in newer versions of transformers, its child in older ones
        r"(Qwen3NextGatedDeltaNet|conv1d \(Conv1d)\) is not covered: torch function torch.nn.functional.conv1d",
    ),
    "nemotron_h": ({}, r"NemotronHExperts\) have no gate"),
    "doge": ({}, r"self_attn \(DogeAttention\) brings a mask of its own"),
}  # fmt: skip


MIXTURES = "qwen3_moe", "qwen2_moe", "mixtral", "olmoe", "granitemoe", "glm4_moe"


def random_sizes(rng: random.Random, family: str) -> dict[str, Any]:
    """Draw sizes of one of MIXTURES: primes, one expert or all of them for each token, dense layers, groups, windows,
    biases, shared experts."""
    grouped = family == "glm4_moe"
    experts = rng.choice([6, 14, 64] if grouped else [2, 3, 7, 13, 31, 64])
    allowed = min(8, experts // 2 if grouped else experts)
    sizes = {
        "num_experts": experts,
        "num_experts_per_tok": rng.choice([1, rng.randint(1, allowed), allowed]),
        "moe_intermediate_size": rng.choice([4, 17, 20, 50]),
        "tie_word_embeddings": rng.random() < 0.5,
    }
    sizes |= {"num_local_experts": experts, "n_routed_experts": experts}
    if family in ("mixtral", "olmoe", "granitemoe"):
        sizes["intermediate_size"] = sizes["moe_intermediate_size"]
    if family in ("qwen3_moe", "glm4_moe"):
        sizes |= {"hidden_size": rng.choice([36, 44, 51, 72]), "norm_topk_prob": rng.random() < 0.5}
    if family == "qwen3_moe":
        sizes |= {"mlp_only_layers": rng.choice([[], [0], [0, 2]]), "decoder_sparse_step": 1}
        sizes["attention_bias"] = rng.random() < 0.5
    elif family == "qwen2_moe":
        sizes |= {"decoder_sparse_step": rng.choice([1, 2]), "norm_topk_prob": rng.random() < 0.5}
        sizes["shared_expert_intermediate_size"] = rng.choice([4, 28, 51])
    elif family == "mixtral":
        sizes["sliding_window"] = rng.choice([None, 5, 40])
    elif grouped:
        sizes |= {"n_group": rng.choice([1, 2]), "first_k_dense_replace": rng.choice([0, 1, 2])}
        sizes |= {"n_shared_experts": rng.choice([1, 2, 3]), "attention_bias": rng.random() < 0.5}
    return sizes


def skip_if_newer(family: str) -> None:
    """Skip a test of a family that is refused in the installed transformers."""
    if family in NEWER:
        pytest.skip(f"{family} is exact from transformers 5.13 on")


def family_config(family: str, **overrides) -> PretrainedConfig:
    """The tiny config of a family."""
    own = {**FAMILIES, **OTHERS, **{name: own for name, (own, _) in REFUSED.items()}}[family]
    settings = {name: value for name, value in (SIZES | own | overrides).items() if value is not None}
    return AutoConfig.for_model(family, **settings)


def make_family(folder, family: str, seed: int = 0, **overrides):
    """Write a random model of a family, whose biases and norms aren't constant, and return its folder."""
    skip_if_newer(family)
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(family_config(family, **overrides), dtype=torch.float32)
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if name.endswith("e_score_correction_bias"):
            torch.nn.init.normal_(tensor, std=0.1)
        elif isinstance(tensor, torch.nn.Parameter) and tensor.dim() == 1:
            torch.nn.init.normal_(tensor.data, mean=1.0 if tensor.min() == 1 else 0.0, std=0.2)
    model.save_pretrained(folder)
    return folder
