"""A slice of a checkpoint's layers as a model of its own: one stage of a pipeline."""

from __future__ import annotations

import functools
import itertools
import os
import pathlib
import re
from collections.abc import Sequence
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from .checkpoint import CheckpointError, manifest, resolve
from .exact import check_config, check_structure, load_config, load_generation_config, parse_dtype, prepare
from .layers import Layers, keep_layers, other_part
from .linear import UnsupportedModelError
from .stored import by_tensor, loaded_dtypes, stored_pieces, stored_state

_LAYER = re.compile(r"(?<=\blayers\.)\d+(?=\.)")


def shift_layer(name: str, by: int) -> str:
    """A tensor's name with its layer's number moved: "model.layers.3.mlp..." by -2 is "model.layers.1.mlp..."."""
    return _LAYER.sub(lambda number: str(int(number[0]) + by), name)


def split_layers(costs: Sequence[float], head: float, stages: int) -> list[Layers]:
    """Return layers of these costs in `stages` runs, at least one each, of which the dearest is as cheap as can be.

    head: the cost of norm and lm_head, which go with the last layer. Among equals, earlier runs are as cheap as can be.
    """
    count = len(costs)
    if not 1 <= stages <= count:
        raise ValueError(f"pipeline_parallel_size {stages}: the model has {count} layers, and a stage needs one")
    total = [0.0, *itertools.accumulate((*costs[:-1], costs[-1] + head))]

    @functools.cache
    def best(runs: int, end: int) -> tuple[float, tuple[int, ...]]:
        """The cost of the dearest of N runs over the first `end` layers, and where each of them ends."""
        if runs == 1:
            return total[end], (end,)
        options = []
        for start in range(runs - 1, end):
            cost, ends = best(runs - 1, start)
            options.append((max(cost, total[end] - total[start]), cost, (*ends, end)))
        dearest, _, ends = min(options)
        return dearest, ends

    return list(itertools.pairwise((0, *best(stages, count)[1])))


def split_by_size(path: os.PathLike, stages: int) -> list[Layers]:
    """Return a checkpoint's layers in stages that are alike in their numbers of parameters."""
    config = load_config(path)
    layers = [0] * config.num_hidden_layers
    head = config.vocab_size * config.hidden_size
    for name, (shape, _) in manifest(resolve(path)).items():
        if (found := _LAYER.search(name)) and int(found[0]) < len(layers):  # others predict further tokens
            layers[int(found[0])] += int(torch.Size(shape).numel())
    return split_layers(layers, head, stages)


def stage_model(
    name: str | os.PathLike,
    dtype: str | torch.dtype,
    device: str | torch.device,
    layers: Layers,
    exact: bool = True,
) -> PreTrainedModel:
    """Return the same as `exact_model`, for layers [from, to) alone, which count from 0 in it.

    The embedding comes with the first layer, norm and lm_head with the last. Only its own tensors are read. Call its
    base model with `inputs_embeds`, the hidden states of the stage before, where there is one.
    """
    dtype = parse_dtype(dtype, device)
    path = resolve(name)
    config = load_config(path)
    check_config(config)
    first = layers[0] == 0
    last = layers[1] == config.num_hidden_layers
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(
            config, dtype=dtype, attn_implementation="eager" if exact else "sdpa"
        )
    check_structure(model)
    other = other_part(model)
    if other is not None:
        raise UnsupportedModelError(f"pipeline stages of {type(model).__name__}: no stage is known for {other!r}")
    keep_layers(model, layers)
    fill_tables(model)
    base = model.base_model
    tied = config.tie_word_embeddings
    if not last:
        base.norm = nn.Identity()
        model.lm_head = None
    if not (first or (last and tied)):
        base.embed_tokens = None
    model.generation_config = load_generation_config(path) or model.generation_config
    model.load_state_dict(_tensors(path, model, layers[0]), assign=True, strict=False)
    if last and tied:
        model.lm_head.weight = base.embed_tokens.weight
    return prepare(model.to(device).eval(), path, exact)


def fill_tables(model: PreTrainedModel) -> None:
    """Compute the buffers of a model without data that are in no checkpoint: rotary tables, scales of embeddings."""
    for module in model.modules():
        tables = {n: b for n, b in module._buffers.items() if b is not None and n in module._non_persistent_buffers_set}
        for name, buffer in tables.items():
            module._buffers[name] = torch.empty_like(buffer, device="cpu")
        if tables:
            model._init_weights(module)


def _tensors(path: os.PathLike, model: PreTrainedModel, first_layer: int) -> dict[str, Tensor]:
    """A stage's own tensors by their names in it; CheckpointError unless they are what its config says."""
    stored = manifest(resolve(path))
    pieces = by_tensor(stored_pieces(model))
    found: dict[str, Tensor] = {}
    reads: dict[pathlib.Path, list[tuple[str, Tensor]]] = {}
    dtypes = loaded_dtypes(model)
    for name, empty in stored_state(model).items():
        whole = torch.empty(empty.shape, dtype=dtypes[name])
        found[name] = whole
        places = {name: whole}
        if shift_layer(name, first_layer) not in stored and name in pieces:
            places = {part: piece.of(whole) for part, piece in pieces[name].items()}
        for part, place in places.items():
            full = shift_layer(part, first_layer)
            if full not in stored:
                raise CheckpointError(f"{path} does not fit its config; missing: {full}")
            there, file = stored[full]
            if there != place.shape:
                raise CheckpointError(
                    f"{path} does not fit its config; mismatched: {full}, {list(there)} for {list(place.shape)}"
                )
            reads.setdefault(file, []).append((full, place))
    for file, wanted in reads.items():
        with safe_open(file, framework="pt") as tensors:
            for full, place in wanted:
                place.copy_(tensors.get_tensor(full))
    return found
