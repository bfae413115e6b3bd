"""A wheel built from the tree holds every sub-package and works away from the tree."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def sources(folder: str) -> list[Path]:
    """Modules, and the parts of the pages that some of them write."""
    patterns = ("*.py", "*.html", "*.css", "*.js")
    return [path for pattern in patterns for path in (ROOT / folder).rglob(pattern)]


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel's content, built from a copy of the tracked and new sources."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    source.mkdir()
    for name in ("core", "frontend", "kernels", "replay", "worker"):
        for path in sources(name):
            target = source / path.relative_to(ROOT)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(path.read_bytes())
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        (source / name).write_bytes((ROOT / name).read_bytes())
    subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "-o", str(folder), source],
        check=True,
        capture_output=True,
    )
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "unpacked")
    return folder / "unpacked"


def test_the_wheel_holds_every_source(unpacked: Path) -> None:
    """No sub-package and no part of a page drops out in silence."""
    expected = {
        str(path.relative_to(ROOT))
        for name in ("core", "frontend", "kernels", "replay", "worker")
        for path in sources(name)
    }
    packed = {
        str(path.relative_to(unpacked / "cearx"))
        for path in unpacked.rglob("cearx/**/*")
        if path.is_file()
    }
    assert packed == expected


def test_the_wheel_works_outside_the_tree(unpacked: Path, tmp_path: Path) -> None:
    """Every module imports from the wheel, and the command line runs."""
    modules = [
        ".".join(path.relative_to(unpacked).with_suffix("").parts)
        for path in (unpacked / "cearx").rglob("*.py")
        if path.name not in ("__main__.py", "__init__.py")
    ]
    code = f"""
import importlib, sys
for name in {modules!r}:
    module = importlib.import_module(name)
    assert module.__file__.startswith({str(unpacked)!r}), module.__file__
sys.exit(importlib.import_module("cearx.core.cli").main(["--version"]))
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={"PYTHONPATH": str(unpacked), "PATH": "/usr/bin"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("cearx ")
