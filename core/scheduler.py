"""The scheduler: a pure state machine that turns events into step plans.

Owns the waiting queue, the running set and the block pool. No clock, socket, float, thread or
logging: the same events give the same decisions on every machine, which is what `cearx replay`
checks. Driven by `process.py`, by replay and by the tests, all through `apply` and `plan`.

Order is by arrival (request id) and total: every running request arrived before every waiting one,
because admission takes the head of the queue and preemption takes the last of the running.
"""

from collections import OrderedDict
from enum import IntEnum

import msgspec

from cearx.core.block_pool import BlockPool, BlockPoolState
from cearx.core.config import SchedulerConfig
from cearx.core.events import (
    Admission,
    BlocksGranted,
    CancelRequested,
    ClockAdvanced,
    Event,
    FinishReason,
    PrefillChunk,
    RefusalReason,
    RequestArrived,
    RequestEnded,
    RequestRefused,
    RequestWaits,
    StepFinished,
    StepPlan,
    WaitReason,
)
from cearx.core.identifiers import BlockHash, BlockId, RequestId, StepId

Outcome = RequestEnded | RequestRefused


class RequestState(IntEnum):
    WAITING = 0
    RUNNING = 1
    ENDED = 2


class Request(msgspec.Struct, array_like=True, kw_only=True):
    """One request's bookkeeping; all lengths in tokens.

    known tokens    0 ───────────────────────────── num_tokens
    in KV           0 ────────── num_computed
    prompt          0 ──── num_prompt_tokens ─ outputs ─┘
    """

    request_id: RequestId
    num_prompt_tokens: int
    max_tokens: int
    block_hashes: list[BlockHash]
    """Of the full blocks of known tokens."""
    num_tokens: int
    num_computed: int = 0
    block_ids: list[BlockId] = msgspec.field(default_factory=list)
    num_published: int = 0
    """Leading blocks that are published, or shared from the cache."""
    state: RequestState = RequestState.WAITING


def _last_length(request: Request) -> int:
    """Tokens whose KV it writes at most: the last output's is never needed."""
    return request.num_prompt_tokens + request.max_tokens - 1


