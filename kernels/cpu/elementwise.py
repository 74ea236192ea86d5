"""Row-wise CPU kernels: RMSNorm, gated activations, rotary tables.

`exp` is a sequence of IEEE-754 operations, so that a value's bits don't depend on its place in a vector. Rotary's sine
and cosine and the exact GELU's erfc are the C library's scalar fp64 functions: the contract names that library.
"""

import math
from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from numba import float32, int32, prange

from .float_modes import check_float_modes
from .jit import elementwise, inline, own_storage, storage
from .simd import add_squares, bits_float, float_bits, fma, narrow, widen

# ln 2 split so that n * LN2_HIGH is exact for |n| < 2^11: Cody & Waite, Software Manual for the Elementary Functions.
_LN2_HIGH, _LN2_LOW = float32(0.693359375), float32(-2.1219444e-4)
_LOG2_E = float32(1.4426950408889634)
_ROUND = float32(12582912.0)  # 1.5 * 2^23: adding it rounds to an integer, kept in the low mantissa bits
_C2, _C3, _C4, _C5, _C6, _C7 = (float32(1.0 / math.factorial(n)) for n in range(2, 8))
_EXP_FLOOR = float32(-87.0)
_ZERO, _ONE, _TWO = float32(0.0), float32(1.0), float32(2.0)
_ROUND_BITS = int(np.float32(12582912.0).view(np.int32))


@inline
def exp(x):
    """Return e^x in fp32 for x <= 0, 0 below -87: Taylor to degree 7 on |r| <= ln(2)/2, error below 1.5 ulp."""
    clamped = max(x, _EXP_FLOOR)
    shifted = fma(clamped, _LOG2_E, _ROUND)
    n = shifted - _ROUND
    r = fma(-n, _LN2_HIGH, clamped)
    r = fma(-n, _LN2_LOW, r)
    p = fma(_C7, r, _C6)
    p = fma(p, r, _C5)
    p = fma(p, r, _C4)
    p = fma(p, r, _C3)
    p = fma(p, r, _C2)
    p = fma(p * r, r, r) + _ONE
    power = bits_float(int32((float_bits(shifted) - int32(_ROUND_BITS) + int32(127)) << int32(23)))
    return p * power if x >= _EXP_FLOOR else (_ZERO if x < _EXP_FLOOR else x)  # the last arm passes a NaN on


@inline
def sum_of_squares(row):
    """Return the sum by 16 interleaved chains of fused multiply-adds, then a pairwise tree: fixed for a width."""
    lanes = np.zeros(16, np.float32)
    whole = row.size - row.size % 16
    add_squares(row.ctypes.data, row[0], whole, lanes.ctypes.data)
    for lane in range(row.size - whole):
        lanes[lane] = fma(widen(row[whole + lane]), widen(row[whole + lane]), lanes[lane])
    width = 8
    while width > 0:
        for lane in range(width):
            lanes[lane] += lanes[lane + width]
        width //= 2
    return lanes[0]


@inline
def norm_row(row, weight, eps, out):
    """Write the normed row to `out`; return 1 / sqrt(mean of squares + eps)."""
    mean = sum_of_squares(row) / float32(row.size)
    scale = _ONE / np.sqrt(mean + float32(eps))
    for j in range(row.size):
        out[j] = narrow(widen(weight[j]) * (widen(row[j]) * scale), row[j])
    return scale


@elementwise
def _rms_norm(x, weight, eps, out, rstd):
    for i in prange(x.shape[0]):
        rstd[i] = norm_row(x[i], weight, eps, out[i])


@inline
def add_row(x, update, total):
    """Write the rounded sum of two rows of the storage dtype to `total`."""
    for j in range(x.size):
        total[j] = narrow(widen(x[j]) + widen(update[j]), x[j])


@elementwise
def _add_rms_norm(x, update, weight, eps, total, out):
    for i in prange(x.shape[0]):
        add_row(x[i], update[i], total[i])
        norm_row(total[i], weight, eps, out[i])


@inline
def times_sigmoid(x, y):
    """Return x * sigmoid(y)."""
    e = exp(-abs(y))
    return x * ((_ONE if y >= _ZERO else e) / (_ONE + e))


@inline
def silu(x):
    """Return x sigmoid(x)."""
    return times_sigmoid(x, x)


@inline
def gelu_tanh(x):
    """Return 0.5 x (1 + tanh(u)) = x sigmoid(2u), u = sqrt(2/pi) (x + 0.044715 x^3) (Hendrycks & Gimpel, 2016)."""
    u = float32(0.7978845608028654) * fma(float32(0.044715) * x * x, x, x)
    return times_sigmoid(x, _TWO * u)


@inline
def gelu(x):
    """Return x times the normal distribution function at x, in fp64."""
    return float32(0.5 * float(x) * math.erfc(-float(x) * 0.7071067811865476))


@inline
def gated_row(gate, up, kind, out):
    """Write activation(gate) * up of a row to `out`; kind: the activation's place in ACTIVATIONS."""
    if kind == 0:
        for j in range(gate.size):
            out[j] = narrow(silu(widen(gate[j])) * widen(up[j]), gate[j])
    elif kind == 1:
        for j in range(gate.size):
            out[j] = narrow(gelu(widen(gate[j])) * widen(up[j]), gate[j])
    else:
        for j in range(gate.size):
            out[j] = narrow(gelu_tanh(widen(gate[j])) * widen(up[j]), gate[j])


@inline
def widen_row(x, out):
    """Write a row to fp32 `out`."""
    for j in range(x.size):
        out[j] = widen(x[j])


