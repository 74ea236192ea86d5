"""Adapters with values in both factors, and models that have them."""

import torch
from peft import LoraConfig

from samebits.trainer import exact_model


def lora(**changes) -> LoraConfig:
    """A small adapter on all linears, with an awkward rank and scale."""
    return LoraConfig(**{"r": 5, "lora_alpha": 7, "target_modules": "all-linear", **changes})


def adapted_model(path, dtype="float32", seed=0, config=None):
    """An exact model with an adapter that moves the log-probs well beyond rounding."""
    model = exact_model(path, dtype, adapter=config or lora())
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if ".lora_" in name:
            parameter.data.normal_(0.0, 0.2, generator=generator)
    return model
