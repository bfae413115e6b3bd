"""Reading a trace: whole records, typed errors for the rest, little memory whatever it holds."""

import itertools
import os
import random
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from trace_samples import BOOT_ID, never, write_run

from cearx.core.events import BlocksGranted, ClockAdvanced, StepPlan
from cearx.core.identifiers import BlockId, RequestId, StepId
from cearx.core.trace_format import (
    HEADER_BYTES,
    MAX_PAYLOAD_BYTES,
    RecordType,
    SegmentHeader,
    TraceDamaged,
    TraceIncompatible,
    decode_header,
    encode_frame,
    encode_header,
    frames,
    salt_crc,
)
from cearx.core.trace_records import Record, StepNote, TraceEnd, encode_record
from cearx.core.trace_writer import TraceWriter
from cearx.replay.trace import Trace, TraceRecord


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A whole trace of about 4 KB."""
    return write_run(tmp_path_factory.mktemp("small"), 8).read_bytes()


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A whole trace of more than 64 KiB."""
    data = write_run(tmp_path_factory.mktemp("large"), 500).read_bytes()
    assert len(data) > 65536
    return data


def read(data: bytes) -> tuple[Trace, list[TraceRecord]]:
    trace = Trace(data)
    return trace, list(trace.records())


def offsets(data: bytes) -> list[int]:
    """Where each frame begins, the header's included, and the end of the file."""
    return [frame.offset for frame in frames(data, decode_header(data))] + [len(data)]


def file_of(*records: Record, header: SegmentHeader | None = None) -> bytes:
    """A file with these records behind a segment header."""
    header = header or SegmentHeader(boot_id=1, salt=2)
    salted = salt_crc(header.salt)
    parts = [encode_frame(salted, i, *encode_record(record)) for i, record in enumerate(records)]
    return encode_header(header) + b"".join(parts)


def test_cut_at_every_byte(small: bytes) -> None:
    """What is read is a prefix of what was written; only a cut into the headers is damage."""
    _, whole = read(small)
    starts = offsets(small)
    for cut in range(len(small)):
        if cut < starts[1]:
            with pytest.raises(TraceDamaged) as caught:
                read(small[:cut])
            assert caught.value.offset == (0 if cut < HEADER_BYTES else HEADER_BYTES)
            continue
        trace, records = read(small[:cut])
        assert records == whole[: len(records)]
        assert not trace.ended
        last_whole = max(start for start in starts if start <= cut)
        assert trace.torn_at == (None if cut == last_whole else last_whole)
        found = frames(small[:last_whole], decode_header(small))
        assert len(records) == sum(frame.num_records for frame in found) - 1


def test_cut_at_every_byte_of_the_last_64_kib(large: bytes) -> None:
    """No cut makes a record out of a torn one: each is looked at behind its whole neighbour."""
    header = decode_header(large)
    num_cuts = 0
    for before, frame in itertools.pairwise(frames(large, header)):
        start = frame.offset
        neighbour = encode_header(msgspec.structs.replace(header, first_seq=before.seq))
        neighbour += large[before.offset : start]
        for cut in range(max(start, len(large) - 65536), frame.end):
            data = neighbour + large[start:cut]
            source = frames(data, decode_header(data))
            assert next(source) == msgspec.structs.replace(before, offset=HEADER_BYTES)
            with pytest.raises(StopIteration) as stop:
                next(source)
            assert stop.value.value == (None if cut == start else len(neighbour))
            num_cuts += 1
    assert num_cuts == 65536


def test_records_in_the_wrong_place_are_damage(small: bytes) -> None:
    """One dropped, one doubled, two swapped, one from another run."""
    starts = offsets(small)
    parts = [small[a:b] for a, b in zip([0, *starts], [*starts, len(small)], strict=True)]
    foreign = file_of(ClockAdvanced(now_us=1), header=SegmentHeader(boot_id=1, salt=2))
    for at in (2, 9, len(parts) - 3):
        dropped = parts[:at] + parts[at + 1 :]
        doubled = [*parts[:at], parts[at], *parts[at:]]
        swapped = [*parts[:at], parts[at + 1], parts[at], *parts[at + 2 :]]
        mixed = [*parts[:at], foreign[HEADER_BYTES:], *parts[at + 1 :]]
        for changed in (dropped, doubled, swapped, mixed):
            with pytest.raises(TraceDamaged):
                read(b"".join(changed))


@given(st.data())
@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_changed_bytes_give_a_prefix_or_an_error(small: bytes, data: st.DataObject) -> None:
    """Any overwritten stretch: typed errors, or the records before it and a torn tail."""
    _, whole = read(small)
    start = data.draw(st.integers(0, len(small) - 1))
    stretch = data.draw(st.binary(min_size=1, max_size=64))
    changed = small[:start] + stretch + small[start + len(stretch) :]
    try:
        trace, records = read(changed)
    except (TraceDamaged, TraceIncompatible):
        return
    assert records == whole[: len(records)]
    assert changed == small or (trace.torn_at is not None and trace.torn_at <= start)


