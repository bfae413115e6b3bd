"""What the records of a trace log hold, and how each becomes the payload of a frame.

Owns the schema: the header with versions and configuration, events and decisions as `events.py`
has them, notes, snapshots, gaps and the end. A payload is msgpack of the array-like struct; decodes
of a plan and hashes of blocks have short forms. Never reads or writes files; called by
`trace_segment.py` and `replay/trace.py`.
"""

import hashlib
from enum import IntEnum

import msgspec

from cearx.core.config import SchedulerConfig
from cearx.core.events import (
    CancelRequested,
    ClockAdvanced,
    Decision,
    Event,
    PrefixCacheEmptied,
    PrefixCacheReset,
    RequestArrived,
    RequestEnded,
    RequestRefused,
    StepFinished,
    StepPlan,
)
from cearx.core.identifiers import RequestId
from cearx.core.trace_decodes import (
    change_of_decodes,
    changed_decodes,
    compact_decodes,
    expand_decodes,
)
from cearx.core.trace_format import CHANGED, COMPACT, Frame, RecordType, TraceIncompatible
from cearx.core.trace_hashes import Short, ShortArrival, ShortFinish, expand, shorten

SCHEMA_VERSION = 5
"""Changes with every change to the fields of a record; a test holds the two together."""


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
    """Times of the step that finished last, for a person; the scheduler never sees them.

    In the order in which they pass; 0 for what was not measured.
    """

    execute_us: int
    """In the worker, by its clock, from the launch or the end of the step before."""
    schedule_us: int
    """In the core: plan it, make its message."""
    log_us: int = 0
    """Write the log, before the step leaves."""
    receive_us: int = 0
    """Until the worker had it."""
    launch_us: int = 0
    """In the worker: bring its inputs to the device and enqueue it."""
    device_us: int = 0
    """Of the model, by the device's own clock; on the CPU by the wall clock."""
    transfer_us: int = 0
    """Of the tokens, to the host."""
    result_us: int = 0
    """From the worker's sight of them to the core's."""
    turn_us: int = 0
    """From the core and back to it, all in all, the wait for the step before included."""
    apply_us: int = 0
    """In the core: take the result in."""
    deliver_us: int = 0
    """Behind that, until the tokens had left to the frontends: only where a prompt's first token
    may be among them, for others leave behind the next plan."""


NUM_NOTED_MIN = 2
"""Fields of a note without a default."""


