"""The threads that run compiled functions together: this one and as many helpers as cores allow.

Owns the helpers, their scratch memory and the counters that `kernels/thread_steps.py` works on.
Helpers sleep between calls. A caller that finds the team busy computes alone.
"""

import threading
from collections.abc import Callable
from functools import cache
from queue import SimpleQueue

import numpy as np
import torch
from numpy.typing import NDArray

from cearx.kernels.panel_product import SCRATCH_FLOATS

Job = Callable[[int, int, int, NDArray[np.float32]], None]
"""Called in every thread with its index, the number of threads, the address of the counters and
its own scratch memory."""


class ThreadTeam:
    def __init__(self, num_threads: int) -> None:
        self._lock = threading.Lock()
        self._todo: list[SimpleQueue[tuple[Job, int]]] = []
        self._done: SimpleQueue[BaseException | None] = SimpleQueue()
        self._scratch = [_scratch() for _ in range(num_threads)]
        self._counters = np.zeros(1, np.int64)
        for index in range(1, num_threads):
            todo: SimpleQueue[tuple[Job, int]] = SimpleQueue()
            self._todo.append(todo)
            name = f"compute-{index}"
            threading.Thread(target=self._help, args=(index, todo), name=name, daemon=True).start()

    def run(self, job: Job, num_counters: int = 1) -> None:
        """Runs the job in all threads, with counters at zero; raises what one of them raised."""
        if not self._lock.acquire(blocking=False):
            job(0, 1, np.zeros(num_counters, np.int64).ctypes.data, _scratch())
            return
        try:
            if len(self._counters) < num_counters:
                self._counters = np.zeros(num_counters, np.int64)
            self._counters[:num_counters] = 0
            counters = self._counters.ctypes.data
            for todo in self._todo:
                todo.put((job, counters))
            job(0, len(self._scratch), counters, self._scratch[0])
            errors = [self._done.get() for _ in self._todo]
        finally:
            self._lock.release()
        for error in errors:
            if error is not None:
                raise error

    def _help(self, index: int, todo: SimpleQueue[tuple[Job, int]]) -> None:
        while True:
            job, counters = todo.get()
            error: BaseException | None = None
            try:
                job(index, len(self._scratch), counters, self._scratch[index])
            except BaseException as raised:  # belongs to the caller, whatever it is
                error = raised
            del job
            self._done.put(error)


def thread_team() -> ThreadTeam:
    """The process's team of as many threads as torch may use."""
    return _team_of(torch.get_num_threads())


@cache
def _team_of(num_threads: int) -> ThreadTeam:
    return ThreadTeam(num_threads)


def _scratch() -> NDArray[np.float32]:
    scratch: NDArray[np.float32] = torch.empty(SCRATCH_FLOATS).numpy()  # on a cache line's boundary
    return scratch
