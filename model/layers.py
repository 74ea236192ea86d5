"""A run of a model's layers in place of all: what a stage of a pipeline computes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle
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


def keep_layers(model: PreTrainedModel, layers: Layers) -> list[RemovableHandle]:
    """Leave these layers of a model alone, numbered from 0; where they aren't the first, they take hidden states.

    Returns the hooks by which they do.
    """
    base: Any = model.base_model
    config: Any = model.config
    base.layers = base.layers[slice(*layers)]
    count = config.num_hidden_layers
    for name, values in list(vars(config).items()):
        if "layer" in name and isinstance(values, list | tuple) and len(values) == count:  # one for each
            setattr(config, name, values[slice(*layers)])
    config.num_hidden_layers = layers[1] - layers[0]
    for module in _numbered(base.layers):
        module.layer_idx -= layers[0]
    model.first_layer = layers[0]  # type: ignore[assignment]
    if not layers[0]:
        return []
    entrance = _Entrance()
    return [
        base.register_forward_pre_hook(entrance.keep, with_kwargs=True),
        base.layers[0].register_forward_pre_hook(entrance.enter, with_kwargs=True),
    ]


def _numbered(layers: nn.Module) -> list[Any]:
    return [module for module in layers.modules() if isinstance(getattr(module, "layer_idx", None), int)]


@contextmanager
def as_stage(model: PreTrainedModel, layers: Layers) -> Iterator[None]:
    """Have a whole model compute as the stage of these layers for a while, without the norm if they aren't the last."""
    base: Any = model.base_model
    whole = base.layers
    norm = base.norm
    settings = dict(vars(model.config))
    numbers = [(module, module.layer_idx) for module in _numbered(whole)]
    hooks: list[RemovableHandle] = []
    try:
        hooks = keep_layers(model, layers)
        if layers[1] < len(whole):
            base.norm = nn.Identity()
        yield
    finally:
        base.layers = whole
        base.norm = norm
        vars(model.config).update(settings)
        for module, number in numbers:
            module.layer_idx = number
        vars(model).pop("first_layer", None)
        for hook in hooks:
            hook.remove()


class _Entrance:
    """Hooks that give a stage's first layer what the stage was given: the model's code may have scaled it between."""

    given: Any  # of the last forward: who probes or recomputes the layer meets it again

    def keep(self, base: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        """Take the hidden states before the base model's own code does."""
        self.given = kwargs["inputs_embeds"]

    def enter(self, layer: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        """Return the arguments of the layer with them in place of its own."""
        own = args[0] if args else kwargs["hidden_states"]
        assert own.shape == self.given.shape, "a stage takes packed hidden states, [1, T, H]"
        return (self.given, *args[1:]), {name: value for name, value in kwargs.items() if name != "hidden_states"}
