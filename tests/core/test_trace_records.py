"""Payloads: every record comes back equal, the schema is pinned, nothing else decodes."""

import re
from enum import IntEnum
from pathlib import Path
from typing import get_args, get_type_hints

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from random_run import SMALL
from trace_samples import records

from cearx.core.events import Decision, Event, StepPlan
from cearx.core.trace_format import COMPACT, Frame, RecordType, TraceIncompatible
from cearx.core.trace_records import (
    MAX_COMPACT_DECODES,
    RECORD_TYPES,
    SCHEMA_VERSION,
    Record,
    TraceEnd,
    TraceHeader,
    compact_decodes,
    config_sha256,
    decode_record,
    encode_record,
    expand_decodes,
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


def test_round_trip_of_header_and_end() -> None:
    """So do the two records that the writer itself makes."""
    for record in (HEADER, TraceEnd(num_events=1, num_decisions=2**40, num_notes=0)):
        assert through(record) == record


def test_every_event_and_decision_has_a_record_type() -> None:
    """A new event cannot be forgotten here, and its record type is its tag."""
    for struct in get_args(Event) + get_args(Decision):
        assert RECORD_TYPES[struct] == struct.__struct_config__.tag
    assert sorted(RECORD_TYPES.values()) == sorted(RecordType)


@given(st.lists(st.integers(0, 2**40), max_size=100, unique=True).map(sorted))
@example(list(range(64)))
@example(list(range(100_000, 100_064)))
def test_short_form_of_rising_decodes(decodes: list[int]) -> None:
    """Rising ids always have a short form, of no more integers, that expands to them."""
    short = compact_decodes(tuple(decodes))
    if len(decodes) < 2:
        assert short is None
        return
    assert short is not None
    assert len(short) <= len(decodes)
    assert expand_decodes(short) == tuple(decodes)


def test_64_decodes_in_a_row_are_two_integers() -> None:
    """What a steady batch costs in the log."""
    assert compact_decodes(tuple(range(500, 564))) == (500, -63)
    assert compact_decodes((7, 8, 9, 12, 13)) == (7, -2, 1, -1)
    assert compact_decodes((3, 2)) is None


def test_a_short_form_cannot_fill_the_memory() -> None:
    """A few bytes that stand for very many decodes are refused with the limit."""
    plan = StepPlan(
        step_id=0,
        decodes=(0, -(2**62)),
        chunks=(),
        granted=(),
        admitted=(),
        preempted=(),
        waits=(),
    )
    frame = Frame(9, 4, RecordType.STEP_PLAN, COMPACT, msgspec.msgpack.encode(plan))
    with pytest.raises(TraceIncompatible, match=f"record 4 at offset 9.*limit is {65536}"):
        decode_record(frame)
    most = (0, -(MAX_COMPACT_DECODES - 1))
    assert len(expand_decodes(most)) == MAX_COMPACT_DECODES
    assert compact_decodes(tuple(range(MAX_COMPACT_DECODES + 1))) is None


@given(st.integers(0, 255), st.integers(0, 255), st.binary(max_size=60))
@settings(max_examples=500)
def test_random_payloads_give_one_error(record_type: int, flags: int, payload: bytes) -> None:
    """Any bytes decode to a record or raise TraceIncompatible."""
    try:
        decode_record(Frame(0, 0, record_type, flags, payload))
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


def schema_text() -> str:
    """Every struct and enum that a record holds, one line each, as it is written."""
    lines, todo = [f"schema {SCHEMA_VERSION}"], list(RECORD_TYPES)
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


def test_the_schema_is_pinned() -> None:
    """Whoever changes what a record holds raises SCHEMA_VERSION and writes the new text here."""
    assert schema_text() == Path(__file__).with_name("trace_schema.txt").read_text()
