"""A run as a table of steps and a table of requests, in engine time.

Owns the dating of what the log does not date: tokens come when their step ends, cancels stand
between two clock readings. One pass over the records with a ledger; no scheduler. The input of
stats, diff, what-if, the Perfetto export and the report.

    engine time   planned ──schedule──┬──execute──┐ finished         next planned
                  the clock record    the note of the step            the next clock record
"""

from collections.abc import Iterable

from cearx.core.config import SchedulerConfig
from cearx.core.events import (
    ClockAdvanced,
    FinishReason,
    RefusalReason,
    RequestArrived,
    RequestEnded,
    RequestRefused,
    StepFinished,
    StepPlan,
)
from cearx.core.identifiers import RequestId, StepId
from cearx.core.trace_records import StepNote
from cearx.replay.ledger import BY_A_RESULT, Ledger
from cearx.replay.request_line import Admitted, Chunk, RequestLine
from cearx.replay.rows import rows
from cearx.replay.step_table import StepTable
from cearx.replay.trace import TraceRecord


def timeline_of(config: SchedulerConfig, records: Iterable[TraceRecord]) -> "Timeline":
    """Of a whole log."""
    timeline = Timeline(config)
    for record in records:
        timeline.feed(record.value)
    timeline.finish()
    return timeline


class Timeline:
    """Feed the records in order, then `finish`."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.steps = StepTable()
        self.requests: dict[RequestId, RequestLine] = {}
        """In order of arrival."""
        self.first_us = 0
        self.last_us = 0
        """The first and the last clock reading, or the last step's end if that is later."""
        self._ledger = Ledger(config)
        self._has_clock = False
        self._index: dict[StepId, int] = {}
        """Of the steps in flight."""
        self._undated_ends: list[RequestLine] = []
        self._undated_steps: list[int] = []
        self._last_finished: int | None = None
        self._carried_over: dict[RequestId, bool] = {}
        """Who is there at a snapshot, and whether it runs, until the next step is planned."""

    @property
    def now_us(self) -> int:
        """The last clock reading."""
        return self._ledger.now_us

    def feed(self, value: object) -> None:
        """Takes the next record's value."""
        if isinstance(value, StepPlan):
            self._ledger.apply(value)
            self._plan(value)
        elif self._ledger.begins_with(value):
            self._ledger.apply(value)
            self._begin()
        elif isinstance(value, StepFinished):
            self._finish_step(value)
            self._ledger.apply(value)
        else:
            self._ledger.apply(value)
            if isinstance(value, ClockAdvanced):
                self._see_clock(value.now_us)
                self._date(value.now_us)
            elif isinstance(value, StepNote):
                self._note(value)
            elif isinstance(value, RequestArrived):
                self.requests[value.request_id] = RequestLine.of(value, len(self.steps))
                self._see_clock(value.arrived_us)
            elif isinstance(value, RequestEnded):
                self._end(value.request_id, value.reason, None)
            elif isinstance(value, RequestRefused):
                self._end(value.request_id, None, value.reason)

    def finish(self) -> None:
        """Dates what is left with the last time that is known."""
        self._date(self.last_us)

    def _begin(self) -> None:
        """Goes on from the ledger's books, at the start of a log or behind a gap."""
        self._date(self.last_us)
        self._index.clear()
        live = self._ledger.live
        for line in self.requests.values():
            if line.ended is None and line.refused is None and line.request_id not in live:
                line.lost, line.ended_us = True, self.last_us
        now_us = self._ledger.now_us
        self._see_clock(now_us)
        for request in live.values():
            if request.request_id not in self.requests:
                self.requests[request.request_id] = RequestLine(
                    request_id=request.request_id,
                    num_prompt_tokens=request.num_prompt_tokens,
                    max_tokens=request.max_tokens,
                    arrived_us=now_us,
                    arrived_step=len(self.steps),
                    began_before=True,
                    _most_planned=request.num_planned,
                )
        self._carried_over = {i: request.is_running for i, request in live.items()}

    def _seat(self, at: int) -> None:
        """Gives those who run since before the log, or got in within a gap, their first step."""
        for request_id, is_running in self._carried_over.items():
            line = self.requests[request_id]
            if line.ended is None and is_running != line.has_seat:
                if is_running:
                    line.admissions.append(Admitted(at, 0))
                else:
                    line.preemptions.append(at)
        self._carried_over = {}

    def _see_clock(self, now_us: int) -> None:
        if not self._has_clock:
            self._has_clock, self.first_us = True, now_us
        self.last_us = max(self.last_us, now_us)

    def _date(self, now_us: int) -> None:
        for step in self._undated_steps:
            self.steps.finished_us[step] = now_us
        for line in self._undated_ends:
            at = line.ended_step
            line.ended_us = now_us if at is None else self.steps.finished_us[at]
        self._undated_steps.clear()
        self._undated_ends.clear()
        self._last_finished = None

    def _end(
        self, request_id: RequestId, ended: FinishReason | None, refused: RefusalReason | None
    ) -> None:
        line = self.requests.get(request_id)
        if line is None:
            return
        line.ended, line.refused = ended, refused
        if ended in BY_A_RESULT:
            line.ended_step = self._last_finished
        if self._ledger.in_flight and line.ended_step is None:
            # Behind the clock that the step in flight was planned at; the log does not say more.
            line.ended_us = self._ledger.now_us + 1
        else:
            self._undated_ends.append(line)

    def _plan(self, plan: StepPlan) -> None:
        steps, ledger, at = self.steps, self._ledger, len(self.steps)
        self._index[plan.step_id] = at
        self._seat(at)
        for request_id in plan.preempted:
            if request_id in self.requests:
                self.requests[request_id].preemptions.append(at)
        for admission in plan.admitted:
            if admission.request_id in self.requests:
                line = self.requests[admission.request_id]
                line.admissions.append(Admitted(at, admission.num_cached_tokens))
        for chunk in plan.chunks:
            if chunk.request_id in self.requests:
                line = self.requests[chunk.request_id]
                line.chunks.append(Chunk(at, chunk.start, chunk.num_tokens, chunk.samples))
        for wait in plan.waits:
            if wait.request_id in self.requests:
                self.requests[wait.request_id].wait(at, wait.reason)
        context = 0
        for row in rows(plan):
            request = ledger.live.get(row.request_id)
            if request is not None:
                context += request.num_planned
                self.requests[row.request_id].count(request.num_planned, row.num_tokens)
        steps.add(plan, ledger, context, len(self._index) - 1)

    def _finish_step(self, event: StepFinished) -> None:
        at = self._index.pop(event.step_id, None)
        step = self._ledger.in_flight.get(event.step_id)
        if at is None or step is None:
            return
        failed = {row.request_id for row in event.stopped if row.reason is FinishReason.FAILED}
        for row in rows(step.plan):
            sampled = row.samples and row.request_id not in failed
            if sampled and row.request_id in self._ledger.live:
                self.requests[row.request_id].token_steps.append(at)
        self._last_finished = at
        self._undated_steps.append(at)

    def _note(self, note: StepNote) -> None:
        at = self._last_finished
        if at is None:
            return
        self.last_us = max(self.last_us, self.steps.take_note(at, note))
        self._undated_steps.remove(at)
