"""An independent model of what a scheduler may decide, naive and slow.

`DecisionChecker` sees events and decisions only and keeps its own books: lists and full scans, no
reference counts, no hash index, every row in flight written down. It holds what is this scheduler's
own policy; what holds for every run is said by the rules of `cearx replay check`, which the
simulation asks first. `check_internals` looks into a real scheduler between two calls. Both raise
AssertionError with what is wrong. Used by the simulation, never by the product.
"""

from dataclasses import dataclass, field

from cearx.core.config import SchedulerConfig
from cearx.core.events import (
    CancelRequested,
    ClockAdvanced,
    Decision,
    Event,
    FinishReason,
    PrefixCacheEmptied,
    PrefixCacheReset,
    RequestArrived,
    RequestEnded,
    StepFinished,
    StepPlan,
    WaitReason,
)
from cearx.core.identifiers import BlockId, RequestId, StepId
from cearx.core.request import RequestState
from cearx.core.scheduler import Scheduler
from cearx.replay.outcome_rules import expected_refusal


@dataclass
class Row:
    """A row in flight."""

    step_id: StepId
    num_tokens: int
    samples: bool
    life: int
    """Number of preemptions of its request before it."""


@dataclass
class ModelRequest:
    """What the model knows of an accepted request that has not ended."""

    request_id: RequestId
    priority: int
    num_prompt_tokens: int
    max_tokens: int
    num_tokens: int
    deadline_us: int
    num_computed: int = 0
    """Settled, in this life."""
    is_running: bool = False
    block_ids: list[BlockId] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    life: int = 0
    lost: int = 0

    @property
    def order(self) -> tuple[int, RequestId]:
        return self.priority, self.request_id

    @property
    def promised(self) -> int:
        return self.num_tokens + sum(row.samples for row in self.rows)

    @property
    def scheduled(self) -> int:
        return self.num_computed + sum(r.num_tokens for r in self.rows if r.life == self.life)

    @property
    def is_finishing(self) -> bool:
        return self.promised - self.num_prompt_tokens == self.max_tokens

    @property
    def last_length(self) -> int:
        return self.num_prompt_tokens + self.max_tokens - 1


