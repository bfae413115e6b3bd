"""Names, the ring over several runs, pinned sets."""

import os
from pathlib import Path

import pytest

from cearx.core import trace_folder
from cearx.core.trace_folder import (
    find_segments,
    lock,
    parse_path,
    pin,
    point_newest_at,
    prune,
    segment_path,
)

OLD, NEW, OTHER = 1 << 32, 2 << 32, 3 << 32


def make(folder: Path, boot_id: int, numbers: range, age_s: int = 0) -> list[Path]:
    paths = [segment_path(folder, boot_id, number).path for number in numbers]
    for path in paths:
        path.write_text(path.name)
        os.utime(path, (10**9 - age_s, 10**9 - age_s))
    return paths


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_names_come_back(tmp_path: Path) -> None:
    """Run and number are read from a name; anything else is no segment."""
    made = segment_path(tmp_path, 0x1F09C2AA_00112233, 7)
    assert made.path.name == "trace-1f09c2aa-000007.log"
    assert parse_path(made.path) == made
    assert segment_path(tmp_path, 0, 1_234_567).path.name == "trace-00000000-1234567.log"
    for name in ("trace.log", "trace-1f09c2aa-7.log", "trace-1F09C2AA-000007.log", "x"):
        assert parse_path(tmp_path / name) is None
    assert not parse_path(tmp_path / "trace-1f09c2aa-000007.log.gz")


def test_the_ring_takes_the_oldest_of_ended_runs_first(tmp_path: Path) -> None:
    """Then the oldest of this one; other files stay."""
    make(tmp_path, OLD, range(3), age_s=100)
    make(tmp_path, OTHER, range(5, 7), age_s=200)
    make(tmp_path, NEW, range(9, 12))
    (tmp_path / "trace-notes.txt").write_text("mine")
    prune(tmp_path, NEW, 5)
    left = [(s.boot, s.number) for s in find_segments(tmp_path)]
    assert left == [
        *(("00000001", number) for number in (1, 2)),
        *(("00000002", number) for number in (9, 10, 11)),
    ]
    prune(tmp_path, NEW, 2)
    assert [(s.boot, s.number) for s in find_segments(tmp_path)] == [
        ("00000002", 10),
        ("00000002", 11),
    ]
    assert (tmp_path / "trace-notes.txt").exists()


def test_the_ring_leaves_live_runs_alone(tmp_path: Path) -> None:
    """Another server with the same folder holds a lock on its newest segment."""
    live = make(tmp_path, OTHER, range(4), age_s=500)
    make(tmp_path, NEW, range(3))
    fd = os.open(live[-1], os.O_WRONLY)
    lock(fd)
    prune(tmp_path, NEW, 2)
    assert len(find_segments(tmp_path, "00000003")) == 4
    assert len(find_segments(tmp_path, "00000002")) == 2
    os.close(fd)
    prune(tmp_path, NEW, 2)
    assert find_segments(tmp_path, "00000003") == []


@pytest.mark.parametrize("has_hard_links", [True, False])
def test_a_pinned_set_holds_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_hard_links: bool
) -> None:
    """All segments of the run and a link to the newest; a second one has another name."""
    if not has_hard_links:

        def refuse(*_: object) -> None:
            raise PermissionError(1, "no hard links here")

        monkeypatch.setattr(Path, "hardlink_to", refuse)
    monkeypatch.setattr(trace_folder.time, "strftime", lambda *_: "20260102T030405Z")
    paths = make(tmp_path, NEW, range(3))
    make(tmp_path, OLD, range(3))
    first = pin(tmp_path, NEW, "crash")
    assert first == tmp_path / "pinned-crash-20260102T030405Z"
    assert names(first) == [*(path.name for path in paths), "trace.log"]
    assert os.readlink(first / "trace.log") == paths[-1].name
    assert pin(tmp_path, NEW, "crash").name == "pinned-crash-20260102T030405Z-2"
    for path in paths:
        path.unlink()
    assert (first / "trace.log").read_text() == paths[-1].name
    with pytest.raises(FileNotFoundError):
        pin(tmp_path, NEW, "crash")


def test_the_link_is_replaced_and_a_file_is_not(tmp_path: Path) -> None:
    """Somebody's own trace.log is not ours."""
    first, second = make(tmp_path, NEW, range(2))
    point_newest_at(first)
    point_newest_at(second)
    assert (tmp_path / "trace.log").read_text() == second.name
    (tmp_path / "trace.log").unlink()
    (tmp_path / "trace.log").write_text("mine")
    with pytest.raises(FileExistsError):
        point_newest_at(first)
