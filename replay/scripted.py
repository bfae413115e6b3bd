"""A log as a script: the order of its inputs without its decisions, to be run under any scheduler.

Owns the script's items and how they are run. An item that has become pointless because others were
taken out (a step without work, a cancel of somebody who never came) is passed over, so that every
part of a script is a script. Used by `shrink.py` and by the tests it writes.
"""

from collections.abc import Iterable, Sequence

import msgspec

from cearx.core.config import SchedulerConfig
from cearx.core.events import (
    CancelReason,
    CancelRequested,
    Decision,
    Event,
    RequestArrived,
    StepFinished,
    StepPlan,
)
from cearx.core.identifiers import RequestId
from cearx.replay.driver import AnyScheduler, Driver, Log
from cearx.replay.oracle import Recorder, SimulatedRequest
from cearx.replay.trace import TraceRecord


class Arrive(msgspec.Struct, frozen=True, tag="arrive"):
    request: SimulatedRequest


class Cancel(msgspec.Struct, frozen=True, tag="cancel"):
    request_id: RequestId
    reason: CancelReason


class Plan(msgspec.Struct, frozen=True, tag="plan"):
    now_us: int


class Finish(msgspec.Struct, frozen=True, tag="finish"):
    """The oldest step in flight is computed."""


Item = Arrive | Cancel | Plan | Finish


class Script(msgspec.Struct, frozen=True):
    """A configuration and what happens under it."""

    config: SchedulerConfig
    items: tuple[Item, ...]

    @property
    def num_requests(self) -> int:
        return sum(isinstance(item, Arrive) for item in self.items)


def script_of(config: SchedulerConfig, records: Iterable[TraceRecord]) -> Script:
    """The inputs of a log in their order."""
    recorder = Recorder(config)
    order: list[Item | RequestId] = []
    for record in records:
        value = record.value
        recorder.feed(value)
        if isinstance(value, RequestArrived):
            order.append(value.request_id)
        elif isinstance(value, CancelRequested):
            order.append(Cancel(value.request_id, value.reason))
        elif isinstance(value, StepPlan):
            order.append(Plan(recorder.timeline.now_us))
        elif isinstance(value, StepFinished):
            order.append(Finish())
    requests = {request.request_id: request for request in recorder.requests()}
    items = [Arrive(requests[item]) if isinstance(item, int) else item for item in order]
    return Script(config, tuple(items))


class RecordList(list[Event | Decision]):
    """A log in memory."""


def run_script(
    scheduler: AnyScheduler, items: Sequence[Item], log: Log, max_extra_steps: int = 0
) -> Driver:
    """Runs the items, then at most so many steps more until everyone has ended."""
    driver = Driver(scheduler, log)
    now_us = 0
    for item in items:
        if isinstance(item, Arrive):
            driver.arrive(item.request)
        elif isinstance(item, Cancel):
            driver.cancel(item.request_id, item.reason)
        elif isinstance(item, Plan):
            now_us = max(now_us, item.now_us)
            if driver.can_plan():
                driver.plan(now_us)
        elif driver.has_step_in_flight:
            driver.finish()
    for _ in range(max_extra_steps):
        while driver.has_step_in_flight:
            driver.finish()
        if not driver.can_plan():
            break
        now_us += 1000
        driver.plan(now_us)
    while driver.has_step_in_flight:
        driver.finish()
    return driver
