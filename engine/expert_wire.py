"""The forms in which `Completion.routed_experts` travels as text: vLLM's and SGLang's."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from typing import Any

import numpy as np

EXPERTS_AS_LOGPROBS = 4  # of a reply, that the experts of a token count as: some 1,500 bytes, those of a large model
_PART = 3 * 2**14  # bytes, a multiple of three


def npy_parts(ids: np.ndarray) -> Iterator[bytes]:
    """Yield an array as vLLM sends it, a .npy file in base64, part by part."""
    file = io.BytesIO()
    np.save(file, np.ascontiguousarray(ids), allow_pickle=False)
    yield from _base64_parts(file.getbuffer())


def npy_text(ids: np.ndarray) -> str:
    """Return what `npy_parts` yields as one string."""
    return b"".join(npy_parts(ids)).decode("ascii")


def int32_parts(ids: np.ndarray) -> Iterator[bytes]:
    """Yield an array as SGLang sends it, its int32 values in base64 without their shape, part by part."""
    yield from _base64_parts(memoryview(np.ascontiguousarray(ids, "<i4").tobytes()))


def _base64_parts(data: memoryview) -> Iterator[bytes]:
    for begin in range(0, len(data), _PART):
        yield base64.b64encode(data[begin : begin + _PART])


def parse_ids(given: Any) -> np.ndarray:
    """Return the integers of either form, or of an array or nested lists; SGLang's are flat. Raises ValueError."""
    if not isinstance(given, str | bytes):
        ids = np.asarray(given)
    else:
        data = base64.b64decode(given, validate=True)
        ids = np.load(io.BytesIO(data), allow_pickle=False) if data[:6] == b"\x93NUMPY" else np.frombuffer(data, "<i4")
    if ids.dtype.kind not in "iu":
        raise ValueError(f"routed experts are {ids.dtype.name}; expected integers")
    return ids


def shape_ids(ids: np.ndarray, tokens: int, layers: int, k: int) -> np.ndarray:
    """Return ids of a sequence of `tokens` tokens, flat or not, as [tokens - 1, layers, k]. Raises ValueError.

    The last token may have a row, too, which is dropped: nothing follows it.
    """
    rows, rest = divmod(ids.size, layers * k)
    fits = ids.ndim < 3 or ids.shape[1:] == (layers, k)
    if rest or not fits or rows not in (tokens - 1, tokens):
        raise ValueError(
            f"routed experts have shape {list(ids.shape)}, expected {[tokens - 1, layers, k]}: tokens of prompt and "
            "completion but the last, layers, experts of a token"
        )
    return ids.reshape(rows, layers, k)[: tokens - 1]
