"""Checkpoints of a training run: complete or absent, and resumed to the bit."""

from __future__ import annotations

import json
import pathlib
import shutil
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from transformers import PreTrainedModel

from ...model import CheckpointError
from ..atomic import publish, sync
from ..fsdp import together

PREFIX = "step-"
STATE = "trainer.json"


def save_checkpoint(
    folder: pathlib.Path, step: int, model: PreTrainedModel, optimizer, state: dict[str, Any], keep: int = 2
) -> pathlib.Path:
    """Write folder/step-N from all ranks and return it; it appears whole or not at all, older ones stay until then.

    Sharded tensors (torch.distributed.checkpoint) and `state` (JSON). The newest `keep` checkpoints are kept. Raises
    OSError on every rank where one of them couldn't write.
    """
    target = folder / f"{PREFIX}{step:06}"
    temporary = folder / f".{target.name}.incomplete"
    first = dist.get_rank() == 0
    try:
        with together():
            if first:
                folder.mkdir(parents=True, exist_ok=True)
                shutil.rmtree(temporary, ignore_errors=True)
        dcp.save(_tensors(model, optimizer), storage_writer=dcp.FileSystemWriter(temporary, sync_files=True))
        with together():
            if first:
                (temporary / STATE).write_text(json.dumps(state, indent=1))
                sync(temporary / STATE)
                publish(temporary, target)
                for old in checkpoints(folder)[:-keep]:
                    shutil.rmtree(old)
    except (dcp.api.CheckpointException, OSError, RuntimeError) as error:
        if first:
            shutil.rmtree(temporary, ignore_errors=True)
        last = latest(folder)
        survives = f"; {last.name} is still there" if last else ""
        raise OSError(f"could not save {target.name} in {folder}: {_reason(error)}{survives}") from error
    return target


def load_checkpoint(
    path: pathlib.Path, model: PreTrainedModel, optimizer, check: Callable[[dict[str, Any]], None]
) -> dict[str, Any]:
    """Restore parameters and optimizer, also onto another number of ranks, and return `state`.

    check: gets `state` first, and raises to refuse. CheckpointError for a damaged or foreign checkpoint.
    """
    try:
        with together():
            state = json.loads((path / STATE).read_text())
            check(state)
        tensors = _tensors(model, optimizer)
        dcp.load(tensors, storage_reader=dcp.FileSystemReader(path))
    except (OSError, ValueError, KeyError, TypeError, dcp.api.CheckpointException) as error:
        raise CheckpointError(f"{path} can't be loaded: {_reason(error)}") from error
    set_optimizer_state_dict(model, optimizer, tensors["optimizer"])
    set_model_state_dict(model, tensors["model"])
    return state


def _tensors(model: PreTrainedModel, optimizer) -> dict[str, Any]:
    return {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}


def checkpoints(folder: pathlib.Path) -> list[pathlib.Path]:
    """Complete checkpoints, oldest first."""
    numbered = (p for p in folder.glob(f"{PREFIX}*") if p.name.removeprefix(PREFIX).isdecimal())
    return sorted((p for p in numbered if (p / STATE).is_file()), key=step_of)


def step_of(checkpoint: pathlib.Path) -> int:
    """The step that a checkpoint was written after."""
    return int(checkpoint.name.removeprefix(PREFIX))


def latest(folder: pathlib.Path) -> pathlib.Path | None:
    """The folder's newest checkpoint, or None."""
    found = checkpoints(folder)
    return found[-1] if found else None


def _reason(error: BaseException) -> str:
    """The first rank's own error, where torch wrapped it."""
    failures = getattr(error, "failures", None)
    if failures:
        rank, (cause, _) = next(iter(failures.items()))
        return f"rank {rank}: {type(cause).__name__}: {cause}"
    return f"{type(error).__name__}: {error}"
