"""Standard output that may fail without a consequence: the exit code says what matters.

A full disk or a closed pipe under it drops what is printed, and nothing else. Used by `cli.py` and
`simulate.py` around everything that they print.
"""

import contextlib
import io
import os
import sys
from collections.abc import Callable, Iterator
from typing import TextIO


class PatientOutput(io.TextIOBase):
    """Writes to a stream until that fails once."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        self._try(lambda: self._stream.write(text))
        return len(text)

    def flush(self) -> None:
        self._try(self._stream.flush)

    def isatty(self) -> bool:
        return self._stream.isatty()

    def fileno(self) -> int:
        return self._stream.fileno()

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self._stream.encoding

    def _try(self, action: Callable[[], object]) -> None:
        try:
            action()
        except OSError:
            with open(os.devnull, "w") as null:  # so that the interpreter's last flush succeeds
                os.dup2(null.fileno(), self._stream.fileno())


@contextlib.contextmanager
def patient_output() -> Iterator[None]:
    """Within it, printing cannot fail."""
    output = PatientOutput(sys.stdout)
    with contextlib.redirect_stdout(output):
        try:
            yield
        finally:
            output.flush()
