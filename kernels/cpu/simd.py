"""The few machine operations that numba has no word for: fused multiply-add, bit casts, and the matrix tile.

The tile is the heart of every matrix product here. It computes, for `rows` rows and `vectors * LANES` columns,

    for k ascending:  c[r, j] = fma(a[r, k], b[k, j], c[r, j])

with the accumulators in registers. Each output element is one chain of fused multiply-adds in ascending k, whatever
the tile's shape, the vector width or the CPU: shapes are a schedule, the chain is the tree. A chain that goes on from
what `c` holds may be cut anywhere along k. A chain in blocks starts from 0 at each multiple of CHAIN, and `c` takes the
blocks' sums: its error grows with the root of CHAIN, not of the depth.
"""

import llvmlite.binding
import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic, overload

from .jit import CALLEE

_F32, _F16, _I16, _I32, _I64 = ir.FloatType(), ir.HalfType(), ir.IntType(16), ir.IntType(32), ir.IntType(64)
_HALVES = {types.int16: "bfloat16", types.uint16: "float16"}  # how `jit.storage` has numba see them


def _host_vector() -> tuple[int, int]:
    """Return the fp32 lanes per vector register, and the number of registers."""
    features = llvmlite.binding.get_host_cpu_features()
    if numba.config.CPU_FEATURES:  # numba's own way to compile for less than the host has
        features = dict.fromkeys((f[1:] for f in numba.config.CPU_FEATURES.split(",") if f.startswith("+")), True)
    if features.get("avx512f"):
        return 16, 32
    if features.get("avx"):
        return 8, 16
    return 4, 32  # NEON; on older x86 still correct


LANES, REGISTERS = _host_vector()
PANEL_VECTORS = 3  # linear: 3 vectors of columns x 8 rows = 24 accumulators, 3 operands (AVX-512, NEON)
TILE_ROWS = 8 if REGISTERS >= 32 else 4
PANEL = PANEL_VECTORS * LANES
CACHE_LINE = 64
CHAIN = 128  # of k, in a product of blocks
FEW_DEPTH, MANY_DEPTH = CHAIN, 8 * CHAIN  # rows of b that stay in cache, for few and for many passes over them
FEW_PASSES = 8


@intrinsic
def fma(typingctx, a, b, c):
    """Return a * b + c with one rounding (IEEE-754 fusedMultiplyAdd), fp32."""

    def codegen(context, builder, signature, args):
        fn = builder.module.declare_intrinsic("llvm.fma.f32", fnty=ir.FunctionType(_F32, [_F32] * 3))
        return builder.call(fn, args)

    return types.float32(types.float32, types.float32, types.float32), codegen


@intrinsic
def float_bits(typingctx, x):
    """Return the bits of an f32 as an i32."""

    def codegen(context, builder, signature, args):
        return builder.bitcast(args[0], _I32)

    return types.int32(types.float32), codegen


@intrinsic
def bits_float(typingctx, x):
    """Return the f32 of the bits in an i32."""

    def codegen(context, builder, signature, args):
        return builder.bitcast(args[0], _F32)

    return types.float32(types.int32), codegen


@intrinsic
def pointer(typingctx, address, like):
    """Return an address as a pointer to elements of `like`'s type, for `numba.carray`."""

    def codegen(context, builder, signature, args):
        return builder.inttoptr(args[0], context.get_value_type(signature.return_type))

    return types.CPointer(like)(types.int64, like), codegen


@intrinsic
def prefetch(typingctx, address):
    """Have the cache line at an address be fetched, into L2: L1 does not hold two blocks of b."""

    def codegen(context, builder, signature, args):
        _prefetch(builder, args[0])
        return context.get_dummy_value()

    return types.void(types.int64), codegen


def _prefetch(builder, address):
    pointer = ir.IntType(8).as_pointer()
    function = builder.module.declare_intrinsic(
        "llvm.prefetch", [pointer], ir.FunctionType(ir.VoidType(), [pointer, _I32, _I32, _I32])
    )
    builder.call(function, [builder.inttoptr(address, pointer), _I32(0), _I32(2), _I32(1)])  # to read


