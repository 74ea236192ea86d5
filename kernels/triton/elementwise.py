"""RMSNorm, gated activations, rotary tables: fp32 inside (rotary angles fp64), one rounding to the storage dtype.

A norm's row is summed by one program whose block and warps follow from its width alone, so its tree does too.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .launch import aligned, await_inputs, launch

ACTIVATIONS: tuple[str, ...] = ("silu", "gelu", "gelu_pytorch_tanh")
_TILE = 1024
_ROWS = 32  # that one program of a backward pass sums


@triton.jit
def norm_scale(values, width, eps):
    """Return 1 / sqrt(mean(x^2) + eps) of each row."""
    mean = tl.sum(values * values, -1) / width
    return tl.div_rn(1.0, tl.sqrt_rn(mean + eps))


@triton.jit(do_not_specialize=["rows"])
def _rms_norm(
    x, update, weight, total, out, rstd, rows, width, eps, ADD: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    await_inputs()
    row, j = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    place, mask, here = row * width + j, j < width, row < rows
    if ROWS > 1:
        row = row * ROWS + tl.arange(0, ROWS)
        here = row < rows
        place, mask = row[:, None] * width + j[None, :], here[:, None] & (j < width)[None, :]
    values = tl.load(x + place, mask=mask, other=0.0).to(tl.float32)
    if ADD:
        values = values + tl.load(update + place, mask=mask, other=0.0).to(tl.float32)
        tl.store(total + place, values.to(total.dtype.element_ty), mask=mask)
        values = values.to(total.dtype.element_ty).to(tl.float32)
    scale = norm_scale(values, width, eps)
    scaled = values * (scale[:, None] if ROWS > 1 else scale)
    scaled = tl.load(weight + j, mask=j < width, other=0.0).to(tl.float32) * scaled
    tl.store(out + place, scaled.to(out.dtype.element_ty), mask=mask)
    tl.store(rstd + row, scale, mask=here)


def one_row(width: int) -> dict[str, int]:
    """Return the block and warps of one row."""
    block = triton.next_power_of_2(width)
    return {"BLOCK": block, "num_warps": min(max(block // 512, 1), 16)}


def several_rows(width: int) -> dict[str, int]:
    """Return the rows of a program, and their block and warps. Several narrow ones have a warp each: the same tree."""
    row = one_row(width)
    rows = 4 if row["BLOCK"] <= 128 else 1
    return {"ROWS": rows, "BLOCK": row["BLOCK"], "num_warps": rows * row["num_warps"]}


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return weight * (x * rstd) in x's dtype, and rstd = 1 / sqrt(mean(x^2) + eps) fp32 [rows]; x [rows, width]."""
    x = aligned(x)
    out = torch.empty_like(x)
    return out, _normed(x, x, weight, out, out, eps, add=False)


