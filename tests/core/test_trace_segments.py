"""Segments: rotation, the ring, what a failing disk leaves, a killed writer."""

import errno
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from random_run import SMALL, RandomRun
from trace_samples import BOOT_ID, SMALL_SEGMENTS, SegmentedRun, never, write_segments

from cearx.core import trace_disk, trace_writer
from cearx.core.config import TraceLimits
from cearx.core.events import ClockAdvanced
from cearx.core.trace_records import GapReason, TraceGap, TraceSnapshot
from cearx.core.trace_writer import TraceError, TraceWriter
from cearx.replay.trace import Trace, TraceRecord
from cearx.replay.verify import Verifier, fresh_scheduler

real_write = os.write
real_close = os.close


def verified(path: Path) -> tuple[Trace, list[TraceRecord]]:
    """A trace's records, when the scheduler repeats every decision of it."""
    trace = Trace.open(path)
    verifier = Verifier(fresh_scheduler(trace.header.config))
    records = list(trace.records())
    for record in records:
        assert verifier.feed(record) is None
    assert verifier.finish(trace.ended) is None
    return trace, records


def values_of(records: list[TraceRecord]) -> list[object]:
    """Events and decisions alone."""
    return [r.value for r in records if type(r.value).__module__.endswith("events")]


def expected(seed: int, num_steps: int) -> list[object]:
    """What the run decides without any log."""
    again = RandomRun(SMALL, seed)
    again.run(num_steps)
    return list(again.engine.log)


def test_rotation_loses_nothing(tmp_path: Path) -> None:
    """Segments begin with a snapshot, follow each other, and replay together as the run was."""
    paths = write_segments(tmp_path, 100, seed=1)
    assert len(paths) > 8
    trace, records = verified(tmp_path)
    assert trace.ended and trace.num_segments == len(paths)
    assert values_of(records) == expected(1, 100)
    snapshots = [r.segment for r in records if isinstance(r.value, TraceSnapshot)]
    assert snapshots == list(range(1, len(paths)))
    assert max(path.stat().st_size for path in paths) < 2 * SMALL_SEGMENTS.segment_bytes
    assert os.readlink(tmp_path / "trace.log") == paths[-1].name


def test_every_suffix_replays_alone(tmp_path: Path) -> None:
    """From each segment's snapshot on; also where the earlier files are gone."""
    paths = write_segments(tmp_path, 80, seed=2)
    _, all_records = verified(tmp_path)
    for number, path in enumerate(paths):
        trace, records = verified(path)
        assert records == [r for r in all_records if r.segment >= number]
        assert [*trace.notes()] == (
            [f"the log begins within the run, with segment {number}"] if number else []
        )
        path.unlink()
        if number + 1 < len(paths):
            assert verified(tmp_path)[1] == [r for r in all_records if r.segment > number]


def test_rotation_with_a_step_in_flight(tmp_path: Path) -> None:
    """The snapshot holds the step, so the segment may begin with its end."""
    write_segments(tmp_path, 60, seed=3)
    _, records = verified(tmp_path)
    behind = [
        type(records[i + 1].value).__name__
        for i, record in enumerate(records)
        if isinstance(record.value, TraceSnapshot)
    ]
    assert "StepFinished" in behind


