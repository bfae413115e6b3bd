"""Standard streams that cannot hurt the server: all three are open, and standard error never fails.

A log is not worth a process: a pipe whose reader is gone, a full disk or a terminal that hung up
takes no line, and the server goes on. Called first by the supervisor and by every child process.
"""

import io
import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

STDERR = 2


class _LossyFile(io.RawIOBase):
    """A file descriptor; what it does not take is dropped."""

    def __init__(self, fd: int) -> None:
        super().__init__()
        self._fd = fd

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._fd

    def isatty(self) -> bool:
        return os.isatty(self._fd)

    def write(self, data: "ReadableBuffer", /) -> int:
        try:
            return os.write(self._fd, data)
        except OSError:
            return memoryview(data).nbytes


def lossy_text(fd: int) -> io.TextIOWrapper:
    """A text file over `fd` whose writes never raise."""
    buffer = io.BufferedWriter(_LossyFile(fd))
    return io.TextIOWrapper(
        buffer, encoding="utf-8", errors="backslashreplace", line_buffering=True, write_through=True
    )


def secure_standard_streams() -> None:
    """Opens the closed ones as the null device and makes `sys.stderr` lossy.

    Else a socket would take the number of a closed one, and a child would get it as its stream.
    """
    null = os.open(os.devnull, os.O_RDWR)
    while null <= STDERR:  # `open` takes the lowest free number
        os.set_inheritable(null, True)
        null = os.open(os.devnull, os.O_RDWR)
    os.close(null)
    sys.stderr = lossy_text(STDERR)