def add_rms_norm(
    x: torch.Tensor, update: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return x + update and its `rms_norm`, [rows, width] in x's dtype, in one launch: the same bits as in two."""
    x, update = aligned(x), aligned(update)
    total, out = torch.empty_like(x), torch.empty_like(x)
    _normed(x, update, weight, total, out, eps, add=True)
    return total, out


def _normed(
    x: torch.Tensor, update: torch.Tensor, weight: torch.Tensor, total: torch.Tensor, out: torch.Tensor, eps: float,
    add: bool,
) -> torch.Tensor:  # fmt: skip
    """Write the norm of x, or of the total of x and update, to `out`; return rstd fp32 [rows]."""
    rows, width = x.shape
    rstd, shape = x.new_empty(rows, dtype=torch.float32), several_rows(width)
    launch(
        _rms_norm, (triton.cdiv(rows, shape["ROWS"]),),
        x, update, aligned(weight.detach()), total, out, rstd, rows, width, eps, ADD=add, **shape,
    )  # fmt: skip
    return rstd


@triton.jit(do_not_specialize=["rows"])
def _rms_norm_backward(
    grad, x, weight, rstd, grad_x, parts, rows, width, ROWS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Write the gradients of ROWS rows, and their sum of the weight's gradient to `parts`."""
    await_inputs()
    program = tl.program_id(0).to(tl.int64)
    j = tl.arange(0, BLOCK)
    mask = j < width
    w = tl.load(weight + j, mask=mask, other=0.0).to(tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    for row in range(program * ROWS, tl.minimum((program + 1) * ROWS, rows)):
        upstream = tl.load(grad + row * width + j, mask=mask, other=0.0).to(tl.float32)
        scale = tl.load(rstd + row)
        normed = tl.load(x + row * width + j, mask=mask, other=0.0).to(tl.float32) * scale
        total = total + upstream * normed
        weighted = upstream * w
        mean = tl.sum(weighted * normed, 0) / width
        tl.store(grad_x + row * width + j, (scale * (weighted - normed * mean)).to(x.dtype.element_ty), mask=mask)
    tl.store(parts + program * width + j, total, mask=mask)


def rms_norm_backward(
    grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, rstd: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradients of x [rows, width] and weight [width], in their dtypes, from the result's."""
    grad, x = grad.contiguous(), x.contiguous()
    rows, width = x.shape
    grad_x, programs = torch.empty_like(x), -(-rows // _ROWS)
    parts = x.new_empty((programs, width), dtype=torch.float32)
    launch(
        _rms_norm_backward, (programs,), grad, x, weight.contiguous(), rstd, grad_x, parts, rows, width,
        ROWS=_ROWS, **one_row(width),
    )  # fmt: skip
    return grad_x, parts.sum(0).to(weight.dtype)


@triton.jit
def _sigmoid(x):
    e = tl.exp(-tl.abs(x))
    return tl.where(x >= 0, 1.0, e) / (1.0 + e)


@triton.jit
def _share(x, KIND: tl.constexpr):
    """Return activation(x) / x: the share of x that passes."""
    if KIND == 0:
        return _sigmoid(x)
    elif KIND == 1:
        return 0.5 * (1.0 + tl.erf(x * 0.7071067811865476))
    else:  # (1 + tanh(u)) / 2 = sigmoid(2u) (Hendrycks & Gimpel, 2016)
        return _sigmoid(2.0 * (0.7978845608028654 * (x + 0.044715 * x * x * x)))


@triton.jit
def activated(x, up, KIND: tl.constexpr):
    """Return activation(x) * up, fp32; KIND: the activation's place in ACTIVATIONS."""
    return x * _share(x, KIND) * up


@triton.jit
def _gated(gate, up, out, size, KIND: tl.constexpr, TILE: tl.constexpr):
    await_inputs()
    i = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    mask = i < size
    x = tl.load(gate + i, mask=mask, other=0.0).to(tl.float32)
    y = activated(x, tl.load(up + i, mask=mask, other=0.0).to(tl.float32), KIND)
    tl.store(out + i, y.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _gated_halves(both, out, size, width, KIND: tl.constexpr, TILE: tl.constexpr):
    await_inputs()
    i = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    mask = i < size
    place = i + i // width * width  # of the gate; its up is a width further
    x = tl.load(both + place, mask=mask, other=0.0).to(tl.float32)
    y = activated(x, tl.load(both + place + width, mask=mask, other=0.0).to(tl.float32), KIND)
    tl.store(out + i, y.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _gated_backward(grad, gate, up, grad_gate, grad_up, size, KIND: tl.constexpr, TILE: tl.constexpr):
    await_inputs()
    i = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    mask = i < size
    upstream = tl.load(grad + i, mask=mask, other=0.0).to(tl.float32)
    x = tl.load(gate + i, mask=mask, other=0.0).to(tl.float32)
    share = _share(x, KIND)
    if KIND == 0:
        slope = share * (1.0 - share)
    elif KIND == 1:
        slope = tl.exp(-0.5 * x * x) * 0.3989422804014327
    else:
        slope = share * (1.0 - share) * (1.5957691216057308 * (1.0 + 0.134145 * x * x))
    by_gate = upstream * tl.load(up + i, mask=mask, other=0.0).to(tl.float32) * (share + x * slope)
    tl.store(grad_gate + i, by_gate.to(gate.dtype.element_ty), mask=mask)
    tl.store(grad_up + i, (upstream * (x * share)).to(up.dtype.element_ty), mask=mask)


def gated_activation(gate: torch.Tensor, up: torch.Tensor, name: str) -> torch.Tensor:
    """Return activation(gate) * up in gate's dtype, [rows, width]; `name` is one of ACTIVATIONS."""
    gate, up = gate.contiguous(), up.contiguous()
    out, size = torch.empty_like(gate), gate.numel()
    launch(_gated, (-(-size // _TILE),), gate, up, out, size, KIND=ACTIVATIONS.index(name), TILE=_TILE, num_warps=4)
    return out


def gated_halves(both: torch.Tensor, name: str) -> torch.Tensor:
    """Return `gated_activation` of the halves, gate and up, of each row of both [rows, 2 width]: [rows, width]."""
    both = both.contiguous()
    rows, width = both.shape[0], both.shape[1] // 2
    out = both.new_empty(rows, width)
    kind, grid = ACTIVATIONS.index(name), (-(-out.numel() // _TILE),)
    launch(_gated_halves, grid, both, out, out.numel(), width, KIND=kind, TILE=_TILE, num_warps=4)
    return out


def gated_activation_backward(
    grad: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, name: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradients of gate and up, in their dtypes, from the result's; all [rows, width]."""
    grad, gate, up = grad.contiguous(), gate.contiguous(), up.contiguous()
    outs, size = (torch.empty_like(gate), torch.empty_like(up)), gate.numel()
    kind = ACTIVATIONS.index(name)
    launch(
        _gated_backward, (-(-size // _TILE),), grad, gate, up, *outs, size, KIND=kind, TILE=_TILE, num_warps=4
    )  # fmt: skip
    return outs


def rotary_tables(positions: torch.Tensor, inv_freq: torch.Tensor, scaling: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cos and sin, fp32 [T, 2 F], of the fp32 products positions [T] * inv_freq [F], evaluated in fp64."""
    angle = (positions.float()[:, None] * inv_freq[None, :]).double()
    return tuple((f(angle) * scaling).float().repeat(1, 2) for f in (torch.cos, torch.sin))  # type: ignore[return-value]