@intrinsic
def add_squares(typingctx, row, like, count, lanes):
    """Add the squares of elements to 16 fp32: element i to lane i % 16, by fused multiply-adds, ascending.

    row, lanes: addresses; like: an element of the row; count: of elements, a multiple of 16.
    """
    stored, width = _HALVES.get(like, "float32"), 16

    def codegen(context, builder, signature, args):
        row, _, count, lanes = args
        vector = ir.VectorType(_F32, width)
        multiply_add = builder.module.declare_intrinsic(
            f"llvm.fma.v{width}f32", fnty=ir.FunctionType(vector, [vector] * 3)
        )
        before = _load_vector(builder, lanes, "float32", width)
        entry = builder.block
        loop, done = builder.append_basic_block("squares_loop"), builder.append_basic_block("squares_done")
        builder.cbranch(builder.icmp_signed(">", count, _I64(0)), loop, done)
        builder.position_at_end(loop)
        i, sums = builder.phi(_I64), builder.phi(vector)
        x = _load_vector(builder, _address(builder, row, (i, context.get_abi_sizeof(args[1].type))), stored, width)
        total = builder.call(multiply_add, [x, x, sums])
        following = builder.add(i, _I64(width))
        builder.cbranch(builder.icmp_signed("<", following, count), loop, done)
        builder.position_at_end(done)
        result = builder.phi(vector)
        for phi, first, next_ in (i, _I64(0), following), (sums, before, total):
            phi.add_incoming(first, entry)
            phi.add_incoming(next_, loop)
        result.add_incoming(before, entry)
        result.add_incoming(total, loop)
        _store_vector(builder, result, lanes)
        return context.get_dummy_value()

    return types.void(types.int64, like, types.int64, types.int64), codegen


@intrinsic
def widen(typingctx, x):
    """Return a stored element as fp32."""
    stored = _HALVES.get(x, "float32")

    def codegen(context, builder, signature, args):
        if stored == "float32":
            return args[0]
        if stored == "float16":
            return builder.fpext(builder.bitcast(args[0], _F16), _F32)
        return builder.bitcast(builder.shl(builder.zext(args[0], _I32), _I32(16)), _F32)

    return types.float32(x), codegen


@intrinsic
def narrow(typingctx, x, like):
    """Return x rounded once, to nearest even, to the storage dtype of the element `like`."""
    stored = _HALVES.get(like, "float32")

    def codegen(context, builder, signature, args):
        if stored == "float32":
            return args[0]
        if stored == "float16":
            return builder.bitcast(builder.fptrunc(args[0], _F16), _I16)
        bits = builder.bitcast(args[0], _I32)
        odd = builder.and_(builder.lshr(bits, _I32(16)), _I32(1))
        rounded = builder.lshr(builder.add(bits, builder.add(odd, _I32(0x7FFF))), _I32(16))
        is_nan = builder.fcmp_unordered("uno", args[0], args[0])
        return builder.trunc(builder.select(is_nan, _I32(0x7FC0), rounded), _I16)

    return like(types.float32, like), codegen


def pairwise(size: int, kind: str):
    """Make the op that folds `size` fp32 at an address by a pairwise tree: the first half with the second, and so on.

    kind: "sum" or "max". size: a power of two.
    """

    @intrinsic
    def fold(typingctx, address):
        def codegen(context, builder, signature, args):
            whole = ir.VectorType(_F32, size)
            x = builder.load(builder.inttoptr(args[0], whole.as_pointer()))
            x.align = 4
            for width in _halvings(size):
                a, b = (_lanes(builder, x, range(at, at + width)) for at in (0, width))
                x = builder.fadd(a, b) if kind == "sum" else builder.select(builder.fcmp_ordered(">", b, a), b, a)
            return builder.extract_element(x, _I32(0))

        return types.float32(types.int64), codegen

    return fold


