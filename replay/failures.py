"""What goes wrong when a script runs under a scheduler, and how two failures are the same.

Owns the classes that shrinking can keep: a broken rule, a scheduler that raises, a request that
gets nothing for too long, and a decision that another scheduler takes otherwise.
"""

import re
from collections.abc import Callable
from typing import Literal

import msgspec

from cearx.core.config import SchedulerConfig
from cearx.core.events import (
    Decision,
    Event,
    RequestArrived,
    RequestEnded,
    RequestRefused,
    StepPlan,
)
from cearx.core.identifiers import RequestId
from cearx.core.scheduler import Scheduler
from cearx.replay.driver import AnyScheduler
from cearx.replay.invariants import Checker
from cearx.replay.rows import rows
from cearx.replay.scripted import Script, ScriptRun
from cearx.replay.trace import TraceRecord
from cearx.replay.verify import Verifier

Kind = Literal["invariant", "crash", "stall", "divergence"]
MakeScheduler = Callable[[SchedulerConfig], AnyScheduler]


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """The first thing that goes wrong."""

    kind: Kind
    label: str
    """What makes two failures the same: the rule, the message without numbers, the field."""
    text: str
    num_items: int
    """Items of the script up to the failure."""


class Watch(msgspec.Struct, frozen=True, kw_only=True):
    """What counts as a failure."""

    kinds: frozenset[Kind] = frozenset({"invariant", "crash"})
    stall_steps: int = 1000
    """Steps without a row after which a request is stalled."""
    other: MakeScheduler | None = None
    """The scheduler to compare with, for `divergence`."""


class _Watcher:
    """A log that looks at each record; `found` is the first failure, without its place."""

    def __init__(self, config: SchedulerConfig, watch: Watch) -> None:
        self.found: tuple[Kind, str, str] | None = None
        self._checker = Checker(config) if "invariant" in watch.kinds else None
        self._verifier: Verifier | None = None
        if "divergence" in watch.kinds and watch.other is not None:
            self._verifier = Verifier(watch.other(config))  # type: ignore[arg-type]
        self._stall_steps = watch.stall_steps if "stall" in watch.kinds else None
        self._last_row: dict[RequestId, int] = {}
        self._num_steps = 0
        self._seq = 0

    def append(self, record: Event | Decision, /) -> None:
        self._seq += 1
        numbered = TraceRecord(self._seq, self._seq, record)
        if self._checker is not None and self.found is None:
            for violation in self._checker.feed(numbered)[:1]:
                self.found = ("invariant", violation.invariant, violation.text)
        if self._verifier is not None and self.found is None:
            difference = self._verifier.feed(numbered)
            if difference is not None:
                label = re.sub(r"\[\d+:?\]", "", difference.field)
                text = f"{difference.field}: {difference.logged}, other {difference.computed}"
                self.found = ("divergence", label, text)
        if self._stall_steps is not None:
            self._watch_stalls(record, self._stall_steps)

    def _watch_stalls(self, record: Event | Decision, limit: int) -> None:
        if isinstance(record, RequestArrived):
            self._last_row[record.request_id] = self._num_steps
        elif isinstance(record, RequestEnded | RequestRefused):
            self._last_row.pop(record.request_id, None)
        elif isinstance(record, StepPlan):
            self._num_steps += 1
            for row in rows(record):
                self._last_row[row.request_id] = self._num_steps
            if self._num_steps % max(1, limit // 8) == 0 and self.found is None:
                late = [i for i, at in self._last_row.items() if self._num_steps - at >= limit]
                if late:
                    text = f"request {late[0]} got no row in {limit} steps"
                    self.found = ("stall", "stall", text)


def first_failure(make: MakeScheduler, script: Script, watch: Watch) -> Failure | None:
    """Runs the script until something goes wrong."""
    watcher = _Watcher(script.config, watch)
    num_items = 0
    try:
        run = ScriptRun(make(script.config), watcher)
        while num_items < len(script.items) and watcher.found is None:
            num_items += 1
            run.take(script.items[num_items - 1])
        if "stall" in watch.kinds and watcher.found is None:
            run.finish(watch.stall_steps)
    except Exception as error:  # whatever a scheduler with a fault raises is the finding
        if watcher.found is None and "crash" in watch.kinds:
            message = f"{type(error).__name__}: {error}"
            watcher.found = ("crash", re.sub(r"\d+", "#", message)[:60], message)
    if watcher.found is None:
        return None
    kind, label, text = watcher.found
    return Failure(kind=kind, label=label, text=text, num_items=num_items)


def keeps(make: MakeScheduler, watch: Watch, failure: Failure) -> Callable[[Script], int | None]:
    """The predicate for `shrink`: the same kind and label of failure comes first."""

    def predicate(script: Script) -> int | None:
        found = first_failure(make, script, watch)
        if found is None or (found.kind, found.label) != (failure.kind, failure.label):
            return None
        return found.num_items

    return predicate


def running_scheduler(config: SchedulerConfig) -> AnyScheduler:
    return Scheduler(config)
