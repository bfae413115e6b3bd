"""The scheduler of another checkout, in a process of its own, behind the scheduler's interface.

Owns the child process. The checkout is a folder of this project that the user names, at any commit
that has `scheduler_service.py`; nothing from a trace decides what is started.
"""

import os
import subprocess
import sys
from pathlib import Path

import msgspec

from cearx.core.config import SchedulerConfig
from cearx.core.events import (
    Event,
    Outcome,
    StepPlan,
)
from cearx.replay.scheduler_service import Answer, Apply, Begin, Call, MakePlan, read_message
from cearx.replay.scheduler_service import write_message as send


class OtherTreeError(Exception):
    """The other checkout cannot be used; the message says why."""


class RaisedThere(Exception):
    """What the other scheduler raised."""


class OtherTree:
    """Starts the checkout's scheduler; use as a context manager, `make` as often as needed."""

    def __init__(self, root: Path) -> None:
        if not (root / ".typing" / "cearx" / "replay" / "scheduler_service.py").is_file():
            raise OtherTreeError(f"{root} is no checkout with a scheduler service")
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "cearx.replay.scheduler_service"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": str(root.resolve() / ".typing")},
        )

    def __enter__(self) -> "OtherTree":
        return self

    def __exit__(self, *_: object) -> None:
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
        self._process.wait()

    def make(self, config: SchedulerConfig) -> "RemoteScheduler":
        """A fresh one; the one before must not be used any more."""
        return RemoteScheduler(self, config)

    def call(self, call: Call) -> Answer:
        """Raises RaisedThere for what the scheduler raised."""
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            send(self._process.stdin, call)  # type: ignore[arg-type]
            data = read_message(self._process.stdout)  # type: ignore[arg-type]
        except BrokenPipeError:
            data = None
        if data is None:
            raise OtherTreeError(f"the other scheduler ended, exit code {self._process.wait()}")
        answer = msgspec.msgpack.decode(data, type=Answer)
        if answer.raised is not None:
            raise RaisedThere(answer.raised)
        return answer


class RemoteScheduler:
    """As much of the scheduler's interface as a verifier needs."""

    def __init__(self, tree: OtherTree, config: SchedulerConfig) -> None:
        self.config = config
        self._tree = tree
        tree.call(Begin(config))

    def apply(self, event: Event) -> tuple[Outcome, ...]:
        decisions = self._tree.call(Apply(event)).decisions
        return tuple(d for d in decisions if not isinstance(d, StepPlan))

    def plan(self) -> StepPlan | None:
        for decision in self._tree.call(MakePlan()).decisions:
            assert isinstance(decision, StepPlan), f"a plan that is a {type(decision).__name__}"
            return decision
        return None
