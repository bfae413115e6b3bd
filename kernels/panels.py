"""Weights as panels of 32 output features, and their product with rows of float32.

Owns the bytes of a panel and the instructions that multiply by one, for any vector width; never
allocates and knows no threads (`panel_product.py`). A weight w is stored as in the file it came
from and expanded exactly as that file's format defines it, so the product has the float32 weights'
values at a fraction of their bytes:

    out[t, n] = sum over groups of 32 k ( sum over k ( x[t, k] * w[n, k] ) )

Both sums run in ascending k whatever the number of rows: a row's result depends on that row alone.

T tokens, K input features, N output features, G = K / 32 groups.

    panel   | group 0 | group 1 | ...                            for 32 consecutive features n
    NIBBLES | scale f32 [32] | offset f32 [32] | u8 [16, 32]     w = scale * code + offset;
                                                                 k = 2j low bits, 2j + 1 high bits
    BYTES   | scale f32 [32] | i8 [32, 32]                       w = scale * code
    FLOATS  | f32 [32, 32]                                       w
"""

from typing import Any

from llvmlite import ir
from numba import types

from cearx.kernels.cpu_compiler import compiled, emitted, external, host_has

PANEL_WIDTH = 32
GROUP = 32
NIBBLES, BYTES, FLOATS = 0, 1, 2
GROUP_BYTES = (768, 1152, 4096)
"""Bytes of one group of a panel, by kind."""
TILE_BYTES = 4096
"""A group's expanded weights, float32 [32 k, 32 n]."""
ROW_BYTES = 4 * PANEL_WIDTH
LANES = 16
ROWS = 8 if host_has("avx512f") else 3
"""Rows multiplied at once: 2 * ROWS accumulators of 16 lanes fill the vector registers."""

I8, I32, I64, F32 = ir.IntType(8), ir.IntType(32), ir.IntType(64), ir.FloatType()
BYTE_VECTOR, INT_VECTOR = ir.VectorType(I8, LANES), ir.VectorType(I32, LANES)
VECTOR = ir.VectorType(F32, LANES)


def _load(b: ir.IRBuilder, address: ir.Value, offset: int, kind: ir.Type, align: int = 4) -> Any:
    pointer = b.inttoptr(b.add(address, ir.Constant(I64, offset)), kind.as_pointer())
    value = b.load(pointer)
    value.align = align
    return value


def _store(b: ir.IRBuilder, value: ir.Value, address: ir.Value, offset: int) -> None:
    pointer = b.inttoptr(b.add(address, ir.Constant(I64, offset)), value.type.as_pointer())
    b.store(value, pointer).align = 4


def _fma(b: ir.IRBuilder, x: ir.Value, y: ir.Value, z: ir.Value) -> ir.Value:
    kind = ir.FunctionType(VECTOR, [VECTOR] * 3)
    return b.call(external(b, kind, "llvm.fma.v16f32"), [x, y, z])


def _splat(b: ir.IRBuilder, scalar: ir.Value) -> ir.Value:
    one = b.insert_element(ir.Constant(VECTOR, ir.Undefined), scalar, ir.Constant(I32, 0))
    return b.shuffle_vector(one, one, ir.Constant(INT_VECTOR, [0] * LANES))


