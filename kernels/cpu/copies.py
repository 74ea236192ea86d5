"""Matrices copied by whole vectors, as they are or transposed, from storage to fp32, back, or without a change."""

from llvmlite import ir
from numba import types
from numba.extending import intrinsic, overload

from .jit import CALLEE, inline
from .simd import _F16, _HALVES, _I16, _I32, LANES, _load_vector, _rounded, narrow, widen


def _make_square(stored: str, widened: bool):
    """Make the op that writes the transpose of LANES x LANES elements; it takes addresses, and strides in bytes.

    widened: True writes them as fp32, False as they are.

    log2(LANES) times, row i and row i + LANES / 2 are interleaved to rows 2 i and 2 i + 1: the perfect shuffle.
    """
    low = [lane // 2 + LANES * (lane % 2) for lane in range(LANES)]
    shuffles = [ir.Constant(ir.VectorType(_I32, LANES), [lane + half for lane in low]) for half in (0, LANES // 2)]

    def load(builder, place):
        if widened or stored == "float32":
            return _load_vector(builder, place, stored)
        vector = builder.load(builder.inttoptr(place, ir.VectorType(_I16, LANES).as_pointer()))
        vector.align = 2
        return vector

    @intrinsic
    def square(typingctx, source, source_stride, target, target_stride):
        def codegen(context, builder, signature, args):
            source, source_stride, target, target_stride = args
            rows = []
            for i in range(LANES):
                place = builder.add(source, builder.mul(source_stride, ir.Constant(source_stride.type, i)))
                rows.append(load(builder, place))
            for _ in range(LANES.bit_length() - 1):
                pairs = zip(rows[: LANES // 2], rows[LANES // 2 :], strict=True)
                rows = [builder.shuffle_vector(a, b, mask) for a, b in pairs for mask in shuffles]
            for i, row in enumerate(rows):
                place = builder.add(target, builder.mul(target_stride, ir.Constant(target_stride.type, i)))
                builder.store(row, builder.inttoptr(place, row.type.as_pointer())).align = 2
            return context.get_dummy_value()

        return types.void(*[types.int64] * 4), codegen

    return square


def _make_copy(source_dtype: str, target_dtype: str):
    """Make the op that copies LANES elements, each rounded once where it is narrowed; it takes addresses."""

    @intrinsic
    def copy(typingctx, source, target):
        def codegen(context, builder, signature, args):
            wide = _load_vector(builder, args[0], source_dtype)
            if target_dtype == "float16":
                wide = builder.fptrunc(wide, ir.VectorType(_F16, LANES))
            elif target_dtype == "bfloat16":
                bits = builder.bitcast(_rounded(builder, wide, target_dtype), ir.VectorType(_I32, LANES))
                high = builder.lshr(bits, ir.Constant(bits.type, [16] * LANES))
                wide = builder.trunc(high, ir.VectorType(_I16, LANES))
            builder.store(wide, builder.inttoptr(args[1], wide.type.as_pointer())).align = 2
            return context.get_dummy_value()

        return types.void(types.int64, types.int64), codegen

    return copy


def copy_rows(x, out):
    """Write x to the first columns of out, in out's dtype; the rows of x and of out are contiguous."""
    raise NotImplementedError("for compiled callers")


@overload(copy_rows, jit_options=CALLEE)
def _copy_rows_by_storage(x, out):
    dtypes = _HALVES.get(x.dtype, "float32"), _HALVES.get(out.dtype, "float32")
    copy = _make_copy(*dtypes)

    def by_vectors(x, out):
        rows, columns = x.shape
        whole = columns - columns % LANES
        for i in range(rows):
            source, target = x.ctypes.data + i * x.strides[0], out.ctypes.data + i * out.strides[0]
            for j in range(0, whole, LANES):
                copy(source + j * x.strides[1], target + j * out.strides[1])
            for j in range(whole, columns):
                out[i, j] = narrow(widen(x[i, j]), out[i, j])

    by_vectors.__qualname__ = "copy_rows_{}_{}".format(*dtypes)  # numba names the machine code after it
    return by_vectors


def transpose(x, out):
    """Write x.T to the first columns of out, fp32 or x's dtype; the rows of x and of out are contiguous."""
    raise NotImplementedError("for compiled callers")


@overload(transpose, jit_options=CALLEE)
def _transpose_by_storage(x, out):
    stored = _HALVES.get(x.dtype, "float32")
    widened = x.dtype != out.dtype
    square = _make_square(stored, widened)

    def by_squares(x, out):
        rows, columns = x.shape
        for j in range(0, rows - rows % LANES, LANES):
            for k in range(0, columns - columns % LANES, LANES):
                source = x.ctypes.data + j * x.strides[0] + k * x.strides[1]
                target = out.ctypes.data + k * out.strides[0] + j * out.strides[1]
                square(source, x.strides[0], target, out.strides[0])
        for j in range(rows):
            whole = j < rows - rows % LANES
            for k in range(columns - columns % LANES if whole else 0, columns):
                out[k, j] = narrow(widen(x[j, k]), out[k, j])

    by_squares.__qualname__ = f"transpose_{stored}_{widened}"  # numba names the machine code after it
    return by_squares


@inline
def pack_panel(weight, panel):
    """Write weight.T, weight [up to PANEL, depth] of any strides, to the first columns of panel fp32 [depth, PANEL]."""
    if weight.strides[1] == weight.itemsize:
        transpose(weight, panel)
    elif weight.strides[0] == weight.itemsize:
        copy_rows(weight.T, panel)
    else:
        for j in range(weight.shape[0]):
            for k in range(weight.shape[1]):
                panel[k, j] = widen(weight[j, k])
