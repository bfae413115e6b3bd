"""Batches: the records come back one by one, whatever their sizes, and nothing else is one."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cearx.core import trace_batch
from cearx.core.trace_batch import MAX_BYTES, MAX_RECORDS, Encoded, batches, split
from cearx.core.trace_format import Frame, RecordType, TraceIncompatible

single = st.sampled_from([t for t in RecordType if t is not RecordType.BATCH])
sizes = st.integers(0, 300) | st.sampled_from([127, 128, 129, 16383, 16384, 16385, MAX_BYTES])
encoded = st.tuples(single, st.integers(0, 2), sizes.map(bytes))


def frames_of(records: list[Encoded], first_seq: int = 5) -> list[Frame]:
    return [Frame(99, first_seq + at, *frame) for at, frame in batches(records)]


@given(st.lists(encoded, max_size=12), st.integers(0, 2**40))
@settings(max_examples=200)
def test_round_trip(records: list[Encoded], first_seq: int) -> None:
    """Types, flags and payloads in order, numbered from the first, in frames within the limit."""
    frames = frames_of(records, first_seq)
    found = [record for frame in frames for record in split(frame)]
    assert [(r.type, r.flags, r.payload) for r in found] == records
    assert [r.seq for r in found] == list(range(first_seq, first_seq + len(records)))
    assert sum(frame.num_records for frame in frames) == len(records)
    assert all(f.num_records == 1 or len(f.payload) <= MAX_BYTES for f in frames)


def test_many_records_take_few_frames() -> None:
    """As many as the flags can count."""
    records = [(RecordType.CLOCK_ADVANCED, 0, bytes([i % 7])) for i in range(2 * MAX_RECORDS + 1)]
    assert [frame.num_records for frame in frames_of(records)] == [MAX_RECORDS, MAX_RECORDS, 1]
    assert frames_of([]) == []
    assert frames_of(records[:1]) == [Frame(99, 5, *records[0])]


CLOCK = bytes([RecordType.CLOCK_ADVANCED])


@pytest.mark.parametrize(
    ("flags", "payload", "what"),
    [
        (1, b"", "its record 0 is not whole"),
        (1, CLOCK, "its record 0 is not whole"),
        (2, CLOCK + b"\x01a" + CLOCK + b"\x02a", "its record 1 is not whole"),
        (1, CLOCK + b"\x80", "its record 0 is not whole"),
        (1, CLOCK + b"\x80\x80\x80\x01" + b"a" * 9, "its record 0 is not whole"),
        (1, CLOCK + b"\x01ab", "1 bytes stand behind its records"),
        (0, b"ab", "2 bytes stand behind its records"),
        (1, bytes([RecordType.BATCH]) + b"\x00", "its record 0 is a batch"),
    ],
)
def test_broken_batches(flags: int, payload: bytes, what: str) -> None:
    """What is wrong, with the place."""
    with pytest.raises(TraceIncompatible, match=f"batch 5 at offset 99: {what}"):
        list(split(Frame(99, 5, RecordType.BATCH, flags, payload)))


@given(st.integers(0, 255), st.binary(max_size=80))
@settings(max_examples=500)
def test_random_payloads(flags: int, payload: bytes) -> None:
    """Records that lie within the payload, or the one error."""
    try:
        found = list(split(Frame(0, 0, RecordType.BATCH, flags, payload)))
    except TraceIncompatible:
        return
    assert len(found) == flags
    assert sum(len(record.payload) for record in found) <= len(payload)


def test_a_type_fits_beside_its_flags() -> None:
    """All types there are, and the flags that records have."""
    assert max(RecordType) < 1 << trace_batch._TYPE_BITS
