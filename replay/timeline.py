"""A run as a table of steps and a table of requests, in engine time.

Owns the dating of what the log does not date: tokens come when their step ends, cancels stand
between two clock readings. One pass over the records with a ledger; no scheduler. The input of
stats, diff, what-if, the Perfetto export and the report.

    engine time   planned ──schedule──┬──execute──┐ finished         next planned
                  the clock record    the note of the step            the next clock record
"""

from array import array
from collections.abc import Iterable

import msgspec

from cearx.core.config import SchedulerConfig
from cearx.core.events import (
    ClockAdvanced,
    FinishReason,
    RefusalReason,
    RequestArrived,
    RequestEnded,
    RequestRefused,
    RequestWaits,
    StepFinished,
    StepPlan,
    WaitReason,
)
from cearx.core.identifiers import RequestId, StepId
from cearx.core.trace_records import StepNote
from cearx.replay.ledger import BY_A_RESULT, Ledger
from cearx.replay.rows import num_attended, num_batched_tokens, rows
from cearx.replay.trace import TraceRecord


def column() -> "array[int]":
    return array("q")


class StepTable(msgspec.Struct, kw_only=True):
    """One entry a planned step in each column, in order; counts are those behind the plan."""

    step_id: "array[int]" = msgspec.field(default_factory=column)
    planned_us: "array[int]" = msgspec.field(default_factory=column)
    finished_us: "array[int]" = msgspec.field(default_factory=column)
    """0 when the log ends before the step did."""
    num_decodes: "array[int]" = msgspec.field(default_factory=column)
    num_prefill_tokens: "array[int]" = msgspec.field(default_factory=column)
    num_context_tokens: "array[int]" = msgspec.field(default_factory=column)
    """Tokens in KV that the rows attend to, summed over the rows."""
    num_attended: "array[int]" = msgspec.field(default_factory=column)
    """Pairs of a token of a chunk and one that it attends to, itself included."""
    num_running: "array[int]" = msgspec.field(default_factory=column)
    num_waiting: "array[int]" = msgspec.field(default_factory=column)
    num_held: "array[int]" = msgspec.field(default_factory=column)
    """Blocks in use."""
    num_preempted: "array[int]" = msgspec.field(default_factory=column)
    execute_us: "array[int]" = msgspec.field(default_factory=column)
    """This and the next ones are the step's note, 0 without one."""
    schedule_us: "array[int]" = msgspec.field(default_factory=column)
    log_us: "array[int]" = msgspec.field(default_factory=column)
    receive_us: "array[int]" = msgspec.field(default_factory=column)
    launch_us: "array[int]" = msgspec.field(default_factory=column)
    device_us: "array[int]" = msgspec.field(default_factory=column)
    transfer_us: "array[int]" = msgspec.field(default_factory=column)
    result_us: "array[int]" = msgspec.field(default_factory=column)
    turn_us: "array[int]" = msgspec.field(default_factory=column)
    apply_us: "array[int]" = msgspec.field(default_factory=column)
    deliver_us: "array[int]" = msgspec.field(default_factory=column)
    num_in_flight: "array[int]" = msgspec.field(default_factory=column)
    """Steps before it that were planned and not finished when it was planned."""
    head_id: "array[int]" = msgspec.field(default_factory=column)
    """Who waits first in the queue with a reason, -1 for nobody."""
    head_reason: "array[int]" = msgspec.field(default_factory=column)

    def __len__(self) -> int:
        return len(self.step_id)

    def num_tokens(self, index: int) -> int:
        """Computed in the step: what counts against the budget."""
        return self.num_decodes[index] + self.num_prefill_tokens[index]

    def busy_us(self, index: int) -> int:
        """How long the step took by the device's clock, or else by the worker's."""
        return self.device_us[index] + self.transfer_us[index] or self.execute_us[index]

    def dispatched_us(self, index: int) -> int:
        """When it left the core."""
        return self.planned_us[index] + self.schedule_us[index] + self.log_us[index]

    def launched_us(self, index: int) -> int:
        """When the worker could begin with it."""
        return self.dispatched_us(index) + self.receive_us[index] + self.launch_us[index]


class Admitted(msgspec.Struct, frozen=True):
    step: int
    """Index in the table of steps, as everywhere in this module."""
    num_cached_tokens: int


class Chunk(msgspec.Struct, frozen=True):
    step: int
    start: int
    num_tokens: int
    samples: bool


class Waited(msgspec.Struct):
    """Steps in a row in which the plan names the request as waiting, with one reason."""

    first_step: int
    last_step: int
    reason: WaitReason


