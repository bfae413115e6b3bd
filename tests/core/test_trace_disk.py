"""The disk behind the trace: slow ones get a thread, full ones a typed failure, syncs elsewhere."""

import errno
import os
import threading
import time
from pathlib import Path

import pytest

from cearx.core import trace_disk, trace_disk_thread
from cearx.core.trace_disk import QueueFull, TraceDisk
from cearx.core.trace_disk_thread import NOTHING_LOST, WriteFailed
from cearx.core.trace_format import RecordType, encode_frame, salt_crc

real_write = os.write
real_fdatasync = os.fdatasync


def frame(seq: int, size: int = 10) -> bytes:
    return encode_frame(salt_crc(1), seq, RecordType.NOTE, 0, bytes(size))


def no_reason() -> None:
    raise AssertionError("no write was slow")


def make_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on every write is slower than what is borne."""
    monkeypatch.setattr(trace_disk, "SLOW_WRITE_NS", -1)


def open_behind(path: Path, monkeypatch: pytest.MonkeyPatch, fsync: str = "never") -> TraceDisk:
    """A disk whose writes go to the thread already; the file has three bytes."""
    make_slow(monkeypatch)
    disk = TraceDisk(fsync, lambda: None)  # type: ignore[arg-type]
    disk.begin(path, b"", 0, 0)
    for _ in range(3):
        assert not disk.writes_behind
        assert disk.write(b"x", 0) is None
    assert disk.writes_behind
    return disk


def test_three_slow_writes_in_a_minute_move_writing_to_the_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three more than a minute apart do not, and it is told once."""
    now = 0
    monkeypatch.setattr(time, "perf_counter_ns", lambda: now)
    make_slow(monkeypatch)
    told: list[int] = []
    disk = TraceDisk("never", lambda: told.append(now))
    disk.begin(tmp_path / "a", b"", 0, 0)
    for seconds in (0, 40, 61, 110):
        now = seconds * 10**9
        disk.write(frame(0), 0)
        assert not disk.writes_behind
    now = 119 * 10**9
    disk.write(frame(0), 0)
    assert disk.writes_behind and told == [now]
    threads = []
    monkeypatch.setattr(
        os, "write", lambda fd, data: threads.append(threading.current_thread()) or len(data)
    )
    disk.write(frame(0), 0)
    assert disk.end() is None
    assert len(threads) == 1 and threads[0] is not threading.current_thread()


def test_the_thread_keeps_the_order_over_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is handed over ends up in its file, in order, before `end` returns."""
    disk = open_behind(tmp_path / "a", monkeypatch)
    for seq in range(100):
        disk.write(frame(seq), seq)
    disk.begin(tmp_path / "b", b"start", 100, 0)
    disk.write(frame(100), 100)
    assert disk.end() is None
    assert (tmp_path / "a").read_bytes() == b"xxx" + b"".join(frame(seq) for seq in range(100))
    assert (tmp_path / "b").read_bytes() == b"start" + frame(100)


def test_the_queue_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that stands still costs 64 MiB; then the record that is lost first is named."""
    disk = open_behind(tmp_path / "a", monkeypatch)
    go_on = threading.Event()
    monkeypatch.setattr(os, "write", lambda fd, data: go_on.wait(10) and len(data))
    big = bytes(16 << 20)
    for seq in range(4):
        assert disk.write(big, seq) is None
    failed = disk.write(b"y", 4)
    assert failed is not None and isinstance(failed.error, QueueFull) and failed.first_lost == 4
    assert not disk.is_drained
    go_on.set()
    assert disk.end() is None
    assert disk.is_drained