@inline
def narrow_row(x, out):
    """Write a row of fp32 to `out`, rounded to its dtype."""
    for j in range(x.size):
        out[j] = narrow(x[j], out[j])


@inline
def gated_products(gate, up, kind, stored, out):
    """Write activation(gate) * up to fp32 `out`; gate and up: rows of products, fp32.

    All three are rounded to the dtype of `stored` [3, width], which is scratch.
    """
    if stored.itemsize == out.itemsize:  # nothing to round
        gated_row(gate, up, kind, stored[2])  # not to `out`, which may be one of the two: LLVM would take no vectors
    else:
        narrow_row(gate, stored[0])
        narrow_row(up, stored[1])
        gated_row(stored[0], stored[1], kind, stored[2])
    widen_row(stored[2], out)


@elementwise
def _gated(gate, up, kind, out):
    for i in prange(gate.shape[0]):
        gated_row(gate[i], up[i], kind, out[i])


@elementwise
def _gated_halves(both, kind, out):
    width = out.shape[1]
    for i in prange(both.shape[0]):
        gated_row(both[i, :width], both[i, width:], kind, out[i])


@elementwise
def _rotary_tables(positions, inv_freq, scaling, cos, sin):
    half = inv_freq.size
    for t in prange(positions.size):
        for j in range(half):
            angle = float(float32(positions[t]) * inv_freq[j])
            c, s = float32(math.cos(angle) * scaling), float32(math.sin(angle) * scaling)
            cos[t, j] = c
            cos[t, j + half] = c
            sin[t, j] = s
            sin[t, j + half] = s


@inline
def _product(x, y, like):
    return widen(narrow(x * y, like))


@inline
def turn(x, cos, sin, out):
    """Turn one token's heads as the model's code does: each product and the sum rounded to the storage dtype."""
    half = x.shape[1] // 2
    for h in range(x.shape[0]):
        for j in range(half):
            low, high, like = widen(x[h, j]), widen(x[h, j + half]), x[h, j]
            new_low = _product(low, widen(cos[j]), like) + _product(-high, widen(sin[j]), like)
            new_high = _product(high, widen(cos[j + half]), like) + _product(low, widen(sin[j + half]), like)
            out[h, j], out[h, j + half] = narrow(new_low, like), narrow(new_high, like)


TORCH_ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_pytorch_tanh": lambda x: F.gelu(x, approximate="tanh"),
}
ACTIVATIONS: tuple[str, ...] = tuple(TORCH_ACTIVATIONS)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return weight * (x * rstd) in x's dtype, and rstd = 1 / sqrt(mean(x^2) + eps) fp32 [rows]; x [rows, width]."""
    x = x.contiguous()
    out, rstd = torch.empty_like(x), x.new_empty(x.shape[0], dtype=torch.float32)
    _rms_norm(own_storage(x), storage(weight), eps, own_storage(out), rstd.numpy())
    return out, rstd


def add_rms_norm(
    x: torch.Tensor, update: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return x + update and its `rms_norm`, [rows, width] in x's dtype, in one launch: the same bits as in two."""
    x, update = x.contiguous(), update.contiguous()
    total, out = torch.empty_like(x), torch.empty_like(x)
    arrays = own_storage(x), own_storage(update), storage(weight.detach())
    _add_rms_norm(*arrays, eps, own_storage(total), own_storage(out))
    return total, out


def rms_norm_backward(
    grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, rstd: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradients of x [rows, width] and weight [width], in their dtypes, from the result's."""
    grad, normed = grad.float(), x.float() * rstd[:, None]
    weighted, grad_weight = grad * weight.float(), (grad * normed).sum(0)
    shared = (weighted * normed).mean(-1, keepdim=True)
    grad_x = weighted.sub_(normed.mul_(shared)).mul_(rstd[:, None])
    return grad_x.to(x.dtype), grad_weight.to(weight.dtype)


def gated_activation(gate: torch.Tensor, up: torch.Tensor, name: str) -> torch.Tensor:
    """Return activation(gate) * up in gate's dtype, [rows, width]; `name` is one of ACTIVATIONS."""
    gate, up = gate.contiguous(), up.contiguous()
    out = torch.empty_like(gate)
    _gated(own_storage(gate), own_storage(up), ACTIVATIONS.index(name), own_storage(out))
    return out


def gated_halves(both: torch.Tensor, name: str) -> torch.Tensor:
    """Return `gated_activation` of the halves, gate and up, of each row of both [rows, 2 width]: [rows, width]."""
    out = both.new_empty(both.shape[0], both.shape[1] // 2)
    _gated_halves(own_storage(both.contiguous()), ACTIVATIONS.index(name), own_storage(out))
    return out


def gated_activation_backward(
    grad: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, name: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradients of gate and up, in their dtypes, from the result's; all [rows, width]."""
    wide, wide_up = (t.float().requires_grad_() for t in (gate, up))
    with torch.enable_grad():
        out = TORCH_ACTIVATIONS[name](wide) * wide_up
    grads = torch.autograd.grad(out, (wide, wide_up), grad.float())
    return grads[0].to(gate.dtype), grads[1].to(up.dtype)


def rotary_tables(positions: torch.Tensor, inv_freq: torch.Tensor, scaling: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cos and sin, fp32 [T, 2 F], of the fp32 products positions [T] * inv_freq [F], evaluated in fp64.

    Every forward calls this once, on both sides: here it is that the arithmetic's modes are looked at.
    """
    check_float_modes()
    shape = positions.numel(), 2 * inv_freq.numel()
    cos, sin = inv_freq.new_empty(shape), inv_freq.new_empty(shape)
    _rotary_tables(positions.numpy(), inv_freq.numpy(), scaling, cos.numpy(), sin.numpy())
    return cos, sin
