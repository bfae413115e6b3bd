"""`cearx replay why REQUEST`: the life of one request, step by step, with the reason of each wait.

Owns the story: spans of steps in which the same thing happened to it, and who got in instead. A
request that the plan does not mention waits behind the first in the queue, whose reason is its own.
"""

from collections.abc import Iterable

import msgspec

from cearx.core.config import SchedulerConfig
from cearx.core.events import (
    CancelRequested,
    ClockAdvanced,
    FinishReason,
    RequestArrived,
    RequestEnded,
    RequestRefused,
    StepFinished,
    StepPlan,
)
from cearx.core.identifiers import RequestId, StepId
from cearx.core.trace_records import TraceGap
from cearx.replay.ledger import Ledger
from cearx.replay.step_table import queue_head
from cearx.replay.trace import TraceRecord

BEHIND = "BEHIND"
"""What a request waits for that nobody considered, because the one at the head had to wait."""


class Span(msgspec.Struct, kw_only=True):
    """Steps in a row in which the same thing happened."""

    what: str
    """`waits`, `prefill`, `decode`, or an event: `arrived`, `admitted`, `preempted`, `ended`;
    where the log does not hold it all: `carried over`, `gap`, `lost`."""
    reason: str = ""
    """Of a wait: the code, or BEHIND with the head of the queue and its code."""
    first_step: StepId | None
    last_step: StepId | None
    from_us: int
    to_us: int
    num_tokens: int = 0
    """Computed for it."""
    num_sampled: int = 0
    """Output tokens that it got."""
    admitted: list[RequestId] = msgspec.field(default_factory=list)
    """Who got in meanwhile."""
    preempted: list[RequestId] = msgspec.field(default_factory=list)
    """Who lost its blocks meanwhile."""

    @property
    def num_steps(self) -> int:
        if self.first_step is None or self.last_step is None:
            return 0
        return self.last_step - self.first_step + 1


class UnknownRequest(Exception):
    """The trace does not mention the request."""


def explain(
    config: SchedulerConfig, records: Iterable[TraceRecord], request_id: RequestId
) -> list[Span]:
    """The spans of a request in order of time; raises UnknownRequest."""
    story = _Story(config, request_id)
    for record in records:
        story.feed(record.value)
    if not story.spans:
        raise UnknownRequest(f"the trace does not mention request {request_id}")
    return story.spans


class _Story:
    def __init__(self, config: SchedulerConfig, request_id: RequestId) -> None:
        self.spans: list[Span] = []
        self._ledger = Ledger(config)
        self._request_id = request_id
        self._sampling: dict[StepId, Span] = {}
        """The span of each step in flight that samples for it."""

    def feed(self, value: object) -> None:
        begins = self._ledger.begins_with(value)
        self._ledger.apply(value)
        if isinstance(value, TraceGap):
            self._sampling.clear()
            if self._is_there:
                self._add("gap", f"records are lost: {value.reason.name}")
        elif begins:
            self._begin()
        elif isinstance(value, ClockAdvanced):
            if self.spans and self.spans[-1].what in ("waits", "prefill", "decode"):
                self.spans[-1].to_us = value.now_us
        elif isinstance(value, StepPlan):
            if self._request_id in self._ledger.live:
                self._plan(value)
        elif isinstance(value, StepFinished):
            span = self._sampling.pop(value.step_id, None)
            if span is not None and not self._failed(value):
                span.num_sampled += 1
        elif getattr(value, "request_id", None) == self._request_id:
            self._event(value)

    @property
    def _is_there(self) -> bool:
        return self._request_id in self._ledger.live

    def _begin(self) -> None:
        """Where the log begins within the run, or goes on behind a gap."""
        request = self._ledger.live.get(self._request_id)
        if request is not None:
            what = "runs" if request.is_running else "waits"
            text = f"{what}, {request.num_prompt_tokens} prompt tokens,"
            text += f" {request.num_outputs} of max_tokens {request.max_tokens} out"
            self._add("carried over", text)
        elif self.spans and self.spans[-1].what == "gap":
            self._add("lost", "it ended where records are missing")

    def _failed(self, event: StepFinished) -> bool:
        return any(
            row.request_id == self._request_id and row.reason is FinishReason.FAILED
            for row in event.stopped
        )

    def _event(self, value: object) -> None:
        if isinstance(value, RequestArrived):
            text = f"{value.num_prompt_tokens} prompt tokens, max_tokens {value.max_tokens}"
            self._add("arrived", text)
        elif isinstance(value, CancelRequested) and self.spans:
            late = "" if value.request_id in self._ledger.live else ", it had ended already"
            self._add("cancelled", value.reason.name + late)
        elif isinstance(value, RequestEnded):
            self._add("ended", value.reason.name)
        elif isinstance(value, RequestRefused):
            text = f"{value.reason.name}: needs {value.num_tokens}, limit {value.limit_tokens}"
            self._add("refused", text)

    def _plan(self, plan: StepPlan) -> None:
        mine, ledger = self._request_id, self._ledger
        if mine in plan.preempted:
            span = self._add("preempted", "its blocks went to requests that arrived before it")
            span.first_step = span.last_step = plan.step_id
        for admission in plan.admitted:
            if admission.request_id == mine:
                span = self._add("admitted", f"{admission.num_cached_tokens} tokens cached")
                span.first_step = span.last_step = plan.step_id
        if mine in plan.decodes:
            self._extend("decode", "", plan, 1, True)
            return
        for chunk in plan.chunks:
            if chunk.request_id == mine:
                self._extend("prefill", "", plan, chunk.num_tokens, chunk.samples)
                return
        for wait in plan.waits:
            if wait.request_id == mine:
                self._extend("waits", wait.reason.name, plan, 0, False)
                return
        head = queue_head(plan, ledger)
        reason = "no reason is logged"
        if head is not None and not ledger.live[mine].is_running:
            reason = f"{BEHIND} {head.request_id}: {head.reason.name}"
        self._extend("waits", reason, plan, 0, False)

    def _add(self, what: str, reason: str) -> Span:
        now = self._ledger.now_us
        span = Span(
            what=what, reason=reason, first_step=None, last_step=None, from_us=now, to_us=now
        )
        self.spans.append(span)
        return span

    def _extend(
        self, what: str, reason: str, plan: StepPlan, num_tokens: int, samples: bool
    ) -> None:
        last = self.spans[-1] if self.spans else None
        if last is None or (last.what, last.reason) != (what, reason):
            last = self._add(what, reason)
            last.first_step = plan.step_id
        last.last_step = plan.step_id
        last.num_tokens += num_tokens
        if samples:
            self._sampling[plan.step_id] = last
        if what == "waits":
            last.admitted += [a.request_id for a in plan.admitted]
            last.preempted += plan.preempted
