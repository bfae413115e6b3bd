"""The private folder with a run's sockets: made, and removed even for a run that was killed.

A killed supervisor takes its children with it, so nobody is left to clean up; the next start does.
Called by `supervisor.py`.
"""

import fcntl
import os
import shutil
import stat
import tempfile
import time
from pathlib import Path

PREFIX = "cearx-"
MIN_AGE_S = 60.0
"""A younger folder may be of somebody who has not locked it yet."""


class RuntimeFolder:
    """Of mode 0700, locked for as long as this process lives."""

    def __init__(self) -> None:
        _remove_left_over(Path(tempfile.gettempdir()))
        self.path = Path(tempfile.mkdtemp(prefix=PREFIX))
        self._fd = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        fcntl.flock(self._fd, fcntl.LOCK_EX)

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._fd)


def _remove_left_over(parent: Path) -> None:
    """Folders of this user that nobody holds any more and that hold nothing but sockets."""
    for path in parent.glob(f"{PREFIX}*"):
        try:
            status = path.lstat()
            is_ours = stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid()
            if not is_ours or time.time() - status.st_mtime < MIN_AGE_S:
                continue
            if not all(stat.S_ISSOCK(entry.lstat().st_mode) for entry in path.iterdir()):
                continue
            fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except OSError:  # gone, or not for us
            continue
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path, ignore_errors=True)
        except BlockingIOError:
            pass  # its server runs
        finally:
            os.close(fd)
