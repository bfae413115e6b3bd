"""Mends Triton's interpreter, which runs the kernels on a machine without a GPU.

The root conftest chooses it by TRITON_INTERPRET, before anything can import Triton.
"""

from triton.runtime import interpreter


def mend_loop_bounds() -> None:
    """Lets a loop of a kernel take its bounds from device values under NumPy 2.4.

    The interpreter's scalars are arrays of one element, which NumPy no longer converts to an index.
    """
    patch_tensor = interpreter._patch_lang_tensor

    def patch(tensor, scope):
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = patch
