"""How requests may end: each once, for the right reason (I7), and refused is what never fits (I10).

Owns the outcomes that the last event must lead to, and the deadlines. Called by `invariants.py`
with every record before it is in the books.
"""

from collections.abc import Iterator

from cearx.core.config import SchedulerConfig
from cearx.core.events import (
    CancelRequested,
    ClockAdvanced,
    FinishReason,
    PrefixCacheEmptied,
    PrefixCacheReset,
    RefusalReason,
    RequestArrived,
    RequestEnded,
    RequestRefused,
    StepFinished,
)
from cearx.core.identifiers import RequestId
from cearx.replay.ledger import Ledger
from cearx.replay.rows import rows
from cearx.replay.violation import Finding


class OutcomeRules:
    """Reads the ledger; hears of every record."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._config = ledger.config
        self._deadlines: dict[RequestId, int] = {}
        self._seen: set[RequestId] = set()
        self._ended: set[RequestId] = set()
        self._due_ends: dict[RequestId, FinishReason] = {}
        """What the last event must lead to, as is the refusal."""
        self._due_refusal: RequestRefused | None = None
        self._is_reset_due = False

    def forget(self) -> None:
        """Nothing is due: it was seen to, or may stand in a gap."""
        self._due_ends, self._due_refusal, self._is_reset_due = {}, None, False

    def begin(self) -> None:
        """Goes on from the ledger's books."""
        self._deadlines = {}
        if self._config.request_timeout_us:
            self._deadlines = {i: r.deadline_us for i, r in self._ledger.live.items()}

    def judge(self, value: object) -> Iterator[Finding]:
        if isinstance(value, RequestEnded):
            yield from self._end(value)
            return
        if isinstance(value, RequestRefused):
            yield from self._refuse(value)
            return
        if isinstance(value, PrefixCacheEmptied):
            yield from self._empty(value)
            return
        yield from self.missing()
        self.forget()
        if isinstance(value, RequestArrived):
            yield from self._arrive(value)
        elif isinstance(value, ClockAdvanced):
            late = (i for i, at_us in self._deadlines.items() if at_us <= value.now_us)
            self._due_ends = dict.fromkeys(late, FinishReason.TIMEOUT)
        elif isinstance(value, CancelRequested):
            if value.request_id in self._ledger.live:
                self._due_ends[value.request_id] = FinishReason.CANCELLED
        elif isinstance(value, StepFinished):
            yield from self._finish(value)
        elif isinstance(value, PrefixCacheReset):
            self._is_reset_due = True

    def _arrive(self, event: RequestArrived) -> Iterator[Finding]:
        if event.request_id in self._seen:
            yield "I7", f"request {event.request_id} arrives twice", (event.request_id,)
        self._seen.add(event.request_id)
        live, waiting = self._ledger.live, self._ledger.waiting()
        num_tokens = sum(request.num_tokens + request.num_pending for request in waiting)
        self._due_refusal = expected_refusal(self._config, event, len(live), num_tokens)
        if self._due_refusal is None and self._config.request_timeout_us:
            deadline_us = event.arrived_us + self._config.request_timeout_us
            self._deadlines[event.request_id] = deadline_us

    def missing(self) -> Iterator[Finding]:
        """Outcomes that should have been logged by now."""
        for request_id, reason in self._due_ends.items():
            yield "I7", f"request {request_id} does not end with {reason.name}", (request_id,)
        if self._due_refusal is not None:
            refused = self._due_refusal
            text = f"request {refused.request_id} is let in: {refused.reason.name},"
            text += f" needs {refused.num_tokens}, limit {refused.limit_tokens}"
            yield "I10", text, (refused.request_id,)
        if self._is_reset_due:
            yield "I1", "a reset of the prefix cache is not answered", ()

    def _empty(self, emptied: PrefixCacheEmptied) -> Iterator[Finding]:
        """The reset is in the books already."""
        is_due, self._is_reset_due = self._is_reset_due, False
        blocks = self._ledger.blocks
        expected = PrefixCacheEmptied(num_freed=blocks.num_forgotten, num_in_use=blocks.num_held)
        if not is_due:
            yield "I1", "the prefix cache is emptied for no reason", ()
        elif emptied != expected:
            yield "I1", f"the prefix cache is emptied with {emptied}, not {expected}", ()

    def _end(self, ended: RequestEnded) -> Iterator[Finding]:
        mine, ids = ended.request_id, (ended.request_id,)
        due = self._due_ends.pop(mine, None)
        if mine in self._ended:
            yield "I7", f"request {mine} ends twice", ids
        elif due is None:
            yield "I7", f"request {mine} ends with {ended.reason.name} for no reason", ids
        elif due is not ended.reason:
            yield "I7", f"request {mine} ends with {ended.reason.name}, not {due.name}", ids
        self._ended.add(mine)
        self._deadlines.pop(mine, None)

    def _refuse(self, refused: RequestRefused) -> Iterator[Finding]:
        due, self._due_refusal = self._due_refusal, None
        if refused != due:
            text = f"request {refused.request_id} is refused with {refused.reason.name}"
            expected = "it fits" if due is None else f"not {due.reason.name}"
            yield "I10", f"{text}, {expected}", (refused.request_id,)
        self._ended.add(refused.request_id)

    def _finish(self, event: StepFinished) -> Iterator[Finding]:
        """Who must end now: stopped, failed, or as long as it may get."""
        step = self._ledger.in_flight.get(event.step_id)
        if step is None:
            yield "I7", f"the result of step {event.step_id}, which is not in flight", ()
            return
        stopped = {row.request_id: row.reason for row in event.stopped}
        for row in rows(step.plan):
            request = self._ledger.live.get(row.request_id)
            if request is None:
                continue
            reason = stopped.get(row.request_id)
            if reason is None and row.samples and request.num_outputs + 1 >= request.max_tokens:
                reason = FinishReason.LENGTH
            if reason is not None:
                self._due_ends[row.request_id] = reason


def expected_refusal(
    config: SchedulerConfig, event: RequestArrived, num_live: int, num_waiting_tokens: int
) -> RequestRefused | None:
    """What must be said to a request that can never run, or may not wait.

    Of those before it `num_live` wait or run; the waiting ones have so many tokens, pending ones
    included.
    """
    queued = event.num_prompt_tokens + num_waiting_tokens
    num_queued = num_live - config.max_num_seqs  # a free seat is no queue
    is_full = 0 < config.max_num_queued_reqs <= num_queued
    is_long = num_queued > 0 and 0 < config.max_num_queued_tokens < queued
    prompt, longest = event.num_prompt_tokens, event.num_prompt_tokens + event.max_tokens
    pool_tokens = config.num_blocks * config.block_size
    checks = (
        (prompt < 1, RefusalReason.EMPTY_PROMPT, prompt, 1),
        (event.max_tokens < 1, RefusalReason.NO_OUTPUT, event.max_tokens, 1),
        (
            longest > config.max_model_len,
            RefusalReason.PROMPT_TOO_LONG,
            longest,
            config.max_model_len,
        ),
        (longest - 1 > pool_tokens, RefusalReason.POOL_TOO_SMALL, longest - 1, pool_tokens),
        (is_full, RefusalReason.QUEUE_FULL, num_queued + 1, config.max_num_queued_reqs),
        (is_long, RefusalReason.QUEUE_TOKENS, queued, config.max_num_queued_tokens),
    )
    for applies, reason, need, limit in checks:
        if applies:
            return RequestRefused(
                request_id=event.request_id, reason=reason, num_tokens=need, limit_tokens=limit
            )
    return None
