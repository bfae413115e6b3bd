"""Runs a scheduler in virtual time: arrivals, step times and cancels as a model has them.

Owns the clock and the order of events: what arrives while a step runs is logged between its plan
and its result, as in the core's shell. Writes the same records as a served run. Used by
`what_if.py` and `simulate.py`.
"""

import heapq
from collections import deque
from collections.abc import Sequence
from typing import Protocol

import msgspec

from cearx.core.events import CancelReason, Decision, Event, StepPlan
from cearx.core.identifiers import RequestId
from cearx.core.plan_timing import PlanTiming
from cearx.core.trace_records import StepNote
from cearx.replay.driver import AnyScheduler, Driver
from cearx.replay.oracle import Cancellation, SimulatedRequest
from cearx.replay.step_time import StepClock, StepTime, Terms, terms_of_plan

POLL_US = 1000
"""The core waits in whole milliseconds."""


class NotedLog(Protocol):
    """Where records go, measured times included."""

    def append(self, record: Event | Decision | StepNote, /) -> object: ...


class Arrival(msgspec.Struct, frozen=True, kw_only=True):
    """A request comes `delay_us` after `num_ended` requests have ended, from 0 on the clock."""

    request: SimulatedRequest
    num_ended: int = 0
    delay_us: int


def open_loop(requests: Sequence[SimulatedRequest], start_us: int) -> list[Arrival]:
    """Everyone comes at the logged time, whatever the server does."""
    return [Arrival(request=r, delay_us=r.arrived_us - start_us) for r in requests]


def closed_loop(
    requests: Sequence[SimulatedRequest], ended_us: Sequence[int], start_us: int
) -> list[Arrival]:
    """Each end makes room for one arrival, as long after it as logged: so many are in flight.

    `ended_us` are the logged ends, in order.
    """
    arrivals: list[Arrival] = []
    num_used = 0
    for request in requests:
        if num_used < len(ended_us) and ended_us[num_used] <= request.arrived_us:
            since = ended_us[num_used]
            num_used += 1
            delay_us = request.arrived_us - since
            arrivals.append(Arrival(request=request, num_ended=num_used, delay_us=delay_us))
        else:  # one more in flight than before
            arrivals.append(Arrival(request=request, delay_us=request.arrived_us - start_us))
    return arrivals


class _Planned(msgspec.Struct, frozen=True):
    planned_us: int
    execute_us: int