class DecisionChecker:
    """Feed every event and the decisions that answer it, every plan, in order."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.live: dict[RequestId, ModelRequest] = {}
        self.fenced: list[tuple[StepId, list[BlockId]]] = []
        """Blocks of requests that ended or were preempted, with the last step that touches them."""
        self.in_flight: list[StepPlan] = []
        self.num_steps = 0
        self.num_preemptions = 0
        self.num_recomputed = 0
        self._decode_us = self._token_ns = 0

    # --- who holds what, by a full scan --------------------------------------------------------

    def tables(self) -> list[list[BlockId]]:
        return [r.block_ids for r in self.live.values()] + [blocks for _, blocks in self.fenced]

    def held(self) -> set[BlockId]:
        return {block for table in self.tables() for block in table}

    def num_free(self) -> int:
        return self.config.num_blocks - len(self.held())

    def num_coming(self) -> int:
        """Blocks that nobody holds when all steps in flight are finished."""
        staying = [r.block_ids for r in self.live.values() if not r.is_finishing]
        return len(self.held() - {block for table in staying for block in table})

    def running(self) -> list[ModelRequest]:
        return sorted((r for r in self.live.values() if r.is_running), key=lambda r: r.order)

    def waiting(self) -> list[ModelRequest]:
        return sorted((r for r in self.live.values() if not r.is_running), key=lambda r: r.order)

    def num_blocks(self, num_tokens: int) -> int:
        return (num_tokens + self.config.block_size - 1) // self.config.block_size

    # --- events and outcomes -------------------------------------------------------------------

    def on_event(self, event: Event, outcomes: tuple[Decision, ...]) -> None:
        """Checks that exactly the right requests end, for the right reasons, in order."""
        expected: list[Decision] = []
        if isinstance(event, RequestArrived):
            expected = self._arrive(event)
        elif isinstance(event, CancelRequested):
            if event.request_id in self.live:
                expected = [self._end(event.request_id, FinishReason.CANCELLED)]
        elif isinstance(event, StepFinished):
            expected = self._finish(event)
        elif isinstance(event, ClockAdvanced):
            late = [i for i, r in sorted(self.live.items()) if r.deadline_us <= event.now_us]
            expected = [self._end(i, FinishReason.TIMEOUT) for i in late]
        else:
            assert isinstance(event, PrefixCacheReset)
            (emptied,) = outcomes
            assert isinstance(emptied, PrefixCacheEmptied)
            assert emptied.num_in_use == len(self.held())
            assert 0 <= emptied.num_freed <= self.num_free()
            expected = [emptied]
        assert list(outcomes) == expected, f"{event}: decided {outcomes}, should be {expected}"

    def _arrive(self, event: RequestArrived) -> list[Decision]:
        config = self.config
        num_tokens = sum(request.promised for request in self.waiting())
        refused = expected_refusal(config, event, len(self.live), num_tokens)
        if refused is not None:
            return [refused]
        has_deadline = config.request_timeout_us
        self.live[event.request_id] = ModelRequest(
            request_id=event.request_id,
            priority=event.priority if config.scheduling_policy == "priority" else 0,
            num_prompt_tokens=event.num_prompt_tokens,
            max_tokens=event.max_tokens,
            num_tokens=event.num_prompt_tokens,
            deadline_us=event.arrived_us + has_deadline if has_deadline else 1 << 62,
        )
        return []

    def _end(self, request_id: RequestId, reason: FinishReason) -> RequestEnded:
        self._drop_blocks(self.live.pop(request_id))
        return RequestEnded(request_id=request_id, reason=reason)

    def _drop_blocks(self, request: ModelRequest) -> None:
        steps = [row.step_id for row in request.rows if row.life == request.life]
        if steps and request.block_ids:
            self.fenced.append((max(steps), request.block_ids))
        request.block_ids = []

    def _finish(self, event: StepFinished) -> list[Decision]:
        plan = self.in_flight.pop(0)
        assert plan.step_id == event.step_id
        stopped = {row.request_id: row.reason for row in event.stopped}
        ended: dict[RequestId, FinishReason] = {}
        for request in self.live.values():
            for row in [row for row in request.rows if row.step_id == plan.step_id]:
                request.rows.remove(row)
                reason = stopped.get(request.request_id)
                if row.life == request.life:
                    request.num_computed += row.num_tokens
                if row.samples and reason is not FinishReason.FAILED:
                    request.num_tokens += 1
                    num_outputs = request.num_tokens - request.num_prompt_tokens
                    if reason is None and num_outputs == request.max_tokens:
                        reason = FinishReason.LENGTH
                if reason is not None:
                    ended[request.request_id] = reason
        outcomes: list[Decision] = [self._end(i, reason) for i, reason in sorted(ended.items())]
        self.fenced = [(step, blocks) for step, blocks in self.fenced if step > plan.step_id]
        self._measure(plan, event.execute_us)
        return outcomes

    def _measure(self, plan: StepPlan, execute_us: int) -> None:
        num_tokens = sum(chunk.num_tokens for chunk in plan.chunks)
        if plan.decodes and not num_tokens:
            self._decode_us = _moved(self._decode_us, max(1, execute_us))
        elif num_tokens and self._decode_us:
            added = max(0, execute_us - self._decode_us) * 1000
            self._token_ns = _moved(self._token_ns, max(1, added // num_tokens))

    # --- plans ---------------------------------------------------------------------------------

    def on_plan(self, plan: StepPlan) -> None:
        """Checks a plan against everything before it and takes it in."""
        depth = self.config.pipeline_depth
        assert len(self.in_flight) < depth, f"step {plan.step_id} with {depth} in flight"
        assert plan.step_id == self.num_steps, f"step {plan.step_id} is number {self.num_steps}"
        self.num_steps += 1
        was_idle = not self.running()
        self.was_finishing = {i for i, r in self.live.items() if r.is_finishing}
        self._preempt(plan)
        self._admit(plan, was_idle)
        self._grant(plan)
        self._check_rows(plan)
        self._add_rows(plan)
        self._check_preemption_was_needed(plan)
        self._check_waits(plan)
        self.in_flight.append(plan)

    def _preempt(self, plan: StepPlan) -> None:
        running = self.running()
        waiting = self.waiting()
        self.num_preemptions += len(plan.preempted)
        if plan.preempted and running[0].request_id in plan.preempted:
            assert waiting and waiting[0].priority < running[0].priority, (
                f"step {plan.step_id} preempts the first of {running}"
            )
        self.last_victim_blocks = 0
        for request_id in plan.preempted:
            request = self.live[request_id]
            assert not request.is_finishing, f"{request_id} is about to end and is preempted"
            staying = [r for r in self.live.values() if r is not request and not r.is_finishing]
            others = {block for other in staying for block in other.block_ids}
            self.last_victim_blocks = len(set(request.block_ids) - others)
            assert self.last_victim_blocks, f"preempting {request_id} frees nothing"
            request.lost = max(request.lost, request.scheduled)
            self._drop_blocks(request)
            request.is_running, request.num_computed = False, 0
            request.life += 1

    def _check_preemption_was_needed(self, plan: StepPlan) -> None:
        """Without the last victim there were fewer blocks than rows in need of one."""
        if plan.preempted and self.config.scheduling_policy == "fcfs":
            stalled = [w for w in plan.waits if self.live[w.request_id].is_running]
            others = [r.block_ids for i, r in self.live.items() if i not in self.was_finishing]
            kept = {block for table in others for block in table}
            at_hand = self.config.num_blocks - len(kept) - self.last_victim_blocks
            assert at_hand <= len(stalled), f"{at_hand} blocks without the last victim of {plan}"

    def _admit(self, plan: StepPlan, was_idle: bool) -> None:
        waiting = self.waiting()
        admitted = [admission.request_id for admission in plan.admitted]
        reasons = {wait.request_id: wait.reason for wait in plan.waits}
        orders = [self.live[request_id].order for request_id in admitted]
        assert orders == sorted(orders), f"admitted out of order: {admitted}"
        assert not set(admitted) & set(plan.preempted), f"preempts and admits at once: {plan}"
        for request in waiting:
            later = sum(order > request.order for order in orders)
            if request.request_id not in admitted and later:
                reason = reasons.get(request.request_id)
                is_short = reason in (WaitReason.NO_BLOCKS, WaitReason.ADMISSION)
                assert is_short, f"{request.request_id} is passed by {later}: {plan}"
        for admission in plan.admitted:
            self._take_admission(admission.request_id, admission.num_cached_tokens)
            request = self.live[admission.request_id]
            again = max(0, min(request.lost, request.promised) - request.num_computed)
            assert admission.num_recomputed_tokens == again, f"{admission}, should be {again}"
            self.num_recomputed += again
        if was_idle and waiting and not self.fenced and not waiting[0].rows:
            assert waiting[0].request_id in admitted, f"idle, and {waiting[0]} is not admitted"

    def _take_admission(self, request_id: RequestId, cached: int) -> None:
        request = self.live[request_id]
        assert not cached or self.config.enable_prefix_caching, "a hit with caching off"
        request.is_running, request.num_computed = True, cached

    def _grant(self, plan: StepPlan) -> None:
        """One grant a request that runs; an admission with hits has one."""
        hits = {
            admission.request_id: admission.num_cached_tokens // self.config.block_size
            for admission in plan.admitted
        }
        granted = [grant.request_id for grant in plan.granted]
        assert len(granted) == len(set(granted)), f"two grants for one request: {granted}"
        for grant in plan.granted:
            request = self.live[grant.request_id]
            assert request.is_running, f"{grant.request_id} waits and gets blocks"
            hits.pop(grant.request_id, 0)
            request.block_ids = request.block_ids + list(grant.block_ids)
            assert len(set(request.block_ids)) == len(request.block_ids), "a block twice"
        assert not any(hits.values()), f"admitted with hits and no grant: {hits}"

    def _check_rows(self, plan: StepPlan) -> None:
        """Each row continues its request; the limits on prefill are kept."""
        prefill = sum(chunk.num_tokens for chunk in plan.chunks)
        total = len(plan.decodes) + prefill
        assert prefill <= self._prefill_budget(plan), f"{prefill} prefill tokens beside decodes"
        assert total or (self.in_flight and (plan.preempted or plan.waits)), f"empty: {plan}"
        assert list(plan.decodes) == sorted(plan.decodes), f"not in order: {plan.decodes}"
        for request_id in plan.decodes:
            request = self.live[request_id]
            assert request.promised > request.num_prompt_tokens, f"{request_id}: no output yet"
            assert request.scheduled == request.promised - 1, f"{request_id}: {request}"
            assert not request.is_finishing, f"{request_id} gets a row behind its last: {request}"
            self._check_room(request, 1)
        partial = 0
        for chunk in plan.chunks:
            request = self.live[chunk.request_id]
            partial += not chunk.samples
            self._check_room(request, chunk.num_tokens)
        if plan.admitted and self.config.max_num_partial_prefills:
            last = plan.chunks[-1]
            most = self.config.max_num_partial_prefills
            assert last.samples or partial <= most, f"{partial} in part, {most} may be: {plan}"

    def _prefill_budget(self, plan: StepPlan) -> int:
        budget = self.config.max_num_batched_tokens - len(plan.decodes)
        if self.config.target_itl_us and plan.decodes and self._token_ns:
            spare_us = self.config.target_itl_us - self._decode_us
            paced = max(spare_us * 1000 // self._token_ns, self.config.block_size)
            return min(budget, paced)
        return budget

    def _check_room(self, request: ModelRequest, num_tokens: int) -> None:
        room = len(request.block_ids) * self.config.block_size
        assert request.scheduled + num_tokens <= room, f"{request} writes past its blocks"
        most = max(self.num_blocks(request.last_length), 1)
        assert len(request.block_ids) <= most, f"{request} holds more than it can ever use"

    def _add_rows(self, plan: StepPlan) -> None:
        rows = [(i, 1, True) for i in plan.decodes]
        rows += [(c.request_id, c.num_tokens, c.samples) for c in plan.chunks]
        self.had_row = {request_id for request_id, _, _ in rows}
        for request_id, num_tokens, samples in rows:
            request = self.live[request_id]
            request.rows.append(Row(plan.step_id, num_tokens, samples, request.life))
            if samples:
                request.lost = 0

    def _check_waits(self, plan: StepPlan) -> None:
        """Whoever gets nothing has a reason, and the reason is true."""
        reasons = {wait.request_id: wait.reason for wait in plan.waits}
        assert len(reasons) == len(plan.waits), f"two reasons for one request: {plan}"
        assert not self.had_row & reasons.keys(), f"both a row and a reason to wait: {plan}"
        prefill = sum(chunk.num_tokens for chunk in plan.chunks)
        budget_left = self._prefill_budget(plan) - prefill
        stalled = False
        for request in self.running():
            reason = reasons.pop(request.request_id, None)
            if request.request_id in self.had_row or (request.is_finishing and request.rows):
                assert reason is None, f"{request.request_id} waits and does not: {plan}"
            elif reason is WaitReason.NO_BLOCKS:
                stalled = True
                assert request.scheduled == request.promised - 1, f"{request} stalls: {plan}"
                assert self.num_coming(), f"{request} stalls and nothing is coming: {plan}"
            else:
                assert reason is WaitReason.NO_BUDGET, f"{request} has no row: {plan}"
                assert not budget_left, f"{budget_left} tokens of budget are left: {plan}"
        waiting = self.waiting()
        assert bool(reasons) == bool(waiting), f"reasons for {list(reasons)}, waiting {waiting}"
        if waiting:
            considered = [request.request_id for request in waiting[: len(reasons)]]
            assert set(reasons) == set(considered), f"{reasons} of {waiting}"
        for request_id, reason in reasons.items():
            request = self.live[request_id]
            if reason is WaitReason.NO_SEAT:
                assert len(self.running()) == self.config.max_num_seqs, f"a seat is free: {plan}"
            elif reason is WaitReason.NO_BUDGET:
                assert not budget_left, f"budget is left: {plan}"
            elif reason is WaitReason.AFTER_PREEMPTION:
                assert plan.preempted or stalled, f"nobody was preempted: {plan}"
            elif reason is WaitReason.IN_FLIGHT:
                assert request.rows, f"{request_id} has nothing in flight"
            elif reason is WaitReason.NO_BLOCKS:
                need = self.num_blocks(request.promised)
                assert need > self.num_free(), f"{request_id} needs {need} blocks: {plan}"
            elif reason is WaitReason.ADMISSION:
                assert self.config.admission != "greedy", f"greedy refuses: {plan}"
                assert len(self.running()), f"nobody runs, and {request_id} waits: {plan}"
            else:
                assert self.config.max_num_partial_prefills, f"{reason} without a limit"

    def check_idle(self) -> None:
        """Everyone ended, and nobody holds a block."""
        assert not self.live, f"never ended: {self.live}"
        assert not self.held(), f"never freed: {self.held()}"


def _moved(estimate: int, measured: int) -> int:
    """Nearer to the measurement by an eighth, rounded up."""
    if not estimate:
        return measured
    distance = measured - estimate
    return estimate + (distance // 8 if distance < 0 else -(-distance // 8))


def check_internals(scheduler: Scheduler, model: DecisionChecker) -> None:
    """Conservation and reference counts of a real scheduler; call between its calls.

    The model says who holds what, also which blocks a step in flight still writes.
    """
    books = scheduler.books
    pool = books.pool
    running, waiting = list(books.running.values()), list(books.waiting)
    tables = [list(request.block_ids) for request in running]
    tables += [list(fence.block_ids) for fence in books.fences.all()]
    held = [block for table in tables for block in table]
    for block, count in enumerate(pool._ref_counts):
        assert count == held.count(block), f"block {block}: count {count}, {held.count(block)} hold"
    places = sorted([*pool._blank, *pool._cached, *set(held)])
    assert places == list(range(scheduler.config.num_blocks)), f"lost or doubled blocks: {places}"
    assert set(held) == model.held(), f"held: {set(held)}, should be {model.held()}"
    for block in pool._blank:
        assert pool.index.hashes[block] is None, f"blank block {block} has a hash"
    for block in pool._cached:
        assert pool.index.hashes[block] is not None, f"cached block {block} has no hash"
    index = {h: block for block, h in enumerate(pool.index.snapshot()) if h is not None}
    assert index == pool.index._by_hash, "the prefix index and the blocks' hashes do not agree"
    assert all(not request.block_ids for request in waiting), "a waiting request holds blocks"
    assert all(r.state == RequestState.WAITING for r in waiting), "state of waiting"
    assert [r.request_id for r in waiting] == [r.request_id for r in model.waiting()], "order"
    assert set(books.running) == {r.request_id for r in model.running()}, "who runs"
    assert list(books.requests) == sorted(model.live), "who lives"
    assert not len(books.fences) or books.steps.in_flight, "a fence without a step"
    assert books.totals.num_preemptions == model.num_preemptions, "preemptions"
    assert books.totals.num_recomputed_tokens == model.num_recomputed, "recomputed tokens"
    assert 0 <= books.margin_blocks <= scheduler.config.num_blocks // 4, "margin"
    for request_id, known in model.live.items():
        request = books.requests[request_id]
        assert books.steps.num_promised(request) == known.promised, f"{request}: {known}"
        assert books.steps.num_scheduled(request) == known.scheduled, f"{request}: {known}"
        if known.is_running:
            assert books.steps.num_settled(request) == known.num_computed, f"{request}: {known}"
