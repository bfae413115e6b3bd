"""The unix socket: in place of what, for whom, and what becomes of its file."""

import resource
import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from cearx.core.config import ServerConfig
from cearx.core.listener import MAX_OPEN_FILES, MAX_UNIX_PATH_BYTES, CannotListen, close, listen


def test_a_left_over_socket_is_replaced(tmp_path: Path) -> None:
    """Of a server that was killed; the file is gone after an orderly end."""
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    config = ServerConfig(uds=path)
    listener = listen(config)
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))
    close(listener, config)
    assert not path.exists()


def test_nothing_else_is_replaced(tmp_path: Path) -> None:
    """Another server's socket, also one with a full queue, a file and a folder stay."""
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(path))
        other.listen(0)
        waiting = socket.socket(socket.AF_UNIX)
        waiting.connect(str(path))  # now nobody else can be queued
        with pytest.raises(CannotListen, match="in use"):
            listen(ServerConfig(uds=path))
        waiting.close()
    for made in (tmp_path / "file", tmp_path / "folder"):
        (made.mkdir if made.name == "folder" else made.touch)()
        with pytest.raises(CannotListen, match="in use"):
            listen(ServerConfig(uds=made))
        assert made.exists()


@pytest.mark.parametrize("missing", ["none/s", "file/s"])
def test_a_folder_that_is_none(tmp_path: Path, missing: str) -> None:
    """One clear line."""
    (tmp_path / "file").touch()
    with pytest.raises(CannotListen, match=missing):
        listen(ServerConfig(uds=tmp_path / missing))


def test_a_path_that_is_too_long(tmp_path: Path) -> None:
    """The message names the length and the limit."""
    path = tmp_path / ("s" * MAX_UNIX_PATH_BYTES)
    with pytest.raises(CannotListen, match=rf"{MAX_UNIX_PATH_BYTES}.*{len(str(path))}"):
        listen(ServerConfig(uds=path))


def test_only_the_owner_may_connect(tmp_path: Path) -> None:
    """Under the usual umask nobody else may write to the socket."""
    config = ServerConfig(uds=tmp_path / "s")
    listener = listen(config)
    mode = stat.S_IMODE((tmp_path / "s").stat().st_mode)
    close(listener, config)
    assert not mode & (stat.S_IWGRP | stat.S_IWOTH), oct(mode)


def test_the_socket_of_a_later_server_stays(tmp_path: Path) -> None:
    """Somebody removed the file and another server took the path: it is not ours to remove."""
    config = ServerConfig(uds=tmp_path / "s")
    first = listen(config)
    (tmp_path / "s").unlink()
    second = listen(config)
    close(first, config)
    assert (tmp_path / "s").exists()
    close(second, config)
    assert not (tmp_path / "s").exists()


def test_a_start_that_fails_leaves_no_socket(tmp_path: Path) -> None:
    """The path is taken before the model is looked for, and given back."""
    path = tmp_path / "s"
    command = [sys.executable, "-P", "-m", "cearx.core.cli", "serve", "/no/such/model"]
    done = subprocess.run(
        [*command, "--uds", str(path)], capture_output=True, text=True, check=False, timeout=60
    )
    assert (done.returncode, path.exists()) == (2, False), done.stderr


@pytest.mark.parametrize(
    ("soft", "hard", "expected"), [(64, 512, 512), (512, 512, 512), (64, 100_000, MAX_OPEN_FILES)]
)
def test_the_limit_of_open_files_is_raised(soft: int, hard: int, expected: int) -> None:
    """To what the system allows this user, within reason."""
    if resource.getrlimit(resource.RLIMIT_NOFILE)[1] < hard:
        pytest.skip("this machine allows fewer")
    code = (
        "import resource; from cearx.core.listener import allow_many_connections;"
        f"resource.setrlimit(resource.RLIMIT_NOFILE, ({soft}, {hard}));"
        "allow_many_connections(); print(*resource.getrlimit(resource.RLIMIT_NOFILE))"
    )
    command = [sys.executable, "-P", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.split() == [f"{expected}", f"{hard}"]