def _halvings(size: int) -> list[int]:
    return [size >> n for n in range(1, size.bit_length())]


def _lanes(builder, x, lanes):
    indices = ir.Constant(ir.VectorType(_I32, len(lanes)), list(lanes))
    return builder.shuffle_vector(x, ir.Constant(x.type, ir.Undefined), indices)


def _load_vector(builder, address, stored: str, lanes: int = LANES):
    """Load `lanes` elements as fp32."""

    def load(type_, align):
        value = builder.load(builder.inttoptr(address, type_.as_pointer()))
        value.align = align
        return value

    vector = ir.VectorType(_F32, lanes)
    if stored == "float32":
        return load(vector, 4)
    if stored == "float16":
        return builder.fpext(load(ir.VectorType(_F16, lanes), 2), vector)
    wide = builder.zext(load(ir.VectorType(_I16, lanes), 2), ir.VectorType(_I32, lanes))
    return builder.bitcast(builder.shl(wide, ir.Constant(wide.type, [16] * lanes)), vector)


def _rounded(builder, wide, stored: str):
    """Return LANES fp32 values, each rounded once to nearest even to a storage dtype, as fp32."""
    if stored == "float32":
        return wide
    if stored == "float16":
        return builder.fpext(builder.fptrunc(wide, ir.VectorType(_F16, LANES)), wide.type)
    integers = ir.VectorType(_I32, LANES)

    def each(value):
        return ir.Constant(integers, [value] * LANES)

    bits = builder.bitcast(wide, integers)
    odd = builder.and_(builder.lshr(bits, each(16)), each(1))
    rounded = builder.and_(builder.add(bits, builder.add(odd, each(0x7FFF))), each(-(1 << 16)))
    is_nan = builder.fcmp_unordered("uno", wide, wide)
    return builder.bitcast(builder.select(is_nan, each(0x7FC00000), rounded), wide.type)


def _store_vector(builder, value, address):
    builder.store(value, builder.inttoptr(address, value.type.as_pointer())).align = 4


