"""Books of a run kept from its records alone: who waits, who runs, who holds which block.

Independent of the scheduler on purpose: a trace of another version, or one that diverged, can be
read and judged all the same. Tolerant: a record that contradicts the books is taken as it stands
(`invariants.py` is the one that judges). Only where a log begins within a run, or goes on behind a
gap, they begin as the snapshot there says. Driven record by record by every verb but verify.
"""

from collections.abc import Iterator, Sequence

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
from cearx.core.identifiers import BlockHash, BlockId, RequestId, StepId
from cearx.core.request import Request
from cearx.core.scheduler import Scheduler
from cearx.core.trace_records import TraceGap, TraceSnapshot
from cearx.replay.verify import restored_scheduler

BY_A_RESULT = (FinishReason.STOP, FinishReason.LENGTH, FinishReason.FAILED)
"""Ends that come with the result of a step; the others come at any time."""


class Row(msgspec.Struct, frozen=True):
    """What one request gets in a step."""

    request_id: RequestId
    num_tokens: int
    samples: bool


def rows(plan: StepPlan) -> Iterator[Row]:
    """The rows of a step: decodes, then chunks."""
    for request_id in plan.decodes:
        yield Row(request_id, 1, True)
    for chunk in plan.chunks:
        yield Row(chunk.request_id, chunk.num_tokens, chunk.samples)


def num_batched_tokens(plan: StepPlan) -> int:
    """Tokens computed in a step: what counts against the budget."""
    return len(plan.decodes) + sum(chunk.num_tokens for chunk in plan.chunks)


class LedgerRequest(msgspec.Struct, kw_only=True):
    """A request that has not ended; lengths in tokens."""

    request_id: RequestId
    num_prompt_tokens: int
    max_tokens: int
    block_hashes: list[BlockHash]
    """Of the full blocks of known tokens."""
    num_tokens: int
    """Known: the prompt and the tokens of finished steps."""
    num_pending: int = 0
    """Tokens that steps in flight will sample."""
    num_planned: int = 0
    """Whose KV the steps planned so far compute."""
    num_written: int = 0
    """Whose KV the finished steps have computed."""
    block_ids: list[BlockId] = msgspec.field(default_factory=list)
    is_running: bool = False
    num_admissions: int = 0
    num_published: int = 0
    """Leading blocks that can be found, or were at its admission."""
    publishes: bool = True
    """False from a failure, or a reset of the cache, to its next admission."""
    last_step: StepId | None = None
    """The last step with a row of its present stay."""
    priority: int = 0
    deadline_us: int = 0
    """With request_timeout_us only."""

    @property
    def num_outputs(self) -> int:
        return self.num_tokens - self.num_prompt_tokens


class _InFlight(msgspec.Struct, frozen=True):
    plan: StepPlan
    admissions: dict[RequestId, int]
    """Of each row's request, when the step was planned: later ones started over."""


class _Fence(msgspec.Struct, frozen=True):
    step_id: StepId
    """The last step in flight that touches the blocks."""
    block_ids: list[BlockId]


