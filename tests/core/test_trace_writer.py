"""The writer: one write a step, a valid prefix whatever fails, and serving never stops for it."""

import errno
import os
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from random_run import SMALL, RandomRun
from simulated_engine import SimulatedEngine
from trace_samples import BOOT_ID, never, write_run

from cearx.core.config import SchedulerConfig
from cearx.core.events import ClockAdvanced, RequestArrived
from cearx.core.identifiers import BlockHash, RequestId
from cearx.core.trace_records import StepNote
from cearx.core.trace_writer import TraceError, TraceWriter
from cearx.replay.trace import Trace

real_write = os.write


def tick(now_us: int) -> ClockAdvanced:
    return ClockAdvanced(now_us=now_us)


def test_names_and_modes(tmp_path: Path) -> None:
    """The file is private, named by the boot, and `trace.log` points at the newest."""
    folder = tmp_path / "a" / "traces"
    TraceWriter.open(folder, SMALL, 5, never).close()
    writer = TraceWriter.open(folder, SMALL, BOOT_ID, never)
    assert writer.path == folder / "trace-1f09c2aa-000000.log"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE(writer.path.stat().st_mode) == 0o600
    assert os.readlink(folder / "trace.log") == writer.path.name
    assert sorted(p.name for p in folder.iterdir()) == [
        "trace-00000000-000000.log",
        "trace-1f09c2aa-000000.log",
        "trace.log",
    ]
    writer.close()


def test_records_come_back(tmp_path: Path) -> None:
    """Each record in its order, the counts in the end, the header's configuration."""
    writer = TraceWriter.open(tmp_path, SMALL, BOOT_ID, never)
    run = RandomRun(SMALL, 1, log=writer)
    for _ in range(30):
        run.step()
    writer.append(StepNote(execute_us=1234, schedule_us=56, deliver_us=7))
    writer.close()
    trace = Trace.open(tmp_path)
    values = [record.value for record in trace.records()]
    assert trace.header.config == SMALL
    assert trace.segment.boot_id == BOOT_ID
    assert trace.ended and trace.torn_at is None
    assert writer.num_bytes == writer.path.stat().st_size
    run_again = RandomRun(SMALL, 1)
    for _ in range(30):
        run_again.step()
    assert values[:-1] == run_again.engine.log
    assert values[-1] == StepNote(execute_us=1234, schedule_us=56, deliver_us=7)


def test_one_write_a_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Records gather; `flush` hands them to the kernel at once, and an empty one does nothing."""
    writer = TraceWriter.open(tmp_path, SMALL, BOOT_ID, never)
    calls: list[int] = []
    monkeypatch.setattr(os, "write", lambda fd, data: calls.append(fd) or real_write(fd, data))
    for now_us in range(10):
        writer.append(tick(now_us))
    assert calls == []
    writer.flush()
    writer.flush()
    assert len(calls) == 1
    writer.close()
    assert len(calls) == 2


@pytest.mark.parametrize("id_distance", [1, 1009])
def test_a_step_of_64_decodes_is_small(tmp_path: Path, id_distance: int) -> None:
    """At most 200 bytes a step, notes included, whatever the ids: 2.2 GB a day at 8 ms a step."""
    config = SchedulerConfig(
        block_size=16,
        num_blocks=1024,
        max_model_len=2048,
        max_num_seqs=64,
        max_num_batched_tokens=2048,
        enable_prefix_caching=True,
    )
    writer = TraceWriter.open(tmp_path, config, BOOT_ID, never)
    engine = SimulatedEngine(config, log=writer)
    for index in range(64):
        engine.arrive([index % 5] * (10 + index % 16), 200)
        engine._next_id += id_distance - 1
    sizes = []
    for step in range(66):
        assert step < 2 or len(engine.scheduler.books.running) == 64
        engine.plan()
        engine.finish()
        writer.append(StepNote(execute_us=8000, schedule_us=200))
        sizes.append(writer.num_bytes)
    per_step = (sizes[-1] - sizes[1]) / (len(sizes) - 2)
    assert 100 < per_step <= 200
    writer.close()


def test_never_waits_for_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No sync from open to close on the scheduler's thread, but one at the end on another."""
    threads: list[threading.Thread] = []
    for name in ("fsync", "fdatasync", "sync"):
        monkeypatch.setattr(os, name, lambda *_: threads.append(threading.current_thread()))
    write_run(tmp_path, 5)
    assert threads and threading.current_thread() not in threads


