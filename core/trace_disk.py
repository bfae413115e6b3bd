"""Brings bytes of trace segments to the disk: on the caller's thread, or behind it when it is slow.

Owns the segment that is written and the choice between the two; fdatasync is for the thread
behind it only. A write that fails is never repeated on the same file. Knows nothing of records but
where frames end. Called by `trace_writer.py`.
"""

import contextlib
import os
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

from cearx.core.trace_disk_thread import (
    FsyncPolicy,
    PartlyWritten,
    SegmentFile,
    TraceDiskThread,
    WriteFailed,
    write_all,
)
from cearx.core.trace_folder import lock
from cearx.core.trace_format import count_records

SLOW_WRITE_NS = 2_000_000
NUM_SLOW_WRITES = 3
SLOW_WINDOW_NS = 60_000_000_000
"""So many slow writes in so long a time move writing to the thread, for the rest of the run."""
QUEUE_BYTES_MAX = 64 * 1024 * 1024


class QueueFull(OSError):
    """The disk is so slow that the records in memory are too many."""


class TraceDisk:
    """One writer's files; all methods are for one thread, the background one is inside."""

    def __init__(self, fsync: FsyncPolicy, on_slow: Callable[[], None]) -> None:
        self._thread = TraceDiskThread(fsync)
        self._on_slow = on_slow
        self._is_behind = False
        self._slow_ns: deque[int] = deque(maxlen=NUM_SLOW_WRITES)

    @property
    def writes_behind(self) -> bool:
        """Whether `write` hands to the background thread instead of to the kernel."""
        return self._is_behind

    @property
    def is_drained(self) -> bool:
        """Whether nothing waits for the background thread."""
        return self._thread.queued_bytes == 0

    def begin(self, path: Path, data: bytes, first_seq: int, num_header_bytes: int) -> None:
        """Creates a segment, writes its beginning and goes on in it; the one before is finished.

        Raises OSError; then there is no file, and `write` goes on in the segment before.
        """
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o600)
        lock(fd)
        segment = SegmentFile(fd)
        if self._is_behind:
            self._thread.write(segment, data, first_seq, num_header_bytes)
        else:
            try:
                write_all(fd, data)
            except OSError:
                os.close(fd)
                with contextlib.suppress(OSError):
                    path.unlink()
                raise
        before, self._thread.segment = self._thread.segment, segment
        self._finish(before)

    def write(self, data: bytes, first_seq: int) -> WriteFailed | None:
        """Appends whole frames; answers what went wrong with these or with earlier ones."""
        failure = self.poll()
        if failure is not None:
            return failure
        segment = self._thread.segment
        assert segment is not None, "a write before the first segment, or after a failure"
        if self._is_behind:
            if self._thread.queued_bytes + len(data) > QUEUE_BYTES_MAX:
                text = f"more than {QUEUE_BYTES_MAX} bytes wait for the disk"
                return WriteFailed(QueueFull(0, text), first_seq)
            self._thread.write(segment, data, first_seq, 0)
            return None
        start_ns = time.perf_counter_ns()
        try:
            write_all(segment.fd, data)
        except PartlyWritten as partly:
            return WriteFailed(partly, first_seq + count_records(data[: partly.written]))
        segment.is_dirty = True
        now_ns = time.perf_counter_ns()
        if now_ns - start_ns > SLOW_WRITE_NS:
            self._note_slow(now_ns)
        return None

    def poll(self) -> WriteFailed | None:
        """What the background thread found, once."""
        return self._thread.poll()

    def abandon(self) -> None:
        """Leaves the segment as it is, after a failure."""
        segment, self._thread.segment = self._thread.segment, None
        if segment is not None:
            self.later(lambda: self._thread.close(segment))

    def later(self, job: Callable[[], None]) -> None:
        """Runs a job on the background thread, soon, behind all writes that were handed to it."""
        self._thread.later(job)

    def end(self) -> WriteFailed | None:
        """Finishes the segment and waits for it, not for ever; answers a failure."""
        before, self._thread.segment = self._thread.segment, None
        self._finish(before)
        self._thread.end()
        return self.poll()

    def _note_slow(self, now_ns: int) -> None:
        self._slow_ns.append(now_ns)
        if len(self._slow_ns) == NUM_SLOW_WRITES and now_ns - self._slow_ns[0] < SLOW_WINDOW_NS:
            self._is_behind = True
            self._on_slow()

    def _finish(self, segment: SegmentFile | None) -> None:
        if segment is not None:
            self.later(lambda: self._thread.sync_and_close(segment))
