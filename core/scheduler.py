"""The scheduler: a pure state machine that turns events into step plans.

The face of `books.py` (state), `settling.py` (finished steps) and `planner.py` (next step). No
clock, socket, float, thread or logging: the same events give the same decisions on every machine,
which is what `cearx replay` checks. Driven by the core's shell, by replay and by the tests, all
through `apply` and `plan`.

Order is total: (priority, arrival), see `Request.order`. The first in order among the running is
never preempted for another, so somebody always gets on.
"""

from collections import deque

import msgspec

from cearx.core.admission import find_policy
from cearx.core.block_pool import BlockPool, BlockPoolState
from cearx.core.books import Books, Totals
from cearx.core.config import SchedulerConfig
from cearx.core.decode_batch import DecodeBatch, DecodeBatchState
from cearx.core.events import (
    ClockAdvanced,
    Event,
    FinishReason,
    Outcome,
    PrefixCacheEmptied,
    PrefixCacheReset,
    RefusalReason,
    RequestArrived,
    RequestRefused,
    StepFinished,
    StepPlan,
)
from cearx.core.fences import Fence, Fences
from cearx.core.identifiers import RequestId, StepId
from cearx.core.output_lengths import OutputLengths
from cearx.core.planner import close_step, plan_step
from cearx.core.prefill_pace import PrefillPace
from cearx.core.request import Request, RequestState
from cearx.core.settling import finish_step
from cearx.core.step_books import InFlightStep