@emitted(types.void, types.int64, types.int64)
def expand_nibbles(b: ir.IRBuilder, group: ir.Value, tile: ir.Value) -> None:
    """Expands the NIBBLES group at an address into the tile at another."""
    for half in (0, 64):
        scale, offset = (_load(b, group, start + half, VECTOR) for start in (0, ROW_BYTES))
        for pair in range(GROUP // 2):
            place = 2 * ROW_BYTES + PANEL_WIDTH * pair + half // 4
            codes = b.zext(_load(b, group, place, BYTE_VECTOR, 1), INT_VECTOR)
            low = b.and_(codes, ir.Constant(INT_VECTOR, [15] * LANES))
            high = b.lshr(codes, ir.Constant(INT_VECTOR, [4] * LANES))
            for k, code in ((2 * pair, low), (2 * pair + 1, high)):
                weight = _fma(b, scale, b.uitofp(code, VECTOR), offset)
                _store(b, weight, tile, ROW_BYTES * k + half)


@emitted(types.void, types.int64, types.int64)
def expand_bytes(b: ir.IRBuilder, group: ir.Value, tile: ir.Value) -> None:
    """Expands the BYTES group at an address into the tile at another."""
    for half in (0, 64):
        scale = _load(b, group, half, VECTOR)
        for k in range(GROUP):
            place = ROW_BYTES + PANEL_WIDTH * k + half // 4
            codes = b.sext(_load(b, group, place, BYTE_VECTOR, 1), INT_VECTOR)
            weight = b.fmul(scale, b.sitofp(codes, VECTOR))
            _store(b, weight, tile, ROW_BYTES * k + half)


def _multiply_rows(num_rows: int) -> Any:
    """Multiplies `num_rows` rows of x by a tile and adds to as many rows of 32 sums."""

    @emitted(types.void, types.int64, types.int64, types.int64, types.int64)
    def multiply(
        b: ir.IRBuilder, x: ir.Value, stride: ir.Value, tile: ir.Value, sums: ir.Value
    ) -> None:
        rows = [b.add(x, b.mul(stride, ir.Constant(I64, row))) for row in range(num_rows)]
        before, loop = b.block, b.append_basic_block("k")
        after = b.append_basic_block("after")
        b.branch(loop)
        b.position_at_end(loop)
        k = b.phi(I64)
        k.add_incoming(ir.Constant(I64, 0), before)
        partial = [(b.phi(VECTOR), b.phi(VECTOR)) for _ in rows]
        weights_at = b.add(tile, b.mul(k, ir.Constant(I64, ROW_BYTES)))
        weights = [_load(b, weights_at, half, VECTOR) for half in (0, 64)]
        for row, old in zip(rows, partial, strict=True):
            value = _splat(b, _load(b, b.add(row, b.mul(k, ir.Constant(I64, 4))), 0, F32))
            for phi, weight in zip(old, weights, strict=True):
                phi.add_incoming(ir.Constant(VECTOR, [0.0] * LANES), before)
                phi.add_incoming(_fma(b, value, weight, phi), loop)
        next_k = b.add(k, ir.Constant(I64, 1))
        k.add_incoming(next_k, loop)
        b.cbranch(b.icmp_signed("<", next_k, ir.Constant(I64, GROUP)), loop, after)
        b.position_at_end(after)
        for row, old in enumerate(partial):
            for phi, half in zip(old, (0, 64), strict=True):
                place = ROW_BYTES * row + half
                total = b.fadd(_load(b, sums, place, VECTOR), phi.incomings[1][0])
                _store(b, total, sums, place)

    return multiply


multiply_many = _multiply_rows(ROWS)
multiply_two = _multiply_rows(2)
multiply_one = _multiply_rows(1)


@compiled
def add_panel_product(
    panel: int, kind: int, num_groups: int, x: int, stride: int, num_rows: int, tile: int, sums: int
) -> None:
    """Adds x times a panel to `sums`, float32 [num_rows, 32]; all places are addresses.

    Rows of x lie `stride` bytes apart; `tile` has room for TILE_BYTES.
    """
    group_bytes = GROUP_BYTES[kind]
    for group in range(num_groups):
        start = panel + group * group_bytes
        weights = tile
        if kind == NIBBLES:
            expand_nibbles(start, tile)
        elif kind == BYTES:
            expand_bytes(start, tile)
        else:
            weights = start
        columns = x + group * (4 * GROUP)
        row = 0
        while row + ROWS <= num_rows:
            multiply_many(columns + row * stride, stride, weights, sums + row * ROW_BYTES)
            row += ROWS
        while row + 2 <= num_rows:
            multiply_two(columns + row * stride, stride, weights, sums + row * ROW_BYTES)
            row += 2
        if row < num_rows:
            multiply_one(columns + row * stride, stride, weights, sums + row * ROW_BYTES)
