"""The sender's side of `update_weights`, for engines that aren't in this process.

In-process, `llm.update_weights(model)`; over HTTP and a process group, `update_weights` of a
`samebits.integrations.Client`; through a file system, `save_weights(model, folder)`, then `update_weights(folder)`.
"""

from __future__ import annotations

import functools
import json
import os
import pathlib
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext

import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from ..engine.weights.group import WHOLE
from ..engine.weights.spec import buckets, checksum, full_tensors
from ..model.adapter import WEIGHTS_FILE, adapter_state, is_adapted, load_adapter_config
from ..model.stored import Piece, by_tensor, stored_pieces, stored_state
from .atomic import publish, sync
from .fsdp import together

FILE_BYTES = 2**30
NamedTensor = tuple[str, Tensor]


def save_weights(model: PreTrainedModel, folder: str | os.PathLike, max_file_bytes: int = FILE_BYTES) -> None:
    """Write an HF checkpoint directory that appears whole or not at all, with a checksum of every tensor.

    Tensors have the names that `save_pretrained` gives them, a layer's experts one by one.
    Of a model with an adapter, write PEFT's files of the adapter alone.
    Under FSDP2 all ranks must call it; a tensor at a time is gathered, and rank 0 writes, holding one file's tensors.
    Tokenizer files come along from where the model was loaded. An older directory of this name is replaced.
    """
    target = pathlib.Path(folder)
    draft = target.with_name(f".{target.name}.incomplete")
    adapted = is_adapted(model)
    state = adapter_state(model) if adapted else stored_state(model)
    sharded = any(isinstance(p, DTensor) for p in model.parameters())
    writes = not sharded or dist.get_rank() == 0
    alike = together if sharded else nullcontext
    with alike():
        if writes:
            shutil.rmtree(draft, ignore_errors=True)
            draft.mkdir(parents=True)
    as_stored = iter if adapted else stored_names(model)
    places: dict[str, str] = {}
    limit = WHOLE if adapted else max_file_bytes
    for number, pairs in enumerate(buckets(_tensors(state, writes), lambda pair: pair[1].nbytes, limit), 1):
        with alike():
            if writes:
                name = WEIGHTS_FILE if adapted else f"model-{number:05}.safetensors"
                tensors = dict(as_stored(pairs))
                sums = {n: checksum([t]) for n, t in tensors.items()}
                save_file(tensors, draft / name, {"format": "pt", "checksums": json.dumps(sums)})
                places |= dict.fromkeys(tensors, name)
    with alike():
        if writes:
            if adapted:
                load_adapter_config(model).save_pretrained(str(draft))
            else:
                _write_configs(model, places, draft)
            for file in draft.iterdir():
                sync(file)
            publish(draft, target)


def _write_configs(model: PreTrainedModel, places: dict[str, str], folder: pathlib.Path) -> None:
    """Write what a checkpoint has beside its tensors. places: the file of each."""
    index = {"metadata": {}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
    model.config.save_pretrained(folder)
    if model.generation_config is not None:
        model.generation_config.save_pretrained(folder)
    source = model.config._name_or_path  # empty for a model that was not read from a checkpoint
    for pattern in ("*token*", "*.jinja", "vocab.*", "merges.txt") if source else ():
        for file in filter(pathlib.Path.is_file, pathlib.Path(source).glob(pattern)):
            shutil.copy(file, folder)


def _tensors(state: Mapping[str, Tensor], keep: bool) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of the state, gathered. keep=False: without their values, only to take part."""
    for name, tensor in full_tensors(state):
        yield name, tensor.detach().cpu().contiguous() if keep else tensor.detach().to("meta")


def stored_names(model: PreTrainedModel) -> Callable[[Iterable[NamedTensor]], Iterator[NamedTensor]]:
    """Return a function of a model's (name, tensor) pairs that gives them the names of checkpoints on a hub."""
    return functools.partial(_as_stored, by_tensor(stored_pieces(model)))


def _as_stored(pieces: Mapping[str, Mapping[str, Piece]], pairs: Iterable[NamedTensor]) -> Iterator[NamedTensor]:
    """Yield the tensors under the names that checkpoints on a hub have: a layer's experts one by one."""
    for name, tensor in pairs:
        if name in pieces:
            yield from ((stored, piece.of(tensor)) for stored, piece in pieces[name].items())
        else:
            yield name, tensor
