"""The few machine operations that numba has no word for: fused multiply-add, bit casts, and the matrix tile.

The tile is the heart of every matrix product here. It computes, for `rows` rows and `vectors * LANES` columns,

    for k ascending:  c[r, j] = fma(a[r, k], b[k, j], c[r, j])

with the accumulators in registers. Each output element is one chain of fused multiply-adds in ascending k, whatever
the tile's shape, the vector width or the CPU: shapes are a schedule, the chain is the tree. Because the chain starts
from what `c` holds, it may be cut anywhere along k and continued without changing a bit.
"""

import llvmlite.binding
import numba
from llvmlite import ir
from numba import types
from numba.extending import intrinsic, overload

_F32, _F16, _I16, _I32, _I64 = ir.FloatType(), ir.HalfType(), ir.IntType(16), ir.IntType(32), ir.IntType(64)
_HALVES = {types.int16: "bfloat16", types.uint16: "float16"}  # how `jit.storage` has numba see them


def _host_vector() -> tuple[int, int]:
    """fp32 lanes per vector register, and how many registers there are."""
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


@intrinsic
def fma(typingctx, a, b, c):
    """a * b + c with one rounding (IEEE-754 fusedMultiplyAdd), fp32."""

    def codegen(context, builder, signature, args):
        fn = builder.module.declare_intrinsic("llvm.fma.f32", fnty=ir.FunctionType(_F32, [_F32] * 3))
        return builder.call(fn, args)

    return types.float32(types.float32, types.float32, types.float32), codegen


@intrinsic
def float_bits(typingctx, x):
    def codegen(context, builder, signature, args):
        return builder.bitcast(args[0], _I32)

    return types.int32(types.float32), codegen


@intrinsic
def bits_float(typingctx, x):
    def codegen(context, builder, signature, args):
        return builder.bitcast(args[0], _F32)

    return types.float32(types.int32), codegen


def _make_tile(vectors: int, stored: str, lines: int, lowest: int):
    """`c[rows, vectors * LANES] += a[rows, depth] @ b[depth, vectors * LANES]` for `lowest` to TILE_ROWS rows;
    addresses, and strides in elements.

    stored: b's dtype. `ahead`: memory to fetch meanwhile, `lines` cache lines for each k: few rows wait for memory
    otherwise.
    """
    vector = ir.VectorType(_F32, LANES)
    size_b = 4 if stored == "float32" else 2

    def emit(builder, rows, a, stride_a, b, stride_b, depth, c, stride_c, ahead):
        def address(base, *terms):
            for index, scale in terms:
                base = builder.add(base, builder.mul(index, _I64(scale)))
            return base

        def load(pointer, type_, align):
            value = builder.load(builder.inttoptr(pointer, type_.as_pointer()))
            value.align = align
            return value

        def load_b(pointer):
            if stored == "float32":
                return load(pointer, vector, 4)
            if stored == "float16":
                return builder.fpext(load(pointer, ir.VectorType(_F16, LANES), 2), vector)
            half = load(pointer, ir.VectorType(_I16, LANES), 2)
            wide = builder.zext(half, ir.VectorType(_I32, LANES))
            return builder.bitcast(builder.shl(wide, ir.Constant(wide.type, [16] * LANES)), vector)

        multiply_add = builder.module.declare_intrinsic(
            f"llvm.fma.v{LANES}f32", fnty=ir.FunctionType(vector, [vector] * 3)
        )
        pointer = ir.IntType(8).as_pointer()
        prefetch = builder.module.declare_intrinsic(
            "llvm.prefetch", [pointer], ir.FunctionType(ir.VoidType(), [pointer, _I32, _I32, _I32])
        )
        row_a = [address(a, (stride_a, 4 * r)) for r in range(rows)]
        cells = [[address(c, (stride_c, 4 * r), (_I64(j), 4 * LANES)) for j in range(vectors)] for r in range(rows)]
        start = [[load(cells[r][j], vector, 4) for j in range(vectors)] for r in range(rows)]

        entry = builder.block
        loop, done = builder.append_basic_block("k_loop"), builder.append_basic_block("k_done")
        builder.cbranch(builder.icmp_signed(">", depth, _I64(0)), loop, done)

        builder.position_at_end(loop)
        k = builder.phi(_I64)
        k.add_incoming(_I64(0), entry)
        acc = [[builder.phi(vector) for _ in range(vectors)] for _ in range(rows)]
        row_b = builder.add(b, builder.mul(builder.mul(k, stride_b), _I64(size_b)))
        columns = [load_b(builder.add(row_b, _I64(j * LANES * size_b))) for j in range(vectors)]
        for number in range(lines):
            line = builder.add(ahead, builder.mul(k, _I64(min(lines * CACHE_LINE, size_b * vectors * LANES))))
            line = builder.inttoptr(builder.add(line, _I64(number * CACHE_LINE)), pointer)
            builder.call(prefetch, [line, _I32(0), _I32(2), _I32(1)])  # to read, into L2
        offset = builder.mul(k, _I64(4))
        after = []
        for r in range(rows):
            scalar = load(builder.add(row_a[r], offset), _F32, 4)
            single = builder.insert_element(ir.Constant(vector, ir.Undefined), scalar, _I32(0))
            broadcast = builder.shuffle_vector(
                single, ir.Constant(vector, ir.Undefined), ir.Constant(ir.VectorType(_I32, LANES), [0] * LANES)
            )
            after.append([builder.call(multiply_add, [broadcast, columns[j], acc[r][j]]) for j in range(vectors)])
        following = builder.add(k, _I64(1))
        k.add_incoming(following, loop)
        builder.cbranch(builder.icmp_signed("<", following, depth), loop, done)

        builder.position_at_end(done)
        for r in range(rows):
            for j in range(vectors):
                acc[r][j].add_incoming(start[r][j], entry)
                acc[r][j].add_incoming(after[r][j], loop)
                result = builder.phi(vector)
                result.add_incoming(start[r][j], entry)
                result.add_incoming(after[r][j], loop)
                after[r][j] = result
        for r in range(rows):
            for j in range(vectors):
                store = builder.store(after[r][j], builder.inttoptr(cells[r][j], vector.as_pointer()))
                store.align = 4

    @intrinsic
    def tile_op(typingctx, rows, a, stride_a, b, stride_b, depth, c, stride_c, ahead):
        def codegen(context, builder, signature, args):
            end = builder.append_basic_block("tile_end")
            choice = builder.switch(args[0], end)
            for rows in range(lowest, TILE_ROWS + 1):
                block = builder.append_basic_block(f"rows_{rows}")
                choice.add_case(_I64(rows), block)
                builder.position_at_end(block)
                emit(builder, rows, *args[1:])
                builder.branch(end)
            builder.position_at_end(end)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 9), codegen

    return tile_op


