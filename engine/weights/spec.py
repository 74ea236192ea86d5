"""The description that goes ahead of tensors' bytes: names, shapes, dtypes, and the buckets that they travel in."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

T = TypeVar("T")

DEFAULT_LABEL = "default"  # what servers call the weights that they started with


@dataclass(frozen=True)
class TensorSpec:
    """The name, shape and dtype of one tensor."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, name: str, tensor: Tensor) -> TensorSpec:
        """The spec of a tensor; of a DTensor (FSDP2) its global shape."""
        return cls(name, tuple(tensor.shape), tensor.dtype)

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return math.prod(self.shape) * self.dtype.itemsize


def specs_of(state: Mapping[str, Tensor]) -> list[TensorSpec]:
    """The specs of a state dict's tensors, in its order."""
    return [TensorSpec.of(name, tensor) for name, tensor in state.items()]


def parse_specs(names: Sequence[str], dtypes: Sequence[str], shapes: Sequence[Sequence[int]]) -> list[TensorSpec]:
    """Specs from three lists, as both HTTP dialects carry them; dtypes like "bfloat16". Raises ValueError."""
    if not names:
        raise ValueError("the update names no tensors")
    if not len(names) == len(dtypes) == len(shapes):
        raise ValueError(f"the update has {len(names)} names, {len(dtypes)} dtypes and {len(shapes)} shapes")
    specs = []
    for name, dtype, shape in zip(names, dtypes, shapes, strict=True):
        found = getattr(torch, dtype.removeprefix("torch."), None)
        if not isinstance(found, torch.dtype):
            raise ValueError(f"tensor {name!r} has the unknown dtype {dtype!r}; expected a torch name like 'bfloat16'")
        specs.append(TensorSpec(name, tuple(shape), found))
    return specs


def full_tensors(state: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Yield a state dict's items; a DTensor (FSDP2) is gathered when its turn comes, so all its ranks must iterate."""
    for name, tensor in state.items():
        yield name, (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor)


@contextmanager
def gathering(tensors: Iterator[tuple[str, Tensor]]) -> Iterator[Iterator[tuple[str, Tensor]]]:
    """Give tensors that are gathered one by one, as `full_tensors`, to the block, then gather and drop what it left, so
    that no rank waits for a failed one."""
    try:
        yield tensors
    finally:
        for _ in tensors:
            pass


def buckets(items: Iterable[T], size: Callable[[T], int], limit: int) -> Iterator[list[T]]:
    """Yield the items in runs whose sizes add up to at most `limit`; a larger item is a run of its own."""
    bucket: list[T] = []
    total = 0
    for item in items:
        if bucket and total + size(item) > limit:
            yield bucket
            bucket = []
            total = 0
        bucket.append(item)
        total += size(item)
    if bucket:
        yield bucket


def byte_buckets(
    tensors: Iterable[tuple[str, Tensor]], limit: int
) -> Iterator[tuple[list[np.ndarray], list[TensorSpec]]]:
    """Yield (bytes, specs) of tensors in `buckets` of at most `limit` bytes."""
    for bucket in buckets(tensors, lambda pair: pair[1].nbytes, limit):
        yield [to_bytes(tensor) for _, tensor in bucket], [TensorSpec.of(name, tensor) for name, tensor in bucket]


def to_bytes(tensor: Tensor) -> np.ndarray:
    """Return a tensor's bytes, uint8, in CPU memory: without a copy if they are there."""
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()


def from_bytes(data: np.ndarray, spec: TensorSpec) -> Tensor:
    """Return the tensor whose bytes these are, without a copy."""
    return torch.from_numpy(data).view(spec.dtype).view(spec.shape)


def split_bucket(flat: Tensor, bucket: Sequence[TensorSpec]) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor) views of a bucket whose bytes are `flat`, or which has `flat` as its only tensor."""
    if len(bucket) == 1 and flat.shape == bucket[0].shape and flat.dtype == bucket[0].dtype:
        yield bucket[0].name, flat
        return
    start = 0
    for spec in bucket:
        part = flat[start : start + spec.nbytes]
        start += spec.nbytes
        if part.storage_offset() % spec.dtype.itemsize:  # tensors of several dtypes lie side by side unpadded
            part = part.clone()
        yield spec.name, part.view(spec.dtype).view(spec.shape)


def checksum(parts: Iterable[Tensor]) -> str:
    """A hash of the bytes of a tensor's parts, one after the other."""
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        digest.update(to_bytes(part).tobytes())
    return digest.hexdigest()
