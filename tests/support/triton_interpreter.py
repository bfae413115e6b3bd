"""Mends Triton's interpreter, which runs the kernels on a machine without a GPU.

The root conftest chooses it by TRITON_INTERPRET, before anything can import Triton.
"""

from typing import Any

import numpy as np
import torch
import triton.language as tl
from numpy.typing import NDArray
from triton.runtime import interpreter

FP8 = torch.float8_e4m3fn
TORCH_TYPES = {tl.float32: torch.float32, tl.float16: torch.float16, tl.bfloat16: torch.bfloat16}


def mend_loop_bounds() -> None:
    """Lets a loop of a kernel take its bounds from device values under NumPy 2.4.

    The interpreter's scalars are arrays of one element, which NumPy no longer converts to an index.
    """
    patch_tensor = interpreter._patch_lang_tensor

    def patch(tensor, scope):
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = patch


def mend_fp8_casts() -> None:
    """Casts from and to e4m3 as PyTorch does.

    The interpreter halves a number whose rounding carries into the exponent, and reads NaN as 480.
    """
    convert = interpreter._convert_float

    def cast(values: NDArray[Any], source: Any, target: Any, rounding: Any) -> NDArray[Any]:
        if tl.float8e4nv not in (source, target):
            return convert(values, source, target, rounding)
        from_type, to_type = (TORCH_TYPES.get(dtype, FP8) for dtype in (source, target))
        found = torch.from_numpy(np.ascontiguousarray(values)).view(from_type).to(to_type)
        return found.view(torch.uint8).numpy().view(f"u{to_type.itemsize}").reshape(values.shape)

    interpreter._convert_float = cast
