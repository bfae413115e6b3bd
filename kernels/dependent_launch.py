"""Programmatic dependent launch: a kernel may start while the one before it in the stream ends.

Owns the switch and the two instructions for it; never launches anything. Only the kernels of a step
of decodes have them: beside larger ones nothing is gained, and the next kernel's programs, which
wait in the running one's place, cost it time. A kernel that is launched so must wait before its
first read of what an earlier kernel wrote and before its first write; weights, which no kernel
writes, may be read first. As every kernel waits for the end of its predecessor, it has waited for
the predecessor's too. A step's lengths and tables, and keys and values of earlier steps, may be
read before the wait as well: the embedding that follows whatever wrote them is launched plainly,
and a plain launch waits for all work before it.
"""

import torch
import triton
import triton.language as tl

ENABLED = False
"""Whether kernels are launched so: never in the interpreter."""


def enable_on(device: torch.device) -> None:
    """Turns the switch on where the device can do it: from compute capability 9.0."""
    global ENABLED
    ENABLED = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


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
