"""The thread behind a trace log: writes that are handed to it, fdatasync, and other slow jobs.

Owns the queue of jobs and its bound in bytes, and what a write or a sync of its own failed with.
A file whose write failed is never written again. Called by `trace_disk.py` from one thread; `_run`
and what stands below it is for the thread inside.
"""

import os
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Literal

import msgspec

from cearx.core.trace_format import count_records

FsyncPolicy = Literal["never", "rotate", "everysec"]

SYNC_PERIOD_S = 1.0
END_TIMEOUT_S = 5.0
"""How long the end of the process may wait for the disk."""
NOTHING_LOST = 2**63
"""`first_lost` where no record is known to be lost: a sync failed."""


class WriteFailed(msgspec.Struct, frozen=True):
    """The file ends before record `first_lost`."""

    error: OSError
    first_lost: int


class SegmentFile:
    """An open file; the thread closes it."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.is_dirty = True
        self.failed = False


class TraceDiskThread:
    """Runs from the start to `end`."""

    def __init__(self, fsync: FsyncPolicy) -> None:
        self.segment: SegmentFile | None = None
        """What is written now: synced every second, if so wished."""
        self.queued_bytes = 0
        """That wait for the thread."""
        self._fsync = fsync
        self._failure: WriteFailed | None = None
        self._changed = threading.Condition()
        self._jobs: deque[Callable[[], None]] = deque()
        self._is_ending = False
        self._thread = threading.Thread(target=self._run, name="trace-disk", daemon=True)
        self._thread.start()

    def poll(self) -> WriteFailed | None:
        """What went wrong, once."""
        if self._failure is None:  # the thread may set it at any moment
            return None
        failure, self._failure = self._failure, None
        return failure

    def write(self, segment: SegmentFile, data: bytes, first_seq: int, skip: int) -> None:
        """Appends soon; the records begin behind `skip` bytes."""
        with self._changed:
            self.queued_bytes += len(data)
            self._jobs.append(lambda: self._write(segment, data, first_seq, skip))
            self._changed.notify()

    def later(self, job: Callable[[], None]) -> None:
        """Runs a job on the background thread, behind all writes that were handed to it.

        Within SYNC_PERIOD_S: waking the thread now would take the interpreter from the caller.
        """
        with self._changed:
            self._jobs.append(job)

    def end(self) -> None:
        """Waits for all jobs, END_TIMEOUT_S at most."""
        with self._changed:
            self._is_ending = True
            self._changed.notify()
        self._thread.join(END_TIMEOUT_S)

    def _run(self) -> None:
        next_sync = time.monotonic() + SYNC_PERIOD_S
        while True:
            with self._changed:
                if not self._is_ending and not self.queued_bytes:
                    self._changed.wait(SYNC_PERIOD_S)
                jobs = list(self._jobs)
                self._jobs.clear()
                if not jobs and self._is_ending:
                    return
            for job in jobs:
                job()
            segment = self.segment
            if self._fsync == "everysec" and segment and time.monotonic() >= next_sync:
                self._sync(segment)
                next_sync = time.monotonic() + SYNC_PERIOD_S

    def _write(self, segment: SegmentFile, data: bytes, first_seq: int, skip: int) -> None:
        if not segment.failed:
            try:
                write_all(segment.fd, data)
                segment.is_dirty = True
            except PartlyWritten as partly:
                segment.failed = True
                num_whole = count_records(data[skip : max(skip, partly.written)])
                self._failure = WriteFailed(partly, first_seq + num_whole)
        with self._changed:
            self.queued_bytes -= len(data)

    def _sync(self, segment: SegmentFile) -> None:
        if not segment.is_dirty or segment.failed:
            return
        segment.is_dirty = False
        try:
            os.fdatasync(segment.fd)
        except OSError as error:
            segment.failed = True
            self._failure = WriteFailed(error, NOTHING_LOST)

    def sync_and_close(self, segment: SegmentFile) -> None:
        if self._fsync != "never":
            self._sync(segment)
        self.close(segment)

    def close(self, segment: SegmentFile) -> None:
        try:
            os.close(segment.fd)
        except OSError as error:  # some file systems tell only now that they have lost something
            self._failure = WriteFailed(error, NOTHING_LOST)


class PartlyWritten(OSError):
    """A write that failed behind its first `written` bytes."""

    written = 0


def write_all(fd: int, data: bytes) -> None:
    """A disk that is almost full takes a part first; raises PartlyWritten."""
    written = 0
    try:
        written = os.write(fd, data)
        while written < len(data):
            written += os.write(fd, data[written:])
    except OSError as error:
        partly = PartlyWritten(error.errno, error.strerror)
        partly.written = written
        raise partly from error