@pytest.mark.parametrize("is_behind", [False, True])
def test_a_failing_write_names_the_first_lost_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_behind: bool
) -> None:
    """Of five records two and a half reach the disk; nothing behind them is tried."""
    if is_behind:
        disk = open_behind(tmp_path / "a", monkeypatch)
    else:
        disk = TraceDisk("never", no_reason)
        disk.begin(tmp_path / "a", b"xxx", 0, 0)
    data = b"".join(frame(seq) for seq in range(7, 12))
    room = len(frame(0)) * 5 // 2
    calls = []

    def write(fd: int, data: bytes) -> int:
        calls.append(len(data))
        if len(calls) > 1:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real_write(fd, data[:room])

    monkeypatch.setattr(os, "write", write)
    failed = disk.write(data, 7)
    if is_behind:
        assert failed is None
        while not disk.is_drained:
            time.sleep(0.001)
        failed = disk.write(frame(12), 12)
    assert failed is not None
    assert (failed.first_lost, failed.error.errno) == (9, errno.ENOSPC)
    disk.abandon()
    assert disk.end() is None
    assert len(calls) == 2
    assert (tmp_path / "a").stat().st_size == 3 + room


def test_nothing_goes_behind_a_failed_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What waited for the thread is not written to the file with the hole."""
    disk = open_behind(tmp_path / "a", monkeypatch)
    go_on = threading.Event()
    calls = []

    def write(fd: int, data: bytes) -> int:
        calls.append(data)
        go_on.wait(10)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "write", write)
    for seq in range(3):
        assert disk.write(frame(seq), seq) is None
    go_on.set()
    failed = disk.end()
    assert failed is not None and failed.first_lost == 0
    assert calls == [frame(0)]
    assert disk.is_drained


@pytest.mark.parametrize(("policy", "num_syncs"), [("never", 0), ("rotate", 2), ("everysec", 2)])
def test_syncs_at_the_end_of_each_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, policy: str, num_syncs: int
) -> None:
    """Once a file, and never on the caller's thread."""
    syncs: list[threading.Thread] = []
    monkeypatch.setattr(os, "fdatasync", lambda fd: syncs.append(threading.current_thread()))
    disk = TraceDisk(policy, no_reason)  # type: ignore[arg-type]
    disk.begin(tmp_path / "a", b"a", 0, 0)
    disk.begin(tmp_path / "b", b"b", 0, 0)
    disk.end()
    assert len(syncs) == num_syncs and threading.current_thread() not in syncs


def test_syncs_every_period_while_something_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that does not change is not synced again."""
    syncs: list[int] = []
    monkeypatch.setattr(os, "fdatasync", syncs.append)
    monkeypatch.setattr(trace_disk_thread, "SYNC_PERIOD_S", 0.01)
    disk = TraceDisk("everysec", no_reason)
    disk.begin(tmp_path / "a", b"a", 0, 0)
    for count in range(1, 4):
        give_up = time.monotonic() + 5
        while len(syncs) < count and time.monotonic() < give_up:
            time.sleep(0.005)
        time.sleep(0.05)
        assert len(syncs) == count
        disk.write(frame(0), 0)
    disk.end()


def test_a_failing_sync_is_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel may have dropped the pages, so nothing more goes to this file."""

    def fail(fd: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "fdatasync", fail)
    disk = TraceDisk("rotate", no_reason)
    disk.begin(tmp_path / "a", b"a", 0, 0)
    failed = disk.end()
    assert isinstance(failed, WriteFailed)
    assert (failed.first_lost, failed.error.errno) == (NOTHING_LOST, errno.EIO)


def test_a_file_that_cannot_be_begun_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file before goes on to be written, and the failed one is deleted."""
    disk = TraceDisk("never", no_reason)
    disk.begin(tmp_path / "a", b"a", 0, 0)
    with pytest.raises(FileExistsError):
        disk.begin(tmp_path / "a", b"b", 0, 0)
    with monkeypatch.context() as context:
        context.setattr(os, "write", lambda fd, data: real_write(99999, data))
        with pytest.raises(OSError):
            disk.begin(tmp_path / "b", b"b", 0, 0)
    disk.write(b"c", 0)
    disk.end()
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
    assert (tmp_path / "a").read_bytes() == b"ac"
