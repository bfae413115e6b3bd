"""Brings bytes of trace segments to the disk: on the caller's thread, or behind it when it is slow.

Owns the file descriptor of the segment that is written, the background thread and fdatasync, which
only that thread calls. A write that fails is never repeated on the same file. Knows nothing of
records but where frames end. Called by `trace_writer.py`.
"""

import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import msgspec

from cearx.core.trace_folder import lock
from cearx.core.trace_format import count_records

FsyncPolicy = Literal["never", "rotate", "everysec"]

SLOW_WRITE_NS = 2_000_000
NUM_SLOW_WRITES = 3
SLOW_WINDOW_NS = 60_000_000_000
"""So many slow writes in so long a time move writing to the thread, for the rest of the run."""
QUEUE_BYTES_MAX = 64 * 1024 * 1024
SYNC_PERIOD_S = 1.0
END_TIMEOUT_S = 5.0
"""How long the end of the process may wait for the disk."""


NOTHING_LOST = 2**63
"""`first_lost` where no record is known to be lost: a sync failed."""


class QueueFull(OSError):
    """The disk is so slow that the records in memory are too many."""


class WriteFailed(msgspec.Struct, frozen=True):
    """The file ends before record `first_lost`."""

    error: OSError
    first_lost: int


class _Segment:
    """An open file; the thread closes it."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.is_dirty = True
        self.failed = False


class TraceDisk:
    """One writer's files; all methods are for one thread, the background one is inside."""

    def __init__(self, fsync: FsyncPolicy, on_slow: Callable[[], None]) -> None:
        self._fsync = fsync
        self._on_slow = on_slow
        self._segment: _Segment | None = None
        self._is_behind = False
        self._slow_ns: deque[int] = deque(maxlen=NUM_SLOW_WRITES)
        self._failure: WriteFailed | None = None
        self._changed = threading.Condition()
        self._jobs: deque[Callable[[], None]] = deque()
        self._queued_bytes = 0
        self._is_ending = False
        self._thread = threading.Thread(target=self._run, name="trace-disk", daemon=True)
        self._thread.start()

    @property
    def writes_behind(self) -> bool:
        """Whether `write` hands to the background thread instead of to the kernel."""
        return self._is_behind

    @property
    def is_drained(self) -> bool:
        """Whether nothing waits for the background thread."""
        return self._queued_bytes == 0

    def begin(self, path: Path, data: bytes, first_seq: int, num_header_bytes: int) -> None:
        """Creates a segment, writes its beginning and goes on in it; the one before is finished.

        Raises OSError; then there is no file, and `write` goes on in the segment before.
        """
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o600)
        lock(fd)
        segment = _Segment(fd)
        if self._is_behind:
            self._queue_write(segment, data, first_seq, num_header_bytes)
        else:
            try:
                _write_all(fd, data)
            except OSError:
                os.close(fd)
                with contextlib.suppress(OSError):
                    path.unlink()
                raise
        before, self._segment = self._segment, segment  # the thread syncs what it finds here
        self._finish(before)

    def write(self, data: bytes, first_seq: int) -> WriteFailed | None:
        """Appends whole frames; answers what went wrong with these or with earlier ones."""
        if self._failure is not None:
            failure, self._failure = self._failure, None
            return failure
        segment = self._segment
        assert segment is not None, "a write before the first segment, or after a failure"
        if self._is_behind:
            if self._queued_bytes + len(data) > QUEUE_BYTES_MAX:
                text = f"more than {QUEUE_BYTES_MAX} bytes wait for the disk"
                return WriteFailed(QueueFull(0, text), first_seq)
            self._queue_write(segment, data, first_seq, 0)
            return None
        start_ns = time.perf_counter_ns()
        try:
            _write_all(segment.fd, data)
        except _PartlyWritten as partly:
            return WriteFailed(partly, first_seq + count_records(data[: partly.written]))
        segment.is_dirty = True
        now_ns = time.perf_counter_ns()
        if now_ns - start_ns > SLOW_WRITE_NS:
            self._note_slow(now_ns)
        return None

    def poll(self) -> WriteFailed | None:
        """What the background thread found, once."""
        failure, self._failure = self._failure, None
        return failure

    def abandon(self) -> None:
        """Leaves the segment as it is, after a failure."""
        segment, self._segment = self._segment, None
        if segment is not None:
            self.later(lambda: self._close(segment))

    def later(self, job: Callable[[], None]) -> None:
        """Runs a job on the background thread, behind all writes that were handed to it.

        Within SYNC_PERIOD_S: waking the thread now would take the interpreter from the caller.
        """
        with self._changed:
            self._jobs.append(job)

    def end(self) -> WriteFailed | None:
        """Finishes the segment and waits for it, END_TIMEOUT_S at most; answers a failure."""
        before, self._segment = self._segment, None
        self._finish(before)
        with self._changed:
            self._is_ending = True
            self._changed.notify()
        self._thread.join(END_TIMEOUT_S)
        return self.poll()

    def _note_slow(self, now_ns: int) -> None:
        self._slow_ns.append(now_ns)
        if len(self._slow_ns) == NUM_SLOW_WRITES and now_ns - self._slow_ns[0] < SLOW_WINDOW_NS:
            self._is_behind = True
            self._on_slow()

    def _queue_write(self, segment: _Segment, data: bytes, first_seq: int, skip: int) -> None:
        with self._changed:
            self._queued_bytes += len(data)
            self._jobs.append(lambda: self._write_behind(segment, data, first_seq, skip))
            self._changed.notify()

    def _finish(self, segment: _Segment | None) -> None:
        if segment is not None:
            self.later(lambda: self._sync_and_close(segment))

    # --- on the background thread ----------------------------------------------------------------

    def _run(self) -> None:
        next_sync = time.monotonic() + SYNC_PERIOD_S
        while True:
            with self._changed:
                if not self._is_ending and not self._queued_bytes:
                    self._changed.wait(SYNC_PERIOD_S)
                jobs = list(self._jobs)
                self._jobs.clear()
                if not jobs and self._is_ending:
                    return
            for job in jobs:
                job()
            segment = self._segment
            if self._fsync == "everysec" and segment and time.monotonic() >= next_sync:
                self._sync(segment)
                next_sync = time.monotonic() + SYNC_PERIOD_S

    def _write_behind(self, segment: _Segment, data: bytes, first_seq: int, skip: int) -> None:
        if not segment.failed:
            try:
                _write_all(segment.fd, data)
                segment.is_dirty = True
            except _PartlyWritten as partly:
                segment.failed = True
                num_whole = count_records(data[skip : max(skip, partly.written)])
                self._failure = WriteFailed(partly, first_seq + num_whole)
        with self._changed:
            self._queued_bytes -= len(data)

    def _sync(self, segment: _Segment) -> None:
        if not segment.is_dirty or segment.failed:
            return
        segment.is_dirty = False
        try:
            os.fdatasync(segment.fd)
        except OSError as error:
            segment.failed = True
            self._failure = WriteFailed(error, NOTHING_LOST)

    def _sync_and_close(self, segment: _Segment) -> None:
        if self._fsync != "never":
            self._sync(segment)
        self._close(segment)

    def _close(self, segment: _Segment) -> None:
        try:
            os.close(segment.fd)
        except OSError as error:  # some file systems tell only now that they have lost something
            self._failure = WriteFailed(error, NOTHING_LOST)


class _PartlyWritten(OSError):
    written = 0


def _write_all(fd: int, data: bytes) -> None:
    """A disk that is almost full takes a part first."""
    written = 0
    try:
        written = os.write(fd, data)
        while written < len(data):
            written += os.write(fd, data[written:])
    except OSError as error:
        partly = _PartlyWritten(error.errno, error.strerror)
        partly.written = written
        raise partly from error
