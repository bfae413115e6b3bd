"""`cearx replay export --jsonl`: every record as one JSON object, and the way back.

Owns the mapping: sorted keys, names for fields, integers for codes, hexadecimal for bytes. The way
back gives the same bytes as the log, except for a last record that is not whole.
"""

import json
import types
import typing
from collections.abc import Iterable, Iterator
from enum import IntEnum
from typing import Any, Union, get_args, get_origin, get_type_hints

import msgspec

from cearx.core.trace_format import (
    RecordType,
    SegmentHeader,
    encode_frame,
    encode_header,
    salt_crc,
)
from cearx.core.trace_records import RECORD_TYPES, Record, RecordEncoder, TraceEnd
from cearx.replay.trace import Trace

SEGMENT = "SegmentHeader"
_NAMES: dict[str, type] = {record.__name__: record for record in RECORD_TYPES}


class JsonlError(Exception):
    """The message names the line and what is wrong with it."""


def export(trace: Trace) -> Iterator[str]:
    """One line a record, each segment's header first."""
    segment, counts = trace.segment.segment, _no_records()
    yield from _start(trace, segment)
    seq = trace.segment.first_seq
    for record in trace.records():
        if record.segment != segment:
            segment, counts = record.segment, _no_records()
            yield from _start(trace, segment)
        seq = record.seq
        kind = _count_of(type(record.value))
        if kind is not None:
            counts[kind] += 1
        yield _line(type(record.value).__name__, record.value, seq)
    if trace.ended:
        yield _line(TraceEnd.__name__, TraceEnd(**counts), seq + 1)


def _start(trace: Trace, segment: int) -> Iterator[str]:
    start = trace.start_of(segment)
    yield _line(SEGMENT, start.header, None)
    yield _line(type(start.trace_header).__name__, start.trace_header, start.header.first_seq)


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


def _line(name: str, value: msgspec.Struct, seq: int | None) -> str:
    fields = _plain(value)
    assert isinstance(fields, dict), f"{name} is no struct"
    fields["t"] = name
    if seq is not None:
        fields["seq"] = seq
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
    """The log's bytes, a piece a line; raises JsonlError."""
    salted, encoder = None, RecordEncoder()
    for number, text in enumerate(lines, 1):
        try:
            fields = msgspec.json.decode(text)
            if not isinstance(fields, dict):
                raise ValueError("not an object")
            name, seq = fields.pop("t", None), fields.pop("seq", None)
            if salted is None:
                if name != SEGMENT:
                    raise ValueError(f"starts with {name!r}, an export with {SEGMENT!r}")
                header = _struct(SegmentHeader, fields)
                salted = salt_crc(header.salt)
                yield encode_header(header)
                continue
            if name == SEGMENT:
                raise ValueError("a second segment, and a file holds one")
            if name not in _NAMES or not isinstance(seq, int):
                raise ValueError(f"{name!r} number {seq!r} is no record")
            record: Record = _struct(_NAMES[name], fields)
            record_type, flags, payload = encoder.encode(record)
            yield encode_frame(salted, seq, record_type, flags, payload)
        except (ValueError, TypeError, KeyError, msgspec.MsgspecError, OverflowError) as error:
            raise JsonlError(f"line {number}: {error}") from None
        except Exception as error:  # struct.error of a number that is too large for its field
            raise JsonlError(f"line {number}: {type(error).__name__}: {error}") from None


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
