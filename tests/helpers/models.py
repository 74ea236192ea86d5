"""Tiny random checkpoints with awkward sizes, one a family."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

from helpers.families import make_family

DTYPES = [torch.float32, torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.slow)]  # of a CPU's kernels
AWKWARD = {
    "vocab_size": 1001,
    "hidden_size": 100,
    "intermediate_size": 172,
    "num_hidden_layers": 2,
    "num_attention_heads": 5,
    "num_key_value_heads": 1,
    "head_dim": 20,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "initializer_range": 0.3,  # far from uniform distributions
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
CONFIGS = {
    "llama": (LlamaConfig, {"tie_word_embeddings": True}),
    "llama3-bias": (
        LlamaConfig,
        {"tie_word_embeddings": False, "attention_bias": True, "mlp_bias": True, "rope_parameters": LLAMA3_ROPE},
    ),
    "qwen2": (Qwen2Config, {"tie_word_embeddings": True}),  # biases on q, k, v
    "qwen3": (Qwen3Config, {"tie_word_embeddings": False}),  # norms on q and k
    "mistral": (MistralConfig, {"tie_word_embeddings": False, "sliding_window": 40}),
}


def make_checkpoint(folder, name: str, seed: int = 0, **overrides):
    """Writes a random model, of `CONFIGS` or of `helpers.families`, and returns its folder."""
    if name not in CONFIGS:
        return make_family(folder, name, seed, **overrides)
    cls, extra = CONFIGS[name]
    config = cls(**{**AWKWARD, **extra, **overrides})
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for parameter in model.parameters():  # biases and norms are constant at initialisation
        if parameter.dim() == 1:
            torch.nn.init.normal_(parameter.data, mean=1.0 if parameter.min() == 1 else 0.0, std=0.2)
    model.save_pretrained(folder)
    return folder
