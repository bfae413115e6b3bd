"""The folder with the sockets goes with its run, also when that was killed."""

import os
import socket
import tempfile
import time
from pathlib import Path

import pytest

from cearx.core.runtime_folder import MIN_AGE_S, RuntimeFolder


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def age(path: Path) -> None:
    before = time.time() - 2 * MIN_AGE_S
    os.utime(path, (before, before))


def test_it_is_private_and_goes(temporary: Path) -> None:
    """Made with mode 0700, removed with what is in it."""
    folder = RuntimeFolder()
    assert folder.path.parent == temporary
    assert folder.path.stat().st_mode & 0o777 == 0o700
    (folder.path / "x").touch()
    folder.remove()
    assert list(temporary.iterdir()) == []


def test_what_a_killed_run_left_goes_with_the_next_start(temporary: Path) -> None:
    """Only an old folder that nobody holds and that has nothing but sockets."""
    killed, young, strange, running = (RuntimeFolder() for _ in range(4))
    for folder in (killed, young, strange):
        os.close(folder._fd)
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(killed.path / "s"))
    (strange.path / "notes.txt").touch()
    (temporary / "cearx-file").touch()
    (temporary / "cearx-link").symlink_to(strange.path)
    for folder in (killed, strange, running):
        age(folder.path)
    started = RuntimeFolder()
    assert {path.name for path in temporary.iterdir()} == {
        *(folder.path.name for folder in (young, strange, running, started)),
        "cearx-file",
        "cearx-link",
    }
    running.remove()
    started.remove()