class _StepUnderConstruction:
    """What `plan` has decided so far in this step."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.decodes: list[RequestId] = []
        self.chunks: list[PrefillChunk] = []
        self.granted: list[BlocksGranted] = []
        self.admitted: list[Admission] = []
        self.preempted: list[RequestId] = []
        self.waits: list[RequestWaits] = []

    def add_chunk(self, request: Request) -> None:
        """The next part of a prompt, as long as the budget allows; needs budget > 0."""
        num_tokens = min(self.budget, request.num_tokens - request.num_computed)
        self.budget -= num_tokens
        self.chunks.append(
            PrefillChunk(
                request_id=request.request_id,
                start=request.num_computed,
                num_tokens=num_tokens,
                samples=request.num_computed + num_tokens == request.num_tokens,
            )
        )

    def wait(self, request: Request, reason: WaitReason) -> None:
        self.waits.append(RequestWaits(request_id=request.request_id, reason=reason))


class SchedulerState(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """A snapshot; msgpack of it is canonical."""

    now_us: int
    next_step: StepId
    in_flight: StepPlan | None
    waiting: tuple[Request, ...]
    running: tuple[Request, ...]
    fenced: tuple[Request, ...]
    pool: BlockPoolState


class Scheduler:
    """See the module docstring; `apply` and `plan` may be called in any order that `has_work` and
    `step_in_flight` allow. A broken invariant is an AssertionError: the process must end."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.now_us = 0
        self.pool = BlockPool(config.num_blocks)
        self._waiting: OrderedDict[RequestId, Request] = OrderedDict()
        self._running: dict[RequestId, Request] = {}
        self._fenced: list[Request] = []
        """Ended while a step that touches their blocks is in flight; freed when it is done."""
        self._in_flight: StepPlan | None = None
        self._next_step = StepId(0)

    # --- what the driver asks ------------------------------------------------------------------

    @property
    def step_in_flight(self) -> StepId | None:
        """The step that was planned and is not finished: at most one."""
        return None if self._in_flight is None else self._in_flight.step_id

    def has_work(self) -> bool:
        """Whether a plan would hold at least one row: someone runs or waits."""
        return bool(self._running or self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    # --- events ------------------------------------------------------------------------------

    def apply(self, event: Event) -> tuple[Outcome, ...]:
        """Takes in one event; answers who ended or was refused because of it, in order."""
        if isinstance(event, StepFinished):
            return self._finish_step(event)
        if isinstance(event, ClockAdvanced):
            assert event.now_us >= self.now_us, f"clock went from {self.now_us} to {event.now_us}"
            self.now_us = event.now_us
            return ()
        if isinstance(event, RequestArrived):
            return self._arrive(event)
        return self._cancel(event)

    def _arrive(self, event: RequestArrived) -> tuple[Outcome, ...]:
        refusal = self._refusal(event)
        if refusal is not None:
            return (refusal,)
        last = next(reversed(self._waiting or self._running), None)
        assert last is None or event.request_id > last, f"id {event.request_id} after {last}"
        self._waiting[event.request_id] = Request(
            request_id=event.request_id,
            num_prompt_tokens=event.num_prompt_tokens,
            max_tokens=event.max_tokens,
            block_hashes=list(event.block_hashes) if self.config.enable_prefix_caching else [],
            num_tokens=event.num_prompt_tokens,
        )
        return ()

    def _refusal(self, event: RequestArrived) -> RequestRefused | None:
        """Whether a request can never run, with what it needs and what there is."""
        length = event.num_prompt_tokens + event.max_tokens
        pool_tokens = self.config.num_blocks * self.config.block_size
        if event.num_prompt_tokens < 1:
            reason, need, limit = RefusalReason.EMPTY_PROMPT, event.num_prompt_tokens, 1
        elif event.max_tokens < 1:
            reason, need, limit = RefusalReason.NO_OUTPUT, event.max_tokens, 1
        elif length > self.config.max_model_len:
            reason, need, limit = RefusalReason.PROMPT_TOO_LONG, length, self.config.max_model_len
        elif length - 1 > pool_tokens:
            # The last token's KV is never written, so it needs no place.
            reason, need, limit = RefusalReason.POOL_TOO_SMALL, length - 1, pool_tokens
        else:
            return None
        return RequestRefused(
            request_id=event.request_id, reason=reason, num_tokens=need, limit_tokens=limit
        )

    def _cancel(self, event: CancelRequested) -> tuple[Outcome, ...]:
        request = self._running.pop(event.request_id, None)
        if request is None:
            request = self._waiting.pop(event.request_id, None)
        if request is None:
            return ()  # it ended before the cancel arrived
        return (self._end(request, FinishReason.CANCELLED),)

    def _end(self, request: Request, reason: FinishReason) -> RequestEnded:
        """The request is in neither queue any more; its blocks go when no step touches them."""
        request.state = RequestState.ENDED
        if self._in_flight is None:
            self._release(request)
        elif request.block_ids:
            self._fenced.append(request)
        return RequestEnded(request_id=request.request_id, reason=reason)

    def _release(self, request: Request) -> None:
        self.pool.release(request.block_ids)
        request.block_ids = []
        request.num_published = 0
        request.num_computed = 0

    def _finish_step(self, event: StepFinished) -> tuple[Outcome, ...]:
        plan = self._in_flight
        assert plan is not None and plan.step_id == event.step_id, (
            f"step {event.step_id} finished, step {plan and plan.step_id} is in flight"
        )
        self._in_flight = None
        for sealed in event.sealed:
            request = self._running.get(sealed.request_id)
            if request is not None and self.config.enable_prefix_caching:
                request.block_hashes.append(sealed.block_hash)
        stopped = {row.request_id: row.reason for row in event.stopped}
        outcomes: list[Outcome] = []
        for request_id in plan.decodes:
            request = self._running.get(request_id)
            if request is not None:
                self._advance(request, 1, True, stopped.get(request_id), outcomes)
        for chunk in plan.chunks:
            request = self._running.get(chunk.request_id)
            if request is not None:
                reason = stopped.get(chunk.request_id)
                self._advance(request, chunk.num_tokens, chunk.samples, reason, outcomes)
        for request in self._fenced:
            self._release(request)
        self._fenced.clear()
        return tuple(outcomes)

    def _advance(
        self,
        request: Request,
        num_tokens: int,
        sampled: bool,
        stopped: FinishReason | None,
        outcomes: list[Outcome],
    ) -> None:
        """One row of the finished step: its KV is written, so its full blocks can be shared."""
        request.num_computed += num_tokens
        if stopped is not FinishReason.FAILED:
            self._publish(request)
            request.num_tokens += sampled
        if stopped is None and self._num_outputs(request) == request.max_tokens:
            stopped = FinishReason.LENGTH
        if stopped is not None:
            del self._running[request.request_id]
            outcomes.append(self._end(request, stopped))

    @staticmethod
    def _num_outputs(request: Request) -> int:
        return request.num_tokens - request.num_prompt_tokens

    def _publish(self, request: Request) -> None:
        full = min(request.num_computed // self.config.block_size, len(request.block_hashes))
        for index in range(request.num_published, full):
            self.pool.publish(request.block_ids[index], request.block_hashes[index])
        request.num_published = max(request.num_published, full)

    # --- planning ------------------------------------------------------------------------------

    def plan(self) -> StepPlan:
        """Decides the next step at `now_us`; call with `has_work()` and no step in flight.

        Decodes first, then prefill chunks of running requests, then admissions, all in order of
        arrival and within one token budget.
        """
        assert self._in_flight is None, "a step is in flight"
        step = _StepUnderConstruction(self.config.max_num_batched_tokens)
        self._plan_decodes(step)
        for request in self._running.values():
            if request.num_computed < request.num_tokens - 1 or not self._num_outputs(request):
                if step.budget:
                    step.add_chunk(request)
                else:
                    step.wait(request, WaitReason.NO_BUDGET)
        self._plan_admissions(step)
        plan = StepPlan(
            step_id=self._next_step,
            decodes=tuple(step.decodes),
            chunks=tuple(step.chunks),
            granted=tuple(step.granted),
            admitted=tuple(step.admitted),
            preempted=tuple(step.preempted),
            waits=tuple(step.waits),
        )
        assert plan.decodes or plan.chunks, "work is pending and nothing can run"
        self._next_step = StepId(self._next_step + 1)
        self._in_flight = plan
        return plan

    def _plan_decodes(self, step: _StepUnderConstruction) -> None:
        for request in list(self._running.values()):
            if request.state is not RequestState.RUNNING:
                break  # preempted below, and so is everyone after it
            if request.num_computed < request.num_tokens - 1 or not self._num_outputs(request):
                continue
            if request.num_computed == len(request.block_ids) * self.config.block_size:
                while not self.pool.num_free and request.state is RequestState.RUNNING:
                    self._preempt_last(step)
                if request.state is not RequestState.RUNNING:
                    break
                self._grant(step, request, self.pool.take(1))
            step.decodes.append(request.request_id)
        step.budget -= len(step.decodes)  # the config holds max_num_seqs within the budget

    def _preempt_last(self, step: _StepUnderConstruction) -> None:
        """The last arrived loses its blocks and waits at the head; its published blocks stay
        cached, so it resumes from what nobody took meanwhile."""
        request_id, request = self._running.popitem()
        self._release(request)
        request.state = RequestState.WAITING
        self._waiting[request_id] = request
        self._waiting.move_to_end(request_id, last=False)
        step.preempted.append(request_id)

    def _plan_admissions(self, step: _StepUnderConstruction) -> None:
        """Admits from the head of the queue; stops at the first that must wait, with its reason."""
        if not self._waiting:
            return
        growing = sum(map(self._can_grow, self._running.values()))
        while self._waiting:
            request = next(iter(self._waiting.values()))
            if step.preempted:
                return step.wait(request, WaitReason.AFTER_PREEMPTION)
            if len(self._running) == self.config.max_num_seqs:
                return step.wait(request, WaitReason.NO_SEAT)
            if not step.budget:
                return step.wait(request, WaitReason.NO_BUDGET)
            # The last known token is always computed, because its logits are needed.
            limit = (request.num_tokens - 1) // self.config.block_size
            hits = self.pool.find(request.block_hashes, limit)
            need = self._num_blocks(request.num_tokens) - len(hits)
            # Every running request that can still grow, the newcomer included, keeps one block to
            # grow into; otherwise the next block of those before it would preempt the newcomer.
            grows = self._num_blocks(request.num_tokens) < self._num_blocks(_last_length(request))
            free = self.pool.num_free - self.pool.num_cached(hits)
            if need + growing + grows > free:
                return step.wait(request, WaitReason.NO_BLOCKS)
            growing += grows
            self._admit(step, request, hits, need)

    def _can_grow(self, request: Request) -> bool:
        return _last_length(request) > len(request.block_ids) * self.config.block_size

    def _admit(
        self, step: _StepUnderConstruction, request: Request, hits: list[BlockId], need: int
    ) -> None:
        """Takes the blocks of all known tokens at once: a prefill never stalls half way."""
        self.pool.share(hits)
        del self._waiting[request.request_id]
        self._running[request.request_id] = request
        request.state = RequestState.RUNNING
        request.num_published = len(hits)
        request.num_computed = len(hits) * self.config.block_size
        step.admitted.append(
            Admission(request_id=request.request_id, num_cached_tokens=request.num_computed)
        )
        self._grant(step, request, hits + self.pool.take(need))
        step.add_chunk(request)

    def _grant(
        self, step: _StepUnderConstruction, request: Request, block_ids: list[BlockId]
    ) -> None:
        request.block_ids.extend(block_ids)
        step.granted.append(
            BlocksGranted(request_id=request.request_id, block_ids=tuple(block_ids))
        )

    def _num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.config.block_size)

    # --- snapshots ---------------------------------------------------------------------------

    def snapshot(self) -> bytes:
        """The whole state, canonical: equal states give equal bytes."""
        return msgspec.msgpack.encode(
            SchedulerState(
                now_us=self.now_us,
                next_step=self._next_step,
                in_flight=self._in_flight,
                waiting=tuple(self._waiting.values()),
                running=tuple(self._running.values()),
                fenced=tuple(self._fenced),
                pool=self.pool.snapshot(),
            )
        )

    @classmethod
    def restore(cls, config: SchedulerConfig, snapshot: bytes) -> "Scheduler":
        """A scheduler that answers exactly as the one that was snapshotted.

        Raises msgspec.DecodeError for bytes that are no snapshot.
        """
        state = msgspec.msgpack.decode(snapshot, type=SchedulerState)
        scheduler = cls(config)
        scheduler.now_us = state.now_us
        scheduler._next_step = state.next_step
        scheduler._in_flight = state.in_flight
        scheduler._waiting = OrderedDict((r.request_id, r) for r in state.waiting)
        scheduler._running = {r.request_id: r for r in state.running}
        scheduler._fenced = list(state.fenced)
        scheduler.pool = BlockPool.restore(state.pool)
        return scheduler
