"""Programmatic dependent launch: a kernel may start while the one before it in the stream ends.

Owns the switch and the two instructions every kernel of a step has for it; never launches anything.
Called by the other kernels. A kernel that is launched so must wait before its first read of what an
earlier kernel wrote and before its first write; weights, which no kernel writes, may be read first.
As every kernel waits for the end of its predecessor, it has waited for the predecessor's too. A
step's lengths, tables, positions and slots may be read before the wait as well: the embedding that
follows whatever wrote them is launched plainly, and a plain launch waits for all work before it.
"""

import triton
import triton.language as tl

ENABLED = False
"""Whether kernels are launched so. Needs compute capability 9.0; must be off in the interpreter."""


def launch_options() -> dict[str, bool]:
    """The keyword arguments of a launch that depend on the switch."""
    return {"launch_pdl": True} if ENABLED else {}


@triton.jit
def let_next_start(PDL: tl.constexpr):
    """Allows the next kernel's programs onto the multiprocessors once all of this one's are."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def wait_for_previous(PDL: tl.constexpr):
    """Returns when the previous kernel has ended and what it wrote can be read."""
    if PDL:
        tl.extra.cuda.gdc_wait()


@triton.jit
def fetch_into_l2(p_lines):
    """Brings the line of 128 bytes at each address into the second-level cache, early.

    That cache is shared, so nothing stale is ever read for it: it may name what is not written yet.
    """
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
        "=r,l",
        [p_lines.to(tl.int64)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