def _row_tiles(vectors: int, stored: str):
    """Any number of rows by `vectors * LANES` columns, in as few passes as TILE_ROWS allow, of about equal heights.

    Passes fetch what is read after b: the first all that the others, with a line for each k, leave to do.
    """
    size = 4 if stored == "float32" else 2
    lines = -(-size * vectors * LANES // CACHE_LINE)
    half = TILE_ROWS // 2  # several passes are no lower
    one_line, two_lines, three_lines = (_make_tile(vectors, stored, n, 1 if n == lines else half) for n in (1, 2, 3))

    def product(a, stride_a, b, offset, stride_b, depth, c, stride_c, rows, ahead):
        address = b.ctypes.data + size * offset
        end = ahead + size * vectors * LANES * depth
        passes = -(-rows // TILE_ROWS)
        todo = lines - passes + 1
        for i in range(passes):
            height = rows // passes + (1 if i < rows % passes else 0)
            where = ahead if ahead < end else address
            if lines == 3 and todo == 3:
                three_lines(height, a, stride_a, address, stride_b, depth, c, stride_c, where)
            elif lines >= 2 and todo == 2:
                two_lines(height, a, stride_a, address, stride_b, depth, c, stride_c, where)
            else:
                one_line(height, a, stride_a, address, stride_b, depth, c, stride_c, where)
            ahead += CACHE_LINE * max(todo, 1) * depth
            a += 4 * height * stride_a
            c += 4 * height * stride_c
            todo = 1

    product.__qualname__ = f"product_{vectors}_{stored}"  # numba names the machine code after it, cached code, too
    return product


def _matmul(vectors: int):
    """c[rows, vectors * LANES] += a[rows, depth] @ b[depth, ...] for an array b of fp32, or of halves.

    Arguments: a's address and row stride, the array b, the element of b to start at and its row stride, depth, c's
    address and row stride, rows, and the address of what will be read after b, to fetch it meanwhile. (numba caches a
    kernel on disk only if it closes over nothing, hence the overload.)
    """

    def matmul(a, stride_a, b, offset, stride_b, depth, c, stride_c, rows, ahead):
        raise NotImplementedError("for compiled callers")

    @overload(matmul, jit_options={"error_model": "numpy", "nogil": True})
    def by_storage(a, stride_a, b, offset, stride_b, depth, c, stride_c, rows, ahead):
        return _row_tiles(vectors, _HALVES.get(b.dtype, "float32"))

    return matmul


matmul_panel, matmul_two, matmul_one = _matmul(PANEL_VECTORS), _matmul(2), _matmul(1)
