"""Counts what happened in a run, from its records alone.

Owns the figures and their text; never runs a scheduler. Called by `cli.py` for every record.
"""

from collections import Counter, deque

import msgspec

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
from cearx.core.identifiers import RequestId
from cearx.core.scheduler_state import SchedulerState
from cearx.core.trace_records import StepNote, TraceSnapshot
from cearx.replay.trace import TraceRecord


class Summary(msgspec.Struct, kw_only=True):
    """Figures of one run; lengths in tokens, times in microseconds."""

    num_requests: int = 0
    """That arrived, the refused ones included."""
    num_steps: int = 0
    """Planned."""
    num_preemptions: int = 0
    num_prompt_tokens: int = 0
    """Of requests that were not refused."""
    num_hit_tokens: int = 0
    """Prompt tokens that the prefix cache held at a request's first admission."""
    num_computed_tokens: int = 0
    """In all planned rows, recomputation after preemption included."""
    num_output_tokens: int = 0
    """Delivered: sampled for requests that had not ended before the step did."""
    duration_us: int = 0
    """From the first step to the last."""
    execute_us: int = 0
    """In the worker, all steps together."""
    schedule_us: int = 0
    """In the core, all steps together."""
    num_notes: int = 0
    refused: Counter[RefusalReason] = msgspec.field(default_factory=Counter)
    ended: Counter[FinishReason] = msgspec.field(default_factory=Counter)
    _prompts: dict[RequestId, int] = msgspec.field(default_factory=dict)
    """Prompt lengths of the requests that have not ended."""
    _admitted: set[RequestId] = msgspec.field(default_factory=set)
    _in_flight: deque[StepPlan] = msgspec.field(default_factory=deque)
    _first_us: int | None = None

    @property
    def num_live(self) -> int:
        """Requests that had neither ended nor been refused when the log ends."""
        return len(self._prompts)

    def feed(self, record: TraceRecord) -> None:
        """Takes the next record; a snapshot only when a verifier has accepted it."""
        value = record.value
        if isinstance(value, StepPlan):
            self._take_plan(value)
        elif isinstance(value, StepFinished):
            self._finish_step(value)
        elif isinstance(value, ClockAdvanced):
            if self._first_us is None:
                self._first_us = value.now_us
            self.duration_us = value.now_us - self._first_us
        elif isinstance(value, RequestArrived):
            self.num_requests += 1
            self.num_prompt_tokens += value.num_prompt_tokens
            self._prompts[value.request_id] = value.num_prompt_tokens
        elif isinstance(value, RequestRefused):
            self.refused[value.reason] += 1
            self.num_prompt_tokens -= self._prompts.pop(value.request_id, 0)
        elif isinstance(value, RequestEnded):
            self.ended[value.reason] += 1
            self._prompts.pop(value.request_id, None)
            self._admitted.discard(value.request_id)
        elif isinstance(value, TraceSnapshot):
            self._carry_over(value)
        elif isinstance(value, StepNote):
            self.num_notes += 1
            self.execute_us += value.execute_us
            self.schedule_us += value.schedule_us

    def _carry_over(self, snapshot: TraceSnapshot) -> None:
        """Who is there: news only where a log begins within its run, or goes on behind a gap."""
        state = msgspec.msgpack.decode(snapshot.state, type=SchedulerState)
        self._prompts = {r.request_id: r.num_prompt_tokens for r in state.requests}
        self._admitted = set(state.running)
        self._in_flight = deque(step.plan for step in state.in_flight)

    def _take_plan(self, plan: StepPlan) -> None:
        self._in_flight.append(plan)
        self.num_steps += 1
        self.num_preemptions += len(plan.preempted)
        self.num_computed_tokens += len(plan.decodes)
        self.num_computed_tokens += sum(chunk.num_tokens for chunk in plan.chunks)
        for admission in plan.admitted:
            if admission.request_id not in self._admitted:
                self._admitted.add(admission.request_id)
                self.num_hit_tokens += admission.num_cached_tokens

    def _finish_step(self, event: StepFinished) -> None:
        """Counts the step's tokens; the outcomes that follow remove who ended with it."""
        while self._in_flight and self._in_flight[0].step_id < event.step_id:
            self._in_flight.popleft()  # its result is lost
        if not self._in_flight or self._in_flight[0].step_id != event.step_id:
            return  # it was planned before the log begins
        plan = self._in_flight.popleft()
        failed = {row.request_id for row in event.stopped if row.reason is FinishReason.FAILED}
        sampled = [*plan.decodes, *(c.request_id for c in plan.chunks if c.samples)]
        self.num_output_tokens += sum(i in self._prompts and i not in failed for i in sampled)

    def text(self) -> str:
        """A few lines for a person."""
        ended = ", ".join(f"{count} {reason.name}" for reason, count in sorted(self.ended.items()))
        lines = [
            f"requests     {self.num_requests} arrived; ended: {ended or 'none'};"
            f" {self.refused.total()} refused, {self.num_live} unfinished",
            f"steps        {self.num_steps} in {self.duration_us / 1e6:.3f} s,"
            f" {self.num_preemptions} preemptions",
            f"tokens       {self.num_prompt_tokens} prompt ({self.num_hit_tokens} from the prefix"
            f" cache), {self.num_computed_tokens} computed, {self.num_output_tokens} out",
        ]
        if self.num_notes:
            lines.append(
                f"step mean    {self.execute_us // self.num_notes} us in the worker,"
                f" {self.schedule_us // self.num_notes} us in the core"
            )
        return "\n".join(lines)