@pytest.fixture
def header(small: bytes) -> Record:
    return Trace(small).header


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda h: [ClockAdvanced(now_us=1)], "first record is a ClockAdvanced"),
        (lambda h: [h, h], "a second header"),
        (lambda h: [h, end(0, 0, 0), ClockAdvanced(now_us=1)], "stands behind the end"),
        (lambda h: [h, ClockAdvanced(now_us=1), end(0, 0, 0)], "num_events=0.*'events': 1"),
        (lambda h: [h, end(0, 1, 0)], "num_decisions=1"),
        (lambda h: [h, end(0, 0, 1)], "num_notes=1"),
    ],
)
def test_order_and_counts(
    header: Record, make: Callable[[Record], list[Record]], reason: str
) -> None:
    """One header first, one end last, and the end tells how much came before it."""
    with pytest.raises(TraceDamaged, match=reason):
        read(file_of(*make(header)))


def end(num_events: int, num_decisions: int, num_notes: int) -> TraceEnd:
    return TraceEnd(num_events=num_events, num_decisions=num_decisions, num_notes=num_notes)


def test_bytes_behind_the_end_are_damage(small: bytes) -> None:
    """A log that was closed in good order has no torn tail."""
    with pytest.raises(TraceDamaged, match="bytes stand behind the end") as caught:
        read(small + b"\x01")
    assert caught.value.offset == len(small)


def test_what_is_no_file(tmp_path: Path) -> None:
    """Nothing, an empty file, a pipe, a folder without a trace."""
    with pytest.raises(FileNotFoundError):
        Trace.open(tmp_path / "none")
    with pytest.raises(FileNotFoundError):
        Trace.open(tmp_path)
    (tmp_path / "empty").touch()
    with pytest.raises(TraceDamaged, match="0 bytes"):
        Trace.open(tmp_path / "empty")
    with pytest.raises(TraceDamaged, match="not a regular file"):
        Trace.open(Path(os.devnull))


def test_a_growing_file_is_read_up_to_now(tmp_path: Path) -> None:
    """The trace of a server that still runs."""
    writer = TraceWriter.open(
        tmp_path, Trace(write_run(tmp_path / "a", 1).read_bytes()).header.config, BOOT_ID, never
    )
    writer.append(ClockAdvanced(now_us=1))
    writer.flush()
    trace = Trace.open(tmp_path)
    writer.append(ClockAdvanced(now_us=2))
    writer.flush()
    assert [record.value for record in trace.records()] == [ClockAdvanced(now_us=1)]
    assert len(list(Trace.open(tmp_path).records())) == 2
    writer.close()


def big_plan() -> StepPlan:
    """Close to 1 MiB of the structs that take most memory for their bytes."""
    grant = BlocksGranted(request_id=RequestId(1), block_ids=(BlockId(1),))
    return StepPlan(
        step_id=StepId(0),
        decodes=(),
        chunks=(),
        granted=(grant,) * (MAX_PAYLOAD_BYTES // 4 - 10),
        admitted=(),
        preempted=(),
        waits=(),
    )


def hostile_files(header: Record) -> dict[str, bytes]:
    """A few MiB each."""
    whole = file_of(header)
    noise = random.Random(0).randbytes(4 << 20)
    bait = MAX_PAYLOAD_BYTES.to_bytes(4, "little") + bytes(4) + (1).to_bytes(8, "little")
    return {
        "zeros": whole + bytes(4 << 20),
        "noise": whole + noise,
        "noise alone": noise,
        "large lengths": whole + b"\xff" * 18 + (bait + bytes([RecordType.NOTE, 0])) * (1 << 17),
        "large plans": file_of(header, *[big_plan()] * 8),
        "many notes": file_of(header, *[StepNote(execute_us=1, schedule_us=1)] * 20_000),
    }


def test_hostile_files_take_bounded_memory(header: Record, tmp_path: Path) -> None:
    """Never more than 64 MiB beside the file, which is mapped; and only typed errors."""
    for name, data in hostile_files(header).items():
        path = tmp_path / "hostile"
        path.write_bytes(data)
        tracemalloc.start()
        try:
            num_records = sum(1 for _ in Trace.open(path).records())
        except (TraceDamaged, TraceIncompatible):
            num_records = 0
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 64 << 20, f"{name}: {peak} bytes"
        assert num_records == {"large plans": 8, "many notes": 20_000}.get(name, 0), name
