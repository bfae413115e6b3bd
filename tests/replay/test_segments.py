"""Many files as one trace: what may be cut, what may be missing, and what is damage."""

import itertools
import os
import shutil
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from random_run import SMALL
from trace_samples import BOOT_ID, SegmentedRun, write_segments

from cearx.core.scheduler import Scheduler
from cearx.core.scheduler_state import SchedulerState
from cearx.core.trace_batch import split
from cearx.core.trace_format import (
    HEADER_BYTES,
    MAX_SNAPSHOT_BYTES,
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
from cearx.core.trace_records import (
    GapReason,
    Record,
    StepNote,
    TraceGap,
    TraceHeader,
    TraceSnapshot,
    config_sha256,
    encode_record,
)
from cearx.replay import cli
from cearx.replay.segments import Segment, find, map_files
from cearx.replay.snapshot_cost import FREE_BYTES, require_bounded
from cearx.replay.trace import Trace, TraceRecord
from cearx.replay.verify import Verifier, fresh_scheduler, restored_scheduler


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The files of one run; tests copy them."""
    return write_segments(tmp_path_factory.mktemp("run"), 50, seed=3)


@pytest.fixture
def paths(written: list[Path], tmp_path: Path) -> list[Path]:
    for path in written:
        shutil.copy(path, tmp_path)
    (tmp_path / "trace.log").symlink_to(written[-1].name)
    return [tmp_path / path.name for path in written]


def read(*files: bytes) -> tuple[Trace, list[TraceRecord]]:
    trace = Trace([Segment(data, None, number) for number, data in enumerate(files)])
    return trace, list(trace.records())


def offsets(data: bytes) -> list[int]:
    """Where each frame begins, and the end of the file."""
    return [frame.offset for frame in frames(data, decode_header(data))] + [len(data)]


def num_records(data: bytes, end: int) -> int:
    """Of whole frames before a place, the header's left out."""
    found = frames(data, decode_header(data))
    return sum(frame.num_records for frame in found if frame.end <= end) - 1


def file_of(*records: Record, header: SegmentHeader) -> bytes:
    salted = salt_crc(header.salt)
    seqs = itertools.count(header.first_seq)
    parts = [
        encode_frame(salted, seq, *encode_record(r)) for seq, r in zip(seqs, records, strict=False)
    ]
    return encode_header(header) + b"".join(parts)


def test_what_a_path_stands_for(paths: list[Path], tmp_path: Path) -> None:
    """The folder and its link mean the whole newest run; a segment means it and what follows."""
    write_segments(tmp_path / "other", 20)
    for other in (tmp_path / "other").glob("trace-*.log"):
        shutil.copy(other, tmp_path / other.name.replace("1f09c2aa", "00000001"))
    assert find(tmp_path) == paths
    assert find(tmp_path / "trace.log") == paths
    assert find(paths[3]) == paths[3:]
    shutil.copy(paths[0], tmp_path / "copy.bin")
    assert find(tmp_path / "copy.bin") == [tmp_path / "copy.bin"]
    (tmp_path / "trace.log").unlink()
    assert find(tmp_path) == [tmp_path / "trace.log"], "two runs and no link: nothing is guessed"
    for other in tmp_path.glob("trace-00000001-*"):
        other.unlink()
    assert find(tmp_path) == paths


def test_the_ring_may_take_the_oldest_while_they_are_opened(paths: list[Path]) -> None:
    """The first ones only: a hole is an error, and so is nothing at all."""
    gone = [path.with_name("gone.log") for path in paths]
    assert [s.path for s in map_files([*gone[:2], *paths[2:]])] == paths[2:]
    for missing in ([paths[0], gone[1], paths[2]], gone, [*paths, gone[0]]):
        with pytest.raises(FileNotFoundError):
            map_files(missing)


def test_cut_at_every_byte_over_a_boundary(written: list[Path]) -> None:
    """The last file cut anywhere, its header and snapshot included: a prefix, never an error."""
    files = [path.read_bytes() for path in written[:3]]
    _, whole = read(*files)
    inside = [record for record in whole if record.segment == 2]
    starts = offsets(files[2])
    num_before = len(whole) - len(inside)
    for cut in range(len(files[2])):
        trace, records = read(*files[:2], files[2][:cut])
        if cut < starts[2]:  # neither the header nor the snapshot counts before both are whole
            assert records == whole[:num_before]
            assert trace.torn_at == 0
        else:
            last = max(start for start in starts if start <= cut)
            assert records == whole[: num_before + num_records(files[2], last)]
            assert trace.torn_at == (None if last == cut else last)
        assert not trace.ended


def test_a_cut_in_the_middle_is_damage(written: list[Path]) -> None:
    """The file before another one has no torn tail: something took its bytes."""
    files = [path.read_bytes() for path in written[:3]]
    starts = offsets(files[1])
    for cut in {0, 1, HEADER_BYTES, *starts[1:6], starts[5] + 3, len(files[1]) - 1}:
        if cut == len(files[1]):
            continue
        with pytest.raises(TraceDamaged):
            read(files[0], files[1][:cut], files[2])
    with pytest.raises(TraceDamaged, match="cut short, and another segment follows") as caught:
        read(files[0], files[1][: starts[5] + 3], files[2])
    assert caught.value.offset == starts[5]


def test_flipped_bits_anywhere_are_noticed(written: list[Path]) -> None:
    """In every byte of a middle segment, its snapshot included."""
    files = [path.read_bytes() for path in written[:3]]
    for at in range(0, len(files[1])):
        flipped = bytearray(files[1])
        flipped[at] ^= 1 << at % 8
        with pytest.raises(TraceDamaged):
            read(files[0], bytes(flipped), files[2])


def test_a_missing_file_is_damage_with_its_name(
    paths: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In the middle; at the start it is the ring's doing, and at the end a log without an end."""
    paths[3].unlink()
    assert cli.main([str(tmp_path)]) == 2
    expected = f"DAMAGED {paths[4]} at offset 0: segment 3 is missing before segment 4"
    assert expected in capsys.readouterr().out
    assert cli.main([str(paths[4])]) == 0
    assert "note: the log begins within the run, with segment 4" in capsys.readouterr().out
    for path in paths[:3]:
        path.unlink()
    paths[-1].unlink()
    assert cli.main([str(paths[4])]) == 0
    assert "note: the log has no end" in capsys.readouterr().out


def test_damage_names_file_and_offset(
    paths: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whichever of the files it is in."""
    data = bytearray(paths[2].read_bytes())
    at = offsets(bytes(data))[4]
    data[at + 20] ^= 4
    paths[2].write_bytes(data)
    assert cli.main([str(tmp_path)]) == 2
    assert f"DAMAGED {paths[2]} at offset {at}: a bad record" in capsys.readouterr().out


def test_files_in_the_wrong_place_are_damage(written: list[Path], tmp_path: Path) -> None:
    """Swapped, doubled, of another run, of the same run's other life."""
    files = [path.read_bytes() for path in written[:4]]
    foreign = SegmentedRun(tmp_path / "b", 3, boot_id=BOOT_ID + 1)
    foreign.steps(50)
    foreign.close()
    alien = sorted((tmp_path / "b").glob("trace-*.log"))[1].read_bytes()
    again = SegmentedRun(tmp_path / "c", 4)
    again.steps(50)
    again.close()
    other = sorted((tmp_path / "c").glob("trace-*.log"))[1].read_bytes()
    for wrong in (
        [files[0], files[2], files[1]],
        [files[0], files[1], files[1]],
        [files[0], alien, files[2]],
        [files[0], other, files[2]],
        [files[0], files[2]],
    ):
        with pytest.raises(TraceDamaged):
            read(*wrong)


def rebuilt(data: bytes, change: Callable[[int, Record], Record | None]) -> bytes:
    """A segment whose leading records are others, with right checksums."""
    header = decode_header(data)
    salted = salt_crc(header.salt)
    parts = [data[:HEADER_BYTES]]
    decoded = {0: Trace(data).header} | {
        r.seq - header.first_seq: r.value for r in Trace(data).records()
    }
    for frame in itertools.chain.from_iterable(map(split, frames(data, header))):
        new = change(frame.seq - header.first_seq, decoded.get(frame.seq - header.first_seq))
        payload = (frame.type, frame.flags, frame.payload) if new is None else encode_record(new)
        parts.append(encode_frame(salted, frame.seq, *payload))
    return b"".join(parts)


def verdict(*files: bytes) -> object:
    """The first difference."""
    trace = Trace([Segment(data) for data in files])
    verifier = Verifier(fresh_scheduler(trace.header.config))
    for record in trace.records():
        difference = verifier.feed(record)
        if difference is not None:
            return difference
    return verifier.finish(trace.ended)


def test_a_snapshot_is_compared(written: list[Path]) -> None:
    """A state that the scheduler has not come to is a difference with its path."""
    files = [path.read_bytes() for path in written[:2]]
    assert verdict(*files) is None

    def later(place: int, record: Record | None) -> Record | None:
        if not isinstance(record, TraceSnapshot):
            return None
        scheduler = Scheduler.restore(SMALL, record.state)
        scheduler.books.now_us += 1
        return TraceSnapshot(state=scheduler.snapshot())

    difference = verdict(files[0], rebuilt(files[1], later))
    assert difference is not None
    assert difference.field == "Snapshot.now_us"  # type: ignore[attr-defined]


def test_a_restored_fault_is_found_behind_it(written: list[Path]) -> None:
    """Alone, a wrong snapshot shows as soon as it decides otherwise."""
    data = written[1].read_bytes()
    assert verdict(data) is None
    fresh = TraceSnapshot(state=Scheduler(SMALL).snapshot())
    wrong = rebuilt(data, lambda _, r: fresh if isinstance(r, TraceSnapshot) else None)
    assert verdict(wrong) is not None


@pytest.mark.parametrize("state", [b"", b"\x90", b"\xc1", b"\x91" * 5000, os.urandom(900)])
def test_a_snapshot_of_anything_is_a_typed_error(state: bytes) -> None:
    """Bytes that are no state."""
    with pytest.raises(TraceIncompatible, match="cannot be restored"):
        restored_scheduler(SMALL, TraceSnapshot(state=state))


@given(st.data())
@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_changed_snapshot_is_an_error_or_a_verdict(
    written: list[Path], data: st.DataObject
) -> None:
    """A state with a right checksum that contradicts itself never ends the replay otherwise."""
    segment = written[2].read_bytes()
    state = next(r.value for r in Trace(segment).records()).state
    at = data.draw(st.integers(0, len(state) - 1))
    stretch = data.draw(st.binary(min_size=1, max_size=8))
    made = TraceSnapshot(state=state[:at] + stretch + state[at + len(stretch) :])
    changed = rebuilt(segment, lambda _, r: made if isinstance(r, TraceSnapshot) else None)
    try:
        verdict(changed)
    except (TraceDamaged, TraceIncompatible):
        return


@given(st.data())
@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_changed_bytes_of_any_file_give_a_prefix_or_an_error(
    written: list[Path], data: st.DataObject
) -> None:
    """Any overwritten stretch in any of three files."""
    files = [path.read_bytes() for path in written[:3]]
    _, whole = read(*files)
    index = data.draw(st.integers(0, 2))
    at = data.draw(st.integers(0, len(files[index]) - 1))
    stretch = data.draw(st.binary(min_size=1, max_size=64))
    files[index] = files[index][:at] + stretch + files[index][at + len(stretch) :]
    try:
        _, records = read(*files)
    except (TraceDamaged, TraceIncompatible):
        return
    assert records == whole[: len(records)]
    assert len(records) == len(whole) or index == 2


@pytest.mark.parametrize(
    ("records", "reason"),
    [
        ([], "not whole"),
        ([StepNote(execute_us=1, schedule_us=1)], "does not start from a state"),
        ([TraceGap(reason=GapReason.WRITE_FAILED, first_lost=1, end_lost=9)], "not whole"),
    ],
)
def test_a_segment_within_a_run_starts_from_a_state(
    written: list[Path], records: list[Record], reason: str
) -> None:
    """Without one nothing behind it can be repeated."""
    header = SegmentHeader(boot_id=1, salt=2, segment=3)
    first = Trace(written[0].read_bytes()).header
    with pytest.raises(TraceDamaged, match=reason):
        read(file_of(first, *records, header=header))


@pytest.mark.parametrize("number", [0, 1])
def test_snapshots_and_gaps_stand_at_the_start_only(written: list[Path], number: int) -> None:
    """Anywhere else they would let a made-up file skip what it does not want verified."""
    first = Trace(written[0].read_bytes()).header
    state = TraceSnapshot(state=Scheduler(SMALL).snapshot())
    note = StepNote(execute_us=1, schedule_us=1)
    gap = TraceGap(reason=GapReason.WRITE_FAILED, first_lost=1, end_lost=9)
    header = SegmentHeader(boot_id=1, salt=2, segment=number)
    for late in (state, gap):
        with pytest.raises(TraceDamaged, match="within a segment"):
            read(file_of(first, *[state] * number, note, note, late, header=header))


@pytest.mark.parametrize(
    ("first_lost", "end_lost", "first_seq", "prev_last_seq", "is_right"),
    [
        (2, 9, 9, 1, True),
        (3, 9, 9, 2, True),
        (4, 9, 9, 3, False),
        (3, 8, 9, 2, False),
        (3, 9, 9, 0, False),
    ],
)
def test_a_gap_must_fit_its_place(
    written: list[Path],
    first_lost: int,
    end_lost: int,
    first_seq: int,
    prev_last_seq: int,
    is_right: bool,
) -> None:
    """It accounts for every record between the two files."""
    first = Trace(written[0].read_bytes()).header
    note = StepNote(execute_us=1, schedule_us=1)
    before = file_of(first, note, note, header=SegmentHeader(boot_id=1, salt=2))
    gap = TraceGap(reason=GapReason.WRITE_FAILED, first_lost=first_lost, end_lost=end_lost)
    state = TraceSnapshot(state=Scheduler(SMALL).snapshot())
    header = SegmentHeader(
        boot_id=1, salt=3, segment=1, first_seq=first_seq, prev_last_seq=prev_last_seq
    )
    after = file_of(first, gap, state, header=header)
    if is_right:
        trace, records = read(before, after)
        assert trace.gaps == [gap] and len(records) == 4
        assert read(before + b"\x01", after)[0].gaps == [gap]
    else:
        with pytest.raises(TraceDamaged, match="stands behind record 2"):
            read(before, after)


def test_another_configuration_is_damage(written: list[Path]) -> None:
    """A run has one."""
    files = [path.read_bytes() for path in written[:2]]
    config = msgspec.structs.replace(SMALL, num_blocks=99)

    def other(place: int, record: Record | None) -> Record | None:
        if not isinstance(record, TraceHeader):
            return None
        return msgspec.structs.replace(record, config=config, config_sha256=config_sha256(config))

    with pytest.raises(TraceDamaged, match="did not begin with"):
        read(files[0], rebuilt(files[1], other))


REQUEST = msgspec.msgpack.encode([1, 0, 1, 1, False, 0, [], 1])
"""All fields that have no default, at their shortest."""


def many(element: bytes, size: int) -> bytes:
    """An array of about `size` bytes."""
    count = size // len(element)
    return b"\xdd" + count.to_bytes(4, "big") + element * count


def state_with(**parts: bytes) -> bytes:
    """A fresh scheduler's state with other bytes for some of its fields."""
    state = msgspec.msgpack.decode(Scheduler(SMALL).snapshot(), type=SchedulerState)
    assert parts.keys() <= set(state.__struct_fields__)
    fields = [
        msgspec.Raw(parts[name]) if name in parts else getattr(state, name)
        for name in state.__struct_fields__
    ]
    return msgspec.msgpack.encode(fields)


def hostile_states() -> dict[str, bytes]:
    """16 MiB each that would be hundreds of MiB as objects."""
    size = MAX_SNAPSHOT_BYTES - 64
    size -= 2000
    pool = b"\x94" + many(b"\xcd\x7f\xff", size) + b"\x90\x90\x90"
    return {
        "requests": state_with(requests=many(REQUEST, size)),
        "numbers": state_with(pool=pool),
        "nothing": b"\xdd\xff\xff\xff\xff" + b"\xc0" * size,
        "arrays": b"\x91" * size,
        "text": b"\xdb\xff\xff\xff\xff" + bytes(size),
    }


def test_hostile_snapshots_take_bounded_memory(written: list[Path], tmp_path: Path) -> None:
    """Never more than 64 MiB beside the mapped file, and a typed error."""
    first = Trace(written[0].read_bytes()).header
    header = SegmentHeader(boot_id=1, salt=2, segment=1)
    for name, state in hostile_states().items():
        path = tmp_path / "hostile"
        path.write_bytes(file_of(first, TraceSnapshot(state=state), header=header))
        tracemalloc.start()
        with pytest.raises(TraceIncompatible):
            trace = Trace.open(path)
            verifier = Verifier(fresh_scheduler(trace.header.config))
            for record in trace.records():
                verifier.feed(record)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 64 << 20, f"{name}: {peak} bytes"


def test_states_of_real_pools_are_not_refused() -> None:
    """A pool of 100,000 cached blocks has a snapshot of megabytes and may be read."""
    config = msgspec.structs.replace(SMALL, num_blocks=100_000)
    scheduler = Scheduler(config)
    pool = scheduler.books.pool
    blocks = pool.take(90_000)
    for block in blocks:
        pool.publish(block, os.urandom(16))  # type: ignore[arg-type]
    pool.release(blocks)
    state = scheduler.snapshot()
    assert len(state) > FREE_BYTES
    require_bounded(state)
    assert restored_scheduler(config, TraceSnapshot(state=state)).snapshot() == state


def test_small_states_cannot_reach_the_limit() -> None:
    """What is not looked at stays below it even as the costliest objects."""
    state = state_with(requests=many(REQUEST, FREE_BYTES - 2000))
    assert FREE_BYTES - 2100 < len(state) < FREE_BYTES
    tracemalloc.start()
    restored_scheduler(SMALL, TraceSnapshot(state=state))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 60 << 20


def test_record_types_of_this_test_exist() -> None:
    """The two that stand at a segment's start have their numbers for good."""
    assert (RecordType.SNAPSHOT, RecordType.GAP) == (35, 36)
