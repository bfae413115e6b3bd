"""The shell around the pure scheduler: between messages and events.

Owns the scheduler, its log and the steps in flight; what the scheduler must not know stands in
`live_requests.py`. Turns `Submit`, `Cancel` and `StepResult` into events, decisions into
`ExecuteStep` and `Output`. Every event is logged before it is applied and every decision before it
leaves. Owns no socket and no clock: `process.py` calls it.
"""

from collections import deque
from collections.abc import Iterator

from cearx.core.block_hash import TOKEN_BYTES
from cearx.core.config import SchedulerConfig
from cearx.core.event_log import EventLog
from cearx.core.events import (
    CancelReason,
    CancelRequested,
    ClockAdvanced,
    Event,
    Outcome,
    PrefixCacheEmptied,
    PrefixCacheReset,
    RequestArrived,
    RequestEnded,
    RequestRefused,
    StepFinished,
    StepPlan,
)
from cearx.core.identifiers import RequestId
from cearx.core.live_requests import LiveRequests, MessageRejected
from cearx.core.messages import (
    Cancel,
    ExecuteStep,
    Output,
    Refused,
    StepResult,
    Submit,
)
from cearx.core.scheduler import Scheduler
from cearx.core.step_outputs import ended_output, outputs_of
from cearx.core.step_tokens import take_tokens


class Engine:
    """One scheduler with its log; see the module docstring."""

    def __init__(self, config: SchedulerConfig, hash_secret: bytes, log: EventLog) -> None:
        self.scheduler = Scheduler(config)
        """To be looked at; events come to it through this engine only."""
        self._config = config
        self._secret = hash_secret
        self.log = log
        """To be flushed before anything that follows from it is sent, to be maintained, and to be
        told the times of the step that `finish_step` took in last."""
        self._requests = LiveRequests(config)
        self._in_flight: deque[StepPlan] = deque()
        self._is_stuck = False
        """Nothing can be planned before something comes in."""
        self._next_id = 0
        self.num_progress = 0
        """Grows with every token, part of a prompt, admission, end and refusal."""

    @property
    def num_requests(self) -> int:
        return len(self._requests)

    @property
    def wants_step(self) -> bool:
        """Whether `next_step` may be called: work is pending and one more step may be in flight."""
        return not self._is_stuck and self.scheduler.has_work()

    def submit(self, frontend_index: int, submit: Submit, now_us: int) -> Refused | None:
        """Takes a request in; answers why it is refused, or None. Raises MessageRejected."""
        self._requests.check(frontend_index, submit)
        request_id = RequestId(self._next_id)
        self._next_id += 1
        event = RequestArrived(
            request_id=request_id,
            num_prompt_tokens=len(submit.token_ids) // TOKEN_BYTES,
            max_tokens=submit.max_tokens,
            block_hashes=submit.block_hashes,
            frontend_index=frontend_index,
            arrived_us=now_us,
            priority=submit.priority,
            has_exact_length=submit.has_exact_length,
        )
        for outcome in self._apply(event):
            assert isinstance(outcome, RequestRefused), f"arrival answered with {outcome}"
            return Refused(
                request_key=submit.request_key,
                reason=outcome.reason,
                num_tokens=outcome.num_tokens,
                limit_tokens=outcome.limit_tokens,
            )
        self._requests.add(request_id, frontend_index, submit)
        return None

    def cancel(self, frontend_index: int, cancel: Cancel) -> None:
        """Ends a request in any state; one that has ended already is ignored."""
        request_id = self._requests.find(frontend_index, cancel.request_key)
        if request_id is not None:
            self._cancel(request_id, cancel.reason)

    def cancel_frontend(self, frontend_index: int) -> None:
        """Ends all requests of a frontend that is gone."""
        for request_id in self._requests.of_frontend(frontend_index):
            self._cancel(request_id, CancelReason.FRONTEND_ERROR)

    def _cancel(self, request_id: RequestId, reason: CancelReason) -> None:
        for outcome in self._apply(CancelRequested(request_id=request_id, reason=reason)):
            assert isinstance(outcome, RequestEnded), f"a cancel answered with {outcome}"
            self._requests.forget(outcome.request_id)

    def reset_prefix_cache(self) -> PrefixCacheEmptied:
        """Nothing computed before is found again; answers what became of the blocks."""
        (outcome,) = self._apply(PrefixCacheReset())
        assert isinstance(outcome, PrefixCacheEmptied), f"a reset answered with {outcome}"
        return outcome

    def tick(self, now_us: int) -> dict[int, list[Output]]:
        """Tells the time; answers what to send to each frontend about requests that ran out of it.

        Call before each step and at `next_deadline_us`.
        """
        outputs: dict[int, list[Output]] = {}
        for outcome in self._apply(ClockAdvanced(now_us=now_us)):
            assert isinstance(outcome, RequestEnded), f"the clock answered with {outcome}"
            request = self._requests.forget(outcome.request_id)
            outputs.setdefault(request.frontend_index, []).append(
                ended_output(request.request_key, outcome.reason)
            )
        return outputs

    def next_step(self) -> ExecuteStep | None:
        """Plans and logs the next step; call when `wants_step`, then flush the log, then send it.

        None when nothing can be done before a step in flight is finished.
        """
        plan = self.scheduler.plan()
        if plan is None:
            self._is_stuck = True
            return None
        self._in_flight.append(plan)
        self.log.append(plan)
        self.num_progress += len(plan.admitted)
        return ExecuteStep(
            plan=plan,
            new_requests=self._requests.take_unsent(plan.admitted),
            ended=self._requests.take_ended(),
        )

    def finish_step(self, result: StepResult) -> dict[int, list[Output]]:
        """Takes in a step's tokens; answers what to send to each frontend.

        Raises MessageRejected for a result of another step (late or doubled).
        """
        if not self._in_flight or result.step_id != self._in_flight[0].step_id:
            raise MessageRejected(f"result of step {result.step_id} is not awaited")
        plan = self._in_flight[0]
        expected = list(_sampling_rows(plan))
        rows = [row.request_id for row in result.rows]
        assert rows == expected, f"step {plan.step_id}: rows {rows} for a plan with {expected}"
        self._in_flight.popleft()
        self.num_progress += len(rows) + sum(map(self._requests.goes_on, plan.chunks))
        taken = take_tokens(self._requests, result.rows, self._config, self._secret)
        event = StepFinished(
            step_id=result.step_id,
            stopped=tuple(taken.stopped),
            sealed=tuple(taken.sealed),
            execute_us=result.execute_us,
        )
        outcomes = self._apply(event)
        ended = {o.request_id: o.reason for o in outcomes if isinstance(o, RequestEnded)}
        outputs = outputs_of(self._requests, result, ended, taken.stop_tokens)
        for request_id in ended:
            self._requests.forget(request_id)
        return outputs

    def _apply(self, event: Event) -> tuple[Outcome, ...]:
        self._is_stuck = self._is_stuck and isinstance(event, ClockAdvanced)
        self.log.append(event)
        outcomes = self.scheduler.apply(event)
        for outcome in outcomes:
            self.log.append(outcome)
        self.num_progress += len(outcomes)
        return outcomes


def _sampling_rows(plan: StepPlan) -> Iterator[RequestId]:
    """The requests that get a token from this plan, in the order of `StepResult.rows`."""
    yield from plan.decodes
    for chunk in plan.chunks:
        if chunk.samples:
            yield chunk.request_id
