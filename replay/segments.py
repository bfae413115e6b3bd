"""The files of a trace log that a path stands for, and how each of them begins.

Owns which segments belong to a run, and what a segment must hold before its first event. Called by
`trace.py` only.
"""

import mmap
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path

import msgspec

from cearx.core.trace_folder import NEWEST, find_segments, parse_path
from cearx.core.trace_format import (
    HEADER_BYTES,
    Data,
    Frame,
    RecordType,
    SegmentHeader,
    TraceDamaged,
    decode_header,
    frames,
)
from cearx.core.trace_records import TraceGap, TraceHeader, decode_record

_NOT_ZERO = re.compile(rb"[^\x00]")


class CutShort(TraceDamaged):
    """The file ends before what every segment begins with: its writer may have been killed."""


class Segment(msgspec.Struct, frozen=True):
    """One file's bytes."""

    data: Data
    path: Path | None = None
    number: int | None = None
    """As its name says."""


class SegmentStart(msgspec.Struct, frozen=True):
    """What stands before a segment's first event, its snapshot left out."""

    header: SegmentHeader
    trace_header: TraceHeader
    gap: TraceGap | None


def find(path: Path) -> list[Path]:
    """The files that `path` stands for, in order; raises OSError."""
    is_whole_run = path.is_dir() or (path.name == NEWEST and path.is_symlink())
    if path.is_dir():
        path = _newest_of(path)
    elif is_whole_run:
        path = path.parent / os.readlink(path)
    first = parse_path(path)
    if first is None or not path.exists():
        return [path]
    run = find_segments(path.parent, first.boot)
    return [s.path for s in run if is_whole_run or s.number >= first.number]


def _newest_of(folder: Path) -> Path:
    """The segment that `trace.log` points at; without one, the last of the only run."""
    link = folder / NEWEST
    if link.is_symlink():
        return folder / os.readlink(link)
    segments = find_segments(folder)
    if link.exists() or len({segment.boot for segment in segments}) != 1:
        return link
    return segments[-1].path


def map_files(paths: list[Path]) -> list[Segment]:
    """Maps a run's files; the ring of a live server may have deleted the first ones meanwhile."""
    segments: list[Segment] = []
    for path in paths:
        try:
            segments.append(_map_file(path))
        except FileNotFoundError:
            if segments or path == paths[-1]:
                raise
        except TraceDamaged as error:
            error.path = path
            raise
    return segments


def _open(path: str, flags: int) -> int:
    """Without waiting for the writer of a named pipe, which is no regular file anyway."""
    return os.open(path, flags | os.O_NONBLOCK)


def _map_file(path: Path) -> Segment:
    with open(path, "rb", opener=_open) as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise TraceDamaged(0, "not a regular file")
        name = parse_path(path)
        data: Data = b""
        if status.st_size:
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        return Segment(data, path, name.number if name else None)


def read_start(data: Data) -> SegmentStart:
    """Reads what every segment begins with; raises TraceDamaged, CutShort, TraceIncompatible.

    A segment after a run's first must hold the state that it starts from.
    """
    if len(data) < HEADER_BYTES:
        raise CutShort(0, f"{len(data)} bytes, a segment header has {HEADER_BYTES}")
    if _NOT_ZERO.search(data) is None:
        raise CutShort(0, f"{len(data)} bytes that are all zero")
    header = decode_header(data)
    source = frames(data, header)
    frame = next(source, None)
    if frame is None:
        raise CutShort(HEADER_BYTES, "the record with the run's configuration is not whole")
    trace_header = decode_record(frame)
    if not isinstance(trace_header, TraceHeader):
        name = type(trace_header).__name__
        raise TraceDamaged(HEADER_BYTES, f"the first record is a {name}")
    if header.segment == 0:
        return SegmentStart(header, trace_header, None)
    gap = None
    frame = _next_of_start(source, frame)
    if frame.type == RecordType.GAP:
        record = decode_record(frame)
        assert isinstance(record, TraceGap), f"a {type(record)} from a gap's decoder"
        gap = record
        frame = _next_of_start(source, frame)
    if frame.type != RecordType.SNAPSHOT:
        raise TraceDamaged(frame.offset, "a segment within a run that does not start from a state")
    return SegmentStart(header, trace_header, gap)


def _next_of_start(source: Iterator[Frame], before: Frame) -> Frame:
    frame = next(source, None)
    if frame is None:
        raise CutShort(before.end, "the state that the segment starts from is not whole")
    return frame
