"""Tensors that a client sends as a pickle, read by an unpickler that knows nothing else.

A pickle names the functions that its reader calls; here these are the few that rebuild a tensor. SGLang's
`FlattenedTensorBucket` metadata is read into a plain class of ours.
"""

from __future__ import annotations

import base64
import binascii
import collections
import io
import pickle
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.multiprocessing.reductions as reductions
from torch import Tensor

from ..engine.weights import parse_specs


@dataclass
class FlattenedTensorMetadata:
    name: str
    shape: Any
    dtype: torch.dtype
    start_idx: int
    end_idx: int
    numel: int


class _LocalSerializedTensor:
    """SGLang's wrapper: a pickle of a tensor for each of its ranks."""

    values: list[bytes]

    def __setstate__(self, state: dict) -> None:
        self.values = state["values"]


_ALLOWED: dict[tuple[str, str], Any] = {
    ("collections", "OrderedDict"): collections.OrderedDict,
    ("torch", "Size"): torch.Size,
    ("torch", "Tensor"): torch.Tensor,
    ("torch._utils", "_rebuild_tensor_v2"): torch._utils._rebuild_tensor_v2,
    ("torch.storage", "_load_from_bytes"): lambda data: torch.load(io.BytesIO(data), weights_only=True),
    ("torch.multiprocessing.reductions", "rebuild_tensor"): reductions.rebuild_tensor,
    ("torch.multiprocessing.reductions", "rebuild_typed_storage"): reductions.rebuild_typed_storage,
    ("torch.multiprocessing.reductions", "rebuild_storage_filename"): reductions.rebuild_storage_filename,
    ("torch.multiprocessing.reductions", "rebuild_storage_empty"): reductions.rebuild_storage_empty,
    ("torch.nn.parameter", "Parameter"): torch.nn.Parameter,
    ("torch._utils", "_rebuild_parameter"): torch._utils._rebuild_parameter,
    **{("torch", n): getattr(torch, n) for n in ("float32", "bfloat16", "float16", "uint8")},
    **{("torch", n): getattr(torch, n) for n in ("FloatStorage", "BFloat16Storage", "HalfStorage", "ByteStorage")},
    ("torch.storage", "UntypedStorage"): torch.UntypedStorage,
    ("torch", "UntypedStorage"): torch.UntypedStorage,
    ("torch.storage", "TypedStorage"): torch.storage.TypedStorage,
}
_BY_CLASS = {"FlattenedTensorMetadata": FlattenedTensorMetadata, "LocalSerializedTensor": _LocalSerializedTensor}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if module.split(".")[0] == "sglang" and name in _BY_CLASS:
            return _BY_CLASS[name]
        try:
            return _ALLOWED[module, name]
        except KeyError:
            raise pickle.UnpicklingError(f"{module}.{name} is not allowed in a pickle of tensors") from None


def _loads(data: bytes) -> Any:
    return _Unpickler(io.BytesIO(data)).load()


def named_tensors(serialized: str, load_format: str | None) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) pairs of a base64 pickle: a list of them, or SGLang's "flattened_bucket". Raises ValueError."""
    try:
        content = _loads(base64.b64decode(serialized, validate=True))
        if load_format is None:
            pairs = [(name, _loads(t.values[0]) if isinstance(t, _LocalSerializedTensor) else t) for name, t in content]
        else:
            flat = content["flattened_tensor"].reshape(-1).view(torch.uint8)
            pairs = [_from_bucket(flat, entry) for entry in content["metadata"]]
    except (binascii.Error, pickle.UnpicklingError, ValueError, TypeError, KeyError, AttributeError, EOFError,
            IndexError, RuntimeError, OSError, ImportError) as error:  # fmt: skip
        raise ValueError(f"serialized_named_tensors can't be read: {type(error).__name__}: {error}") from error
    yield from pairs


def _from_bucket(flat: Tensor, entry: FlattenedTensorMetadata) -> tuple[str, Tensor]:
    (spec,) = parse_specs([entry.name], [str(entry.dtype)], [tuple(entry.shape)])
    part = flat[entry.start_idx : entry.end_idx]
    if part.numel() != spec.nbytes:
        raise ValueError(f"{entry.name!r} has {part.numel()} bytes, expected {spec.nbytes}")
    return spec.name, part.clone().view(spec.dtype).view(spec.shape)
