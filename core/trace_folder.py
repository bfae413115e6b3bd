"""The files of trace logs in a folder: their names, the ring that bounds them, and pinned sets.

Owns names and life of whole files; never looks into one. A run's files are segments numbered from
0; `trace.log` points at the newest. A pinned set is a folder of hard links, so that the ring may
delete its own names meanwhile. Called by `trace_writer.py`, the supervisor and `replay/trace.py`.
"""

import contextlib
import fcntl
import os
import re
import shutil
import time
from pathlib import Path
from typing import NamedTuple

NEWEST = "trace.log"
"""Symbolic link in the trace folder to the newest segment."""
_SEGMENT_NAME = re.compile(r"trace-([0-9a-f]{8})-([0-9]{6,9})\.log")


class SegmentPath(NamedTuple):
    """A file that is named like a segment."""

    boot: str
    """First half of the run's boot id, in hex."""
    number: int
    path: Path


def boot_name(boot_id: int) -> str:
    """How the names of a run's segments tell the run."""
    return f"{boot_id >> 32:08x}"


def segment_path(folder: Path, boot_id: int, number: int) -> SegmentPath:
    """Where a segment belongs."""
    boot = boot_name(boot_id)
    return SegmentPath(boot, number, folder / f"trace-{boot}-{number:06d}.log")


def parse_path(path: Path) -> SegmentPath | None:
    """What a file's name says, or None when it is not named like a segment."""
    found = _SEGMENT_NAME.fullmatch(path.name)
    return None if found is None else SegmentPath(found[1], int(found[2]), path)


def find_segments(folder: Path, boot: str | None = None) -> list[SegmentPath]:
    """The segments in a folder, of one run or of all, by run and number; raises OSError."""
    found = (parse_path(path) for path in folder.iterdir())
    return sorted(s for s in found if s is not None and boot in (None, s.boot))


def point_newest_at(path: Path) -> None:
    """Replaces the link in one step; raises OSError, also for somebody's own file there."""
    link = path.parent / NEWEST
    if link.exists() and not link.is_symlink():
        raise FileExistsError(0, f"{link} is not a symbolic link")
    made = path.with_suffix(".link")
    made.symlink_to(path.name)
    made.replace(link)


def lock(fd: int) -> None:
    """Marks a segment as the one that a live process writes, until `fd` is closed."""
    with contextlib.suppress(OSError):  # a file system without locks: the ring may then take it
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _is_locked(path: Path) -> bool:
    try:
        fd = os.open(path, os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(fd)
    return False


def prune(folder: Path, boot_id: int, keep: int) -> None:
    """Deletes the oldest segments until `keep` are left: first of ended runs, then of this one.

    Segments of other runs that still live are neither counted nor touched. Raises OSError when
    one cannot be deleted.
    """
    own = boot_name(boot_id)
    segments = find_segments(folder)
    newest = {segment.boot: segment for segment in segments}
    live = {boot for boot, last in newest.items() if boot != own and _is_locked(last.path)}
    ended = [s for s in segments if s.boot != own and s.boot not in live]
    ended.sort(key=lambda s: (newest[s.boot].path.stat().st_mtime_ns, s.boot, s.number))
    ring = ended + [s for s in segments if s.boot == own]
    for segment in ring[:-keep]:
        segment.path.unlink(missing_ok=True)


def pin(folder: Path, boot_id: int, reason: str) -> Path:
    """Keeps what a run has logged in a folder of its own, which the ring never deletes.

    The newest segment is linked too, so it goes on to grow there until it is full. Answers the
    folder, `pinned-<reason>-<UTC time>`; raises OSError.
    """
    stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    name = f"pinned-{reason}-{stamp}"
    segments = find_segments(folder, boot_name(boot_id))
    if not segments:
        raise FileNotFoundError(0, f"no trace log of run {boot_name(boot_id)} in {folder}")
    pinned = folder / name
    for attempt in range(2, 1000):
        try:
            pinned.mkdir(mode=0o700)
            break
        except FileExistsError:
            pinned = folder / f"{name}-{attempt}"
    for segment in segments:
        _link_or_copy(segment.path, pinned / segment.path.name)
    point_newest_at(pinned / segments[-1].path.name)
    return pinned


def _link_or_copy(source: Path, target: Path) -> None:
    try:
        target.hardlink_to(source)
    except FileNotFoundError:
        return  # the ring deleted it meanwhile
    except OSError:  # a file system without hard links
        shutil.copy2(source, target)
