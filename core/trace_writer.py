"""Writes the trace log of a run: records gather in memory, one write a step.

Owns the order of records and segments: rotation, the gap that a failure leaves, the retry behind
it. Never waits for the disk and never stops serving: what cannot be written is counted. The core's
shell calls `append` for each input before use and each decision, `flush` before it dispatches and
`maintain` after; `trace_disk.py` has the file, `trace_folder.py` the ring.
"""

import errno
import os
import platform
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from cearx.core.config import SchedulerConfig, TraceLimits
from cearx.core.events import Decision, Event
from cearx.core.scheduler_source import code_version, scheduler_sha256
from cearx.core.trace_disk import QueueFull, TraceDisk
from cearx.core.trace_disk_thread import NOTHING_LOST
from cearx.core.trace_folder import (
    boot_name,
    find_segments,
    pin,
    point_newest_at,
    prune,
    segment_path,
)
from cearx.core.trace_format import HEADER_BYTES, SegmentHeader
from cearx.core.trace_records import (
    SCHEMA_VERSION,
    GapReason,
    Record,
    StepNote,
    TraceGap,
    TraceHeader,
    TraceSnapshot,
    config_sha256,
)
from cearx.core.trace_segment import SegmentEncoder

RETRY_S = 30.0
"""How long after a failure, or a failed retry, a new segment is tried."""
CREATE_ATTEMPTS = 1000
SLOW = "the disk of the trace log is slow, a thread writes from now on"


class TraceError(Exception):
    """The trace cannot be started; the message names the path and what is wrong with it."""


def _ignore(_text: str) -> None:
    pass


class _Gap(msgspec.Struct):
    """What is lost while nothing can be written."""

    reason: GapReason
    first_lost: int
    retry_at: float


