"""How the CPU kernels are compiled: by numba, once a machine and version, without the GIL.

Owns the options and the place of compiled code on disk; imports none of the kernels. A kernel's
compiled code also depends on the files beside it, which numba does not see: the folder's name is a
digest of all of them.
"""

import hashlib
import inspect
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

import numba
from llvmlite import ir
from numba.core import cgutils, registry
from numba.extending import intrinsic

Function = TypeVar("Function", bound=Callable[..., object])
OPTIONS: dict[str, Any] = {
    "nogil": True,
    "error_model": "numpy",
    "fastmath": {"contract", "reassoc"},
}
"""Products may be contracted and sums reordered; NaN and infinities keep their meaning."""


def compiled(function: Function) -> Function:
    """Compiles at the first call."""
    try:
        return cast(Function, numba.njit(cache=True, **OPTIONS)(function))
    except RuntimeError:  # no folder to write to: compiled again at every start
        return cast(Function, numba.njit(**OPTIONS)(function))


def emitted(result: Any, *arguments: Any) -> Callable[[Callable[..., ir.Value | None]], Any]:
    """Makes a function for compiled ones of one that emits LLVM instructions.

    The emitting function gets the builder and the values of the arguments.
    """

    def decorate(emit: Callable[..., ir.Value | None]) -> Any:
        def generate(context: Any, b: ir.IRBuilder, _: Any, values: tuple[ir.Value, ...]) -> Any:
            value = emit(b, *values)
            return context.get_dummy_value() if value is None else value

        def describe(_: Any, *__: Any) -> tuple[Any, Any]:
            return result(*arguments), generate

        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        names = ["context", *(f"value_{index}" for index in range(len(arguments)))]
        signature = inspect.Signature([inspect.Parameter(name, kind) for name in names])
        describe.__name__ = emit.__name__
        describe.__signature__ = signature  # type: ignore[attr-defined]  # numba asks for it
        return intrinsic(describe)

    return decorate


def external(b: ir.IRBuilder, kind: ir.FunctionType, name: str) -> ir.Function:
    """A function of the C library or of LLVM, declared once a module."""
    declare: Any = cgutils.get_or_insert_function
    return declare(b.module, kind, name)


def host_has(feature: str) -> bool:
    """Whether code is compiled for a processor with this LLVM feature."""
    _, _, features = registry.cpu_target.target_context.codegen().magic_tuple()
    return f"+{feature}" in features.split(",")


def _cache_folder() -> Path:
    digest = hashlib.blake2b(digest_size=8)
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return root / "cearx" / "kernels" / digest.hexdigest()


NUMBA_CONFIG: Any = numba.config
if not NUMBA_CONFIG.CACHE_DIR:
    NUMBA_CONFIG.CACHE_DIR = str(_cache_folder())
