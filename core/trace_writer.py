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
from cearx.core.scheduler import Scheduler
from cearx.core.scheduler_source import code_version, scheduler_sha256
from cearx.core.trace_disk import NOTHING_LOST, QueueFull, TraceDisk, WriteFailed
from cearx.core.trace_folder import (
    SegmentPath,
    boot_name,
    find_segments,
    pin,
    point_newest_at,
    prune,
    segment_path,
)
from cearx.core.trace_format import (
    HEADER_BYTES,
    RecordType,
    SegmentHeader,
    encode_frame,
    encode_header,
    salt_crc,
)
from cearx.core.trace_records import (
    SCHEMA_VERSION,
    GapReason,
    Record,
    RecordEncoder,
    StepNote,
    TraceEnd,
    TraceGap,
    TraceHeader,
    TraceSnapshot,
    config_sha256,
)

RETRY_S = 30.0
"""How long after a failure, or a failed retry, a new segment is tried."""
CREATE_ATTEMPTS = 1000


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
        self.path = folder
        """The newest segment."""
        self.stopped: str | None = None
        """Why nothing is written now."""
        self.num_lost = 0
        """Records that are in no file because writing failed."""
        self.num_bytes = 0
        """Bytes in the newest segment."""
        self._folder = folder
        self._boot_id = boot_id
        self._limits = limits
        self._on_stop = on_stop
        self._on_note = on_note
        self._header = _trace_header(config)
        self._disk = TraceDisk(limits.fsync, self._is_slow)
        self._gap: _Gap | None = None
        self._next_seq = 0
        self._number = -1
        self._gathered: list[bytes] = []

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
        have 0600. Where the run has segments already, because its core was started anew, the next
        number is taken. `on_stop` gets the reason each time that writing stops, `on_note` what
        else a person should know, maybe on another thread. Raises TraceError.
        """
        writer = cls(folder, config, boot_id, limits or TraceLimits(), on_stop, on_note)
        path = segment_path(folder, boot_id, 0).path
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            earlier = find_segments(folder, boot_name(boot_id))
            if earlier:
                writer._number = earlier[-1].number
                path = segment_path(folder, boot_id, writer._number + 1).path
                gap = TraceGap(reason=GapReason.RESTARTED, first_lost=0, end_lost=0)
                writer._begin_segment([gap, TraceSnapshot(state=Scheduler(config).snapshot())], 0)
            else:
                writer._begin_segment([], 0)
            point_newest_at(writer.path)
        except OSError as error:
            writer._disk.end()
            if writer._number >= 0 and writer.path != folder:
                writer.path.unlink(missing_ok=True)
            reason = error.strerror or error
            raise TraceError(f"cannot write the trace log {path}: {reason}") from error
        return writer

    def note_step(self, execute_us: int, schedule_us: int) -> None:
        """Gathers the measured times of the step that finished last."""
        self.append(StepNote(execute_us=execute_us, schedule_us=schedule_us))

    def append(self, record: Event | Decision | StepNote) -> None:
        """Gathers one record for the next `flush`."""
        if self.stopped is not None:
            self.num_lost += 1
            self._next_seq += 1
            return
        try:
            record_type = self._gather(record)
        except ValueError as error:  # too large for a frame: the log may not have a hole
            self.flush()
            if self.stopped is None:
                self._stop(error, GapReason.RECORD_TOO_LARGE, self._next_seq)
            self.num_lost += 1
            self._next_seq += 1
            return
        if record_type < RecordType.STEP_PLAN:
            self._num_events += 1
        elif record_type < RecordType.HEADER:
            self._num_decisions += 1
        else:
            self._num_notes += 1

    def flush(self) -> None:
        """Hands all gathered records to the kernel, or to the thread where the disk is slow.

        What the kernel has survives the end of this process; what the thread has does not.
        """
        if not self._gathered:
            return
        data = b"".join(self._gathered)
        failed = self._disk.write(data, self._next_seq - len(self._gathered))
        if failed is not None:
            self._fail(failed)
            return
        self.num_bytes += len(data)
        self._gathered.clear()

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
            or (now - self._began_at >= self._limits.segment_seconds and self._num_events)
        ):
            self.flush()
            if self.stopped is None:
                self._rotate(snapshot)

    def pin(self, reason: str) -> None:
        """Keeps what the run has logged up to now; `on_note` gets where, or why not."""
        self.flush()
        self._disk.later(lambda: self._pin(reason))

    def close(self) -> None:
        """Ends the log in good order; nothing may be appended behind it."""
        if self.stopped is None:
            self._gather(
                TraceEnd(
                    num_events=self._num_events,
                    num_decisions=self._num_decisions,
                    num_notes=self._num_notes,
                )
            )
            self.flush()
        self._gap = None
        failed = self._disk.end()
        if self.stopped is None:
            if failed is not None:
                self._on_stop(f"the trace log {self.path} may lack its end: {failed.error}")
            self.stopped = "closed"

    def _gather(self, record: Record) -> int:
        record_type, flags, payload = self._encoder.encode(record)
        self._gathered.append(
            encode_frame(self._salted, self._next_seq, record_type, flags, payload)
        )
        self._next_seq += 1
        return record_type

    def _begin_segment(self, records: list[Record], prev_last_seq: int) -> None:
        """Creates the next segment with its header and these records; raises OSError, ValueError.

        After an error the writer is as before.
        """
        first_seq = self._next_seq
        header = SegmentHeader(
            boot_id=self._boot_id,
            salt=int.from_bytes(os.urandom(4), "little"),
            segment=self._number + 1,
            first_seq=first_seq,
            prev_last_seq=prev_last_seq,
        )
        encoder = RecordEncoder()
        path = segment_path(self._folder, self._boot_id, header.segment)
        for _ in range(CREATE_ATTEMPTS):
            header = msgspec.structs.replace(header, segment=path.number)
            salted = salt_crc(header.salt)
            parts = [encode_header(header)]
            for seq, record in enumerate([self._header, *records], first_seq):
                parts.append(encode_frame(salted, seq, *encoder.encode(record)))
            data = b"".join(parts)
            try:
                self._disk.begin(path.path, data, first_seq, HEADER_BYTES)
            except FileExistsError:
                path = segment_path(self._folder, self._boot_id, path.number + 1)
                continue
            self._take_segment(path, header, encoder, len(data), 1 + len(records))
            return
        raise FileExistsError(errno.EEXIST, f"{CREATE_ATTEMPTS} segments exist up to {path.path}")

    def _take_segment(
        self,
        path: SegmentPath,
        header: SegmentHeader,
        encoder: RecordEncoder,
        num_bytes: int,
        num_records: int,
    ) -> None:
        self.path, self._number = path.path, path.number
        self.num_bytes = num_bytes
        self._salted = salt_crc(header.salt)
        self._encoder = encoder
        self._next_seq = header.first_seq + num_records
        self._num_events = self._num_decisions = self._num_notes = 0
        self._began_at = time.monotonic()
        self._disk.later(lambda: self._publish(path.path))

    def _rotate(self, snapshot: Callable[[], bytes]) -> None:
        try:
            self._begin_segment([TraceSnapshot(state=snapshot())], self._next_seq - 1)
        except OSError as error:
            self._stop(error, GapReason.WRITE_FAILED, self._next_seq)
        except ValueError as error:
            self._stop(error, GapReason.RECORD_TOO_LARGE, self._next_seq)

    def _resume(self, gap: _Gap, snapshot: Callable[[], bytes], now: float) -> None:
        late = self._disk.poll()
        first_lost = gap.first_lost if late is None else min(gap.first_lost, late.first_lost)
        first_lost = min(first_lost, self._next_seq)
        record = TraceGap(reason=gap.reason, first_lost=first_lost, end_lost=self._next_seq)
        try:
            self._begin_segment([record, TraceSnapshot(state=snapshot())], max(0, first_lost - 1))
        except (OSError, ValueError):
            gap.first_lost, gap.retry_at = first_lost, now + RETRY_S
            return
        self._gap = self.stopped = None
        lost = record.end_lost - record.first_lost
        self._on_note(f"the trace log goes on in {self.path}, {lost} records are lost")

    def _fail(self, failed: WriteFailed) -> None:
        is_full = isinstance(failed.error, QueueFull)
        reason = GapReason.QUEUE_FULL if is_full else GapReason.WRITE_FAILED
        self._stop(failed.error, reason, failed.first_lost)

    def _stop(self, error: Exception, reason: GapReason, first_lost: int) -> None:
        if first_lost == NOTHING_LOST:  # but these were not written any more
            first_lost = self._next_seq - len(self._gathered)
        self.num_lost += self._next_seq - first_lost
        self._gathered.clear()
        self.stopped = f"the trace log {self.path} ends here: {error}"
        self._gap = _Gap(reason, first_lost, time.monotonic() + RETRY_S)
        self._disk.abandon()
        self._on_stop(self.stopped)

    def _is_slow(self) -> None:
        self._on_note("the disk of the trace log is slow, a thread writes from now on")

    # --- on the disk's thread --------------------------------------------------------------------

    def _publish(self, path: Path) -> None:
        """Points at the new segment, then deletes what it pushes out of the ring."""
        try:
            point_newest_at(path)
            prune(self._folder, self._boot_id, self._limits.keep)
        except OSError as error:
            self._on_note(
                f"cannot point at a trace log or delete an old one in {self._folder}: {error}"
            )

    def _pin(self, reason: str) -> None:
        try:
            self._on_note(f"trace log pinned: {pin(self._folder, self._boot_id, reason)}")
        except OSError as error:
            self._on_note(f"cannot pin the trace log in {self._folder}: {error}")


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
