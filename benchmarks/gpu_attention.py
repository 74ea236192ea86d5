"""Attention beside libraries': xformers where it is installed and loads, and the operators of torch behind it.

Theirs are references and baselines. They are close to ours, not equal: their trees are others.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from samebits.kernels import ops

from gpu_probes import Report
from isolate import note

paged = import_module("samebits.kernels.triton.attention")
gradients = import_module("samebits.kernels.triton.attention_backward")
libraries = import_module("samebits.kernels.triton.library_backward")
LAYERS = 28  # of the shapes that the speed parts measure
Tensors = tuple[torch.Tensor, ...]


def expanded(q: torch.Tensor, *kv: torch.Tensor) -> Tensors:
    """Return keys and values [T, kv heads, D] with as many heads as the queries have."""
    return tuple(t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in kv)


def _xformers_bias(lengths: Sequence[int], window: int, device: torch.device) -> Any:
    from xformers.ops import fmha

    bias = fmha.attn_bias.BlockDiagonalCausalMask.from_seqlens(list(lengths), device=device)
    return bias.make_local_attention(window) if window else bias


def xformers_forward(q, k, v, lengths: Sequence[int], scale: float, window: int) -> Tensors:
    """Return attention [T, heads, D], by the operator that xformers picks."""
    from xformers.ops import fmha

    given = [t[None] for t in (q, *expanded(q, k, v))]
    bias = _xformers_bias(lengths, window, q.device)
    return (fmha.memory_efficient_attention_forward(*given, bias, scale=scale)[0],)


def xformers_backward(q, k, v, out, lse, grad, lengths: Sequence[int], scale: float, window: int) -> Tensors:
    """Return gradients by xformers' FlashAttention-2, from our output and log-sum-exp."""
    from xformers.ops import fmha

    given = [t[None] for t in (q, *expanded(q, k, v))]
    bias, sums = _xformers_bias(lengths, window, q.device), lse.t().contiguous()[None]
    found = fmha.memory_efficient_attention_backward(
        grad[None], out[None], sums, *given, bias, scale=scale, op=fmha.flash.BwOp
    )
    dq, dk, dv = (t[0] for t in found)
    return dq, *(t.unflatten(1, (k.shape[1], -1)).sum(2) for t in (dk, dv))


