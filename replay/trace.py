"""Reads a trace log: typed records in order, and how the file ends.

Owns the mapping of the file and the rules that need more than one record (one header first, one end
last, counts that agree). Streams: one record is in memory at a time, never the whole log. Never
executes anything that a file names. Called by `cli.py`, `verify.py` and tests.
"""

import mmap
import os
import stat
from collections.abc import Generator, Iterator
from pathlib import Path

import msgspec

from cearx.core.events import Decision, Event
from cearx.core.trace_format import (
    HEADER_BYTES,
    Data,
    Frame,
    RecordType,
    SegmentHeader,
    TraceDamaged,
    TraceIncompatible,
    decode_frame,
    decode_header,
    frames,
    salt_crc,
)
from cearx.core.trace_records import StepNote, TraceEnd, TraceHeader, decode_record

NEWEST = "trace.log"
"""What a folder stands for: the link to its newest trace."""


def _open(path: str, flags: int) -> int:
    """Without waiting for the writer of a named pipe, which is no regular file anyway."""
    return os.open(path, flags | os.O_NONBLOCK)


class TraceRecord(msgspec.Struct, frozen=True):
    """One record of a run, between the header and the end."""

    offset: int
    """Of its first byte in the file."""
    seq: int
    value: Event | Decision | StepNote


class Trace:
    """A segment's records; `ended` and `torn_at` are known once `records` is used up."""

    def __init__(self, data: Data) -> None:
        """Reads the two headers; raises TraceDamaged or TraceIncompatible."""
        self._data = data
        self.segment: SegmentHeader = decode_header(data)
        if self.segment.segment != 0:
            raise TraceIncompatible(
                f"segment {self.segment.segment} begins within a run; this version reads segment 0"
            )
        first = decode_frame(data, HEADER_BYTES, salt_crc(self.segment.salt))
        if first is None:
            raise TraceDamaged(HEADER_BYTES, "the record with the run's configuration is not whole")
        header = decode_record(first)
        if not isinstance(header, TraceHeader):
            raise TraceDamaged(HEADER_BYTES, f"the first record is a {type(header).__name__}")
        self.header: TraceHeader = header
        self.ended = False
        """Whether the writer closed the log in good order."""
        self.torn_at: int | None = None
        """Offset of a last record that is not whole, if there is one."""

    @classmethod
    def open(cls, path: Path) -> "Trace":
        """Maps a file, or the newest of a folder; raises OSError and as the constructor does."""
        with open(path / NEWEST if path.is_dir() else path, "rb", opener=_open) as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise TraceDamaged(0, "not a regular file")
            if status.st_size == 0:
                return cls(b"")
            return cls(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))

    @property
    def num_bytes(self) -> int:
        return len(self._data)

    def records(self) -> Iterator[TraceRecord]:
        """All records behind the header, from the start; raises as the constructor does."""
        counts = dict.fromkeys(("events", "decisions", "notes"), 0)
        self.ended = False
        source = self._frames()
        next(source)  # the header
        for frame in source:
            if self.ended:
                raise TraceDamaged(frame.offset, "a record stands behind the end")
            value = decode_record(frame)
            if isinstance(value, TraceHeader):
                raise TraceDamaged(frame.offset, "a second header")
            if isinstance(value, TraceEnd):
                if msgspec.structs.astuple(value) != tuple(counts.values()):
                    raise TraceDamaged(frame.offset, f"{value} stands behind {counts}")
                self.ended = True
                continue
            counts[_class_of(frame)] += 1
            yield TraceRecord(frame.offset, frame.seq, value)
        if self.ended and self.torn_at is not None:
            raise TraceDamaged(self.torn_at, "bytes stand behind the end")

    def _frames(self) -> Generator[Frame, None, None]:
        self.torn_at = None
        self.torn_at = yield from frames(self._data, self.segment)


def _class_of(frame: Frame) -> str:
    if frame.type < RecordType.STEP_PLAN:
        return "events"
    return "decisions" if frame.type < RecordType.HEADER else "notes"
