"""Writes the trace log of a run: records gather in memory, one write a step.

Owns the file and its name. Never calls fsync, never blocks on anything but the page cache, and
never stops serving: a disk that fails while the server runs ends the trace, not the run. The core's
shell calls `append` for each input before use and each decision, and `flush` before it dispatches.
"""

import contextlib
import os
import platform
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from cearx.core.config import SchedulerConfig
from cearx.core.events import Decision, Event
from cearx.core.scheduler_source import code_version, scheduler_sha256
from cearx.core.trace_format import (
    RecordType,
    SegmentHeader,
    encode_frame,
    encode_header,
    salt_crc,
)
from cearx.core.trace_records import (
    SCHEMA_VERSION,
    Record,
    StepNote,
    TraceEnd,
    TraceHeader,
    config_sha256,
    encode_record,
)

NEWEST = "trace.log"
"""Symbolic link in the trace folder to the newest file."""


class TraceError(Exception):
    """The trace cannot be started; the message names the path and what is wrong with it."""


class TraceWriter:
    """One run's log, made by `open`; after a failure it only counts what is lost."""

    def __init__(
        self, path: Path, fd: int, header: SegmentHeader, on_stop: Callable[[str], None]
    ) -> None:
        self.path = path
        self.stopped: str | None = None
        """Why nothing more is written."""
        self.num_lost = 0
        """Records that are not in the file because writing failed."""
        self.num_bytes = 0
        """Bytes in the file."""
        self._fd = fd
        self._on_stop = on_stop
        self._salted = salt_crc(header.salt)
        self._next_seq = header.first_seq
        self._gathered: list[bytes] = []
        self._num_events = self._num_decisions = self._num_notes = 0

    @classmethod
    def open(
        cls,
        folder: Path,
        config: SchedulerConfig,
        boot_id: int,
        on_stop: Callable[[str], None],
    ) -> "TraceWriter":
        """Creates the run's file with its header in `folder` and points `trace.log` at it.

        A folder that is missing is made with mode 0700, one that exists keeps its mode; the file
        has 0600. `on_stop` gets the reason, at most once, when a later write fails. Raises
        TraceError.
        """
        path = folder / f"trace-{boot_id >> 32:08x}-000000.log"
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o600)
        except OSError as error:
            raise TraceError(f"cannot create the trace log {path}: {error.strerror}") from error
        header = SegmentHeader(boot_id=boot_id, salt=int.from_bytes(os.urandom(4), "little"))
        writer = cls(path, fd, header, on_stop)
        try:
            writer._gathered.append(encode_header(header))
            writer._gather(_trace_header(config))
            writer._write()
            _point_newest_at(path)
        except OSError as error:
            os.close(fd)
            with contextlib.suppress(OSError):
                path.unlink()
            raise TraceError(f"cannot write the trace log {path}: {error.strerror}") from error
        return writer

    def note_step(self, execute_us: int, schedule_us: int) -> None:
        """Gathers the measured times of the step that finished last."""
        self.append(StepNote(execute_us=execute_us, schedule_us=schedule_us))

    def append(self, record: Event | Decision | StepNote) -> None:
        """Gathers one record for the next `flush`."""
        if self.stopped is not None:
            self.num_lost += 1
            return
        try:
            record_type = self._gather(record)
        except ValueError as error:  # too large for a frame: the log may not have a hole
            self.num_lost += 1
            self._stop(error)
            return
        if record_type < RecordType.STEP_PLAN:
            self._num_events += 1
        elif record_type < RecordType.HEADER:
            self._num_decisions += 1
        else:
            self._num_notes += 1

    def flush(self) -> None:
        """Hands all gathered records to the kernel; they survive the end of this process."""
        if self._gathered:
            try:
                self._write()
            except OSError as error:
                self._stop(error)

    def close(self) -> None:
        """Ends the log in good order; nothing may be appended behind it."""
        if self.stopped is not None:
            return
        self._gather(
            TraceEnd(
                num_events=self._num_events,
                num_decisions=self._num_decisions,
                num_notes=self._num_notes,
            )
        )
        self.flush()
        if self.stopped is None:
            os.close(self._fd)
            self.stopped = "closed"

    def _gather(self, record: Record) -> int:
        record_type, flags, payload = encode_record(record)
        self._gathered.append(
            encode_frame(self._salted, self._next_seq, record_type, flags, payload)
        )
        self._next_seq += 1
        return record_type

    def _write(self) -> None:
        data = b"".join(self._gathered)
        written = os.write(self._fd, data)
        while written < len(data):  # a disk that is almost full takes a part first
            written += os.write(self._fd, data[written:])
        self.num_bytes += written
        self._gathered.clear()

    def _stop(self, error: Exception) -> None:
        self.num_lost += len(self._gathered)
        self._gathered.clear()
        self.stopped = f"the trace log {self.path} ends here: {error}"
        with contextlib.suppress(OSError):
            os.close(self._fd)
        self._on_stop(self.stopped)


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


def _point_newest_at(path: Path) -> None:
    """Replaces the link in one step; never replaces a file that somebody put there."""
    link = path.parent / NEWEST
    if link.exists() and not link.is_symlink():
        raise FileExistsError(0, f"{link} is not a symbolic link")
    made = path.with_suffix(".link")
    made.symlink_to(path.name)
    made.replace(link)
