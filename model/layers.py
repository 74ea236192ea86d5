"""A run of a model's layers in place of all: what a stage of a pipeline computes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import nn
from transformers import PreTrainedModel

Layers = tuple[int, int]  # from, up to
_PARTS = {"embed_tokens", "layers", "norm"}


def other_part(model: PreTrainedModel) -> str | None:
    """Return the name of what has weights and isn't embedding, layers, norm or lm_head: no stage is known for it."""
    for parent, known in ((model, {model.base_model_prefix, "lm_head"}), (model.base_model, _PARTS)):
        for name, child in parent.named_children():
            if name not in known and next(child.parameters(), None) is not None:
                return name
    return None


def keep_layers(model: PreTrainedModel, layers: Layers) -> Callable[[], None]:
    """Leave these layers of a model alone, numbered from 0; where they aren't the first, they take hidden states.

    Returns a function that undoes it.
    """
    base: Any = model.base_model
    config: Any = model.config
    whole, settings, hooks = base.layers, dict(vars(config)), []
    base.layers = whole[slice(*layers)]
    count = config.num_hidden_layers
    for name, values in settings.items():
        if "layer" in name and isinstance(values, list | tuple) and len(values) == count:  # one for each
            setattr(config, name, values[slice(*layers)])
    config.num_hidden_layers = layers[1] - layers[0]
    numbered = [m for m in base.layers.modules() if isinstance(getattr(m, "layer_idx", None), int)]

    def shift(by: int) -> None:
        for module in numbered:
            module.layer_idx += by

    shift(-layers[0])
    model.first_layer = layers[0]  # type: ignore[assignment]
    if layers[0]:
        hooks.append(base.register_forward_pre_hook(_keep_given, with_kwargs=True))
        hooks.append(base.layers[0].register_forward_pre_hook(functools.partial(_enter, base), with_kwargs=True))

    def undo() -> None:
        base.layers = whole
        vars(config).update(settings)
        shift(layers[0])
        model.first_layer = 0  # type: ignore[assignment]
        for hook in hooks:
            hook.remove()

    return undo


def _keep_given(base: Any, args: tuple, kwargs: dict[str, Any]) -> None:
    base.given = kwargs["inputs_embeds"]


def _enter(base: Any, layer: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    """Give a stage's first layer what the stage was given: the model's code may have scaled it, as embeddings."""
    own = args[0] if args else kwargs["hidden_states"]
    assert own.shape == base.given.shape, "a stage takes packed hidden states, [1, T, H]"
    return (base.given, *args[1:]), {name: value for name, value in kwargs.items() if name != "hidden_states"}