class SchedulerState(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """A snapshot; msgpack of it is canonical."""

    now_us: int
    next_step: StepId
    last_id: RequestId | None
    in_flight: tuple[InFlightStep, ...]
    requests: tuple[Request, ...]
    running: tuple[RequestId, ...]
    batch: DecodeBatchState
    fences: tuple[Fence, ...]
    pool: BlockPoolState
    lengths: OutputLengths
    pace: PrefillPace
    margin_blocks: int
    totals: Totals
    blocked: tuple[RequestId, int] | None


class Scheduler:
    """See the module docstring; `apply` and `plan` may be called in any order that `has_work` and
    `num_in_flight` allow. A broken invariant is an AssertionError: the process must end.

    Raises ValueError for an admission policy that nobody knows.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.books = Books(config)
        self._policy = find_policy(config.admission)
        self._last_id: RequestId | None = None

    # --- what the driver asks ------------------------------------------------------------------

    @property
    def num_in_flight(self) -> int:
        """Steps that were planned and are not finished: at most `pipeline_depth`."""
        return len(self.books.steps.in_flight)

    def has_work(self) -> bool:
        """Whether `plan` may be called: somebody runs or waits, and a step more may be in flight.

        Its answer may be that nothing can be done before a step in flight is finished.
        """
        return bool(self.books.requests) and self.num_in_flight < self.config.pipeline_depth

    @property
    def num_running(self) -> int:
        return len(self.books.running)

    @property
    def num_waiting(self) -> int:
        return len(self.books.waiting)

    @property
    def num_deferred(self) -> int:
        """Of the waiting ones, those whose next token is still in flight."""
        return sum(request.num_pending > 0 for request in self.books.waiting)

    @property
    def num_free_blocks(self) -> int:
        return self.books.pool.num_free

    @property
    def totals(self) -> Totals:
        return self.books.totals

    @property
    def next_deadline_us(self) -> int | None:
        """When the next request runs out of time; arrivals and deadlines have one order."""
        if not self.config.request_timeout_us or not self.books.requests:
            return None
        return next(iter(self.books.requests.values())).deadline_us

    # --- events ------------------------------------------------------------------------------

    def apply(self, event: Event) -> tuple[Outcome, ...]:
        """Takes in one event; answers who ended or was refused because of it, in order."""
        if isinstance(event, StepFinished):
            return finish_step(self.books, event)
        if isinstance(event, ClockAdvanced):
            return self._advance(event.now_us)
        if isinstance(event, RequestArrived):
            return self._arrive(event)
        if isinstance(event, PrefixCacheReset):
            return self._reset_cache()
        request = self.books.requests.get(event.request_id)
        if request is None:
            return ()  # it ended before the cancel arrived
        return (self.books.end(request, FinishReason.CANCELLED),)

    def _set_clock(self, now_us: int) -> None:
        assert now_us >= self.books.now_us, f"clock went from {self.books.now_us} to {now_us}"
        self.books.now_us = now_us

    def _advance(self, now_us: int) -> tuple[Outcome, ...]:
        self._set_clock(now_us)
        ended: list[Outcome] = []
        while (deadline_us := self.next_deadline_us) is not None and deadline_us <= now_us:
            late = next(iter(self.books.requests.values()))
            ended.append(self.books.end(late, FinishReason.TIMEOUT))
        return tuple(ended)

    def _reset_cache(self) -> tuple[Outcome, ...]:
        pool = self.books.pool
        num_freed = pool.forget_contents()
        for request in self.books.running.values():
            request.publishes = False
        self.books.totals.num_cache_resets += 1
        num_in_use = self.config.num_blocks - pool.num_free
        return (PrefixCacheEmptied(num_freed=num_freed, num_in_use=num_in_use),)

    def _arrive(self, event: RequestArrived) -> tuple[Outcome, ...]:
        last_id, books = self._last_id, self.books
        assert last_id is None or event.request_id > last_id, f"{event.request_id} after {last_id}"
        self._set_clock(event.arrived_us)
        self._last_id = event.request_id
        refusal = self._refusal(event)
        if refusal is not None:
            return (refusal,)
        request = Request(
            request_id=event.request_id,
            priority=event.priority if self.config.scheduling_policy == "priority" else 0,
            num_prompt_tokens=event.num_prompt_tokens,
            max_tokens=event.max_tokens,
            has_exact_length=event.has_exact_length,
            deadline_us=event.arrived_us + self.config.request_timeout_us,
            block_hashes=list(event.block_hashes) if self.config.enable_prefix_caching else [],
            num_tokens=event.num_prompt_tokens,
        )
        books.requests[request.request_id] = request
        books.waiting.add(request)
        books.blocked = None
        return ()

    def _refusal(self, event: RequestArrived) -> RequestRefused | None:
        """Whether it can never run, or may not wait; with what it needs and what there is."""
        config, waiting = self.config, self.books.waiting
        length = event.num_prompt_tokens + event.max_tokens
        pool_tokens = config.num_blocks * config.block_size
        most_tokens = config.max_num_queued_tokens
        # Whoever finds a free seat does not queue: it only waits for the next plan.
        num_queued = len(waiting) - (config.max_num_seqs - len(self.books.running))
        if event.num_prompt_tokens < 1:
            reason, need, limit = RefusalReason.EMPTY_PROMPT, event.num_prompt_tokens, 1
        elif event.max_tokens < 1:
            reason, need, limit = RefusalReason.NO_OUTPUT, event.max_tokens, 1
        elif length > config.max_model_len:
            reason, need, limit = RefusalReason.PROMPT_TOO_LONG, length, config.max_model_len
        elif length - 1 > pool_tokens:
            # The last token's KV is never written, so it needs no place.
            reason, need, limit = RefusalReason.POOL_TOO_SMALL, length - 1, pool_tokens
        elif 0 < config.max_num_queued_reqs <= num_queued:
            reason, need = RefusalReason.QUEUE_FULL, num_queued + 1
            limit = config.max_num_queued_reqs
        elif num_queued > 0 and 0 < most_tokens < waiting.num_tokens + event.num_prompt_tokens:
            # Alone in the queue it is let in whatever its length, or it could never come in.
            need = waiting.num_tokens + event.num_prompt_tokens
            reason, limit = RefusalReason.QUEUE_TOKENS, most_tokens
        else:
            return None
        return RequestRefused(
            request_id=event.request_id, reason=reason, num_tokens=need, limit_tokens=limit
        )

    # --- planning ------------------------------------------------------------------------------

    def plan(self) -> StepPlan | None:
        """Decides the next step at the clock's time; call when `has_work()`.

        None means that nothing can be done before a step in flight is finished; nothing has
        changed then.
        """
        books = self.books
        assert self.num_in_flight < self.config.pipeline_depth, "too many steps in flight"
        planned = plan_step(books, self._policy)
        if planned is None:
            assert books.steps.in_flight, "work is pending and nothing can run"
            return None
        plan, draft = planned
        books.steps.in_flight.append(InFlightStep(plan=plan))
        books.steps.next_step = StepId(books.steps.next_step + 1)
        close_step(books, draft)
        return plan

    # --- snapshots ---------------------------------------------------------------------------

    def snapshot(self) -> bytes:
        """The whole state, canonical: equal states give equal bytes."""
        books = self.books
        return msgspec.msgpack.encode(
            SchedulerState(
                now_us=books.now_us,
                next_step=books.steps.next_step,
                last_id=self._last_id,
                in_flight=tuple(books.steps.in_flight),
                requests=tuple(books.requests.values()),
                running=tuple(books.running),
                batch=books.steps.batch.snapshot(),
                fences=books.fences.all(),
                pool=books.pool.snapshot(),
                lengths=books.lengths,
                pace=books.pace,
                margin_blocks=books.margin_blocks,
                totals=books.totals,
                blocked=books.blocked,
            )
        )

    @classmethod
    def restore(cls, config: SchedulerConfig, snapshot: bytes) -> "Scheduler":
        """A scheduler that answers exactly as the one that was snapshotted.

        Raises msgspec.DecodeError for bytes that are no snapshot.
        """
        state = msgspec.msgpack.decode(snapshot, type=SchedulerState)
        scheduler = cls(config)
        scheduler._last_id = state.last_id
        books = scheduler.books
        books.now_us = state.now_us
        books.steps.next_step = state.next_step
        books.steps.in_flight = deque(state.in_flight)
        books.requests = {request.request_id: request for request in state.requests}
        books.running = {request_id: books.requests[request_id] for request_id in state.running}
        for request in state.requests:
            if request.state is RequestState.WAITING:
                books.waiting.add(request)
            elif request.state is RequestState.PREFILLING:
                books.steps.prefilling[request.request_id] = request
            elif request.state is RequestState.JOINING:
                books.steps.joining[request.request_id] = request
        decoding = [r.request_id for r in state.requests if r.state is RequestState.DECODING]
        books.steps.batch = DecodeBatch.restore(state.batch, decoding)
        books.pool = BlockPool.restore(state.pool)
        books.fences = Fences(books.pool, state.fences)
        books.lengths, books.pace, books.totals = state.lengths, state.pace, state.totals
        books.margin_blocks, books.blocked = state.margin_blocks, state.blocked
        books.num_to_come = sum(
            books.num_blocks(request.final_length) - len(request.block_ids)
            for request in books.running.values()
        )
        return scheduler
