"""Reads a trace log: typed records in order over all its segments, and how it ends.

Owns the mapping of the files and the rules that need more than one record (one header first, one
end last, counts that agree, segments that follow each other). Streams: one record is in memory at a
time, never the whole log. Never executes anything that a file names. Called by `cli.py`,
`verify.py` and tests.
"""

import contextlib
import mmap
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path

import msgspec

from cearx.core.events import Decision, Event
from cearx.core.trace_batch import split
from cearx.core.trace_format import (
    HEADER_BYTES,
    Data,
    Frame,
    RecordType,
    SegmentHeader,
    TraceDamaged,
    frames,
)
from cearx.core.trace_records import (
    RecordDecoder,
    StepNote,
    TraceEnd,
    TraceGap,
    TraceHeader,
    TraceSnapshot,
)
from cearx.replay.segments import CutShort, Segment, SegmentStart, find, map_files, read_start


class TraceRecord(msgspec.Struct, frozen=True):
    """One record of a run, between the header and the end.

    A snapshot stands at the start of every segment after the run's first, behind a gap if there
    is one: a reader that comes from the segment before has that state already, all others start
    from it.
    """

    offset: int
    """Of the first byte of its frame in its segment."""
    seq: int
    value: Event | Decision | StepNote | TraceSnapshot | TraceGap
    segment: int = 0
    """Number of the file in its run."""


class Trace:
    """A run's records; `ended`, `torn_at` and `gaps` are known once `records` is used up."""

    def __init__(self, data: Data | Sequence[Segment]) -> None:
        """Takes one file's bytes, or segments in order, and reads the headers of the first.

        Raises TraceDamaged or TraceIncompatible.
        """
        self._segments = [Segment(data)] if isinstance(data, bytes | mmap.mmap) else list(data)
        self.ended = False
        """Whether the writer closed the log in good order."""
        self.torn_at: int | None = None
        """Offset in the last segment of a record that is not whole, if there is one."""
        self.gaps: list[TraceGap] = []
        """Where records are missing."""
        self.num_bytes = len(self._segments[-1].data)
        """Of the last segment."""
        start = self._start(0)
        self.segment: SegmentHeader = start.header
        self.header: TraceHeader = start.trace_header

    @classmethod
    def open(cls, path: Path) -> "Trace":
        """Maps what `path` stands for; raises OSError and as the constructor does.

        A folder, or its `trace.log`: all segments of the newest run. A segment: it and those of
        its run that follow. Another file: itself.
        """
        return cls(map_files(find(path)))

    @property
    def num_bytes_in_all(self) -> int:
        return sum(len(segment.data) for segment in self._segments)

    @property
    def num_segments(self) -> int:
        return len(self._segments)

    def records(self) -> Iterator[TraceRecord]:
        """All records behind the header, from the start; raises as the constructor does."""
        self.ended, self.torn_at = False, None
        self.gaps = []
        before: _SegmentReader | None = None
        for index, segment in enumerate(self._segments):
            try:
                self._require_number(index)
                try:
                    start = self._start(index)
                except CutShort:
                    if index and self._may_be_cut(index):
                        self.ended, self.torn_at = False, 0
                        continue  # the writer was stopped while it began this file
                    raise
                if before is not None:
                    self._require_successor(before, start)
                if start.gap is not None:
                    self.gaps.append(start.gap)
                before = _SegmentReader(segment.data, start.header)
                yield from before.records()
                self.ended, self.torn_at = before.ended, before.torn_at
                if before.torn_at is not None and not self._may_be_cut(index):
                    raise TraceDamaged(before.torn_at, "cut short, and another segment follows")
                if before.ended and not self._may_be_cut(index):
                    raise TraceDamaged(len(segment.data), "a segment stands behind the end")
            except TraceDamaged as error:
                error.path = segment.path
                raise

    def notes(self) -> Iterator[str]:
        """What a person who reads the records should know of those that are not there."""
        if self.segment.segment > 0:
            yield f"the log begins within the run, with segment {self.segment.segment}"
        for gap in self.gaps:
            yield (
                f"records {gap.first_lost} to {gap.end_lost - 1} are lost ({gap.reason.name});"
                " what follows begins from the snapshot behind them"
            )

    def start_of(self, number: int) -> SegmentStart:
        """How the segment of that number begins, which a record was read from."""
        for index in range(len(self._segments)):
            with contextlib.suppress(CutShort):
                start = self._start(index)
                if start.header.segment == number:
                    return start
        raise AssertionError(f"no record is of segment {number}")

    def _start(self, index: int) -> SegmentStart:
        segment = self._segments[index]
        try:
            return read_start(segment.data)
        except TraceDamaged as error:
            error.path = segment.path
            raise

    def _may_be_cut(self, index: int) -> bool:
        """Whether nothing follows a segment but what says that records are missing."""
        for later in range(index + 1, len(self._segments)):
            try:
                return self._start(later).gap is not None
            except CutShort:
                continue
            except TraceDamaged:
                return False
        return True

    def _require_number(self, index: int) -> None:
        """Files of one run have numbers without holes."""
        number = self._segments[index].number
        before = self._segments[index - 1].number if index else None
        if number is not None and before is not None and number != before + 1:
            raise TraceDamaged(0, f"segment {before + 1} is missing before segment {number}")

    def _require_successor(self, before: "_SegmentReader", start: SegmentStart) -> None:
        header, gap, last_seq = start.header, start.gap, before.last_seq
        if header.boot_id != self.segment.boot_id:
            raise TraceDamaged(0, "a segment of another run")
        if header.segment <= before.header.segment:
            raise TraceDamaged(
                0, f"segment {header.segment} stands behind segment {before.header.segment}"
            )
        if start.trace_header.config_sha256 != self.header.config_sha256:
            raise TraceDamaged(HEADER_BYTES, "a configuration that the run did not begin with")
        if gap is None:
            if (header.prev_last_seq, header.first_seq) != (last_seq, last_seq + 1):
                raise TraceDamaged(
                    0,
                    f"begins with record {header.first_seq} behind {header.prev_last_seq},"
                    f" the segment before ends with {last_seq}",
                )
        elif not (
            gap.first_lost <= last_seq + 1
            and header.prev_last_seq == max(0, gap.first_lost - 1)
            and gap.end_lost == header.first_seq
        ):
            raise TraceDamaged(0, f"{gap} stands behind record {last_seq}")


