"""Metrics as a fold over what the trace log gets: every event and decision, once, in order.

Owns the lives of the requests as far as metrics need them; decides nothing. A step of calm decodes
costs the same whatever the number of rows: only who joins or leaves the batch is looked at.
`MeteredLog` feeds it; the same records with the same times give the same numbers.
"""

from collections import deque
from collections.abc import Callable

import msgspec

from cearx.core.event_log import EventLog
from cearx.core.events import (
    Admission,
    CancelReason,
    CancelRequested,
    Decision,
    Event,
    FinishReason,
    RefusalReason,
    RequestArrived,
    RequestEnded,
    RequestRefused,
    StepFinished,
    StepPlan,
)
from cearx.core.identifiers import RequestId
from cearx.core.metrics import Counters, Histograms
from cearx.core.trace_records import StepNote


class _Life(msgspec.Struct, kw_only=True):
    """A request that has not ended."""

    received_us: int
    arrived_us: int
    num_prompt_tokens: int
    max_tokens: int
    admitted_us: int | None = None
    num_cached_tokens: int = 0
    first_us: int | None = None
    last_us: int = 0
    """Of its last token, up to date when it has left the batch."""
    num_tokens: int = 0
    """Generated until it joined the batch."""
    joined_at: int = 0
    """The step's number before the first one of the batch that it has a token from."""
    num_preemptions: int = 0


class MetricsFold:
    """See the module docstring. `counters` and `histograms` are complete after every `apply`."""

    def __init__(self, max_model_len: int, *, generates: bool = True) -> None:
        """`generates`: an output is a token; else it is a vector, which is not counted as one."""
        self._generates = generates
        self.counters = Counters()
        self.histograms = Histograms.empty(max_model_len)
        self._lives: dict[RequestId, _Life] = {}
        self._plans: deque[StepPlan] = deque()
        self._batch: set[RequestId] = set()
        """Who got a token from the last finished step and has not ended."""
        self._calm_decodes: tuple[RequestId, ...] | None = None
        """The last step's decodes, if they are the batch exactly."""
        self._step_us = 0
        """When the last step finished."""
        self._num_finished = 0
        self._cancel_reason = CancelReason.DISCONNECT
        self._next_received_us: int | None = None
        self._next_num_choices = 0

    def note_submit(self, received_us: int | None, num_choices: int) -> None:
        """What a frontend says of the request that arrives next; num_choices 0: said before."""
        self._next_received_us = received_us
        self._next_num_choices = num_choices

    def apply(self, record: Event | Decision, now_us: int) -> None:
        """Takes in one record at the time when it became true."""
        if isinstance(record, StepFinished):
            self._finish(record, now_us)
        elif isinstance(record, StepPlan):
            self._plan(record, now_us)
        elif isinstance(record, RequestArrived):
            self._arrive(record)
        elif isinstance(record, CancelRequested):
            self._cancel_reason = record.reason
        elif isinstance(record, RequestEnded):
            self._end(record, now_us)
        elif isinstance(record, RequestRefused):
            self._refuse(record)

    def _arrive(self, event: RequestArrived) -> None:
        received_us = self._next_received_us
        self.counters.num_received += 1
        if self._next_num_choices:
            self.histograms.num_choices.observe(self._next_num_choices)
        self._next_received_us, self._next_num_choices = None, 0
        self._lives[event.request_id] = _Life(
            received_us=event.arrived_us if received_us is None else received_us,
            arrived_us=event.arrived_us,
            num_prompt_tokens=event.num_prompt_tokens,
            max_tokens=event.max_tokens,
        )

    def _refuse(self, decision: RequestRefused) -> None:
        del self._lives[decision.request_id]
        if decision.reason is RefusalReason.QUEUE_FULL:
            self.counters.num_refused_queue_full += 1
        elif decision.reason is RefusalReason.QUEUE_TOKENS:
            self.counters.num_refused_queue_tokens += 1
        else:
            self.counters.num_refused_impossible += 1

    # --- steps -------------------------------------------------------------------------------

    def _plan(self, plan: StepPlan, now_us: int) -> None:
        self._plans.append(plan)
        for admission in plan.admitted:
            self._admit(admission, now_us)
        for request_id in plan.preempted:
            self._lives[request_id].num_preemptions += 1
        self.counters.num_preemptions += len(plan.preempted)

    def _admit(self, admission: Admission, now_us: int) -> None:
        life, counters = self._lives[admission.request_id], self.counters
        counters.num_recomputed_tokens += admission.num_recomputed_tokens
        if life.admitted_us is None:
            life.admitted_us = now_us
            life.num_cached_tokens = admission.num_cached_tokens
            counters.num_lookup_tokens += life.num_prompt_tokens
            counters.num_hit_tokens += admission.num_cached_tokens

    def _finish(self, event: StepFinished, now_us: int) -> None:
        plan = self._plans.popleft()
        num_tokens = len(plan.decodes) + sum(chunk.num_tokens for chunk in plan.chunks)
        self.counters.num_steps += 1
        if num_tokens:
            self.histograms.step_tokens.observe(num_tokens)
        failed = {r.request_id for r in event.stopped if r.reason is FinishReason.FAILED}
        if plan.chunks or failed or plan.decodes != self._calm_decodes:
            num_calm = self._change_batch(plan, failed, now_us)
        else:
            num_calm = len(self._batch)
        if num_calm:
            self.histograms.inter_token_us.observe(now_us - self._step_us, num_calm)
        if self._generates:
            self.counters.num_generated_tokens += len(self._batch)
        self._step_us = now_us
        self._num_finished += 1

    def _change_batch(self, plan: StepPlan, failed: set[RequestId], now_us: int) -> int:
        """The batch becomes the rows that got a token; answers how many were in it before."""
        rows = set(plan.decodes)
        rows.update(chunk.request_id for chunk in plan.chunks if chunk.samples)
        rows -= failed
        for request_id in self._batch - rows:
            self._leave(self._lives[request_id])
        joined = rows - self._batch
        num_calm = len(rows) - len(joined)
        for request_id in joined:
            life = self._lives.get(request_id)
            if life is None:  # it ended while the step ran
                rows.discard(request_id)
            else:
                self._join(life, now_us)
        self._batch = rows
        is_calm = not plan.chunks and len(rows) == len(plan.decodes)
        self._calm_decodes = plan.decodes if is_calm else None
        return num_calm

    def _join(self, life: _Life, now_us: int) -> None:
        life.joined_at = self._num_finished
        if life.first_us is not None:
            self.histograms.inter_token_us.observe(now_us - life.last_us)
            return
        life.first_us = now_us
        if self._generates:
            self.histograms.first_token_us.observe(now_us - life.received_us)
        self.counters.num_prompt_tokens += life.num_prompt_tokens
        self.counters.num_cached_prompt_tokens += life.num_cached_tokens

    def _leave(self, life: _Life) -> None:
        life.num_tokens += self._num_finished - life.joined_at
        life.last_us = self._step_us

    # --- ends --------------------------------------------------------------------------------

    def _end(self, decision: RequestEnded, now_us: int) -> None:
        life = self._lives.pop(decision.request_id)
        if decision.request_id in self._batch:
            self._leave(life)
            self._batch.discard(decision.request_id)
            self._calm_decodes = None
        reason, counters = decision.reason, self.counters
        is_stop_string = self._cancel_reason is CancelReason.STOP_STRING
        if not self._generates and reason is FinishReason.LENGTH:  # all that was asked for
            reason = FinishReason.STOP
        if reason is FinishReason.STOP or (reason is FinishReason.CANCELLED and is_stop_string):
            counters.num_stopped += 1
            _observe(self.histograms, life, now_us, self._generates)
        elif reason is FinishReason.LENGTH:
            counters.num_at_length += 1
            _observe(self.histograms, life, now_us, self._generates)
        elif reason is FinishReason.FAILED:
            counters.num_failed += 1
        else:
            counters.num_aborted += 1


