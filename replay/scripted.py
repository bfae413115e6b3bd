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
    ClockAdvanced,
    Decision,
    Event,
    PrefixCacheReset,
    RequestArrived,
    StepFinished,
    StepPlan,
)
from cearx.core.identifiers import RequestId
from cearx.replay.driver import AnyScheduler, Driver, Log
from cearx.replay.oracle import Recorder, SimulatedRequest
from cearx.replay.trace import TraceRecord

EXTRA_STEP_US = 1000


class Arrive(msgspec.Struct, frozen=True, tag="arrive"):
    request: SimulatedRequest


class Cancel(msgspec.Struct, frozen=True, tag="cancel"):
    request_id: RequestId
    reason: CancelReason


class Plan(msgspec.Struct, frozen=True, tag="plan"):
    now_us: int


class Tick(msgspec.Struct, frozen=True, tag="tick"):
    """The clock without a step behind it."""

    now_us: int


class Finish(msgspec.Struct, frozen=True, tag="finish"):
    """The oldest step in flight is computed."""

    execute_us: int = 1000


class Reset(msgspec.Struct, frozen=True, tag="reset"):
    """The prefix cache is reset."""


Item = Arrive | Cancel | Plan | Tick | Finish | Reset


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
        elif isinstance(value, ClockAdvanced):
            order.append(Tick(value.now_us))
        elif isinstance(value, StepPlan):
            if isinstance(order[-1], Tick):
                order.pop()
            order.append(Plan(recorder.timeline.now_us))
        elif isinstance(value, StepFinished):
            order.append(Finish(value.execute_us))
        elif isinstance(value, PrefixCacheReset):
            order.append(Reset())
    requests = {request.request_id: request for request in recorder.requests()}
    items = [Arrive(requests[item]) if isinstance(item, int) else item for item in order]
    return Script(config, tuple(items))


class RecordList(list[Event | Decision]):
    """A log in memory."""


class ScriptRun:
    """One run; feed the items in order, then `finish`."""

    def __init__(self, scheduler: AnyScheduler, log: Log) -> None:
        self.driver = Driver(scheduler, log)
        self._now_us = 0

    def take(self, item: Item) -> None:
        """Does what the item says, if there is anything to do."""
        driver = self.driver
        if isinstance(item, Arrive):
            self._now_us = max(self._now_us, item.request.arrived_us)
            driver.arrive(item.request, self._now_us)
        elif isinstance(item, Cancel):
            driver.cancel(item.request_id, item.reason)
        elif isinstance(item, Reset):
            driver.reset_prefix_cache()
        elif isinstance(item, Finish):
            if driver.has_step_in_flight:
                driver.finish(item.execute_us)
        else:
            self._now_us = max(self._now_us, item.now_us)
            if isinstance(item, Tick):
                driver.tick(self._now_us)
            elif driver.can_plan():
                driver.plan(self._now_us)

    def finish(self, max_extra_steps: int) -> None:
        """At most so many steps more, until everyone has ended."""
        driver = self.driver
        for _ in range(max_extra_steps):
            if driver.can_plan():
                self._now_us += EXTRA_STEP_US
                driver.plan(self._now_us)
            elif driver.has_step_in_flight:
                driver.finish(EXTRA_STEP_US)
            else:
                break
        while driver.has_step_in_flight:
            driver.finish(EXTRA_STEP_US)


def run_script(
    scheduler: AnyScheduler, items: Sequence[Item], log: Log, max_extra_steps: int = 0
) -> Driver:
    """Runs the items, then at most so many steps more until everyone has ended."""
    run = ScriptRun(scheduler, log)
    for item in items:
        run.take(item)
    run.finish(max_extra_steps)
    return run.driver


def encode_script(script: Script) -> str:
    """As JSON, one item a line."""
    items = ",\n".join(msgspec.json.encode(item).decode() for item in script.items)
    config = msgspec.json.encode(script.config).decode()
    return f'{{"config": {config}, "items": [\n{items}\n]}}'


def decode_script(text: str) -> Script:
    """The inverse; raises msgspec.ValidationError."""
    return msgspec.json.decode(text, type=Script)
