"""An independent model of what a scheduler may decide, naive and slow.

`DecisionChecker` sees events and decisions only and keeps its own books: lists and full scans, no
reference counts, no hash index. `check_internals` looks into a real scheduler between two calls.
Both raise AssertionError with what is wrong. Used by the simulation, never by the product.
"""

from dataclasses import dataclass, field

from cearx.core.config import SchedulerConfig
from cearx.core.events import (
    CancelRequested,
    ClockAdvanced,
    Decision,
    Event,
    FinishReason,
    RefusalReason,
    RequestArrived,
    RequestEnded,
    RequestRefused,
    StepFinished,
    StepPlan,
    WaitReason,
)
from cearx.core.identifiers import BlockId, RequestId
from cearx.core.scheduler import RequestState, Scheduler


@dataclass
class ModelRequest:
    """What the model knows of an accepted request that has not ended."""

    num_prompt_tokens: int
    max_tokens: int
    num_tokens: int
    num_computed: int = 0
    is_running: bool = False
    block_ids: list[BlockId] = field(default_factory=list)

    @property
    def num_outputs(self) -> int:
        return self.num_tokens - self.num_prompt_tokens

    @property
    def last_length(self) -> int:
        return self.num_prompt_tokens + self.max_tokens - 1


class DecisionChecker:
    """Feed every event and the decisions that answer it, every plan, in order."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.live: dict[RequestId, ModelRequest] = {}
        self.seen: set[RequestId] = set()
        """Every id that ever arrived."""
        self.fenced: list[list[BlockId]] = []
        """Blocks of requests that ended during the step in flight."""
        self.in_flight: StepPlan | None = None
        self.num_steps = 0

    # --- who holds what, by a full scan --------------------------------------------------------

    def held(self) -> set[BlockId]:
        tables = [request.block_ids for request in self.live.values()] + self.fenced
        return {block for table in tables for block in table}

    def running(self) -> list[RequestId]:
        return sorted(i for i, request in self.live.items() if request.is_running)

    def waiting(self) -> list[RequestId]:
        return sorted(i for i, request in self.live.items() if not request.is_running)

    def num_blocks(self, num_tokens: int) -> int:
        return (num_tokens + self.config.block_size - 1) // self.config.block_size

    # --- events and outcomes -------------------------------------------------------------------

    def on_event(self, event: Event, outcomes: tuple[Decision, ...]) -> None:
        """Checks that exactly the right requests end, for the right reasons, in order."""
        if isinstance(event, RequestArrived):
            expected = self._arrive(event)
        elif isinstance(event, CancelRequested):
            expected = self._cancel(event)
        elif isinstance(event, StepFinished):
            expected = self._finish(event)
        else:
            assert isinstance(event, ClockAdvanced)
            expected = []
        assert list(outcomes) == expected, f"{event}: decided {outcomes}, should be {expected}"

    def _arrive(self, event: RequestArrived) -> list[Decision]:
        assert event.request_id not in self.seen, f"id {event.request_id} came twice"
        self.seen.add(event.request_id)
        prompt, longest = event.num_prompt_tokens, event.num_prompt_tokens + event.max_tokens
        pool_tokens = self.config.num_blocks * self.config.block_size
        refusals = [
            (prompt < 1, RefusalReason.EMPTY_PROMPT, prompt, 1),
            (event.max_tokens < 1, RefusalReason.NO_OUTPUT, event.max_tokens, 1),
            (
                longest > self.config.max_model_len,
                RefusalReason.PROMPT_TOO_LONG,
                longest,
                self.config.max_model_len,
            ),
            (longest - 1 > pool_tokens, RefusalReason.POOL_TOO_SMALL, longest - 1, pool_tokens),
        ]
        for applies, reason, need, limit in refusals:
            if applies:
                return [
                    RequestRefused(
                        request_id=event.request_id,
                        reason=reason,
                        num_tokens=need,
                        limit_tokens=limit,
                    )
                ]
        self.live[event.request_id] = ModelRequest(prompt, event.max_tokens, prompt)
        return []

    def _cancel(self, event: CancelRequested) -> list[Decision]:
        if event.request_id not in self.live:
            return []
        return [self._end(event.request_id, FinishReason.CANCELLED)]

    def _end(self, request_id: RequestId, reason: FinishReason) -> RequestEnded:
        request = self.live.pop(request_id)
        if self.in_flight is not None:
            self.fenced.append(request.block_ids)
        return RequestEnded(request_id=request_id, reason=reason)

    def _finish(self, event: StepFinished) -> list[Decision]:
        plan, self.in_flight = self.in_flight, None
        assert plan is not None and plan.step_id == event.step_id
        stopped = {row.request_id: row.reason for row in event.stopped}
        rows = [(i, 1, True) for i in plan.decodes]
        rows += [(c.request_id, c.num_tokens, c.samples) for c in plan.chunks]
        ended: list[Decision] = []
        for request_id, num_tokens, samples in rows:
            request = self.live.get(request_id)
            if request is None:
                continue  # cancelled meanwhile
            request.num_computed += num_tokens
            reason = stopped.get(request_id)
            if samples and reason is not FinishReason.FAILED:
                request.num_tokens += 1
                if reason is None and request.num_outputs == request.max_tokens:
                    reason = FinishReason.LENGTH
            if reason is not None:
                ended.append(self._end(request_id, reason))
        self.fenced.clear()
        return ended

    # --- plans ---------------------------------------------------------------------------------

    def on_plan(self, plan: StepPlan) -> None:
        """Checks a plan against everything before it and takes it in."""
        assert self.in_flight is None, f"step {plan.step_id} planned while one is in flight"
        assert plan.step_id == self.num_steps, f"step {plan.step_id} is number {self.num_steps}"
        self.num_steps += 1
        self._preempt(plan)
        self._admit(plan)
        self._grant(plan)
        self._check_rows(plan)
        self._check_waits(plan)
        self.in_flight = plan

    def _preempt(self, plan: StepPlan) -> None:
        running = self.running()
        victims = running[len(running) - len(plan.preempted) :]
        assert list(plan.preempted) == victims[::-1], (
            f"preempted {plan.preempted}, the last arrived of {running} are {victims}"
        )
        for request_id in plan.preempted:
            request = self.live[request_id]
            request.is_running, request.num_computed, request.block_ids = False, 0, []

    def _admit(self, plan: StepPlan) -> None:
        waiting = self.waiting()
        admitted = [admission.request_id for admission in plan.admitted]
        assert admitted == waiting[: len(admitted)], f"admitted {admitted} of {waiting}"
        assert not (admitted and plan.preempted), "admits in a step that preempts"
        for admission in plan.admitted:
            request = self.live[admission.request_id]
            cached = admission.num_cached_tokens
            assert cached % self.config.block_size == 0, f"{cached} cached tokens: not whole blocks"
            assert 0 <= cached < request.num_tokens, f"all of {request.num_tokens} tokens cached"
            assert not cached or self.config.enable_prefix_caching, "a hit with caching off"
            request.is_running, request.num_computed = True, cached
        count = len(self.running())
        assert count <= self.config.max_num_seqs, f"{count} run, {self.config.max_num_seqs} may"

    def _grant(self, plan: StepPlan) -> None:
        """New blocks are held by nobody; only the cached head of an admission is shared."""
        hits = {
            admission.request_id: admission.num_cached_tokens // self.config.block_size
            for admission in plan.admitted
        }
        granted = [grant.request_id for grant in plan.granted]
        assert len(granted) == len(set(granted)), f"two grants for one request: {granted}"
        for grant in plan.granted:
            request = self.live.get(grant.request_id)
            assert request is not None, f"{grant.request_id} has ended and gets blocks"
            assert request.is_running, f"{grant.request_id} waits and gets blocks"
            num_hits = hits.pop(grant.request_id, 0)
            fresh = grant.block_ids[num_hits:]
            twice = self.held() & set(fresh)
            assert not twice, f"blocks {twice} are held and granted to {grant.request_id}"
            for block in grant.block_ids:
                assert 0 <= block < self.config.num_blocks, f"there is no block {block}"
            request.block_ids = request.block_ids + list(grant.block_ids)
            assert len(set(request.block_ids)) == len(request.block_ids), "a block twice"
        assert not any(hits.values()), f"admitted with hits and no grant: {hits}"

    def _check_rows(self, plan: StepPlan) -> None:
        """Each row continues its request; together they keep the budget."""
        total = len(plan.decodes) + sum(chunk.num_tokens for chunk in plan.chunks)
        limit = self.config.max_num_batched_tokens
        assert 0 < total <= limit, f"{total} tokens in a step, the budget is {limit}"
        rows = [*plan.decodes, *(chunk.request_id for chunk in plan.chunks)]
        assert len(set(rows)) == len(rows), f"two rows for one request: {rows}"
        for request_id in rows:
            assert request_id in self.live, f"{request_id} has ended and gets a row"
            assert self.live[request_id].is_running, f"{request_id} waits and gets a row"
        for request_id in plan.decodes:
            request = self.live[request_id]
            assert request.num_outputs > 0, f"{request_id} decodes before its prompt is done"
            assert request.num_computed == request.num_tokens - 1, f"{request_id}: {request}"
            self._check_room(request_id, 1)
        for chunk in plan.chunks:
            request = self.live[chunk.request_id]
            end = chunk.start + chunk.num_tokens
            assert chunk.start == request.num_computed, f"{chunk} does not continue {request}"
            assert chunk.num_tokens > 0 and end <= request.num_tokens, f"{chunk} of {request}"
            assert chunk.samples == (end == request.num_tokens), f"{chunk} of {request}"
            self._check_room(chunk.request_id, chunk.num_tokens)
        idle = set(self.running()) - set(rows)
        assert not idle or total == limit, f"{idle} run without a row, budget {total} of {limit}"
        decoding = {i for i in idle if self.live[i].num_computed == self.live[i].num_tokens - 1}
        decoding = {i for i in decoding if self.live[i].num_outputs}
        assert not decoding, f"{decoding} could decode and do not"

    def _check_room(self, request_id: RequestId, num_tokens: int) -> None:
        request = self.live[request_id]
        room = len(request.block_ids) * self.config.block_size
        assert request.num_computed + num_tokens <= room, f"{request_id} writes past its blocks"
        most = max(self.num_blocks(request.last_length), 1)
        assert len(request.block_ids) <= most, f"{request_id} holds more than it can ever use"

    def _check_waits(self, plan: StepPlan) -> None:
        """Whoever gets nothing has a reason, and the reason is true."""
        total = len(plan.decodes) + sum(chunk.num_tokens for chunk in plan.chunks)
        reasons = {wait.request_id: wait.reason for wait in plan.waits}
        rows = {*plan.decodes, *(chunk.request_id for chunk in plan.chunks)}
        assert not rows & reasons.keys(), f"both a row and a reason to wait: {plan}"
        for request_id in set(self.running()) - rows:
            assert reasons.pop(request_id, None) is WaitReason.NO_BUDGET, f"{request_id}: {plan}"
        waiting = self.waiting()
        assert list(reasons) == waiting[:1], f"reasons for {list(reasons)}, waiting {waiting}"
        for request_id, reason in reasons.items():
            if reason is WaitReason.NO_SEAT:
                assert len(self.running()) == self.config.max_num_seqs, f"a seat is free: {plan}"
            elif reason is WaitReason.NO_BUDGET:
                assert total == self.config.max_num_batched_tokens, f"budget is left: {plan}"
            elif reason is WaitReason.AFTER_PREEMPTION:
                assert plan.preempted, f"nobody was preempted: {plan}"
            else:
                self._check_no_blocks(request_id)

    def _check_no_blocks(self, request_id: RequestId) -> None:
        """One block of growth for each request that can grow is all that may be held back."""
        free = self.config.num_blocks - len(self.held())
        grows = [
            other
            for other in self.running()
            if self.num_blocks(self.live[other].last_length) > len(self.live[other].block_ids)
        ]
        need = self.num_blocks(self.live[request_id].num_tokens) + 1
        assert need + len(grows) > free, f"{request_id} needs {need} of {free} blocks and waits"

    def check_idle(self) -> None:
        """Everyone ended, and nobody holds a block."""
        assert not self.live, f"never ended: {self.live}"
        assert not self.held(), f"never freed: {self.held()}"


def check_internals(scheduler: Scheduler, model: DecisionChecker) -> None:
    """Conservation and reference counts of a real scheduler; call between its calls.

    The model says who holds what, also which blocks a step in flight still writes.
    """
    pool = scheduler.pool
    running, waiting = list(scheduler._running.values()), list(scheduler._waiting.values())
    tables = [request.block_ids for request in (*running, *scheduler._fenced)]
    held = [block for table in tables for block in table]
    for block, count in enumerate(pool._ref_counts):
        assert count == held.count(block), f"block {block}: count {count}, {held.count(block)} hold"
    places = sorted([*pool._blank, *pool._cached, *set(held)])
    assert places == list(range(scheduler.config.num_blocks)), f"lost or doubled blocks: {places}"
    assert set(held) == model.held(), f"held: {set(held)}, should be {model.held()}"
    for block in pool._blank:
        assert pool._hashes[block] is None, f"blank block {block} has a hash"
    for block in pool._cached:
        assert pool._hashes[block] is not None, f"cached block {block} has no hash"
    index = {h: block for block, h in enumerate(pool._hashes) if h is not None}
    assert index == pool._by_hash, "the prefix index and the blocks' hashes do not agree"
    assert all(not request.block_ids for request in waiting), "a waiting request holds blocks"
    assert all(request.state == RequestState.RUNNING for request in running), "state of running"
    assert all(request.state == RequestState.WAITING for request in waiting), "state of waiting"
    order = [request.request_id for request in (*running, *waiting)]
    assert order == sorted(order), f"not in order of arrival: {order}"
    assert not scheduler._fenced or scheduler.step_in_flight is not None, "a fence without a step"