def _observe(histograms: Histograms, life: _Life, now_us: int, generates: bool) -> None:
    """The histograms of a request that ended well."""
    first_us, admitted_us = life.first_us, life.admitted_us
    assert first_us is not None and admitted_us is not None, "it ended without a token"
    decode_us = life.last_us - first_us
    histograms.e2e_us.observe(now_us - life.received_us)
    histograms.queue_us.observe(admitted_us - life.arrived_us)
    histograms.prefill_us.observe(first_us - admitted_us)
    histograms.inference_us.observe(life.last_us - admitted_us)
    histograms.prompt_tokens.observe(life.num_prompt_tokens)
    histograms.num_preemptions.observe(life.num_preemptions)
    histograms.computed_prefill_tokens.observe(life.num_prompt_tokens - life.num_cached_tokens)
    if not generates:
        return
    histograms.decode_us.observe(decode_us)
    if life.num_tokens > 1:
        histograms.per_token_us.observe(decode_us // (life.num_tokens - 1))
    histograms.generated_tokens.observe(life.num_tokens)
    histograms.max_tokens.observe(life.max_tokens)


class MeteredLog:
    """An event log around another one, which counts what goes by."""

    def __init__(self, log: EventLog, fold: MetricsFold, clock_us: Callable[[], int]) -> None:
        self._log = log
        self._fold = fold
        self._clock_us = clock_us
        self.flush = log.flush
        self.maintain = log.maintain
        self.pin = log.pin

    def append(self, record: Event | Decision | StepNote) -> None:
        self._log.append(record)
        if not isinstance(record, StepNote):
            self._fold.apply(record, self._clock_us())