class Simulation:
    """One run from time 0; `run` ends when everyone has ended, or at `stop_us`."""

    def __init__(
        self,
        scheduler: AnyScheduler,
        arrivals: Sequence[Arrival],
        step_time: StepTime,
        log: NotedLog,
        stop_us: int | None = None,
    ) -> None:
        self._driver = Driver(scheduler, log)
        self._arrivals = arrivals
        self._next = 0
        self._ends_us: list[int] = []
        """When each request ended, in order."""
        self._cancels: list[tuple[int, RequestId, Cancellation]] = []
        """By time, those that wait for a time."""
        self._stop_strings: dict[RequestId, int] = {}
        """Tokens after which the frontend finds a stop string."""
        self._step_time = step_time
        self._log = log
        self._stop_us = stop_us
        self._planned: deque[_Planned] = deque()
        """The steps in flight."""
        self._clock = StepClock(step_time)
        self._timing = PlanTiming()
        self._free_us = 0
        """Since when the worker has nothing to do but the steps in flight."""
        self._written: dict[RequestId, int] = {}
        """Tokens in KV behind the steps planned so far."""

    def run(self) -> int:
        """Answers the time of the end.

        The worker takes the steps in flight one by one; the core plans whenever something came.
        """
        driver, now_us = self._driver, 0
        while True:
            self._deliver(now_us)
            while driver.can_plan() and self._timing.hold_us(now_us) < POLL_US:
                if not self._plan(now_us):
                    break
            hold_us = self._timing.hold_us(now_us) // POLL_US * POLL_US
            due_us = self._next_arrival_us()
            if self._planned:
                end_us = self._end_of_step_us()
                wake_us = [us for us in (due_us,) if us is not None]
                wake_us += [now_us + hold_us] if hold_us and driver.can_plan() else []
                if wake_us and min(wake_us) < end_us:
                    now_us = max(now_us, min(wake_us))
                    continue
                self._deliver(end_us)
                self._finish(end_us)
                now_us = end_us + self._step_time.gap_us
            elif due_us is not None:
                now_us = max(now_us, due_us)
            else:
                return now_us
            if self._stop_us is not None and now_us >= self._stop_us:
                return now_us

    def _plan(self, now_us: int) -> bool:
        plan = self._driver.plan(now_us)
        self._note_ends(now_us)  # some may have run out of time
        if plan is None:
            return False
        self._planned.append(_Planned(now_us, self._clock.execute_us(self._terms(plan))))
        self._timing.sent(now_us + self._step_time.schedule_us)
        return True

    def _end_of_step_us(self) -> int:
        """Of the oldest step in flight: it begins when it is there and the worker is free."""
        oldest = self._planned[0]
        model = self._step_time
        begun_us = max(oldest.planned_us + model.schedule_us, self._free_us + model.handover_us)
        return begun_us + oldest.execute_us

    def _finish(self, end_us: int) -> None:
        step, schedule_us = self._planned.popleft(), self._step_time.schedule_us
        execute_us = step.execute_us
        waited_us = end_us - execute_us - step.planned_us - schedule_us
        self._free_us = end_us
        self._timing.finished(end_us, execute_us)
        self._driver.finish(execute_us)
        self._log.append(
            StepNote(execute_us=execute_us, schedule_us=schedule_us, receive_us=waited_us)
        )
        self._note_ends(end_us)

    def _terms(self, plan: StepPlan) -> Terms:
        """What the step computes, once its rows are counted as written."""
        written = self._written
        for request_id in plan.preempted:
            written.pop(request_id, None)
        for admission in plan.admitted:
            written[admission.request_id] = admission.num_cached_tokens
        for chunk in plan.chunks:
            written[chunk.request_id] = chunk.start + chunk.num_tokens
        for request_id in plan.decodes:
            written[request_id] = written.get(request_id, 0) + 1
        context = sum(written[request_id] for request_id in plan.decodes)
        context += sum(written[chunk.request_id] for chunk in plan.chunks)
        return terms_of_plan(plan, context)

    def _next_arrival_us(self) -> int | None:
        """When the next one comes, None if somebody has to end before or nobody is left."""
        if self._next == len(self._arrivals):
            return None
        arrival = self._arrivals[self._next]
        if arrival.num_ended > len(self._ends_us):
            assert self._planned, "waits for an end that never comes"
            return None
        return self._due_us(arrival)

    def _due_us(self, arrival: Arrival) -> int:
        since = self._ends_us[arrival.num_ended - 1] if arrival.num_ended else 0
        return since + arrival.delay_us

    def _deliver(self, now_us: int) -> None:
        """Everything that has come by now: arrivals in order, then cancels."""
        while self._next < len(self._arrivals):
            arrival = self._arrivals[self._next]
            if arrival.num_ended > len(self._ends_us) or self._due_us(arrival) > now_us:
                break
            self._next += 1
            self._arrive(arrival.request, now_us)
            self._note_ends(now_us)  # it may have been refused
        while self._cancels and self._cancels[0][0] <= now_us:
            _, request_id, cancellation = heapq.heappop(self._cancels)
            self._driver.cancel(request_id, cancellation.reason)
        if self._driver.has_step_in_flight:  # the frontend reads a token while the next is made
            self._find_stop_strings()
        self._note_ends(now_us)

    def _find_stop_strings(self) -> None:
        outputs = self._driver.num_outputs
        found = [i for i, after in self._stop_strings.items() if outputs.get(i, after) >= after]
        for request_id in found:
            del self._stop_strings[request_id]
            self._driver.cancel(request_id, CancelReason.STOP_STRING)

    def _arrive(self, request: SimulatedRequest, now_us: int) -> None:
        self._timing.arrived(now_us)
        self._driver.arrive(request, now_us)
        cancellation = request.cancellation
        if cancellation is None:
            return
        if cancellation.reason is CancelReason.STOP_STRING:
            self._stop_strings[request.request_id] = cancellation.after_outputs
        else:
            due = now_us + cancellation.after_us
            heapq.heappush(self._cancels, (due, request.request_id, cancellation))

    def _note_ends(self, now_us: int) -> None:
        count = self._driver.num_ended - len(self._ends_us)
        self._ends_us += [now_us] * count
