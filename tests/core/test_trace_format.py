"""Framing: whole records come back as written, and nothing else is ever taken for one."""

import itertools
import random
import time
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cearx.core import trace_format
from cearx.core.trace_format import (
    CHANGED,
    FORMAT,
    FRAME_BYTES,
    HEADER_BYTES,
    MAX_PAYLOAD_BYTES,
    MAX_SNAPSHOT_BYTES,
    Frame,
    RecordType,
    SegmentHeader,
    TraceDamaged,
    TraceIncompatible,
    count_records,
    decode_frame,
    decode_header,
    encode_frame,
    encode_header,
    frames,
    salt_crc,
)

HEADER = SegmentHeader(boot_id=0x1F09C2AA, salt=0xC0FFEE)
single = [record_type for record_type in RecordType if record_type is not RecordType.BATCH]
payloads = st.lists(
    st.tuples(st.sampled_from(single), st.integers(0, CHANGED), st.binary(max_size=80))
    | st.tuples(st.just(RecordType.BATCH), st.integers(1, 255), st.binary(max_size=80)),
    min_size=1,
    max_size=12,
)
"""Type, flags and payload of frames; of a batch the flags are the number of records."""


def segment(records: list[tuple[int, int, bytes]], header: SegmentHeader = HEADER) -> bytes:
    """A whole file of these (type, flags, payload)."""
    salted = salt_crc(header.salt)
    parts, seq = [encode_header(header)], header.first_seq
    for record in records:
        parts.append(encode_frame(salted, seq, *record))
        seq += num_records(record)
    return b"".join(parts)


def num_records(record: tuple[int, int, bytes]) -> int:
    return record[1] if record[0] == RecordType.BATCH else 1


def read(data: bytes) -> tuple[list[Frame], int | None]:
    """All frames of a file and where its torn tail begins."""
    found: list[Frame] = []
    source = frames(data, decode_header(data))
    while True:
        try:
            found.append(next(source))
        except StopIteration as end:
            return found, end.value


def contents(found: list[Frame]) -> list[tuple[int, int, bytes]]:
    return [(frame.type, frame.flags, frame.payload) for frame in found]


SAMPLE = [(RecordType.HEADER, 0, b"config" * 5)] + [
    (RecordType(1 + i % 4), 0, bytes([i]) * (i % 9)) for i in range(24)
]


@given(
    payloads,
    st.integers(0, 2**64 - 1),
    st.integers(0, 2**32 - 1),
    st.integers(0, 2**30),
    st.integers(0, 2**30),
)
def test_round_trip(
    records: list[tuple[int, int, bytes]], boot_id: int, salt: int, segment_index: int, first: int
) -> None:
    """Header and records come back equal, numbered from the segment's first number."""
    header = SegmentHeader(
        boot_id=boot_id, salt=salt, segment=segment_index, first_seq=first, prev_last_seq=first
    )
    data = segment(records, header)
    assert decode_header(data) == header
    found, torn_at = read(data)
    assert torn_at is None
    assert contents(found) == records
    counts = itertools.accumulate(map(num_records, records), initial=first)
    assert [frame.seq for frame in found] == list(counts)[:-1]
    assert found[-1].end == len(data)


@given(payloads, st.data())
def test_a_cut_leaves_a_prefix(records: list[tuple[int, int, bytes]], data: st.DataObject) -> None:
    """A file cut anywhere behind its header gives whole leading records and the torn offset."""
    whole = segment(records)
    cut = data.draw(st.integers(HEADER_BYTES, len(whole)))
    found, torn_at = read(whole[:cut])
    assert contents(found) == records[: len(found)]
    end = found[-1].end if found else HEADER_BYTES
    assert torn_at == (None if end == cut else end)


def test_a_cut_header_is_damage() -> None:
    """Fewer than 64 bytes are no segment."""
    whole = segment(SAMPLE)
    for cut in range(HEADER_BYTES):
        with pytest.raises(TraceDamaged) as caught:
            read(whole[:cut])
        assert caught.value.offset == 0