def _most_rows(vectors: int) -> int:
    """Return the rows of a tile whose accumulators fit the registers."""
    return min(TILE_ROWS, TILE_ROWS * PANEL_VECTORS // vectors)


def _address(builder, base, *terms):
    for index, scale in terms:
        base = builder.add(base, builder.mul(index, _I64(scale)))
    return base


def _make_tile(vectors: int, stored: str, anew: bool):
    """Make the op `c[rows, vectors * LANES] += a[rows, depth] @ b[depth, vectors * LANES]` for up to `_most_rows` rows.

    It takes addresses, and strides in elements. stored: b's dtype. anew: chains start from 0, not from c. Few rows wait
    for memory, so each k fetches as many lines as a row of b has, from streams `gap` bytes apart that start at `ahead`
    and advance by `step`: a core's prefetcher looks ahead in each.
    """
    vector = ir.VectorType(_F32, LANES)
    size_b = 4 if stored == "float32" else 2
    lines = -(-size_b * vectors * LANES // CACHE_LINE)

    def emit(builder, rows, a, stride_a, b, stride_b, depth, c, stride_c, ahead, step, gap):
        multiply_add = builder.module.declare_intrinsic(
            f"llvm.fma.v{LANES}f32", fnty=ir.FunctionType(vector, [vector] * 3)
        )
        row_a = [_address(builder, a, (stride_a, 4 * r)) for r in range(rows)]
        cells = [
            [_address(builder, c, (stride_c, 4 * r), (_I64(j), 4 * LANES)) for j in range(vectors)] for r in range(rows)
        ]
        zero = ir.Constant(vector, [0.0] * LANES)
        held = [[zero if anew else _load_vector(builder, c, "float32") for c in row] for row in cells]

        entry = builder.block
        loop, done = builder.append_basic_block("k_loop"), builder.append_basic_block("k_done")
        builder.cbranch(builder.icmp_signed(">", depth, _I64(0)), loop, done)

        builder.position_at_end(loop)
        k, line = builder.phi(_I64), builder.phi(_I64)
        k.add_incoming(_I64(0), entry)
        line.add_incoming(ahead, entry)
        acc = [[builder.phi(vector) for _ in range(vectors)] for _ in range(rows)]
        row_b = builder.add(b, builder.mul(builder.mul(k, stride_b), _I64(size_b)))
        columns = [_load_vector(builder, builder.add(row_b, _I64(j * LANES * size_b)), stored) for j in range(vectors)]
        for j in range(lines):
            _prefetch(builder, builder.add(line, builder.mul(gap, _I64(j))))
        next_line = builder.add(line, step)
        offset = builder.mul(k, _I64(4))
        after = []
        for r in range(rows):
            broadcast = _broadcast(builder, _load_scalar(builder, builder.add(row_a[r], offset)))
            after.append([builder.call(multiply_add, [broadcast, columns[j], acc[r][j]]) for j in range(vectors)])
        following = builder.add(k, _I64(1))
        k.add_incoming(following, loop)
        line.add_incoming(next_line, loop)
        builder.cbranch(builder.icmp_signed("<", following, depth), loop, done)

        builder.position_at_end(done)
        for r in range(rows):
            for j in range(vectors):
                acc[r][j].add_incoming(held[r][j], entry)
                acc[r][j].add_incoming(after[r][j], loop)
                result = builder.phi(vector)
                result.add_incoming(held[r][j], entry)
                result.add_incoming(after[r][j], loop)
                after[r][j] = result
        for r in range(rows):
            for j in range(vectors):
                total = after[r][j]
                if anew:
                    total = builder.fadd(_load_vector(builder, cells[r][j], "float32"), total)
                _store_vector(builder, total, cells[r][j])

    @intrinsic
    def tile_op(typingctx, rows, a, stride_a, b, stride_b, depth, c, stride_c, ahead, step, gap):
        return _by_rows(emit, _most_rows(vectors), [types.int64] * 11)

    return tile_op


def _load_scalar(builder, address):
    return builder.load(builder.inttoptr(address, _F32.as_pointer()))


def _broadcast(builder, scalar):
    """Return LANES copies of an fp32 value."""
    vector = ir.VectorType(_F32, LANES)
    single = builder.insert_element(ir.Constant(vector, ir.Undefined), scalar, _I32(0))
    lanes = ir.Constant(ir.VectorType(_I32, LANES), [0] * LANES)
    return builder.shuffle_vector(single, ir.Constant(vector, ir.Undefined), lanes)


def _by_rows(emit, most, arguments):
    """Return an intrinsic's signature and code: its first argument is the number of rows, up to `most`.

    emit: writes the code for a number of rows; arguments: numba's types of all arguments.
    """

    def codegen(context, builder, signature, args):
        end = builder.append_basic_block("tile_end")
        choice = builder.switch(args[0], end)
        for rows in range(1, most + 1):
            block = builder.append_basic_block(f"rows_{rows}")
            choice.add_case(_I64(rows), block)
            builder.position_at_end(block)
            emit(builder, rows, *args[1:])
            builder.branch(end)
        builder.position_at_end(end)
        return context.get_dummy_value()

    return types.void(*arguments), codegen


def _make_widen(vectors: int, stored: str):
    """Make the op that writes one row of b, `vectors * LANES` halves, as fp32; it takes addresses."""

    @intrinsic
    def widen_op(typingctx, source, destination):
        def codegen(context, builder, signature, args):
            for j in range(vectors):
                wide = _load_vector(builder, builder.add(args[0], _I64(2 * LANES * j)), stored)
                _store_vector(builder, wide, builder.add(args[1], _I64(4 * LANES * j)))
            return context.get_dummy_value()

        return types.void(types.int64, types.int64), codegen

    return widen_op


def _row_tiles(vectors: int, stored: str, blocked: bool, fetch_part: int):
    """Make the product of any number of rows by `vectors * LANES` columns, with chains in blocks or whole ones.

    It takes as few passes as a tile's rows allow, of about equal heights.

    All passes go over a block of b, which stays in L1, before the next; several passes widen halves once. The first
    passes fetch the next block.
    """
    size = 4 if stored == "float32" else 2
    width = vectors * LANES
    tile, wide_tile = _make_tile(vectors, stored, blocked), _make_tile(vectors, "float32", blocked)
    widen = _make_widen(vectors, stored)
    halves, most = size == 2, _most_rows(vectors)
    whole_step = -(-size * width // (fetch_part * -(-size * width // CACHE_LINE)))

    def product(a, stride_a, b, like, stride_b, depth, c, stride_c, rows, ahead):
        if rows <= most and depth <= FEW_DEPTH:  # one tile, without the divisions below
            tile(rows, a, stride_a, b, stride_b, depth, c, stride_c, ahead, whole_step, whole_step * depth)
            return
        passes = -(-rows // most)
        block = FEW_DEPTH if passes <= FEW_PASSES else MANY_DEPTH
        fetching = min(passes, FEW_PASSES)
        lines = -(-(size if passes == 1 else 4) * width // CACHE_LINE)  # that a tile fetches for each k
        if halves and passes > 1:
            scratch = np.empty((min(block, depth), width), np.float32)
        for k in range(0, depth, block):
            part = min(block, depth - k)
            here, stride = b + size * stride_b * k, stride_b
            following = here + size * stride_b * part if k + part < depth else ahead
            if halves and passes > 1:
                for row in range(part):
                    widen(here + size * stride_b * row, scratch.ctypes.data + 4 * width * row)
                here, stride = scratch.ctypes.data, width
            step = -(-size * width // (fetch_part * fetching * lines))
            gap = step * fetching * part
            length = CHAIN if blocked else part
            tile_a, tile_c = a + 4 * k, c
            for i in range(passes):
                height = rows // passes + (1 if i < rows % passes else 0)
                if halves and passes == 1:  # a part is one chain
                    tile(height, tile_a, stride_a, here, stride, part, tile_c, stride_c, following, step, gap)
                else:
                    for at in range(0, part, length):
                        wide_tile(
                            height, tile_a + 4 * at, stride_a, here + 4 * stride * at, stride, min(length, part - at),
                            tile_c, stride_c, following + step * at, step, gap,
                        )  # fmt: skip
                following += step * part
                if i + 1 == fetching:
                    following, step, gap = here, 0, 0
                tile_a += 4 * height * stride_a
                tile_c += 4 * height * stride_c

    product.__qualname__ = (
        f"product_{vectors}_{stored}_{blocked}_{fetch_part}"  # numba names the machine code after it, cached code, too
    )
    return product


def matmul(vectors: int, blocked: bool = False, fetch_part: int = 1):
    """Make the op `c[rows, vectors * LANES] += a[rows, depth] @ b[depth, ...]` for b of fp32, or of halves.

    blocked: chains in blocks. fetch_part: it fetches an nth of as many bytes as b has.

    Arguments: a's address and row stride, b's address, an element of its dtype and its row stride, depth, c's address
    and row stride, rows, and the address of what will be read after b, to fetch it meanwhile. Addresses, since numba
    counts references wherever an array is handed on. (It caches a kernel on disk only if it closes over nothing, hence
    the overload.)
    """

    def product(a, stride_a, b, like, stride_b, depth, c, stride_c, rows, ahead):
        raise NotImplementedError("for compiled callers")

    @overload(product, jit_options=CALLEE)
    def by_storage(a, stride_a, b, like, stride_b, depth, c, stride_c, rows, ahead):
        return _row_tiles(vectors, _HALVES.get(like, "float32"), blocked, fetch_part)

    return product


blocked_panel, blocked_one = matmul(PANEL_VECTORS, blocked=True), matmul(1, blocked=True)
matmul_panel = matmul(PANEL_VECTORS)
