"""The scheduler: a pure state machine that turns events into step plans.

The face of `books.py` (state), `settling.py` (finished steps) and `planner.py` (next step). No
clock, socket, float, thread or logging: the same events give the same decisions on every machine,
which is what `cearx replay` checks. Driven by the core's shell, by replay and by the tests, all
through `apply` and `plan`.

Order is total: (priority, arrival), see `Request.order`. The first in order among the running is
never preempted for another, so somebody always gets on.
"""

import msgspec

from cearx.core.admission import find_policy
from cearx.core.books import Books
from cearx.core.config import SchedulerConfig
from cearx.core.events import (
    ClockAdvanced,
    Event,
    FinishReason,
    Outcome,
    PrefixCacheEmptied,
    PrefixCacheReset,
    RequestArrived,
    StepFinished,
    StepPlan,
)
from cearx.core.identifiers import RequestId, StepId
from cearx.core.planner import close_step, plan_step
from cearx.core.refusals import refusal
from cearx.core.request import Request
from cearx.core.scheduler_state import SchedulerState, books_of, state_of
from cearx.core.settling import finish_step
from cearx.core.step_books import InFlightStep


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
        refused = refusal(books, event)
        if refused is not None:
            return (refused,)
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
        return msgspec.msgpack.encode(state_of(self.books, self._last_id))

    @classmethod
    def restore(cls, config: SchedulerConfig, snapshot: bytes) -> "Scheduler":
        """A scheduler that answers exactly as the one that was snapshotted.

        Raises msgspec.DecodeError for bytes that are no snapshot.
        """
        state = msgspec.msgpack.decode(snapshot, type=SchedulerState)
        scheduler = cls(config)
        scheduler.books = books_of(config, state)
        scheduler._last_id = state.last_id
        return scheduler