class RequestLine(msgspec.Struct, kw_only=True):
    """All that happened to one request."""

    request_id: RequestId
    num_prompt_tokens: int
    max_tokens: int
    arrived_us: int
    arrived_step: int
    """The first step planned after its arrival."""
    admissions: list[Admitted] = msgspec.field(default_factory=list)
    preemptions: list[int] = msgspec.field(default_factory=list)
    """Steps."""
    chunks: list[Chunk] = msgspec.field(default_factory=list)
    waits: list[Waited] = msgspec.field(default_factory=list)
    """Only those that the plans name: behind them others wait for the same."""
    token_steps: "array[int]" = msgspec.field(default_factory=lambda: array("i"))
    """The step that sampled each output token."""
    num_computed_tokens: int = 0
    num_recomputed_tokens: int = 0
    """Computed again after a preemption."""
    refused: RefusalReason | None = None
    ended: FinishReason | None = None
    ended_us: int | None = None
    """When it ended or was refused."""
    ended_step: int | None = None
    """The step whose tokens ended it, None when something else did."""
    lost: bool = False
    """It ended where records are missing; `ended_us` is where they begin to miss."""
    began_before: bool = False
    """It was there when the log begins, or records were missing when it came: `arrived_us` is the
    earliest time that is known of it."""
    _most_planned: int = 0

    @property
    def has_seat(self) -> bool:
        return len(self.admissions) > len(self.preemptions)

    @property
    def num_hit_tokens(self) -> int:
        """Prompt tokens that the prefix cache held at the first admission."""
        return self.admissions[0].num_cached_tokens if self.admissions else 0


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

    @classmethod
    def of(cls, config: SchedulerConfig, records: Iterable[TraceRecord]) -> "Timeline":
        timeline = cls(config)
        for record in records:
            timeline.feed(record.value)
        timeline.finish()
        return timeline

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
                self._tick(value.now_us)
            elif isinstance(value, StepNote):
                self._note(value)
            elif isinstance(value, RequestArrived):
                self._arrive(value)
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

    def _tick(self, now_us: int) -> None:
        self._see_clock(now_us)
        self._date(now_us)

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

    def _arrive(self, event: RequestArrived) -> None:
        line = RequestLine(
            request_id=event.request_id,
            num_prompt_tokens=event.num_prompt_tokens,
            max_tokens=event.max_tokens,
            arrived_us=event.arrived_us,
            arrived_step=len(self.steps),
        )
        self.requests[event.request_id] = line
        self._see_clock(event.arrived_us)

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
                _wait(self.requests[wait.request_id].waits, at, wait.reason)
        context = 0
        for row in rows(plan):
            request = ledger.live.get(row.request_id)
            if request is not None:
                context += request.num_planned
                _count(self.requests[row.request_id], request.num_planned, row.num_tokens)
        steps.step_id.append(plan.step_id)
        steps.planned_us.append(ledger.now_us)
        steps.finished_us.append(0)
        steps.num_decodes.append(len(plan.decodes))
        steps.num_prefill_tokens.append(num_batched_tokens(plan) - len(plan.decodes))
        steps.num_context_tokens.append(context)
        steps.num_attended.append(num_attended(plan))
        steps.num_running.append(ledger.num_running)
        steps.num_waiting.append(ledger.num_waiting)
        steps.num_held.append(ledger.blocks.num_held)
        steps.num_preempted.append(len(plan.preempted))
        for name in StepNote.__struct_fields__:
            getattr(steps, name).append(0)
        steps.num_in_flight.append(len(self._index) - 1)
        head = queue_head(plan, ledger)
        steps.head_id.append(-1 if head is None else head.request_id)
        steps.head_reason.append(-1 if head is None else head.reason)

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
        steps = self.steps
        for name in StepNote.__struct_fields__:
            getattr(steps, name)[at] = getattr(note, name)
        begun = steps.launched_us(at)
        if at:
            begun = max(begun, steps.finished_us[at - 1])
        steps.finished_us[at] = begun + steps.busy_us(at)
        self.last_us = max(self.last_us, steps.finished_us[at])
        self._undated_steps.remove(at)


def _count(line: RequestLine, end: int, num_tokens: int) -> None:
    """Tokens [end - num_tokens, end) are computed, maybe not for the first time."""
    line.num_computed_tokens += num_tokens
    line.num_recomputed_tokens += max(0, min(end, line._most_planned) - (end - num_tokens))
    line._most_planned = max(line._most_planned, end)


def _wait(waits: list[Waited], step: int, reason: WaitReason) -> None:
    """One step more of the last wait, or the first of another."""
    if waits and waits[-1].reason is reason and waits[-1].last_step == step - 1:
        waits[-1].last_step = step
    else:
        waits.append(Waited(step, step, reason))


def queue_head(plan: StepPlan, ledger: Ledger) -> RequestWaits | None:
    """The first request in the plan's waits that is not running: those behind it wait for it."""
    for wait in plan.waits:
        request = ledger.live.get(wait.request_id)
        if request is not None and not request.is_running:
            return wait
    return None