def test_rotation_by_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An hour is up, and something happened in it; an idle server makes no files."""
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    run = SegmentedRun(tmp_path, limits=TraceLimits(segment_seconds=3600))
    run.steps(3)
    now += 3599
    run.steps(3)
    assert len(list(tmp_path.glob("trace-*.log"))) == 1
    now += 2
    run.steps(3)
    assert len(list(tmp_path.glob("trace-*.log"))) == 2
    now += 8000
    run.writer.maintain(run.run.engine.scheduler.snapshot)
    now += 8000
    run.writer.maintain(run.run.engine.scheduler.snapshot)
    assert len(list(tmp_path.glob("trace-*.log"))) == 3
    run.close()
    verified(tmp_path)


def test_the_ring_is_bounded(tmp_path: Path) -> None:
    """At most `keep` files, the newest ones, and they replay."""
    run = SegmentedRun(tmp_path, 4, TraceLimits(segment_bytes=3000, keep=3))
    run.steps(100)
    run.close()
    numbers = sorted(int(path.stem[-6:]) for path in tmp_path.glob("trace-*.log"))
    assert len(numbers) == 3 and numbers[0] > 5
    trace, _ = verified(tmp_path)
    assert trace.ended and trace.segment.segment == numbers[0]
    assert run.notes == []


class FailingDisk:
    """os.write on a disk with room for so many more bytes, that refuses files without."""

    def __init__(self, room: int, code: int) -> None:
        self.room = room
        self.code = code
        self.failed: set[int] = set()

    def write(self, fd: int, data: bytes) -> int:
        assert fd not in self.failed, "a write behind a failed one on the same file"
        if self.room <= 0:
            self.failed.add(fd)
            raise OSError(self.code, os.strerror(self.code))
        written = real_write(fd, data[: self.room])
        self.room -= written
        return written

    def close(self, fd: int) -> None:
        self.failed.discard(fd)
        real_close(fd)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EROFS])
@pytest.mark.parametrize("room", [0, 1, 7000])
def test_serving_goes_on_and_the_log_comes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, room: int
) -> None:
    """A disk that fails leaves a gap that names what is lost; replay goes on behind it."""
    now = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    reasons: list[str] = []
    run = SegmentedRun(tmp_path, 5, on_stop=reasons.append)
    run.steps(10)
    disk = FailingDisk(room, code)
    monkeypatch.setattr(os, "write", disk.write)
    monkeypatch.setattr(os, "close", disk.close)
    run.steps(40)
    assert len(reasons) == 1 and os.strerror(code) in reasons[0]
    now += trace_writer.RETRY_S + 1  # still full
    run.steps(5)
    assert len(reasons) == 1 and run.writer.stopped is not None
    monkeypatch.setattr(os, "write", real_write)
    run.steps(5)
    assert run.writer.stopped is not None, "a retry before its time"
    now += trace_writer.RETRY_S + 1
    run.steps(20)
    assert run.writer.stopped is None
    run.close()
    assert "the trace log goes on in" in run.notes[0]
    trace, records = verified(tmp_path)
    (gap,) = trace.gaps
    assert gap.reason is GapReason.WRITE_FAILED
    assert gap.end_lost - gap.first_lost == run.writer.num_lost
    values, everything = values_of(records), expected(5, 80)
    at = next(i for i, r in enumerate(records) if isinstance(r.value, TraceGap))
    num_before = len(values_of(records[:at]))
    assert values[:num_before] == everything[:num_before]
    assert values[num_before:] == everything[len(everything) - len(values) + num_before :]
    seqs = [r.seq for r in records]
    assert seqs[-1] + 1 == len(records) + trace.num_segments + run.writer.num_lost
    assert gap.first_lost - 1 == seqs[at - 1] and records[at].seq == gap.end_lost + 1
    assert any(
        f"records {gap.first_lost} to {gap.end_lost - 1} are lost" in n for n in trace.notes()
    )


def test_a_file_that_was_only_begun_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A retry that fails half way and cannot even delete its file leaves a stub in the middle."""
    now = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    run = SegmentedRun(tmp_path, 6, on_stop=lambda _: None)
    run.steps(10)
    monkeypatch.setattr(os, "write", FailingDisk(100, errno.ENOSPC).write)
    run.steps(10)
    with monkeypatch.context() as context:
        context.setattr(Path, "unlink", lambda *_, **__: None)
        context.setattr(os, "write", FailingDisk(90, errno.ENOSPC).write)
        now += trace_writer.RETRY_S + 1
        run.steps(1)
    monkeypatch.setattr(os, "write", real_write)
    now += trace_writer.RETRY_S + 1
    run.steps(10)
    run.close()
    stubs = [path for path in tmp_path.glob("trace-*.log") if path.stat().st_size == 90]
    assert len(stubs) == 1
    trace, _ = verified(tmp_path)
    assert trace.ended and len(trace.gaps) == 1
    stubs[0].unlink()
    with pytest.raises(Exception, match="is missing before segment"):
        verified(tmp_path)


