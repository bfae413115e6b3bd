"""The hash of the scheduler's source covers all of it and nothing that cannot matter."""

import ast
import importlib.util
from pathlib import Path

from cearx.core.scheduler_source import PURE_MODULES, scheduler_sha256


def imports(name: str) -> set[str]:
    """Modules of ours that a module imports."""
    spec = importlib.util.find_spec(name)
    assert spec is not None and spec.origin is not None
    found = set()
    for node in ast.walk(ast.parse(Path(spec.origin).read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("cearx."):
            found.add(str(node.module))
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name.startswith("cearx")}
    return found


def test_pure_modules_are_all_that_the_scheduler_imports() -> None:
    """The list is the closure of the imports, so no rule can live outside of the hash."""
    closure, todo = set(), {"cearx.core.scheduler"}
    while todo:
        name = todo.pop()
        closure.add(name)
        todo |= imports(name) - closure
    assert sorted(closure) == list(PURE_MODULES)


def test_hash_is_stable() -> None:
    """The same source gives the same 64 hex digits."""
    first = scheduler_sha256()
    scheduler_sha256.cache_clear()
    assert scheduler_sha256() == first
    assert len(bytes.fromhex(first)) == 32