class Ledger:
    """Feed every record in order; look at the fields between two calls."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self._knows_state = False
        """Whether a record was taken in since the start or a gap."""
        self._reset()

    def _reset(self) -> None:
        self.now_us = 0
        self.step_id: StepId | None = None
        """The step planned last."""
        self.live: dict[RequestId, LedgerRequest] = {}
        """In order of arrival."""
        self.num_running = 0
        self.num_held = 0
        """Blocks that somebody holds, fenced ones included."""
        self.num_cached = 0
        """Blocks that nobody holds and that can be found by their hash."""
        self.in_flight: dict[StepId, _InFlight] = {}
        self._fences: list[_Fence] = []
        self._finished: StepId | None = None
        """The step whose result was taken in, until those who end with it have ended."""
        self._ref_counts = [0] * self.config.num_blocks
        self._hashes: dict[BlockId, BlockHash] = {}
        self._by_hash: dict[BlockHash, BlockId] = {}

    # --- questions ---------------------------------------------------------------------------

    @property
    def num_waiting(self) -> int:
        return len(self.live) - self.num_running

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds."""
        return self.config.num_blocks - self.num_held

    def num_holders(self, block_id: BlockId) -> int:
        return self._ref_counts[block_id]

    def content(self, block_id: BlockId) -> BlockHash | None:
        """The hash under which a block can be found now."""
        return self._hashes.get(block_id)

    def running(self) -> list[LedgerRequest]:
        return [request for request in self.live.values() if request.is_running]

    def waiting(self) -> list[LedgerRequest]:
        """In order of arrival."""
        return [request for request in self.live.values() if not request.is_running]

    def fenced(self) -> list[tuple[StepId, list[BlockId]]]:
        """Blocks of requests that are gone, with the step in flight that may touch them."""
        return [(fence.step_id, fence.block_ids) for fence in self._fences]

    # --- records -----------------------------------------------------------------------------

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
            self._arrive(value)
        elif isinstance(value, RequestEnded):
            self._end(value)
        elif isinstance(value, PrefixCacheReset):
            self._forget_contents()
        elif isinstance(value, RequestRefused):
            self.live.pop(value.request_id, None)

    def begins_with(self, value: object) -> bool:
        """Whether the books begin anew with the record, which comes next."""
        return isinstance(value, TraceSnapshot) and not self._knows_state

    def _begin(self, scheduler: Scheduler) -> None:
        """The books as of a snapshot."""
        self._reset()
        books = scheduler.books
        self.now_us = books.now_us
        self.step_id = StepId(books.next_step - 1) if books.next_step else None
        self.live = {i: self._carried_over(scheduler, r) for i, r in books.requests.items()}
        self.num_running = len(books.running)
        for step in books.in_flight:
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
        self._fences = [_Fence(f.last_step, list(f.block_ids)) for f in books.fences.all()]
        pool = books.pool.snapshot()
        self._ref_counts = list(pool.ref_counts)
        self._hashes = {BlockId(b): h for b, h in enumerate(pool.hashes) if h is not None}
        self._by_hash = {h: b for b, h in self._hashes.items()}
        self.num_held = sum(count > 0 for count in pool.ref_counts)
        self.num_cached = len(pool.cached)

    def _carried_over(self, scheduler: Scheduler, request: Request) -> LedgerRequest:
        """Its rows in flight counted as known; `_begin` corrects that."""
        books = scheduler.books
        return LedgerRequest(
            request_id=request.request_id,
            num_prompt_tokens=request.num_prompt_tokens,
            max_tokens=request.max_tokens,
            block_hashes=list(request.block_hashes),
            num_tokens=books.num_promised(request),
            num_planned=books.num_scheduled(request),
            num_written=books.num_settled(request),
            block_ids=list(request.block_ids),
            is_running=request.request_id in books.running,
            num_admissions=1,
            publishes=request.publishes,
            num_published=request.num_published,
            last_step=request.last_step,
            priority=request.priority,
            deadline_us=request.deadline_us,
        )

    def _arrive(self, event: RequestArrived) -> None:
        self.live[event.request_id] = LedgerRequest(
            request_id=event.request_id,
            num_prompt_tokens=event.num_prompt_tokens,
            max_tokens=event.max_tokens,
            block_hashes=list(event.block_hashes) if self.config.enable_prefix_caching else [],
            num_tokens=event.num_prompt_tokens,
            priority=event.priority if self.config.scheduling_policy == "priority" else 0,
            deadline_us=event.arrived_us + self.config.request_timeout_us,
        )

    def _end(self, ended: RequestEnded) -> None:
        request = self.live.pop(ended.request_id, None)
        if request is not None:
            if ended.reason in BY_A_RESULT and request.is_running:
                self._publish(request)
            self.num_running -= request.is_running
            self._give_back(request)

    def _forget_contents(self) -> None:
        self._hashes.clear()
        self._by_hash.clear()
        self.num_cached = 0
        for request in self.live.values():
            request.publishes = request.publishes and not request.is_running

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
                self._hold(request, grant.block_ids, hits.get(grant.request_id, 0))
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
                self._settle(request, row, row.request_id in failed, step)
        for chunk in step.plan.chunks:
            if chunk.request_id in self.live:
                self._publish(self.live[chunk.request_id])
        for grant in step.plan.granted:  # with its row the block before was filled
            if grant.request_id in self.live:
                self._publish(self.live[grant.request_id])
        # Who ends with this result gives its blocks back before those of earlier ends come free.
        self._finished = event.step_id

    def _settle(self, request: LedgerRequest, row: Row, has_failed: bool, step: _InFlight) -> None:
        """One row: its token counts in any case, its KV only if it was not preempted since."""
        request.num_pending -= row.samples
        if has_failed:
            request.publishes = False
        else:
            request.num_tokens += row.samples
        if request.is_running and request.num_admissions == step.admissions[row.request_id]:
            request.num_written += row.num_tokens

    def settle(self) -> None:
        """Frees what no step behind the finished one touches; call behind the last record."""
        if self._finished is not None:
            finished, self._finished = self._finished, None
            freed = [fence for fence in self._fences if fence.step_id <= finished]
            self._fences = [fence for fence in self._fences if fence.step_id > finished]
            for fence in freed:
                self._release(fence.block_ids)

    # --- blocks ------------------------------------------------------------------------------

    def _hold(self, request: LedgerRequest, block_ids: Sequence[BlockId], num_hits: int) -> None:
        """One more holder each; all but the `num_hits` first get new content."""
        request.block_ids.extend(block_ids)
        for index, block in enumerate(block_ids):
            if not 0 <= block < self.config.num_blocks:
                continue
            if self._ref_counts[block] == 0:
                self.num_held += 1
                self.num_cached -= block in self._hashes
                if index >= num_hits and block in self._hashes:
                    del self._by_hash[self._hashes.pop(block)]
            self._ref_counts[block] += 1

    def _publish(self, request: LedgerRequest) -> None:
        """Full blocks of known tokens whose KV is there can be found from now on."""
        if not (request.publishes and request.is_running):
            return
        full = min(request.num_written // self.config.block_size, len(request.block_hashes))
        for index in range(request.num_published, min(full, len(request.block_ids))):
            block, block_hash = request.block_ids[index], request.block_hashes[index]
            if block_hash not in self._by_hash and block not in self._hashes:
                self._by_hash[block_hash] = block
                self._hashes[block] = block_hash
        request.num_published = max(request.num_published, full)

    def _give_back(self, request: LedgerRequest) -> None:
        """Holds the blocks until no step in flight can touch them."""
        block_ids, request.block_ids = request.block_ids, []
        request.num_published = 0
        last = request.last_step
        if last is not None and self.in_flight and last >= next(iter(self.in_flight)):
            self._fences.append(_Fence(last, block_ids))
        else:
            self._release(block_ids)

    def _release(self, block_ids: Sequence[BlockId]) -> None:
        for block in block_ids:
            if 0 <= block < self.config.num_blocks and self._ref_counts[block]:
                self._ref_counts[block] -= 1
                if self._ref_counts[block] == 0:
                    self.num_held -= 1
                    self.num_cached += block in self._hashes
