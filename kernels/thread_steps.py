"""What threads share while one compiled function runs in all of them: work claims and barriers.

Owns two operations on int64 counters in shared memory; never starts a thread. Every counter starts
at zero and serves once. A thread that waits gives its core away after some hundred looks, so that a
machine with other work does not stand still.
"""

from llvmlite import ir
from numba import types

from cearx.kernels.cpu_compiler import compiled, emitted, external

LOOKS = 2000
I64 = ir.IntType(64)


@emitted(types.int64, types.int64, types.int64)
def fetch_add(b: ir.IRBuilder, counter: ir.Value, amount: ir.Value) -> ir.Value:
    """Adds to the counter at an address and returns what it was before."""
    return b.atomic_rmw("add", b.inttoptr(counter, I64.as_pointer()), amount, "seq_cst")


@emitted(types.int64, types.int64)
def read_counter(b: ir.IRBuilder, counter: ir.Value) -> ir.Value:
    """The counter's value; what its writers stored before is visible afterwards."""
    return b.load_atomic(b.inttoptr(counter, I64.as_pointer()), "seq_cst", 8)


@emitted(types.int32)
def give_core_away(b: ir.IRBuilder) -> ir.Value:
    """POSIX sched_yield."""
    return b.call(external(b, ir.FunctionType(ir.IntType(32), []), "sched_yield"), [])


@compiled
def wait_for_all(counter: int, num_threads: int) -> None:
    """Returns once all threads have called it with this counter."""
    fetch_add(counter, 1)
    looks = 0
    while read_counter(counter) < num_threads:
        looks += 1
        if looks > LOOKS:
            give_core_away()
