"""Standard error may break and the process goes on; closed streams are opened first."""

import os
import subprocess
import sys

import pytest

from cearx.core.standard_streams import lossy_text

LOG_AN_EXCEPTION = """
import structlog
from cearx.core.child import configure_logging

def fail(prompt):
    raise RuntimeError("expected")

configure_logging("info")
try:
    fail("what the client wrote")
except RuntimeError:
    structlog.get_logger().exception("it failed")
"""

TELL_THE_STREAMS = """
import os, sys
from cearx.core.standard_streams import secure_standard_streams
secure_standard_streams()
print("to standard error", file=sys.stderr, flush=True)
fd = os.open(os.devnull, os.O_RDONLY)
os._exit(fd)  # the lowest number that was free
"""


def python(code: str, **options: object) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-P", "-c", code]
    return subprocess.run(command, check=False, text=True, timeout=60, **options)  # type: ignore[call-overload, no-any-return]


@pytest.mark.parametrize("kind", ["pipe without a reader", "full disk", "closed"])
def test_a_broken_file_takes_everything(kind: str) -> None:
    """No write raises, however much it is."""
    reader, fd = os.pipe()
    os.close(reader)
    if kind != "pipe without a reader":
        os.close(fd)
        fd = os.open("/dev/full", os.O_WRONLY) if kind == "full disk" else fd
    text = lossy_text(fd)
    for _ in range(3):
        print("x" * 100_000, file=text, flush=True)
    if kind != "closed":
        os.close(fd)


def test_a_file_that_works_gets_every_line() -> None:
    """Text arrives at once and whole; what is no Unicode is escaped."""
    reader, fd = os.pipe()
    text = lossy_text(fd)
    print("a\u00e9\udcff", file=text)
    assert os.read(reader, 100).decode() == "a\u00e9\\udcff\n"
    os.close(fd)
    os.close(reader)


@pytest.mark.parametrize("closed", [(), (0,), (2,), (0, 1, 2)])
def test_closed_streams_are_opened(closed: tuple[int, ...]) -> None:
    """No later file gets the number of a standard stream."""
    redirections = " ".join(f"{fd}>&-" for fd in closed)
    done = subprocess.run(
        ["sh", "-c", f'exec "$0" -P -c "$1" {redirections}', sys.executable, TELL_THE_STREAMS],
        check=False,
        capture_output=True,
        timeout=60,
    )
    assert done.returncode > 2
    assert done.stderr == (b"" if 2 in closed else b"to standard error\n")


def test_a_logged_exception_shows_no_values() -> None:
    """Tracebacks name the lines and never the local variables, which hold what clients write."""
    done = python(LOG_AN_EXCEPTION, stderr=subprocess.PIPE)
    assert "it failed" in done.stderr and "RuntimeError: expected" in done.stderr
    assert done.stderr.count("what the client wrote") == 0
