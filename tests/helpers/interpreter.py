"""GPU kernels without a GPU: Triton's interpreter, with the two things mended that it does not do as a GPU does.

Its `dot` calls a BLAS, whose sums depend on the tile's shape, while a matrix unit adds up one element over ascending K;
and it cuts fp32 to bf16 where hardware rounds to nearest even. (conftest.py tells Triton to interpret.)

`interpreted()` makes them the backend for tensors on the CPU, each product with a schedule of its own, and stands in
for CUDA graphs.
"""

import contextlib
import functools
import importlib
import random

import numba
import numpy as np
import pytest
import torch
import triton.language as tl
from triton.language import core
from triton.runtime import interpreter

_convert = interpreter._convert_float


def _dot(self, a, b, d, *_):
    a, b = (
        _convert(t.data, tl.bfloat16, tl.float32, None).view(np.float32)
        if t.dtype.scalar == tl.bfloat16
        else t.data.astype(np.float32)
        for t in (a, b)
    )
    total = d.data.copy()
    _chains(np.ascontiguousarray(a), np.ascontiguousarray(b), total)
    return interpreter.TensorHandle(total, d.dtype.scalar)


@numba.njit(cache=True)
def _chains(a, b, total):
    for i in range(a.shape[0]):
        for k in range(a.shape[1]):
            for j in range(b.shape[1]):
                total[i, j] += a[i, k] * b[k, j]


def _convert_rounding(values, source, target, mode):
    if source == tl.float32 and target == tl.bfloat16:
        rounded = torch.from_numpy(np.ascontiguousarray(values).view(np.float32)).bfloat16()
        return rounded.view(torch.int16).numpy().view(np.uint16)
    return _convert(values, source, target, mode)


def _both_languages():
    """Names what `_patch_lang` looks for: all that a kernel and the functions it calls use."""
    tl, core  # noqa: B018


def _call(self, *args, **kwargs):
    """Without patching the language once more for each inner call: the kernel's own did it, below."""
    return self.rewrite()(*args, **kwargs)


_np_dtype = functools.cache(interpreter._get_np_dtype)  # which makes a dictionary for each look into it


def _dtype_of(dtype):
    return _np_dtype(tl.uint64 if dtype.scalar.is_ptr() else dtype.scalar)


def _with_room(call):
    """Have Python keep all frames below `call` in one piece of memory.

    It takes 16 KB at a time, or as much as a frame is large. Where a loop calls from the end of such a piece, each call
    maps a new one and gives it back: 700,000 system calls in a test of 20 seconds, a quarter of its time.
    """

    def roomy(*args, **kwargs):
        return call(*args, **kwargs)

    roomy.__code__ = roomy.__code__.replace(co_stacksize=2**17)
    return roomy


_patch = interpreter._patch_lang
interpreter._patch_lang = lambda fn: _patch(_both_languages)
interpreter.InterpreterBuilder.create_dot = _dot
interpreter.InterpretedFunction.__call__ = _call
interpreter.GridExecutor.__call__ = _with_room(interpreter.GridExecutor.__call__)
interpreter._convert_float = _convert_rounding
interpreter._get_np_dtype = _dtype_of


def _capture(run, device, pool, side):
    """Of a graph: what runs is the same each time, on the same buffers."""
    out = run()
    return lambda: out.copy_(run()), out


@contextlib.contextmanager
def interpreted(seed: int = 0):
    from samebits.engine import cuda_graphs
    from samebits.kernels import ops
    from samebits.kernels.triton.schedules import Tile

    names = "linear", "attention", "experts"
    linear, attention, experts = (importlib.import_module(f"samebits.kernels.triton.{name}") for name in names)

    rng = random.Random(seed)

    def any_tile(*_):
        split, tma, deep = (rng.random() < chance for chance in (0.5, 0.3, 0.5))
        return Tile(rng.choice((16, 32, 64)), rng.choice((128, 256, 512)), 2, 4, split, tma, deep=deep)

    def any_splits(items, kv_heads, segments, device):
        return rng.randint(1, segments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(ops.BACKENDS, "cpu", "triton")
        patch.setattr(linear, "linear_tile", any_tile)
        patch.setattr(experts, "experts_tile", any_tile)
        patch.setattr(linear, "MIN_CHUNK", 64)
        patch.setattr(linear, "FULL_WIDTH", 256)
        patch.setattr(attention, "num_splits", any_splits)
        patch.setattr(attention, "SEGMENT", 128)
        patch.setattr(cuda_graphs, "capture", _capture)
        patch.setattr(cuda_graphs, "_BUCKETS", (1, 2, 4, 8, 16))  # padding costs time here
        patch.setattr(cuda_graphs, "_SMALL_TILES", 8)
        patch.setattr(cuda_graphs, "_WORTH_IT", 1)
        patch.setattr(cuda_graphs, "_LEAST_PROMPT", 8)
        ops.backend.cache_clear()
        yield
    ops.backend.cache_clear()
