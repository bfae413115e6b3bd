"""Books of a run kept from its records alone: who waits, who runs, who holds which block.

Independent of the scheduler on purpose: a trace of another version, or one that diverged, can be
read and judged all the same. Tolerant: a record that contradicts the books is taken as it stands
(`invariants.py` is the one that judges). Only where a log begins within a run, or goes on behind a
gap, they begin as the snapshot there says. Driven record by record by every verb but verify.
"""

import msgspec

from cearx.core.config import SchedulerConfig
from cearx.core.events import (
    ClockAdvanced,
    FinishReason,
    PrefixCacheReset,
    RequestArrived,
    RequestEnded,
    RequestRefused,
    StepFinished,
    StepPlan,
)
from cearx.core.identifiers import RequestId, StepId
from cearx.core.scheduler import Scheduler
from cearx.core.trace_records import TraceGap, TraceSnapshot
from cearx.replay.block_ledger import BlockLedger
from cearx.replay.ledger_request import LedgerRequest, arrived, carried_over
from cearx.replay.rows import rows
from cearx.replay.verify import restored_scheduler

BY_A_RESULT = (FinishReason.STOP, FinishReason.LENGTH, FinishReason.FAILED)
"""Ends that come with the result of a step; the others come at any time."""


class _InFlight(msgspec.Struct, frozen=True):
    plan: StepPlan
    admissions: dict[RequestId, int]
    """Of each row's request, when the step was planned: later ones started over."""


