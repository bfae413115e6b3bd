"""The rules of the tree that a reader relies on: who imports whom, and what nobody may do."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ALLOWED = {
    "core": {"core"},
    "kernels": {"kernels"},
    "frontend": {"core", "frontend"},
    "worker": {"core", "kernels", "worker"},
    "replay": {"core", "replay"},
}
PURE = ("events", "scheduler", "block_pool", "identifiers")
"""Modules of the pure scheduler, which must give the same decisions on every machine."""
FORBIDDEN_IN_PURE = {"time", "random", "os", "asyncio", "threading", "uuid", "logging", "structlog"}
FILES_OUTSIDE_FOLDERS = {"README.md", "LICENSE", "CONTRIBUTING.md", "pyproject.toml", "check"}


def sources() -> list[Path]:
    return [path for folder in ALLOWED for path in sorted((ROOT / folder).rglob("*.py"))]


def imported_modules(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            names.add(node.module or "")
    return names


@pytest.mark.parametrize("path", sources(), ids=lambda path: str(path.relative_to(ROOT)))
def test_folders_import_only_what_they_may(path: Path) -> None:
    """A process boundary is an import boundary."""
    allowed = ALLOWED[path.relative_to(ROOT).parts[0]]
    ours = {name.split(".")[1] for name in imported_modules(path) if name.startswith("cearx.")}
    assert ours <= allowed


@pytest.mark.parametrize("module", PURE)
def test_the_scheduler_is_pure(module: str) -> None:
    """No clock, no randomness, no float and no iteration over sets in what replay re-runs."""
    tree = ast.parse((ROOT / "core" / f"{module}.py").read_text())
    roots = {name.split(".")[0] for name in imported_modules(ROOT / "core" / f"{module}.py")}
    assert not roots & FORBIDDEN_IN_PURE
    for node in ast.walk(tree):
        assert not (isinstance(node, ast.Constant) and isinstance(node.value, float))
        assert not isinstance(node, ast.Set | ast.SetComp), f"a set at line {node.lineno}"
        assert not (isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div))
        if isinstance(node, ast.Name):
            assert node.id not in ("set", "frozenset", "id", "hash", "float")


@pytest.mark.parametrize("path", sources(), ids=lambda path: str(path.relative_to(ROOT)))
def test_nothing_unpickles_or_evaluates(path: Path) -> None:
    """No message, file or request can become code."""
    assert not imported_modules(path) & {"pickle", "cloudpickle", "dill", "marshal", "shelve"}
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            assert called not in ("eval", "exec", "torch.load", "__import__"), called


def test_root_holds_what_the_readme_says() -> None:
    """Top-level files and folders are the fixed ones; dot-folders and docs may join them."""
    tracked = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if tracked.returncode:
        pytest.skip("not a git checkout")
    tops = {name.split("/")[0] for name in tracked.stdout.splitlines()}
    folders = {name for name in tops if (ROOT / name).is_dir() and not name.startswith(".")}
    assert folders <= {*ALLOWED, "tests", "docs"}
    assert {n for n in tops if (ROOT / n).is_file()} <= FILES_OUTSIDE_FOLDERS | {".gitignore"}


@pytest.mark.parametrize("module", ["cearx.replay.cli", "cearx.core.cli", "cearx.core.process"])
def test_torch_stays_out(module: str) -> None:
    """Replay and the core start without torch: on a laptop, and fast."""
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-P", "-c", code], check=False).returncode == 0
