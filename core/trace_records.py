"""What the records of a trace log hold, and how each becomes the payload of a frame.

Owns the schema: the header with versions and configuration, events and decisions as `events.py`
has them, notes and the end. A payload is msgpack of the array-like struct; only a plan's decodes
have a short form. Never reads or writes files; called by `trace_writer.py` and `replay/trace.py`.
"""

import hashlib

import msgspec

from cearx.core.config import SchedulerConfig
from cearx.core.events import (
    CancelRequested,
    ClockAdvanced,
    Decision,
    Event,
    PrefixCacheReset,
    RequestArrived,
    RequestEnded,
    RequestRefused,
    StepFinished,
    StepPlan,
)
from cearx.core.identifiers import RequestId
from cearx.core.trace_format import COMPACT, Frame, RecordType, TraceIncompatible

SCHEMA_VERSION = 2
"""Changes with every change to the fields of a record; a test holds the two together."""
MAX_COMPACT_DECODES = 65536
"""Most decodes that the short form may stand for, so that a few bytes cannot fill the memory."""


class TraceHeader(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """Who wrote the trace, and all that a fresh scheduler needs to repeat it."""

    schema_version: int
    """First, and an integer, in every schema."""
    code_version: str
    """Of the cearx package."""
    scheduler_sha256: str
    """Over the source of the pure scheduler (`scheduler_source.py`)."""
    config: SchedulerConfig
    config_sha256: str
    """`config_sha256(config)`."""
    python_version: str
    msgspec_version: str
    wall_ns: int
    """Nanoseconds since 1970 at the moment `monotonic_ns` was read."""
    monotonic_ns: int
    """The clock that `ClockAdvanced` shows, in nanoseconds."""


class StepNote(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """Times of the step that finished last, for a person; the scheduler never sees them."""

    execute_us: int
    """In the worker."""
    schedule_us: int
    """In the core: plan it, log it, make its message."""


class TraceEnd(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """How many records of each class stand before it."""

    num_events: int
    num_decisions: int
    num_notes: int


Record = TraceHeader | Event | Decision | StepNote | TraceEnd

RECORD_TYPES: dict[type[Record], RecordType] = {
    RequestArrived: RecordType.REQUEST_ARRIVED,
    CancelRequested: RecordType.CANCEL_REQUESTED,
    StepFinished: RecordType.STEP_FINISHED,
    ClockAdvanced: RecordType.CLOCK_ADVANCED,
    PrefixCacheReset: RecordType.PREFIX_CACHE_RESET,
    StepPlan: RecordType.STEP_PLAN,
    RequestEnded: RecordType.REQUEST_ENDED,
    RequestRefused: RecordType.REQUEST_REFUSED,
    TraceHeader: RecordType.HEADER,
    StepNote: RecordType.NOTE,
    TraceEnd: RecordType.END,
}

_encode = msgspec.msgpack.Encoder().encode
_DECODERS: dict[int, msgspec.msgpack.Decoder[Record]] = {
    record_type: msgspec.msgpack.Decoder(struct) for struct, record_type in RECORD_TYPES.items()
}


class _AnySchema(msgspec.Struct, array_like=True):
    schema_version: int


def config_sha256(config: SchedulerConfig) -> str:
    """Identifies a configuration whatever the order of its fields."""
    return hashlib.sha256(msgspec.json.encode(config, order="sorted")).hexdigest()


def encode_record(record: Record) -> tuple[int, int, bytes]:
    """The type, the flags and the payload of a record's frame."""
    if type(record) is StepPlan:
        short = compact_decodes(record.decodes)
        if short is not None:
            plan = StepPlan(
                step_id=record.step_id,
                decodes=short,
                chunks=record.chunks,
                granted=record.granted,
                admitted=record.admitted,
                preempted=record.preempted,
                waits=record.waits,
                margin_blocks=record.margin_blocks,
            )
            return RecordType.STEP_PLAN, COMPACT, _encode(plan)
    return RECORD_TYPES[type(record)], 0, _encode(record)


def decode_record(frame: Frame) -> Record:
    """The inverse of `encode_record`; raises TraceIncompatible for whatever does not decode."""
    decoder = _DECODERS.get(frame.type)
    is_short = frame.flags == COMPACT and frame.type == RecordType.STEP_PLAN
    try:
        if decoder is None or (frame.flags and not is_short):
            raise ValueError("unknown type or flags")
        if frame.type == RecordType.HEADER:
            _require_schema(frame.payload)
        record = decoder.decode(frame.payload)
        if is_short:
            assert isinstance(record, StepPlan), f"a {type(record)} from a step plan's decoder"
            record = msgspec.structs.replace(record, decodes=expand_decodes(record.decodes))
        if isinstance(record, TraceHeader) and record.config_sha256 != config_sha256(record.config):
            raise ValueError("the configuration is not the one whose hash stands beside it")
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise TraceIncompatible(
            f"record {frame.seq} at offset {frame.offset}, type {frame.type}: {error}"
        ) from None
    return record


def _require_schema(payload: bytes) -> None:
    found = msgspec.msgpack.decode(payload, type=_AnySchema).schema_version
    if found != SCHEMA_VERSION:
        raise ValueError(f"schema {found}, this version reads schema {SCHEMA_VERSION}")


def compact_decodes(decodes: tuple[RequestId, ...]) -> tuple[RequestId, ...] | None:
    """Rising request ids in few small integers, or None where that is not possible.

    The first integer is the first id. Behind it a negative one, -n, stands for the n ids that
    follow; another one, g, for the id behind 1 + g left out. (7, 8, 9, 12, 13) is (7, -2, 1, -1).
    """
    if not 2 <= len(decodes) <= MAX_COMPACT_DECODES:
        return None
    first, last = decodes[0], decodes[-1]
    if last - first == len(decodes) - 1 and decodes == tuple(range(first, last + 1)):
        return (first, RequestId(first - last))
    short: list[int] = [first]
    expected = first + 1
    run = 0
    for request_id in decodes[1:]:
        gap = request_id - expected
        if gap == 0:
            run += 1
        elif gap > 0:
            if run:
                short.append(-run)
                run = 0
            short.append(gap - 1)
        else:
            return None
        expected = request_id + 1
    if run:
        short.append(-run)
    return tuple(short)  # type: ignore[arg-type]


def expand_decodes(short: tuple[RequestId, ...]) -> tuple[RequestId, ...]:
    """The inverse of `compact_decodes`; raises ValueError over MAX_COMPACT_DECODES."""
    decodes: list[int] = list(short[:1])
    for step in short[1:]:
        expected = decodes[-1] + 1
        if step >= 0:
            decodes.append(expected + 1 + step)
        elif len(decodes) - step <= MAX_COMPACT_DECODES:
            decodes.extend(range(expected, expected - step))
        else:
            count = len(decodes) - step
            raise ValueError(f"a plan of {count} decodes, the limit is {MAX_COMPACT_DECODES}")
    return tuple(decodes)  # type: ignore[arg-type]
