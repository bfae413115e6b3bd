"""Two operations on short runs of floats that must not cost a loop's set-up: dot product, addition.

Owns their LLVM instructions; runs are multiples of 16 floats, given by address. Called once a key
and head by `decoder_step.py`.
"""

from typing import Any

from llvmlite import ir
from numba import types

from cearx.kernels.cpu_compiler import emitted, external

LANES = 16
F32, I64 = ir.FloatType(), ir.IntType(64)
VECTOR, INDICES = ir.VectorType(F32, LANES), ir.VectorType(ir.IntType(32), LANES)
ZEROS = ir.Constant(VECTOR, [0.0] * LANES)


class _Run:
    """A loop over the vectors of a run; the builder stands in its body until `close`."""

    def __init__(self, b: ir.IRBuilder, length: ir.Value) -> None:
        self.b, self.length, self.before = b, length, b.block
        self.body, self.after = b.append_basic_block("run"), b.append_basic_block("after")
        b.branch(self.body)
        b.position_at_end(self.body)
        self.index = b.phi(I64)
        self.index.add_incoming(ir.Constant(I64, 0), self.before)

    def pointer(self, address: ir.Value) -> ir.Value:
        offset = self.b.mul(self.index, ir.Constant(I64, 4))
        return self.b.inttoptr(self.b.add(address, offset), VECTOR.as_pointer())

    def load(self, address: ir.Value) -> Any:
        value = self.b.load(self.pointer(address))
        value.align = 4
        return value

    def close(self) -> None:
        following = self.b.add(self.index, ir.Constant(I64, LANES))
        self.index.add_incoming(following, self.body)
        self.b.cbranch(self.b.icmp_signed("<", following, self.length), self.body, self.after)
        self.b.position_at_end(self.after)


def _fma(b: ir.IRBuilder, x: ir.Value, y: ir.Value, z: ir.Value) -> ir.Value:
    kind = ir.FunctionType(VECTOR, [VECTOR] * 3)
    return b.call(external(b, kind, "llvm.fma.v16f32"), [x, y, z])


@emitted(types.float32, types.int64, types.int64, types.int64)
def dot(b: ir.IRBuilder, x: ir.Value, y: ir.Value, length: ir.Value) -> ir.Value:
    """The sum of products of two runs."""
    run = _Run(b, length)
    total = b.phi(VECTOR)
    total.add_incoming(ZEROS, run.before)
    following = _fma(b, run.load(x), run.load(y), total)
    total.add_incoming(following, run.body)
    run.close()
    kind = ir.FunctionType(F32, [F32, VECTOR])
    reduce = external(b, kind, "llvm.vector.reduce.fadd.v16f32")
    return b.call(reduce, [ir.Constant(F32, 0.0), following], fastmath=("reassoc",))


@emitted(types.void, types.int64, types.float32, types.int64, types.int64)
def add_scaled(
    b: ir.IRBuilder, out: ir.Value, factor: ir.Value, x: ir.Value, length: ir.Value
) -> None:
    """`out += factor * x`."""
    one = b.insert_element(ZEROS, factor, ir.Constant(ir.IntType(32), 0))
    factors = b.shuffle_vector(one, one, ir.Constant(INDICES, [0] * LANES))
    run = _Run(b, length)
    b.store(_fma(b, factors, run.load(x), run.load(out)), run.pointer(out)).align = 4
    run.close()