def test_every_flipped_bit_is_noticed() -> None:
    """No flip of one bit goes unnoticed: damage, but a torn tail in the last record."""
    whole = segment(SAMPLE)
    last = read(whole)[0][-1].offset
    for bit in range(8 * len(whole)):
        flipped = bytearray(whole)
        flipped[bit // 8] ^= 1 << bit % 8
        if bit // 8 >= last:
            found, torn_at = read(bytes(flipped))
            assert torn_at == last
            assert contents(found) == SAMPLE[:-1]
        else:
            with pytest.raises(TraceDamaged):
                read(bytes(flipped))


@pytest.mark.parametrize("gone", [1, 5, 23])
def test_dropped_swapped_and_doubled_records_are_damage(gone: int) -> None:
    """Every record is whole here, only its place is wrong; the offset is of the first such one."""
    whole = segment(SAMPLE)
    found, _ = read(whole)
    at = found[gone].offset
    one, following = whole[at : found[gone].end], found[gone].end
    dropped = whole[:at] + whole[following:]
    doubled = whole[:following] + one + whole[following:]
    next_end = found[gone + 1].end
    swapped = whole[:at] + whole[following:next_end] + one + whole[next_end:]
    for data, offset in [(dropped, at), (doubled, following), (swapped, at)]:
        with pytest.raises(TraceDamaged) as caught:
            read(data)
        assert caught.value.offset == offset


def test_stale_bytes_of_another_segment_are_rejected() -> None:
    """Records with another salt are not taken, even where their numbers would fit."""
    other = segment(SAMPLE, SegmentHeader(boot_id=7, salt=HEADER.salt ^ 1))
    whole = segment(SAMPLE)
    half = read(whole)[0][12].offset
    found, torn_at = read(whole[:half] + other[half:])
    assert (len(found), torn_at) == (12, half)
    with pytest.raises(TraceDamaged) as caught:
        last = read(whole)[0][-1].offset
        read(whole[:half] + other[half:last] + whole[last:])
    assert caught.value.offset == half


def test_a_bad_record_before_a_valid_one_is_damage() -> None:
    """Also when the valid one stands far behind, after zeros, or has an older number."""
    whole = segment(SAMPLE)
    found, _ = read(whole)
    old = whole[found[3].offset : found[3].end]
    for rubbish in (b"\x00" * 70_000, random.Random(1).randbytes(70_000)):
        assert read(whole + rubbish)[1] == len(whole)
        with pytest.raises(TraceDamaged) as caught:
            read(whole + rubbish + old)
        assert caught.value.offset == len(whole)


def test_another_format_is_incompatible() -> None:
    """A whole header of another format, or with flags, is not damage."""
    for header in (
        SegmentHeader(boot_id=1, salt=1, format=FORMAT + 1),
        SegmentHeader(boot_id=1, salt=1, flags=1),
    ):
        with pytest.raises(TraceIncompatible):
            decode_header(encode_header(header))


def test_size_limit() -> None:
    """1 MiB fits, one byte more is refused by the writer and not taken by the reader."""
    salted = salt_crc(1)
    largest = encode_frame(salted, 0, RecordType.NOTE, 0, bytes(MAX_PAYLOAD_BYTES))
    assert decode_frame(largest, 0, salted) is not None
    with pytest.raises(ValueError, match="1048577 bytes, the limit is 1048576"):
        encode_frame(salted, 0, RecordType.NOTE, 0, bytes(MAX_PAYLOAD_BYTES + 1))
    too_large = largest.replace(
        (MAX_PAYLOAD_BYTES).to_bytes(4, "little"), (MAX_PAYLOAD_BYTES + 1).to_bytes(4, "little"), 1
    )
    assert decode_frame(too_large + b"\x00", 0, salted) is None


def test_size_limit_of_a_snapshot() -> None:
    """A snapshot holds a whole state: 16 MiB fit, and not one byte more."""
    salted = salt_crc(1)
    largest = encode_frame(salted, 0, RecordType.SNAPSHOT, 0, bytes(MAX_SNAPSHOT_BYTES))
    assert decode_frame(largest, 0, salted) is not None
    with pytest.raises(ValueError, match="16777217 bytes, the limit is 16777216"):
        encode_frame(salted, 0, RecordType.SNAPSHOT, 0, bytes(MAX_SNAPSHOT_BYTES + 1))


def test_a_valid_snapshot_behind_a_bad_record_is_found() -> None:
    """Also one that is larger than any other record."""
    whole = segment([*SAMPLE[:3], (RecordType.SNAPSHOT, 0, bytes(2 * MAX_PAYLOAD_BYTES + 7))])
    at = read(whole)[0][1].offset
    damaged = whole[: at + 4] + b"\xff" + whole[at + 5 :]
    bad_two = bytearray(damaged)
    bad_two[read(whole)[0][2].offset + 4] ^= 1
    with pytest.raises(TraceDamaged, match="a valid one follows") as caught:
        read(bytes(bad_two))
    assert caught.value.offset == at


@given(payloads, st.data())
def test_frames_of_a_writer_are_counted(
    records: list[tuple[int, int, bytes]], data: st.DataObject
) -> None:
    """A part of what was to be written holds as many whole records as are read from it."""
    whole = segment(records)
    cut = data.draw(st.integers(HEADER_BYTES, len(whole)))
    found, _ = read(whole[:cut])
    assert count_records(whole[HEADER_BYTES:cut]) == sum(frame.num_records for frame in found)


@given(st.binary(max_size=400), st.booleans())
@settings(max_examples=500)
def test_random_bytes_give_typed_errors(rubbish: bytes, has_header: bool) -> None:
    """Whatever the bytes are, the answer is frames, a torn tail or one of two errors."""
    try:
        found, torn_at = read(segment([]) + rubbish if has_header else rubbish)
    except (TraceDamaged, TraceIncompatible):
        return
    assert found == []
    assert torn_at == (HEADER_BYTES if rubbish else None)


def test_a_file_made_to_be_slow_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes that look like a record at every turn cost bounded time and memory."""
    monkeypatch.setattr(trace_format, "RESYNC_BYTES_MAX", 16 * 1024 * 1024)
    bait = (MAX_PAYLOAD_BYTES).to_bytes(4, "little") + bytes(4) + (1).to_bytes(8, "little")
    bait += bytes([RecordType.NOTE, 0])
    data = segment([]) + b"\xff" * FRAME_BYTES + bait * (4 * MAX_PAYLOAD_BYTES // len(bait))
    tracemalloc.start()
    start = time.monotonic()
    with pytest.raises(TraceDamaged, match="too much behind it"):
        read(data)
    assert time.monotonic() - start < 5
    assert tracemalloc.get_traced_memory()[1] < 16 * 1024 * 1024
    tracemalloc.stop()


def test_known_bytes() -> None:
    """The format is fixed: a change of these bytes is another FORMAT."""
    assert encode_header(HEADER).hex() == (
        "43584c470100000000000000aac2091f00000000000000000000000000000000"
        "00000000eeffc0000000000000000000000000000000000000000000b2e61a55"
    )
    frame = encode_frame(salt_crc(HEADER.salt), 7, RecordType.CLOCK_ADVANCED, 0, b"\x92\x04\x05")
    assert frame.hex() == "03000000e7ae356707000000000000000400920405"