class Ledger:
    """Feed every record in order; look at the fields between two calls."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.now_us = 0
        self.step_id: StepId | None = None
        """The step planned last."""
        self.live: dict[RequestId, LedgerRequest] = {}
        """In order of arrival."""
        self.num_running = 0
        self.blocks = BlockLedger(config)
        self.in_flight: dict[StepId, _InFlight] = {}
        self._finished: StepId | None = None
        """The step whose result was taken in, until those who end with it have ended."""
        self._knows_state = False
        """Whether a record was taken in since the start or a gap."""

    @property
    def num_waiting(self) -> int:
        return len(self.live) - self.num_running

    def running(self) -> list[LedgerRequest]:
        return [request for request in self.live.values() if request.is_running]

    def waiting(self) -> list[LedgerRequest]:
        """In order of arrival."""
        return [request for request in self.live.values() if not request.is_running]

    def apply(self, value: object) -> None:
        """Takes in the next record; notes and others that change nothing are passed over.

        Raises TraceIncompatible for a snapshot that cannot be read.
        """
        if isinstance(value, TraceSnapshot):
            if not self._knows_state:
                self._begin(restored_scheduler(self.config, value))
            return
        self._knows_state = not isinstance(value, TraceGap)
        if not isinstance(value, RequestEnded):
            self.settle()
        if isinstance(value, StepPlan):
            self._plan(value)
        elif isinstance(value, StepFinished):
            self._finish(value)
        elif isinstance(value, ClockAdvanced):
            self.now_us = value.now_us
        elif isinstance(value, RequestArrived):
            self.live[value.request_id] = arrived(self.config, value)
        elif isinstance(value, RequestEnded):
            self._end(value)
        elif isinstance(value, PrefixCacheReset):
            self.blocks.forget_contents()
            for request in self.live.values():
                request.publishes = request.publishes and not request.is_running
        elif isinstance(value, RequestRefused):
            self.live.pop(value.request_id, None)

    def begins_with(self, value: object) -> bool:
        """Whether the books begin anew with the record, which comes next."""
        return isinstance(value, TraceSnapshot) and not self._knows_state

    def _begin(self, scheduler: Scheduler) -> None:
        """The books as of a snapshot."""
        books = scheduler.books
        self.now_us = books.now_us
        self.step_id = StepId(books.steps.next_step - 1) if books.steps.next_step else None
        self.live = {i: carried_over(scheduler, r) for i, r in books.requests.items()}
        self.num_running = len(books.running)
        self.blocks = BlockLedger.of(books)
        self.in_flight = {}
        self._finished = None
        for step in books.steps.in_flight:
            admissions: dict[RequestId, int] = {}
            for row in rows(step.plan):
                request = self.live.get(row.request_id)
                if request is not None:
                    since = books.requests[row.request_id].admitted_step
                    is_present = since is not None and since <= step.step_id
                    admissions[row.request_id] = int(is_present)
                    request.num_tokens -= row.samples
                    request.num_pending += row.samples
                    request.last_step = step.step_id
            self.in_flight[step.step_id] = _InFlight(step.plan, admissions)

    def _end(self, ended: RequestEnded) -> None:
        request = self.live.pop(ended.request_id, None)
        if request is not None:
            if ended.reason in BY_A_RESULT and request.is_running:
                self.blocks.publish(request)
            self.num_running -= request.is_running
            self._give_back(request)

    def _plan(self, plan: StepPlan) -> None:
        self.step_id = plan.step_id
        for request_id in plan.preempted:
            request = self.live.get(request_id)
            if request is not None:
                self._give_back(request)
                self.num_running -= request.is_running
                request.is_running = False
                request.num_planned = request.num_written = 0
        hits: dict[RequestId, int] = {}
        for admission in plan.admitted:
            request = self.live.get(admission.request_id)
            if request is not None:
                self.num_running += not request.is_running
                request.is_running = True
                request.num_admissions += 1
                request.publishes = True
                request.last_step = None
                request.num_planned = request.num_written = admission.num_cached_tokens
                num_hits = admission.num_cached_tokens // self.config.block_size
                hits[request.request_id] = request.num_published = num_hits
        for grant in plan.granted:
            request = self.live.get(grant.request_id)
            if request is not None:
                self.blocks.hold(request, grant.block_ids, hits.get(grant.request_id, 0))
        admissions: dict[RequestId, int] = {}
        for row in rows(plan):
            request = self.live.get(row.request_id)
            if request is not None:
                request.num_planned += row.num_tokens
                request.num_pending += row.samples
                request.last_step = plan.step_id
                admissions[row.request_id] = request.num_admissions
        self.in_flight[plan.step_id] = _InFlight(plan, admissions)

    def _finish(self, event: StepFinished) -> None:
        step = self.in_flight.pop(event.step_id, None)
        if step is None:
            return
        for sealed in event.sealed:
            request = self.live.get(sealed.request_id)
            if request is not None and self.config.enable_prefix_caching:
                request.block_hashes.append(sealed.block_hash)
        failed = {row.request_id for row in event.stopped if row.reason is FinishReason.FAILED}
        for row in rows(step.plan):
            request = self.live.get(row.request_id)
            if request is not None:
                is_same_stay = request.num_admissions == step.admissions.get(row.request_id)
                request.settle(row, row.request_id in failed, is_same_stay)
        for chunk in step.plan.chunks:
            if chunk.request_id in self.live:
                self.blocks.publish(self.live[chunk.request_id])
        for grant in step.plan.granted:  # with its row the block before was filled
            if grant.request_id in self.live:
                self.blocks.publish(self.live[grant.request_id])
        # Who ends with this result gives its blocks back before those of earlier ends come free.
        self._finished = event.step_id

    def settle(self) -> None:
        """Frees what no step behind the finished one touches; call behind the last record."""
        if self._finished is not None:
            finished, self._finished = self._finished, None
            self.blocks.release_behind(finished)

    def _give_back(self, request: LedgerRequest) -> None:
        """Holds the blocks until no step in flight can touch them."""
        block_ids, request.block_ids = request.block_ids, []
        request.num_published = 0
        last = request.last_step
        if last is not None and self.in_flight and last >= next(iter(self.in_flight)):
            self.blocks.fence(last, block_ids)
        else:
            self.blocks.release(block_ids)
