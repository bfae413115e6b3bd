"""Payloads: every record comes back equal, the schema is pinned, nothing else decodes."""

import re
from enum import IntEnum
from pathlib import Path
from typing import get_args, get_type_hints

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_run import SMALL
from trace_samples import records

from cearx.core.block_hash import DIGEST_SIZE
from cearx.core.events import Decision, Event, StepPlan
from cearx.core.trace_format import CHANGED, COMPACT, Frame, RecordType, TraceIncompatible
from cearx.core.trace_hashes import ShortArrival, ShortFinish
from cearx.core.trace_records import (
    NUM_NOTED_MIN,
    RECORD_TYPES,
    SCHEMA_VERSION,
    GapReason,
    Record,
    RecordDecoder,
    RecordEncoder,
    StepNote,
    TraceEnd,
    TraceGap,
    TraceHeader,
    TraceSnapshot,
    config_sha256,
    decode_record,
    encode_record,
)

HEADER = TraceHeader(
    schema_version=SCHEMA_VERSION,
    code_version="0.1.0",
    scheduler_sha256="ab" * 32,
    config=SMALL,
    config_sha256=config_sha256(SMALL),
    python_version="3.11.0",
    msgspec_version="0.19",
    wall_ns=1,
    monotonic_ns=2,
)


def through(record: Record) -> Record:
    return decode_record(Frame(0, 0, *encode_record(record)))


@given(records)
@settings(max_examples=300)
def test_round_trip(record: Record) -> None:
    """Events, decisions and notes come back equal and of the same type."""
    assert through(record) == record


def test_round_trip_of_what_the_writer_makes() -> None:
    """So do the records of the writer itself."""
    for record in (
        HEADER,
        TraceEnd(num_events=1, num_decisions=2**40, num_notes=0),
        TraceSnapshot(state=b"\x00" * 70_000),
        *(TraceGap(reason=reason, first_lost=3, end_lost=2**40) for reason in GapReason),
    ):
        assert through(record) == record


@given(st.lists(records | st.just(TraceSnapshot(state=b"state")), max_size=30))
@settings(max_examples=200)
def test_round_trip_in_order(sequence: list[Record]) -> None:
    """A plan that is told as a change of the one before comes back as it was."""
    encoder, decoder = RecordEncoder(), RecordDecoder()
    for record in sequence:
        assert decoder.decode(Frame(0, 0, *encoder.encode(record))) == record


def plan_of(*decodes: int) -> StepPlan:
    return StepPlan(
        step_id=0, decodes=decodes, chunks=(), granted=(), admitted=(), preempted=(), waits=()
    )


def test_an_unchanged_batch_costs_nothing_whatever_its_ids() -> None:
    """64 scattered ids, and one that leaves and one that comes, take a few bytes."""
    ids = [100_000 + 37 * i * i for i in range(64)]
    encoder = RecordEncoder()
    first = encoder.encode(plan_of(*ids))[2]
    again = encoder.encode(plan_of(*ids))[2]
    changed = encoder.encode(plan_of(*ids[:30], *ids[31:], 999_999))[2]
    assert len(first) > 128 and len(again) < 20 and len(changed) < 30
    encoder.encode(TraceSnapshot(state=b""))
    assert encoder.encode(plan_of(*ids[:30], *ids[31:], 999_999))[1] == COMPACT


@pytest.mark.parametrize("decodes", [(1, 9), (3, 0, 0), (1, -1), (-9,), (5, 1, 1)])
def test_a_change_of_nothing_known_is_refused(decodes: tuple[int, ...]) -> None:
    """A change without a plan before it, behind a snapshot, or of places that are not there."""
    payload = encode_record(plan_of())[2].replace(b"\x90", msgspec.msgpack.encode(decodes), 1)
    frame = Frame(9, 4, RecordType.STEP_PLAN, CHANGED, payload)
    decoder = RecordDecoder()
    with pytest.raises(TraceIncompatible, match="no plan before it"):
        decoder.decode(frame)
    decoder.decode(Frame(0, 0, *encode_record(plan_of(4, 7))))
    with pytest.raises(TraceIncompatible, match="record 4 at offset 9"):
        decoder.decode(frame)
    decoder.decode(Frame(0, 0, *encode_record(TraceSnapshot(state=b""))))
    with pytest.raises(TraceIncompatible, match="no plan before it"):
        decoder.decode(frame)


def test_a_note_leaves_out_what_was_not_measured() -> None:
    """Its last zeros cost nothing; one between two times comes back too."""
    bare = StepNote(execute_us=5_000, schedule_us=50)
    full = StepNote(execute_us=5_000, schedule_us=0, transfer_us=9, turn_us=9_800)
    assert len(encode_record(bare)[2]) == 5
    assert len(encode_record(full)[2]) < 20
    assert through(bare) == bare and through(full) == full
    assert sum(field.required for field in msgspec.structs.fields(StepNote)) == NUM_NOTED_MIN