def test_a_record_that_is_too_large_leaves_a_gap(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What does not fit into a frame cannot be logged, and what follows it can."""
    now = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    reasons: list[str] = []
    run = SegmentedRun(tmp_path, 7, on_stop=reasons.append)
    run.steps(5)
    run.writer.flush()
    monkeypatch.setattr("cearx.core.trace_format.MAX_PAYLOAD_BYTES", 30)
    monkeypatch.setattr("cearx.core.trace_batch.MAX_BYTES", 20)
    run.steps(5)
    monkeypatch.undo()
    assert len(reasons) == 1 and "the limit is 30" in reasons[0]
    monkeypatch.setattr(time, "monotonic", lambda: trace_writer.RETRY_S + 1)
    run.steps(5)
    run.close()
    trace, _ = verified(tmp_path)
    assert [gap.reason for gap in trace.gaps] == [GapReason.RECORD_TOO_LARGE]


def test_a_run_that_is_logged_already(tmp_path: Path) -> None:
    """Its files are left as they are; numbers of requests would otherwise come twice in one log."""
    paths = write_segments(tmp_path, 40, seed=8)
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(TraceError, match=rf"{paths[-1].name}: the run is logged there already"):
        SegmentedRun(tmp_path, 9)
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before
    SegmentedRun(tmp_path, 9, boot_id=BOOT_ID + (1 << 32)).close()


def test_a_name_that_is_taken_meanwhile_is_not_overwritten(tmp_path: Path) -> None:
    """Somebody made the next file: the one behind it is used."""
    run = SegmentedRun(tmp_path, 10)
    taken = tmp_path / run.writer.path.name.replace("000000", "000001")
    taken.write_bytes(b"mine")
    run.steps(40)
    run.close()
    assert taken.read_bytes() == b"mine"
    assert (tmp_path / taken.name.replace("000001", "000002")).exists()


KILLED = """
import os, random, signal, sys, time
from pathlib import Path
from trace_samples import SegmentedRun
draw = random.Random(11)
for seed in range(50):
    child = os.fork()
    if child == 0:
        run = SegmentedRun(Path(sys.argv[1]) / str(seed), seed)
        while True:
            run.steps(1)
    while not (Path(sys.argv[1]) / str(seed) / "trace.log").exists():
        time.sleep(0.001)
    time.sleep(draw.uniform(0, 0.1))
    os.kill(child, signal.SIGKILL)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
"""


def test_kill_at_any_moment(tmp_path: Path) -> None:
    """50 writers are killed: each trace replays up to its last whole record, over all segments."""
    path = os.pathsep.join(sys.path)
    subprocess.run(
        [sys.executable, "-c", KILLED, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": path},
        check=True,
    )
    num_segments = []
    for seed in range(50):
        trace, records = verified(tmp_path / str(seed))
        num_segments.append(trace.num_segments)
        assert not trace.ended and not trace.gaps
        values = values_of(records)
        again = RandomRun(SMALL, seed)
        while len(again.engine.log) < len(values):
            again.step()
        assert values == again.engine.log[: len(values)]
    assert max(num_segments) > 3


def test_pinned_segments_survive_the_ring(tmp_path: Path) -> None:
    """A pinned set replays as it was, however far the ring moves on; modes stay private."""
    run = SegmentedRun(tmp_path, 12, TraceLimits(segment_bytes=3000, keep=2))
    run.steps(30)
    run.writer.pin("stall")
    while not run.notes:
        time.sleep(0.001)
    run.steps(60)
    run.close()
    (pinned,) = tmp_path.glob("pinned-stall-*")
    assert run.notes == [f"trace log pinned: {pinned}"]
    assert pinned.stat().st_mode & 0o777 == 0o700
    assert all(p.stat().st_mode & 0o777 == 0o600 for p in pinned.glob("trace-*.log"))
    ring = {path.name for path in tmp_path.glob("trace-*.log")}
    assert ring.isdisjoint(path.name for path in pinned.glob("trace-*.log"))
    _, records = verified(pinned)
    values, everything = values_of(records), expected(12, 90)
    start = next(i for i in range(len(everything)) if everything[i:][: len(values)] == values)
    assert start > 0 or len(values) > 50


def test_a_slow_disk_keeps_everything_that_the_end_waits_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the thread writing, over rotations, the log is the same; also without a good end."""
    for is_orderly in (True, False):
        folder = tmp_path / str(is_orderly)
        monkeypatch.setattr(trace_disk, "SLOW_WRITE_NS", -1)
        run = SegmentedRun(folder, 13)
        run.steps(60)
        run.run.engine.drain()
        assert run.notes[0] == trace_writer.SLOW
        run.writer.close(is_orderly)
        trace, records = verified(folder)
        assert trace.ended is is_orderly and trace.num_segments > 3
        assert values_of(records) == expected(13, 60)


def test_a_queue_that_is_full_leaves_a_gap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was handed over before is in the log, and what comes after the retry, too."""
    now = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    monkeypatch.setattr(trace_disk, "SLOW_WRITE_NS", -1)
    reasons: list[str] = []
    run = SegmentedRun(tmp_path, 14, on_stop=reasons.append)
    run.steps(20)
    monkeypatch.setattr(trace_disk, "QUEUE_BYTES_MAX", 10)
    run.steps(5)
    assert len(reasons) == 1 and "more than 10 bytes wait" in reasons[0]
    monkeypatch.setattr(trace_disk, "QUEUE_BYTES_MAX", 1 << 20)
    while not run.writer._disk.is_drained:
        time.sleep(0.001)
    now += trace_writer.RETRY_S + 1
    run.steps(20)
    run.close()
    trace, _ = verified(tmp_path)
    assert [gap.reason for gap in trace.gaps] == [GapReason.QUEUE_FULL]


def test_limits_have_a_default(tmp_path: Path) -> None:
    """64 MiB, an hour, eight files, a sync a second."""
    assert TraceLimits() == TraceLimits(
        segment_bytes=64 << 20, segment_seconds=3600, keep=8, fsync="everysec"
    )
    writer = TraceWriter.open(tmp_path, SMALL, BOOT_ID, never)
    writer.append(ClockAdvanced(now_us=1))
    writer.flush()
    writer.maintain(lambda: pytest.fail("nothing is due"))
    writer.close()