class TraceEnd(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """How many records of each class stand before it in its segment."""

    num_events: int
    num_decisions: int
    num_notes: int


class TraceSnapshot(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """The scheduler between the record before and the record behind it."""

    state: bytes
    """`Scheduler.snapshot()`; read by `Scheduler.restore`."""


class GapReason(IntEnum):
    """Why records are lost."""

    WRITE_FAILED = 0
    """The disk was full or failed."""
    QUEUE_FULL = 1
    """The disk was too slow for longer than memory could hold records."""
    RECORD_TOO_LARGE = 2


class TraceGap(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """Records [first_lost, end_lost) are not in the log."""

    reason: GapReason
    first_lost: int
    end_lost: int


Record = TraceHeader | Event | Decision | StepNote | TraceEnd | TraceSnapshot | TraceGap

RECORD_TYPES: dict[type[Record], RecordType] = {
    RequestArrived: RecordType.REQUEST_ARRIVED,
    CancelRequested: RecordType.CANCEL_REQUESTED,
    StepFinished: RecordType.STEP_FINISHED,
    ClockAdvanced: RecordType.CLOCK_ADVANCED,
    PrefixCacheReset: RecordType.PREFIX_CACHE_RESET,
    StepPlan: RecordType.STEP_PLAN,
    RequestEnded: RecordType.REQUEST_ENDED,
    RequestRefused: RecordType.REQUEST_REFUSED,
    PrefixCacheEmptied: RecordType.PREFIX_CACHE_EMPTIED,
    TraceHeader: RecordType.HEADER,
    StepNote: RecordType.NOTE,
    TraceEnd: RecordType.END,
    TraceSnapshot: RecordType.SNAPSHOT,
    TraceGap: RecordType.GAP,
}

_encode = msgspec.msgpack.Encoder().encode
_PLAN_DECODER = msgspec.msgpack.Decoder(StepPlan)
_DECODERS: dict[int, msgspec.msgpack.Decoder[Record]] = {
    record_type: msgspec.msgpack.Decoder(struct) for struct, record_type in RECORD_TYPES.items()
}

_SHORT_DECODERS: dict[int, msgspec.msgpack.Decoder[Short]] = {
    RecordType.REQUEST_ARRIVED: msgspec.msgpack.Decoder(ShortArrival),
    RecordType.STEP_FINISHED: msgspec.msgpack.Decoder(ShortFinish),
}


class _AnySchema(msgspec.Struct, array_like=True):
    schema_version: int


def config_sha256(config: SchedulerConfig) -> str:
    """Identifies a configuration whatever the order of its fields."""
    return hashlib.sha256(msgspec.json.encode(config, order="sorted")).hexdigest()


class RecordEncoder:
    """Payloads of a segment in order: a plan is told as a change from the one before."""

    def __init__(self) -> None:
        self._decodes: tuple[RequestId, ...] | None = None
        """Of the last plan since the start or a snapshot."""

    def encode(self, record: Record) -> tuple[int, int, bytes]:
        """The type, the flags and the payload of the next record's frame."""
        if type(record) is StepPlan:
            before, self._decodes = self._decodes, record.decodes
            change = None if before is None else change_of_decodes(before, record.decodes)
            if change is not None:
                return RecordType.STEP_PLAN, CHANGED, _encode_plan(record, change)
        elif type(record) is TraceSnapshot:
            self._decodes = None
        return encode_record(record)


class RecordDecoder:
    """The inverse of `RecordEncoder`."""

    def __init__(self) -> None:
        self._decodes: tuple[RequestId, ...] | None = None

    def decode(self, frame: Frame) -> Record:
        """The next record; raises TraceIncompatible for whatever does not decode."""
        if frame.type != RecordType.STEP_PLAN:
            if frame.type == RecordType.SNAPSHOT:
                self._decodes = None
            return decode_record(frame)
        if frame.flags != CHANGED:
            plan = decode_record(frame)
        else:
            try:
                if self._decodes is None:
                    raise ValueError("a change of decodes, and no plan before it")
                plan = _PLAN_DECODER.decode(frame.payload)
                decodes = changed_decodes(self._decodes, plan.decodes)
                plan = msgspec.structs.replace(plan, decodes=decodes)
            except (msgspec.DecodeError, ValueError) as error:
                raise _incompatible(frame, error) from None
        assert isinstance(plan, StepPlan), f"a {type(plan)} from a step plan's decoder"
        self._decodes = plan.decodes
        return plan


def _encode_plan(plan: StepPlan, decodes: tuple[int, ...]) -> bytes:
    return _encode(msgspec.structs.replace(plan, decodes=decodes))


def _encode_note(note: StepNote) -> bytes:
    """Without the last ones of its times that were not measured: decoding puts them back."""
    if note.apply_us:  # a live core measures all of them
        return _encode(note)
    times = msgspec.structs.astuple(note)
    end = len(times)
    while end > NUM_NOTED_MIN and not times[end - 1]:
        end -= 1
    return _encode(times[:end])


def encode_record(record: Record) -> tuple[int, int, bytes]:
    """The type, the flags and the payload of a record that refers to no other."""
    if isinstance(record, StepPlan):
        decodes = compact_decodes(record.decodes)
        if decodes is not None:
            return RecordType.STEP_PLAN, COMPACT, _encode_plan(record, decodes)
    elif isinstance(record, StepFinished | RequestArrived):
        short = shorten(record)
        if short is not None:
            return RECORD_TYPES[type(record)], COMPACT, _encode(short)
    elif isinstance(record, StepNote):
        return RecordType.NOTE, 0, _encode_note(record)
    return RECORD_TYPES[type(record)], 0, _encode(record)


def decode_record(frame: Frame) -> Record:
    """The inverse of `encode_record`; raises TraceIncompatible for whatever does not decode."""
    try:
        if frame.flags:
            return _decode_short(frame)
        decoder = _DECODERS.get(frame.type)
        if decoder is None:
            raise ValueError("unknown type")
        if frame.type == RecordType.HEADER:
            _require_schema(frame.payload)
        record = decoder.decode(frame.payload)
        if isinstance(record, TraceHeader) and record.config_sha256 != config_sha256(record.config):
            raise ValueError("the configuration is not the one whose hash stands beside it")
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise _incompatible(frame, error) from None
    return record


def _decode_short(frame: Frame) -> Record:
    if frame.flags != COMPACT:
        raise ValueError("unknown flags")
    if frame.type == RecordType.STEP_PLAN:
        plan = _PLAN_DECODER.decode(frame.payload)
        return msgspec.structs.replace(plan, decodes=expand_decodes(plan.decodes))
    decoder = _SHORT_DECODERS.get(frame.type)
    if decoder is None:
        raise ValueError("a type without a short form")
    return expand(decoder.decode(frame.payload))


def _incompatible(frame: Frame, error: Exception) -> TraceIncompatible:
    return TraceIncompatible(
        f"record {frame.seq} at offset {frame.offset}, type {frame.type}: {error}"
    )


def _require_schema(payload: bytes) -> None:
    found = msgspec.msgpack.decode(payload, type=_AnySchema).schema_version
    if found != SCHEMA_VERSION:
        raise ValueError(f"schema {found}, this version reads schema {SCHEMA_VERSION}")