def test_every_event_and_decision_has_a_record_type() -> None:
    """A new event cannot be forgotten here, and its record type is its tag."""
    for struct in get_args(Event) + get_args(Decision):
        assert RECORD_TYPES[struct] == struct.__struct_config__.tag
    assert sorted([*RECORD_TYPES.values(), RecordType.BATCH]) == sorted(RecordType)


@given(st.integers(0, 255), st.integers(0, 255), st.binary(max_size=60))
@settings(max_examples=500)
def test_random_payloads_give_one_error(record_type: int, flags: int, payload: bytes) -> None:
    """Any bytes decode to a record or raise TraceIncompatible."""
    try:
        decoder = RecordDecoder()
        decoder.decode(Frame(0, 0, *encode_record(plan_of(1, 2))))
        decoder.decode(Frame(0, 0, record_type, flags, payload))
    except TraceIncompatible:
        return
    assert record_type in RECORD_TYPES.values()


@pytest.mark.parametrize("depth", [100, 100_000])
def test_deep_nesting_is_refused(depth: int) -> None:
    """Nesting that would exhaust the stack is one more payload that does not decode."""
    for record_type in RecordType:
        with pytest.raises(TraceIncompatible):
            decode_record(Frame(0, 0, record_type, 0, b"\x91" * depth))


def test_another_schema_is_named() -> None:
    """A header of another schema is told from one that is broken, whatever else it holds."""
    payload = msgspec.msgpack.encode([SCHEMA_VERSION + 1, {"unknown": []}])
    with pytest.raises(TraceIncompatible, match=f"schema {SCHEMA_VERSION + 1}, this version reads"):
        decode_record(Frame(0, 0, RecordType.HEADER, 0, payload))


def test_a_config_that_is_not_the_hashed_one_is_refused() -> None:
    """The configuration and its hash stand for each other."""
    header = msgspec.structs.replace(HEADER, config_sha256="00" * 32)
    with pytest.raises(TraceIncompatible, match="whose hash stands beside it"):
        through(header)


def test_an_invalid_config_is_refused() -> None:
    """Limits of the configuration hold for a file as for the command line."""
    payload = msgspec.to_builtins(HEADER)
    payload[3]["num_blocks"] = 0
    with pytest.raises(TraceIncompatible, match="num_blocks must be at least 1, got 0"):
        decode_record(Frame(0, 0, RecordType.HEADER, 0, msgspec.msgpack.encode(payload)))


@pytest.mark.parametrize(
    "payload",
    [
        [3, 7, [], [1], b"x" * 13, 5],
        [3, 7, [], [1, 2], b"x" * DIGEST_SIZE, 5],
        [3, 7, [], [], b"x" * DIGEST_SIZE, 5],
    ],
)
def test_hashes_that_do_not_fit_their_requests(payload: list[object]) -> None:
    """A short form whose counts disagree is no record."""
    frame = Frame(9, 4, RecordType.STEP_FINISHED, COMPACT, msgspec.msgpack.encode(payload))
    with pytest.raises(TraceIncompatible, match=r"record 4 at offset 9, type 3: .*hash"):
        decode_record(frame)


def schema_text() -> str:
    """Every struct and enum that a record holds, one line each, as it is written."""
    lines, todo = [f"schema {SCHEMA_VERSION}"], [*RECORD_TYPES, ShortArrival, ShortFinish]
    for found in todo:  # grows while it is read
        fields = []
        if issubclass(found, IntEnum):
            fields = [f"{member.name}={member.value}" for member in found]
        else:
            hints = get_type_hints(found)
            for name in found.__struct_fields__:
                hint = hints[name]
                parts = [part for part in (hint, *get_args(hint)) if isinstance(part, type)]
                parts = [p for p in parts if issubclass(p, msgspec.Struct | IntEnum)]
                todo += [part for part in parts if part not in todo]
                text = str(hint) if get_args(hint) else hint.__name__
                fields.append(f"{name}:{re.sub(r'[a-z_.]+[.]', '', text).replace(' ', '')}")
        lines.append(f"{found.__name__} {int(RECORD_TYPES.get(found, 0))} {' '.join(fields)}")
    return "\n".join(lines) + "\n"


def test_the_schema_is_pinned(update_golden: bool) -> None:
    """Whoever changes what a record holds raises SCHEMA_VERSION and writes the new text here."""
    if update_golden:
        Path(__file__).with_name("trace_schema.txt").write_text(schema_text())
    assert schema_text() == Path(__file__).with_name("trace_schema.txt").read_text()
