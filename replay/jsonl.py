"""`cearx replay export --jsonl`: every record as one JSON object, and the way back.

Owns the mapping: sorted keys, names for fields, integers for codes, hexadecimal for bytes. `frame`
is the number of the first record in the same frame. The way back gives the same bytes as the log,
except for a last frame that is not whole.
"""

import json
import types
import typing
from collections.abc import Iterable, Iterator
from enum import IntEnum
from typing import Any, Union, get_args, get_origin, get_type_hints

import msgspec

from cearx.core.trace_format import RecordType, SegmentHeader
from cearx.core.trace_records import RECORD_TYPES, TraceEnd
from cearx.core.trace_segment import SegmentEncoder
from cearx.replay.trace import Trace

SEGMENT = "SegmentHeader"
_NAMES: dict[str, type] = {record.__name__: record for record in RECORD_TYPES}


class JsonlError(Exception):
    """The message names the line and what is wrong with it."""


def export(trace: Trace) -> Iterator[str]:
    """One line a record, each segment's header first."""
    segment, counts = trace.segment.segment, _no_records()
    yield from _start(trace, segment)
    seq = frame = trace.segment.first_seq
    offset = 0
    for record in trace.records():
        if record.segment != segment:
            offset = 0
            segment, counts = record.segment, _no_records()
            yield from _start(trace, segment)
        seq = record.seq
        if record.offset != offset:
            offset, frame = record.offset, seq
        kind = _count_of(type(record.value))
        if kind is not None:
            counts[kind] += 1
        yield _line(type(record.value).__name__, record.value, seq, frame)
    if trace.ended:
        yield _line(TraceEnd.__name__, TraceEnd(**counts), seq + 1, seq + 1)


def _start(trace: Trace, segment: int) -> Iterator[str]:
    start = trace.start_of(segment)
    yield _line(SEGMENT, start.header)
    seq = start.header.first_seq
    yield _line(type(start.trace_header).__name__, start.trace_header, seq, seq)


def _no_records() -> dict[str, int]:
    return dict.fromkeys(("num_events", "num_decisions", "num_notes"), 0)


def _count_of(record: type) -> str | None:
    """Where the end of a segment counts a record."""
    number = RECORD_TYPES[record]
    if number < RecordType.STEP_PLAN:
        return "num_events"
    if number < RecordType.HEADER:
        return "num_decisions"
    return "num_notes" if number == RecordType.NOTE else None


def _line(name: str, value: msgspec.Struct, seq: int | None = None, frame: int = 0) -> str:
    fields = _plain(value)
    assert isinstance(fields, dict), f"{name} is no struct"
    fields["t"] = name
    if seq is not None:
        fields |= {"seq": seq, "frame": frame}
    return json.dumps(fields, sort_keys=True, separators=(",", ":"))


def _plain(value: object) -> object:
    if isinstance(value, msgspec.Struct):
        return {name: _plain(getattr(value, name)) for name in value.__struct_fields__}
    if isinstance(value, tuple | list):
        return [_plain(element) for element in value]
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, IntEnum):
        return int(value)
    return value


def rebuild(lines: Iterable[str]) -> Iterator[bytes]:
    """The log's bytes, a piece a frame; raises JsonlError."""
    segment: SegmentEncoder | None = None
    for number, text in enumerate(lines, 1):
        try:
            fields = msgspec.json.decode(text)
            if not isinstance(fields, dict):
                raise ValueError("not an object")
            name = fields.pop("t", None)
            if segment is None:
                if name != SEGMENT:
                    raise ValueError(f"starts with {name!r}, an export with {SEGMENT!r}")
                segment = SegmentEncoder(_struct(SegmentHeader, fields))
                yield segment.begin([])
                continue
            seq, frame = fields.pop("seq", None), fields.pop("frame", None)
            if name == SEGMENT:
                raise ValueError("a second segment, and a file holds one")
            if name not in _NAMES:
                raise ValueError(f"{name!r} number {seq!r} is no record")
            if seq != segment.next_seq:
                raise ValueError(f"record {seq!r} stands where record {segment.next_seq} belongs")
            if frame == seq:
                yield segment.take()
            segment.add(_struct(_NAMES[name], fields))
        except (ValueError, TypeError, KeyError, msgspec.MsgspecError, OverflowError) as error:
            raise JsonlError(f"line {number}: {error}") from None
        except Exception as error:  # struct.error of a number that is too large for its field
            raise JsonlError(f"line {number}: {type(error).__name__}: {error}") from None
    if segment is not None:
        yield segment.take()


def _struct(wanted: Any, fields: object) -> Any:
    if not isinstance(fields, dict):
        raise ValueError(f"{fields!r} is no {wanted.__name__}")
    hints = get_type_hints(wanted)
    if fields.keys() != set(wanted.__struct_fields__):
        raise ValueError(f"{wanted.__name__} has the fields {', '.join(wanted.__struct_fields__)}")
    return wanted(**{name: _value(hints[name], value) for name, value in fields.items()})


def _value(wanted: Any, value: object) -> object:
    """The inverse of `_plain` for a value of an annotated type."""
    wanted = getattr(wanted, "__supertype__", wanted)
    origin = get_origin(wanted)
    if origin in (Union, types.UnionType):
        if value is None and type(None) in get_args(wanted):
            return None
        (wanted,) = (a for a in get_args(wanted) if a is not type(None))
        return _value(wanted, value)
    if origin is tuple:
        if not isinstance(value, list):
            raise ValueError(f"{value!r} is no list")
        return tuple(_value(typing.get_args(wanted)[0], element) for element in value)
    if isinstance(wanted, type) and issubclass(wanted, msgspec.Struct):
        return _struct(wanted, value)
    if wanted is bytes:
        return bytes.fromhex(msgspec.convert(value, str))
    return msgspec.convert(value, wanted)
