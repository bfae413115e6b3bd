"""Drives a scheduler as the core's shell does, with an oracle in the place of the worker.

Owns the step results: one token for each row that samples, ends and hashes as the oracle has them.
Every event and decision goes to a log. The callers own the order of events and the clock:
`scripted.py` repeats a log's order, `simulation.py` has a virtual clock.
"""

from collections import deque
from typing import Protocol

from cearx.core.config import SchedulerConfig
from cearx.core.events import (
    BlockSealed,
    CancelReason,
    CancelRequested,
    ClockAdvanced,
    Decision,
    Event,
    FinishReason,
    Outcome,
    PrefixCacheEmptied,
    PrefixCacheReset,
    RowStopped,
    StepFinished,
    StepPlan,
)
from cearx.core.identifiers import RequestId
from cearx.replay.oracle import SimulatedRequest
from cearx.replay.rows import rows


class AnyScheduler(Protocol):
    """What a driver needs of a scheduler."""

    config: SchedulerConfig

    def has_work(self) -> bool: ...

    def apply(self, event: Event) -> tuple[Outcome, ...]: ...

    def plan(self) -> StepPlan | None: ...


class Log(Protocol):
    """Where records go."""

    def append(self, record: Event | Decision, /) -> object: ...


class Driver:
    """One run; a scheduler's own AssertionErrors pass through."""

    def __init__(self, scheduler: AnyScheduler, log: Log) -> None:
        self.scheduler = scheduler
        self.num_outputs: dict[RequestId, int] = {}
        """Of each live request, so far."""
        self.num_ended = 0
        """Requests that ended or were refused."""
        self._log = log
        self._requests: dict[RequestId, SimulatedRequest] = {}
        self._in_flight: deque[StepPlan] = deque()
        self._is_stuck = False
        """Nothing can be planned before something but the clock comes in."""

    @property
    def has_step_in_flight(self) -> bool:
        return bool(self._in_flight)

    def can_plan(self) -> bool:
        """Whether a step may be planned now."""
        return not self._is_stuck and self.scheduler.has_work()

    def arrive(self, request: SimulatedRequest, now_us: int) -> None:
        self._requests[request.request_id] = request
        self.num_outputs[request.request_id] = 0
        self._apply(request.arrival(now_us))

    def cancel(self, request_id: RequestId, reason: CancelReason) -> None:
        """In any state; one that has ended already is passed over, as the shell does."""
        if request_id in self._requests:
            self._apply(CancelRequested(request_id=request_id, reason=reason))

    def reset_prefix_cache(self) -> None:
        """Nothing computed before is found again."""
        self._apply(PrefixCacheReset())

    def tick(self, now_us: int) -> None:
        """Time passes; requests may run out of it."""
        self._apply(ClockAdvanced(now_us=now_us))

    def plan(self, now_us: int) -> StepPlan | None:
        """The next step, None when it must wait for one in flight; call when `can_plan`."""
        self.tick(now_us)
        if not self.scheduler.has_work():
            return None  # the last ones ran out of time
        plan = self.scheduler.plan()
        if plan is None:
            self._is_stuck = True
            return None
        self._log.append(plan)
        self._in_flight.append(plan)
        return plan

    def finish(self, execute_us: int) -> None:
        """The oldest step in flight is computed, in so much time."""
        plan = self._in_flight.popleft()
        config = self.scheduler.config
        stopped: list[RowStopped] = []
        sealed: list[BlockSealed] = []
        for row in rows(plan):
            request = self._requests.get(row.request_id)
            if request is None or not row.samples:
                continue
            count = self.num_outputs[row.request_id] + 1
            reason = request.stop_at(count)
            if reason is not None:
                stopped.append(RowStopped(request_id=row.request_id, reason=reason))
            if reason is FinishReason.FAILED:
                continue
            self.num_outputs[row.request_id] = count
            if config.enable_prefix_caching:
                block = request.sealed_by(count, config.block_size)
                if block is not None:
                    sealed.append(block)
        self._apply(
            StepFinished(
                step_id=plan.step_id,
                stopped=tuple(stopped),
                sealed=tuple(sealed),
                execute_us=execute_us,
            )
        )

    def _apply(self, event: Event) -> None:
        self._is_stuck = self._is_stuck and isinstance(event, ClockAdvanced)
        self._log.append(event)
        for outcome in self.scheduler.apply(event):
            self._log.append(outcome)
            if isinstance(outcome, PrefixCacheEmptied):
                continue
            if self._requests.pop(outcome.request_id, None) is not None:
                del self.num_outputs[outcome.request_id]
                self.num_ended += 1
