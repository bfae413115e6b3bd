"""Programmatic dependent launch: a kernel may start while the one before it in the stream ends.

Owns the switch and the two instructions every kernel of a step has for it; never launches anything.
Called by the other kernels. A kernel that is launched so must wait before its first read of what an
earlier kernel wrote and before its first write; weights, which no kernel writes, may be read first.
As every kernel waits for the end of its predecessor, it has waited for the predecessor's too.
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
