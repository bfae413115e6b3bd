"""A semaphore that all client processes share: a pipe with one byte for each free place.

Owns the bound of requests in flight over the whole machine, as make's job server does it: who reads
a byte has a place, and writes the byte back when it is done. Used by `load_loop.py`; filled and
emptied by `fleet.py` between runs.
"""

import asyncio
import contextlib
import os

MAX_PLACES = 16384
"""A pipe holds 64 KiB; what does not fit must never block the writer."""


class ConcurrencyGate:
    """One process's end of the pipe."""

    def __init__(self, read_fd: int, write_fd: int) -> None:
        self._read_fd = read_fd
        self._write_fd = write_fd
        self._waiting: list[asyncio.Future[None]] = []

    async def enter(self) -> None:
        """Waits for a free place; those of one process go in order."""
        if not self._waiting and self._try_take():
            return
        loop = asyncio.get_running_loop()
        place: asyncio.Future[None] = loop.create_future()
        self._waiting.append(place)
        loop.add_reader(self._read_fd, self._on_readable)
        await place

    def leave(self) -> None:
        os.write(self._write_fd, b"x")

    def _try_take(self) -> bool:
        with contextlib.suppress(BlockingIOError):  # another process was faster
            return len(os.read(self._read_fd, 1)) == 1
        return False

    def _on_readable(self) -> None:
        while self._waiting and self._try_take():
            self._waiting.pop(0).set_result(None)
        if not self._waiting:
            asyncio.get_running_loop().remove_reader(self._read_fd)


def open_gate() -> tuple[int, int]:
    """Both ends of an empty gate, for the children to inherit."""
    read_fd, write_fd = os.pipe()
    os.set_blocking(read_fd, False)
    os.set_blocking(write_fd, False)
    return read_fd, write_fd


def fill_gate(read_fd: int, write_fd: int, num_places: int) -> None:
    """Makes exactly `num_places` places free, while nobody uses the gate."""
    with contextlib.suppress(BlockingIOError):
        while os.read(read_fd, MAX_PLACES):
            pass
    written = os.write(write_fd, b"x" * num_places)
    assert written == num_places, f"the gate took {written} of {num_places} places"