class TraceWriter:
    """One run's log, made by `open`."""

    def __init__(
        self,
        folder: Path,
        config: SchedulerConfig,
        boot_id: int,
        limits: TraceLimits,
        on_stop: Callable[[str], None],
        on_note: Callable[[str], None],
    ) -> None:
        """Begins no file yet: `open` does."""
        self.path = folder
        """The newest segment."""
        self.stopped: str | None = None
        """Why nothing is written now."""
        self._num_lost = 0
        """In gaps that are closed."""
        self.num_bytes = 0
        """Bytes in the newest segment."""
        self._limits = limits
        self._on_stop = on_stop
        self._on_note = on_note
        self._header = _trace_header(config)
        self._disk = TraceDisk(limits.fsync, lambda: on_note(SLOW))
        self._gap: _Gap | None = None
        self._segment = SegmentEncoder(SegmentHeader(boot_id=boot_id, salt=0, segment=-1))
        """Of the newest file; before the first it only has the run's id."""
        self._began_at = 0.0

    @classmethod
    def open(
        cls,
        folder: Path,
        config: SchedulerConfig,
        boot_id: int,
        on_stop: Callable[[str], None],
        *,
        limits: TraceLimits | None = None,
        on_note: Callable[[str], None] = _ignore,
    ) -> "TraceWriter":
        """Creates the run's first segment in `folder` and points `trace.log` at it.

        A folder that is missing is made with mode 0700, one that exists keeps its mode; files
        have 0600. `on_stop` gets the reason each time that writing stops, `on_note` what else a
        person should know, maybe on another thread. Raises TraceError, also where the run has
        segments already: a run has one core.
        """
        writer = cls(folder, config, boot_id, limits or TraceLimits(), on_stop, on_note)
        path = segment_path(folder, boot_id, 0).path
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if earlier := find_segments(folder, boot_name(boot_id)):
                path = earlier[-1].path
                raise FileExistsError(errno.EEXIST, "the run is logged there already")
            writer._begin_segment(folder, 0, [], 0)
            point_newest_at(writer.path)
        except OSError as error:
            writer._disk.end()
            if writer.path != folder:
                writer.path.unlink(missing_ok=True)
            reason = error.strerror or error
            raise TraceError(f"cannot write the trace log {path}: {reason}") from error
        return writer

    @property
    def num_lost(self) -> int:
        """Records that are in no file because writing failed."""
        now = 0 if self._gap is None else self._segment.next_seq - self._gap.first_lost
        return self._num_lost + now

    def append(self, record: Event | Decision | StepNote) -> None:
        """Gathers one record for the next `flush`; a note is of the step that finished last."""
        if self.stopped is None:
            try:
                self._segment.add(record)
                return
            except ValueError as error:  # too large for a frame: the log may not have a hole
                self.flush()
                if self.stopped is None:
                    self._stop(error, GapReason.RECORD_TOO_LARGE, self._segment.next_seq)
        self._segment.next_seq += 1

    def flush(self) -> None:
        """Hands all gathered records to the kernel, or to the thread where the disk is slow.

        What the kernel has survives the end of this process; what the thread has does not.
        """
        if not self._segment.num_added:
            return
        first_seq = self._segment.next_seq - self._segment.num_added
        data = self._segment.take()
        failed = self._disk.write(data, first_seq)
        if failed is not None:
            is_full = isinstance(failed.error, QueueFull)
            reason = GapReason.QUEUE_FULL if is_full else GapReason.WRITE_FAILED
            # A sync that failed lost nothing that is known, but these were not written any more.
            is_known = failed.first_lost != NOTHING_LOST
            self._stop(failed.error, reason, failed.first_lost if is_known else first_seq)
            return
        self.num_bytes += len(data)

    def maintain(self, snapshot: Callable[[], bytes]) -> None:
        """Begins a new segment when one is due; cheap when none is.

        Call between events, when every record that was appended is applied and nothing waits for
        the caller; `snapshot` is `Scheduler.snapshot`.
        """
        now = time.monotonic()
        if self._gap is not None:
            if now >= self._gap.retry_at and self._disk.is_drained:
                self._resume(self._gap, snapshot, now)
        elif self.stopped is None and (
            self.num_bytes >= self._limits.segment_bytes
            or (now - self._began_at >= self._limits.segment_seconds and self._segment.num_events)
        ):
            self.flush()
            if self.stopped is None:
                self._rotate(snapshot)

    def pin(self, reason: str) -> None:
        """Keeps what the run has logged up to now; `on_note` gets where, or why not."""
        self.flush()
        folder, boot_id = self.path.parent, self._segment.header.boot_id
        self._disk.later(lambda: self._on_note(pin_text(folder, boot_id, reason)))

    def close(self, is_orderly: bool = True) -> None:
        """Ends the log and waits for the disk; a log that is not ended in good order says so."""
        self.flush()
        if self.stopped is None and is_orderly:
            self._segment.end()
            self.flush()
        self._num_lost, self._gap = self.num_lost, None
        failed = self._disk.end()
        if self.stopped is None:
            if failed is not None:
                self._num_lost += max(0, self._segment.next_seq - failed.first_lost)
                self._on_stop(f"the trace log {self.path} may lack its end: {failed.error}")
            self.stopped = "closed"

    def _begin_segment(
        self, folder: Path, number: int, records: list[Record], prev_last_seq: int
    ) -> None:
        """Creates the segment of that number, or of the next one that nobody has, with its header
        and these records. Raises OSError and ValueError; then the writer is as before."""
        boot_id = self._segment.header.boot_id
        for taken in range(CREATE_ATTEMPTS):
            path = segment_path(folder, boot_id, number + taken).path
            header = SegmentHeader(
                boot_id=boot_id,
                salt=int.from_bytes(os.urandom(4), "little"),
                segment=number + taken,
                first_seq=self._segment.next_seq,
                prev_last_seq=prev_last_seq,
            )
            segment = SegmentEncoder(header)
            data = segment.begin([self._header, *records])
            try:
                self._disk.begin(path, data, header.first_seq, HEADER_BYTES)
                break
            except FileExistsError:
                continue
        else:
            raise FileExistsError(errno.EEXIST, f"{CREATE_ATTEMPTS} files exist up to {path}")
        self.path, self.num_bytes = path, len(data)
        self._segment = segment
        self._began_at = time.monotonic()
        keep, on_note = self._limits.keep, self._on_note
        self._disk.later(lambda: _publish(path, boot_id, keep, on_note))

    def _rotate(self, snapshot: Callable[[], bytes]) -> None:
        last_seq = self._segment.next_seq - 1
        try:
            number = self._segment.header.segment + 1
            state = TraceSnapshot(state=snapshot())
            self._begin_segment(self.path.parent, number, [state], last_seq)
        except OSError as error:
            self._stop(error, GapReason.WRITE_FAILED, last_seq + 1)
        except ValueError as error:
            self._stop(error, GapReason.RECORD_TOO_LARGE, last_seq + 1)

    def _resume(self, gap: _Gap, snapshot: Callable[[], bytes], now: float) -> None:
        late = self._disk.poll()
        end_lost = self._segment.next_seq
        if late is not None:
            gap.first_lost = min(gap.first_lost, late.first_lost)
        record = TraceGap(reason=gap.reason, first_lost=gap.first_lost, end_lost=end_lost)
        number = self._segment.header.segment + 1
        try:
            records: list[Record] = [record, TraceSnapshot(state=snapshot())]
            self._begin_segment(self.path.parent, number, records, max(0, gap.first_lost - 1))
        except (OSError, ValueError):
            gap.retry_at = now + RETRY_S
            return
        self._gap = self.stopped = None
        lost = end_lost - gap.first_lost
        self._num_lost += lost
        self._on_note(f"the trace log goes on in {self.path}, {lost} records are lost")

    def _stop(self, error: Exception, reason: GapReason, first_lost: int) -> None:
        self.stopped = f"the trace log {self.path} ends here: {error}"
        self._gap = _Gap(reason, first_lost, time.monotonic() + RETRY_S)
        self._disk.abandon()
        self._on_stop(self.stopped)


def _publish(path: Path, boot_id: int, keep: int, on_note: Callable[[str], None]) -> None:
    """Points at a new segment, then deletes what it pushes out of the ring."""
    try:
        point_newest_at(path)
        prune(path.parent, boot_id, keep)
    except OSError as error:
        on_note(f"cannot point at the trace log {path} or delete an old one: {error}")


def pin_text(folder: Path, boot_id: int, reason: str) -> str:
    """Pins what a run has logged; answers a line that says where, or why not."""
    try:
        return f"trace log pinned: {pin(folder, boot_id, reason)}"
    except OSError as error:
        return f"cannot pin the trace log in {folder}: {error}"


def _trace_header(config: SchedulerConfig) -> TraceHeader:
    return TraceHeader(
        schema_version=SCHEMA_VERSION,
        code_version=code_version(),
        scheduler_sha256=scheduler_sha256(),
        config=config,
        config_sha256=config_sha256(config),
        python_version=platform.python_version(),
        msgspec_version=msgspec.__version__,
        wall_ns=time.time_ns(),
        monotonic_ns=time.monotonic_ns(),
    )