@functools.cache
def _starts(lengths: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """Return where sequences start, uploaded once: a graph can't be recorded of an upload."""
    return torch.tensor(np.cumsum([0, *lengths]), dtype=torch.int32, device=device)


def aten_forward(q, k, v, lengths: Sequence[int], scale: float, window: int) -> Tensors:
    """Return attention by torch's FlashAttention-2 (16 bits) or its memory-efficient kernels (fp32)."""
    starts, most = _starts(tuple(lengths), q.device), max(lengths)
    if q.dtype != torch.float32:
        sides = {"window_size_left": window - 1 if window else -1, "window_size_right": 0}
        return torch.ops.aten._flash_attention_forward(
            q, k, v, starts, starts, most, most, 0.0, True, False, scale=scale, **sides
        )[:1]
    given = [t[None] for t in (q, *expanded(q, k, v))]
    options = {"scale": scale, "window_size": window or None}
    found = torch.ops.aten._efficient_attention_forward(*given, None, starts, starts, most, most, 0.0, 1, **options)
    return (found[0][0],)


def sdpa_forward(q, k, v, lengths: Sequence[int], scale: float, window: int) -> Tensors:
    """Return attention by torch's public function, one sequence after the other: it runs on any device."""
    outs = []
    for a, b, c in zip(*(t.transpose(0, 1).split(list(lengths), 1) for t in (q, *expanded(q, k, v))), strict=True):
        at = torch.arange(a.shape[1], device=q.device)
        seen = (at <= at[:, None]) & (at > at[:, None] - (window or len(at)))
        outs.append(F.scaled_dot_product_attention(a, b, c, attn_mask=seen, scale=scale).transpose(0, 1))
    return (torch.cat(outs),)


FORWARDS = {"xformers": xformers_forward, "aten": aten_forward, "sdpa": sdpa_forward}
BACKWARDS = {
    "xformers": xformers_backward,
    "aten flash": libraries.flash_backward,
    "aten efficient": libraries.efficient_backward,
}


def attempt(call: Callable[[], Any]) -> Any:
    """Return what the library gives, or a line that says why it gives nothing."""
    try:
        return call()
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # a library that is missing, doesn't load, or takes no such tensors
        return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"[:160]


def gate(device: torch.device, tiny: bool) -> dict[str, Any]:
    """Our attention and its gradients against fp64, and beside them every library's: its errors, whether it repeats.

    Only ours can fail the gate.
    """
    report = Report()
    lengths, heads, kv_heads, dim = ([70, 9], 4, 2, 16) if tiny else ([700, 1, 333], 16, 8, 128)
    dtypes = (torch.float32,) if tiny else (torch.bfloat16, torch.float16, torch.float32)
    for dtype, window in itertools.product(dtypes, (0, 40)):
        name = f"{str(dtype).removeprefix('torch.')}, window {window}"
        note(name)
        numbers = (
            torch.randn(sum(lengths), n, dim, device=device).to(dtype) for n in (heads, kv_heads, kv_heads, heads)
        )
        q, k, v, grad = numbers
        layout = ops.packed_layout(lengths, heads // kv_heads, device)
        cache = paged.new_kv_cache(layout.num_blocks, kv_heads, dim, dtype, device)
        settings = lengths, dim**-0.5, window
        out, lse = ops.paged_attention(q, k, v, cache, layout, *settings[1:])
        exact, _ = gradients.dense_attention(q.double(), k.double(), v.double(), *settings)
        error = gradients.gradient_error(out, exact)
        report.expect(f"{name}: our forward and fp64, {error:.1e}", error < gradients.BUDGETS[dtype])
        information = report.found["information"]
        for library, forward in FORWARDS.items():
            found = attempt(functools.partial(forward, q, k, v, *settings))
            said = found if isinstance(found, str) else gradients.gradient_error(found[0], exact)
            information[f"{name}: forward, {library}"] = said
        wanted = gradients.exact_gradients(q, k, v, grad, *settings)
        given = q, k, v, out, lse, grad, *settings
        ours = gradients._triton_backward(*given)
        error = max(map(gradients.gradient_error, ours, wanted))
        report.expect(f"{name}: our gradients and fp64, {error:.1e}", error < gradients.BUDGETS[dtype])
        information[f"{name}: gradients, ours"] = error
        for library, backward in BACKWARDS.items():
            found = attempt(lambda backward=backward, given=given: [backward(*given) for _ in range(3)])
            if not isinstance(found, str):
                repeats = all(map(torch.equal, found[0] + found[0], found[1] + found[2]))
                found = [max(map(gradients.gradient_error, found[0], wanted)), f"repeats its bits: {repeats}"]
            information[f"{name}: gradients, {library}"] = found
    return report.found


def decode_calls(device: torch.device, batch: int, context: int, shape: tuple[int, int, int]) -> dict[str, Callable]:
    """Return calls of one layer's attention of a decode step: ours, FlashAttention-2, xformers' paged split-K."""
    heads, kv_heads, dim = shape
    kernels, dtype = ops.backend(device), torch.bfloat16
    block = kernels.BLOCK
    blocks = -(-context // block)
    q = torch.randn(batch, heads, dim, device=device, dtype=dtype)
    keys, values = torch.randn(2, batch * blocks * block, kv_heads, dim, device=device, dtype=dtype)
    cache = kernels.new_kv_cache(batch * blocks, kv_heads, dim, dtype, device)
    for part in cache:
        part.normal_()
    tables = np.arange(batch * blocks, dtype=np.int32)
    items = kernels.work_items([1] * batch, heads // kv_heads)
    positions = np.full(batch, context - 1, np.int32)
    layout = ops.PagedLayout([1] * batch, positions, positions, tables, tables[::blocks].copy(), items)
    layout.on(device)
    ends = torch.arange(batch + 1, dtype=torch.int32, device=device)
    used = torch.full((batch,), context, dtype=torch.int32, device=device)

    def ours() -> Any:
        return kernels.attention(q, *cache, layout, dim**-0.5, 0)

    def flash() -> Any:
        return torch.ops.aten._flash_attention_forward(
            q, keys, values, ends, ends * blocks * block, 1, context, 0.0, False, False, scale=dim**-0.5, seqused_k=used
        )

    def splitk() -> Any:
        from xformers.ops import fmha

        mask = fmha.attn_bias.PagedBlockDiagonalCausalWithOffsetPaddedKeysMask.from_seqlens(
            [1] * batch, [context] * batch, torch.from_numpy(tables).view(batch, blocks).to(device), block
        )
        wide = [t[None, :, :, None].expand(1, -1, -1, heads // kv_heads, -1) for t in (keys, values)]
        given = fmha.Inputs(query=q[None].unflatten(2, (kv_heads, -1)), key=wide[0], value=wide[1], attn_bias=mask)
        given.scale = dim**-0.5
        return functools.partial(fmha.triton_splitk.FwOp.apply, given, False)

    prepared = attempt(splitk)
    return {"ours": ours, "flash": flash, "splitk": prepared if callable(prepared) else lambda: _refuse(prepared)}


def _refuse(reason: str) -> None:
    raise RuntimeError(reason)


def times(device: torch.device, tiny: bool, timers: tuple[Any, Any]) -> list[dict[str, Any]]:
    """Time one layer's attention in decode steps, and packed forward and backward, in microseconds.

    timers: the seconds of a call on a device, and of a graph of it.
    """
    seconds, graph_seconds = timers
    shape = (4, 2, 16) if tiny else (16, 8, 128)
    found = []
    for batch, context in ((2, 70),) if tiny else itertools.product((1, 8, 32, 128, 256), (1024, 8192)):
        if batch * context > 256 * 4096:
            continue
        note(f"decode, batch {batch}, context {context}")
        row: dict[str, Any] = {"what": "decode", "batch": batch, "context": context, "layers": LAYERS}
        rows = {name: attempt(functools.partial(graph_seconds, device, call))
                for name, call in decode_calls(device, batch, context, shape).items()}  # fmt: skip
        found.append(row | _columns(rows))
    lengths = [70, 9] if tiny else [1024] * 8
    q, k, v, grad = (
        torch.randn(sum(lengths), n, shape[2], device=device).bfloat16() for n in (*shape[:2], shape[1], shape[0])
    )
    layout = ops.packed_layout(lengths, shape[0] // shape[1], device)
    settings = lengths, shape[2] ** -0.5, 0
    kernels = ops.backend(device)
    cache = kernels.new_kv_cache(layout.num_blocks, shape[1], shape[2], q.dtype, device)
    out, lse = ops.paged_attention(q, k, v, cache, layout, *settings[1:])
    given = q, k, v, out, lse, grad, *settings
    forwards = {"ours": lambda: ops.attention(q, k, v, layout, *settings[1:])}
    forwards |= {name: functools.partial(f, q, k, v, *settings) for name, f in FORWARDS.items() if name != "sdpa"}
    backwards = {"ours": functools.partial(gradients._triton_backward, *given)}
    backwards |= {name: functools.partial(f, *given) for name, f in BACKWARDS.items()}
    for what, calls, timer in (("forward", forwards, graph_seconds), ("backward", backwards, seconds)):
        note(what)
        rows = {name: attempt(functools.partial(timer, device, call)) for name, call in calls.items()}
        row = {"what": what, "batch": len(lengths), "context": f"{lengths[0]} packed", "layers": LAYERS}
        found.append(row | _columns(rows))
    return found


def _columns(times: dict[str, Any]) -> dict[str, Any]:
    """Return the columns of a row: ours and the fastest library's, and what became of each."""
    measured = {name: t * 1e6 for name, t in times.items() if isinstance(t, float)}
    best = min((name for name in measured if name != "ours"), key=measured.__getitem__, default=None)
    ours = measured.get("ours")
    return {
        "us": ours, "library_us": measured.get(best) if best else None, "library": best,
        "of_library": measured[best] / ours if best and ours else None, "each": times,
    }  # fmt: skip