def failing_write(limit: int, code: int) -> Callable[[int, bytes], int]:
    """os.write on a disk with room for `limit` more bytes."""
    room = limit

    def write(fd: int, data: bytes) -> int:
        nonlocal room
        if room == 0:
            raise OSError(code, os.strerror(code))
        written = real_write(fd, data[:room])
        room -= written
        return written

    return write


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EROFS])
def test_a_failing_disk_stops_the_trace_and_not_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """The file keeps a valid prefix, the reason is told once, what is lost is counted."""
    reasons: list[str] = []
    writer = TraceWriter.open(tmp_path, SMALL, BOOT_ID, reasons.append)
    monkeypatch.setattr(os, "write", failing_write(4900, code))
    engine = RandomRun(SMALL, 3, log=writer).run(60)
    writer.close()
    assert len(engine.ended) > 10
    assert len(reasons) == 1 and os.strerror(code) in reasons[0] and str(writer.path) in reasons[0]
    assert writer.stopped == reasons[0]
    trace = Trace.open(tmp_path)
    values = [record.value for record in trace.records()]
    again = RandomRun(SMALL, 3)
    again.run(60)
    assert values == again.engine.log[: len(values)]
    assert len(values) + writer.num_lost == len(again.engine.log)
    assert trace.torn_at is not None and not trace.ended


def test_a_short_write_is_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that takes seven bytes at a time still gets everything, in order."""
    monkeypatch.setattr(os, "write", lambda fd, data: real_write(fd, data[:7]))
    write_run(tmp_path, 5)
    trace = Trace.open(tmp_path)
    assert len(list(trace.records())) > 10
    assert trace.ended


def test_a_record_that_is_too_large_stops_the_trace(tmp_path: Path) -> None:
    """A hole is not possible, so the log ends with the last record that fits."""
    reasons: list[str] = []
    writer = TraceWriter.open(tmp_path, SMALL, BOOT_ID, reasons.append)
    writer.append(tick(1))
    writer.flush()
    huge = RequestArrived(
        request_id=RequestId(0),
        num_prompt_tokens=1,
        max_tokens=1,
        block_hashes=(BlockHash(bytes(16)),) * 70_000,
        frontend_index=0,
        arrived_us=1,
        priority=0,
        has_exact_length=False,
    )
    writer.append(huge)
    writer.append(tick(2))
    writer.flush()
    writer.close()
    assert len(reasons) == 1 and "the limit is 1048576" in reasons[0]
    assert writer.num_lost == 2
    assert [record.value for record in Trace.open(tmp_path).records()] == [tick(1)]


def test_errors_at_open_are_typed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder that cannot be made and a full disk name path and reason."""
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(TraceError, match=r"file/t/trace-1f09c2aa-000000\.log: Not a directory"):
        TraceWriter.open(file / "t", SMALL, BOOT_ID, never)
    monkeypatch.setattr(os, "write", failing_write(100, errno.ENOSPC))
    with pytest.raises(TraceError, match="No space left on device"):
        TraceWriter.open(tmp_path / "full", SMALL, BOOT_ID, never)
    assert list((tmp_path / "full").iterdir()) == []


def test_a_file_named_like_the_link_is_kept(tmp_path: Path) -> None:
    """Somebody's own trace.log is not replaced."""
    (tmp_path / "trace.log").write_text("mine")
    with pytest.raises(TraceError, match=r"trace\.log is not a symbolic link"):
        TraceWriter.open(tmp_path, SMALL, BOOT_ID, never)
    assert (tmp_path / "trace.log").read_text() == "mine"


KILLED = """
import os, signal, sys
from pathlib import Path
from trace_samples import write_run
write_run(Path(sys.argv[1]), 20, close=False)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_was_flushed_survives_kill(tmp_path: Path) -> None:
    """After SIGKILL the file holds everything up to the last flush and has no end."""
    path = os.pathsep.join(sys.path)
    killed = subprocess.run(
        [sys.executable, "-c", KILLED, str(tmp_path)], env={**os.environ, "PYTHONPATH": path}
    )
    assert killed.returncode == -signal.SIGKILL
    trace = Trace.open(tmp_path)
    assert sum(record.value == tick(20 * 8000) for record in trace.records()) == 1
    assert not trace.ended and trace.torn_at is None
