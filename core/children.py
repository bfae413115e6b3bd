"""The supervisor's child processes: start, watch, end.

A child gets its launch spec as one line of JSON on its standard input; the pipe stays open for as
long as the supervisor lives, and its end is the child's end (`child.py`).
"""

import os
import signal
import subprocess
import sys
import time

from cearx.core.child import encode_launch
from cearx.core.config import Launch

KILL_AFTER_S = 5.0
PROFILE_END_S = 300.0
"""For a worker that has a profile to write."""
"""How long a child may take to end after SIGTERM."""


class Child:
    """One started process."""

    def __init__(self, name: str, module: str, spec: Launch, pass_fds: tuple[int, ...]) -> None:
        self.name = name
        self.process = subprocess.Popen(
            # -P: the folders of a source checkout must not be importable by their bare names.
            [sys.executable, "-P", "-m", module],
            stdin=subprocess.PIPE,
            pass_fds=pass_fds,
            start_new_session=True,  # Ctrl-C in the terminal reaches the supervisor only
        )
        self.pid_fd = os.pidfd_open(self.process.pid)
        assert self.process.stdin is not None
        self.process.stdin.write(encode_launch(spec))
        self.process.stdin.flush()

    @property
    def is_running(self) -> bool:
        return self.process.poll() is None

    def describe_end(self) -> str:
        """How it ended, for a person."""
        code = self.process.wait()
        if code >= 0:
            return f"{self.name} ended with exit code {code}"
        name = signal.Signals(-code).name
        hint = " (out of memory?)" if name == "SIGKILL" else ""
        return f"{self.name} was killed by {name}{hint}"

    def signal(self, number: signal.Signals) -> None:
        """Sends a signal, if it still runs."""
        if self.is_running:
            self.process.send_signal(number)

    def terminate(self) -> None:
        if self.is_running:
            self.process.terminate()


def end_all(stages: list[list[Child]], deadline_s: float = KILL_AFTER_S) -> None:
    """Ends the children stage by stage: SIGTERM, then SIGKILL for those that do not go."""
    for stage in stages:
        for child in stage:
            child.terminate()
        give_up = time.monotonic() + deadline_s
        for child in stage:
            try:
                child.process.wait(max(0.0, give_up - time.monotonic()))
            except subprocess.TimeoutExpired:
                child.process.kill()
                child.process.wait()
            os.close(child.pid_fd)
            if child.process.stdin is not None:
                child.process.stdin.close()