class _SegmentReader:
    """The records of one segment, behind its header."""

    def __init__(self, data: Data, header: SegmentHeader) -> None:
        self.header = header
        self.ended = False
        self.torn_at: int | None = None
        self.last_seq = header.first_seq
        self._data = data

    def records(self) -> Iterator[TraceRecord]:
        decode = RecordDecoder().decode
        number = self.header.segment
        counts = [0, 0, 0]
        source = self._frames()
        next(source)  # the header
        for frame in (record for batch in source for record in split(batch)):
            if self.ended:
                raise TraceDamaged(frame.offset, "a record stands behind the end")
            value = decode(frame)
            self.last_seq = frame.seq
            if frame.type < RecordType.STEP_PLAN:
                counts[0] += 1
            elif frame.type < RecordType.HEADER:
                counts[1] += 1
            elif frame.type == RecordType.NOTE:
                counts[2] += 1
            elif self._is_end(frame, value, counts):
                continue
            yield TraceRecord(frame.offset, frame.seq, value, number)  # type: ignore[arg-type]
        if self.ended and self.torn_at is not None:
            raise TraceDamaged(self.torn_at, "bytes stand behind the end")

    def _is_end(self, frame: Frame, value: object, counts: list[int]) -> bool:
        """Whether a record of the writer's own is the end; raises TraceDamaged out of place."""
        if isinstance(value, TraceEnd):
            if [value.num_events, value.num_decisions, value.num_notes] != counts:
                found = dict(zip(("events", "decisions", "notes"), counts, strict=True))
                raise TraceDamaged(frame.offset, f"{value} stands behind {found}")
            self.ended = True
            return True
        if isinstance(value, TraceHeader):
            raise TraceDamaged(frame.offset, "a second header")
        place = frame.seq - self.header.first_seq
        last_place = 2 if isinstance(value, TraceSnapshot) else 1
        if self.header.segment == 0 or place > last_place:
            raise TraceDamaged(frame.offset, f"a {type(value).__name__} within a segment")
        return False

    def _frames(self) -> Generator[Frame, None, None]:
        self.torn_at = yield from frames(self._data, self.header)
