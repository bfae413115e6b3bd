"""Where bodies are read and prompts rendered, tokenised and hashed: short ones at once, long ones
in threads.

Owns the bounds between the two and the threads. A thread's hand-over there and back costs more than
the work on a short prompt, and in a burst every request pays it. Called by the routes, on the
event loop.
"""

import contextlib
import gc
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

import anyio
from anyio import to_thread

RESULT = TypeVar("RESULT")

MAX_READ_AT_ONCE_BYTES = 32 * 1024
"""Of a body whose JSON is decoded and checked; that is a hundred times faster than tokenising."""

MAX_AT_ONCE_BYTES = 2048
"""Of a body; tokenising so much takes some 0.5 ms at most, and streams wait for it."""
SLOW_S = 0.005
"""A short prompt that took so long sends the next one to a thread: a template may loop."""


class PromptWork:
    """One for all requests of a frontend."""

    def __init__(self, num_threads: int) -> None:
        self.threads = anyio.CapacityLimiter(num_threads)
        """Bounds the threads, so that streams keep their share of the CPU."""
        self._was_slow = False

    async def run(self, num_bytes: int, work: Callable[[], RESULT]) -> RESULT:
        """The result of `work` for a body of `num_bytes`; raises what it raises."""
        if num_bytes > MAX_AT_ONCE_BYTES:
            return await to_thread.run_sync(work, limiter=self.threads)
        if self._was_slow:
            return await to_thread.run_sync(self._timed, work, limiter=self.threads)
        return self._timed(work)

    async def read(self, body: bytes, read: Callable[[bytes], RESULT]) -> RESULT:
        """What `read` makes of a body; raises what it raises."""
        if len(body) <= MAX_READ_AT_ONCE_BYTES:
            return read(body)

        def read_undisturbed() -> RESULT:
            with _collector_paused():
                return read(body)

        return await to_thread.run_sync(read_undisturbed, limiter=self.threads)

    def _timed(self, work: Callable[[], RESULT]) -> RESULT:
        began = time.perf_counter()
        try:
            return work()
        finally:
            self._was_slow = time.perf_counter() - began > SLOW_S


@contextlib.contextmanager
def _collector_paused() -> Iterator[None]:
    """Decoding a million small lists is one call of C, which holds up every other thread; the
    collector, which would look at them again and again, makes it five times as long."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
