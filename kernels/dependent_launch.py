"""Programmatic dependent launch: a kernel may start while the one before it in the stream ends.

Owns the switch and the two instructions for it; never launches anything. Only the kernels of a step
of decodes have them, and only models with small layers turn them on: a layer of some 20 us gains
from every start that is hidden, a layer of 100 us loses more to the programs that wait in the
running ones' place. For the same reason products let the next kernel in behind their loop.

A kernel that is launched so must wait before its first read of what an earlier kernel wrote and
before its first write; weights, which no kernel writes, may be read first. As every kernel waits
for the end of its predecessor, it has waited for the predecessor's too. A step's lengths and
tables, and keys and values of earlier steps, may be read before the wait as well: the embedding
that follows whatever wrote them is launched plainly, and a plain launch waits for all before it.
"""

import torch
import triton
import triton.language as tl

ENABLED = False
"""Whether kernels are launched so: never in the interpreter."""


def enable_on(device: torch.device, layer_bytes: int) -> None:
    """Sets the switch for a model: on from compute capability 9.0, for layers that its shared cache
    could hold."""
    global ENABLED
    ENABLED = False
    if device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0):
        ENABLED = layer_bytes <= torch.cuda.get_device_properties(device).L2_cache_size


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
