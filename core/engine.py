"""The shell around the pure scheduler: between messages and events.

Owns what the scheduler must not know: token ids, sampling parameters, who asked, the hashes of
generated blocks, the trace log. Turns `Submit`, `Cancel` and `StepResult` into events, decisions
into `ExecuteStep` and `Output`. Every event is logged before it is applied and every decision
before it leaves. Owns no socket and no clock: `process.py` calls it.
"""

from array import array
from collections import deque
from collections.abc import Callable, Iterator
from typing import Protocol

import msgspec

from cearx.core.block_hash import DIGEST_SIZE, TOKEN_BYTES, block_hash
from cearx.core.config import SchedulerConfig
from cearx.core.events import (
    BlockSealed,
    CancelReason,
    CancelRequested,
    ClockAdvanced,
    Decision,
    Event,
    FinishReason,
    Outcome,
    PrefillChunk,
    PrefixCacheEmptied,
    PrefixCacheReset,
    RequestArrived,
    RequestEnded,
    RequestRefused,
    RowStopped,
    StepFinished,
    StepPlan,
)
from cearx.core.identifiers import BlockHash, RequestId, RequestKey
from cearx.core.messages import (
    Cancel,
    ExecuteStep,
    NewRequest,
    Output,
    PromptLogprobs,
    Refused,
    RowOutput,
    SamplingParams,
    StepResult,
    Submit,
    TokenLogprobs,
    unpack_tokens,
)
from cearx.core.metrics import EngineLoad
from cearx.core.scheduler import Scheduler
from cearx.core.trace_records import StepNote


class MessageRejected(ValueError):
    """A message that decodes but cannot be meant: the sender is at fault, nothing has changed."""


class EventLog(Protocol):
    """Where events and decisions go, in the order in which they became true."""

    def append(self, record: Event | Decision) -> None: ...

    def note_step(self, note: StepNote) -> None: ...

    def flush(self) -> None: ...

    def maintain(self, snapshot: Callable[[], bytes]) -> None: ...

    def pin(self, reason: str) -> None: ...


class NullLog:
    """`--trace off`."""

    def append(self, record: Event | Decision) -> None:
        pass

    def note_step(self, note: StepNote) -> None:
        pass

    def flush(self) -> None:
        pass

    def maintain(self, snapshot: Callable[[], bytes]) -> None:
        pass

    def pin(self, reason: str) -> None:
        pass


class LiveRequest(msgspec.Struct, kw_only=True):
    """What the shell keeps of a request until it ends."""

    frontend_index: int
    request_key: RequestKey
    sampling: SamplingParams
    min_tokens: int
    """Before that many tokens no token ends it."""
    parent_hash: BlockHash
    """Hash of the last full block of known tokens (the root before the first)."""
    open_block: "array[int]"
    """The known tokens behind the last full block."""
    num_outputs: int = 0
    num_cached_tokens: int | None = None
    """From the first admission, until the first output has told it."""
    is_at_worker: bool = False
    num_prefilled: int = 0
    """Most tokens that its chunks have come to."""
    num_prompt_told: int = 1
    """Tokens of the prompt whose log-probabilities have left; the first has none."""


class Engine:
    """One scheduler with its log; see the module docstring."""

    def __init__(self, config: SchedulerConfig, hash_secret: bytes, log: EventLog) -> None:
        self._scheduler = Scheduler(config)
        self._config = config
        self._secret = hash_secret
        self._log = log
        self._requests: dict[RequestId, LiveRequest] = {}
        self._by_key: dict[tuple[int, RequestKey], RequestId] = {}
        self._unsent: dict[RequestId, NewRequest] = {}
        self._ended_at_worker: list[RequestId] = []
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
        return not self._is_stuck and self._scheduler.has_work()

    @property
    def next_deadline_us(self) -> int | None:
        """When `tick` has to be called at the latest."""
        return self._scheduler.next_deadline_us

    def flush_log(self) -> None:
        """Makes the log complete up to now; call before anything that follows from it is sent."""
        self._log.flush()

    def maintain_log(self) -> None:
        """Lets the log begin a new file when one is due; call when the worker has its work."""
        self._log.maintain(self._scheduler.snapshot)

    def note_step(self, note: StepNote) -> None:
        """Logs the times of the step that `finish_step` took in last."""
        self._log.note_step(note)

    def pin_log(self, reason: str) -> None:
        """Keeps the log as it is now from being deleted."""
        self._log.pin(reason)

    @property
    def load(self) -> EngineLoad:
        return EngineLoad(
            num_running=self._scheduler.num_running,
            num_waiting=self._scheduler.num_waiting,
            num_deferred=self._scheduler.num_deferred,
            num_free_blocks=self._scheduler.num_free_blocks,
        )

    def describe(self) -> str:
        """Where the scheduler stands, for a log line: counts only."""
        return (
            f"{self._scheduler.num_running} running, {self._scheduler.num_waiting} waiting,"
            f" {self._scheduler.num_in_flight} steps in flight"
        )

    def submit(self, frontend_index: int, submit: Submit, now_us: int) -> Refused | None:
        """Takes a request in; answers why it is refused, or None. Raises MessageRejected."""
        self._check(frontend_index, submit)
        request_id = RequestId(self._next_id)
        self._next_id += 1
        token_ids = unpack_tokens(submit.token_ids)
        hashes = submit.block_hashes
        event = RequestArrived(
            request_id=request_id,
            num_prompt_tokens=len(token_ids),
            max_tokens=submit.max_tokens,
            block_hashes=hashes,
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
        self._requests[request_id] = LiveRequest(
            frontend_index=frontend_index,
            request_key=submit.request_key,
            sampling=submit.sampling,
            # The worker knows when a grammar is at its end, and keeps min_tokens until then.
            min_tokens=submit.sampling.min_tokens if submit.grammar is None else 0,
            parent_hash=hashes[-1] if hashes else submit.cache_root,
            open_block=token_ids[
                len(token_ids) // self._config.block_size * self._config.block_size :
            ],
        )
        self._by_key[frontend_index, submit.request_key] = request_id
        self._unsent[request_id] = NewRequest(
            request_id=request_id,
            token_ids=submit.token_ids,
            sampling=submit.sampling,
            grammar=submit.grammar,
            pooling=submit.pooling,
        )
        return None

    def _check(self, frontend_index: int, submit: Submit) -> None:
        if len(submit.token_ids) % TOKEN_BYTES:
            raise MessageRejected(f"token_ids of {len(submit.token_ids)} bytes")
        if (frontend_index, submit.request_key) in self._by_key:
            raise MessageRejected(f"request key {submit.request_key} is in use")
        if submit.pooling is not None and submit.max_tokens != 1:
            raise MessageRejected(f"max_tokens {submit.max_tokens} for one vector")
        full_blocks = len(submit.token_ids) // TOKEN_BYTES // self._config.block_size
        expected = full_blocks if self._config.enable_prefix_caching else 0
        if len(submit.block_hashes) != expected:
            raise MessageRejected(f"{len(submit.block_hashes)} block hashes for {expected} blocks")
        if any(len(h) != DIGEST_SIZE for h in (*submit.block_hashes, submit.cache_root)):
            raise MessageRejected(f"a block hash is not {DIGEST_SIZE} bytes")

    def cancel(self, frontend_index: int, cancel: Cancel) -> None:
        """Ends a request in any state; one that has ended already is ignored."""
        request_id = self._by_key.get((frontend_index, cancel.request_key))
        if request_id is not None:
            self._cancel(request_id, cancel.reason)

    def cancel_frontend(self, frontend_index: int) -> None:
        """Ends all requests of a frontend that is gone."""
        mine = [i for i, r in self._requests.items() if r.frontend_index == frontend_index]
        for request_id in mine:
            self._cancel(request_id, CancelReason.FRONTEND_ERROR)

    def _cancel(self, request_id: RequestId, reason: CancelReason) -> None:
        for outcome in self._apply(CancelRequested(request_id=request_id, reason=reason)):
            assert isinstance(outcome, RequestEnded), f"a cancel answered with {outcome}"
            self._forget(outcome.request_id)

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
            request = self._requests[outcome.request_id]
            outputs.setdefault(request.frontend_index, []).append(
                ended_output(request.request_key, outcome.reason)
            )
            self._forget(outcome.request_id)
        return outputs

    def next_step(self) -> ExecuteStep | None:
        """Plans and logs the next step; call when `wants_step`, then `flush_log`, then send it.

        None when nothing can be done before a step in flight is finished.
        """
        plan = self._scheduler.plan()
        if plan is None:
            self._is_stuck = True
            return None
        self._in_flight.append(plan)
        self._log.append(plan)
        self.num_progress += len(plan.admitted)
        new_requests: list[NewRequest] = []
        for admission in plan.admitted:
            new_request = self._unsent.pop(admission.request_id, None)
            if new_request is not None:
                request = self._requests[admission.request_id]
                request.num_cached_tokens = admission.num_cached_tokens
                request.is_at_worker = True
                new_requests.append(new_request)
        ended = tuple(self._ended_at_worker)
        self._ended_at_worker.clear()
        return ExecuteStep(plan=plan, new_requests=tuple(new_requests), ended=ended)

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
        self.num_progress += len(rows) + sum(map(self._goes_on, plan.chunks))
        stopped: list[RowStopped] = []
        sealed: list[BlockSealed] = []
        stop_tokens: dict[RequestId, int] = {}
        for row in result.rows:
            request = self._requests.get(row.request_id)
            if request is not None:  # else it ended while the step ran
                self._take_token(request, row, stopped, sealed, stop_tokens)
        event = StepFinished(
            step_id=result.step_id,
            stopped=tuple(stopped),
            sealed=tuple(sealed),
            execute_us=result.execute_us,
        )
        outcomes = self._apply(event)
        ended = {o.request_id: o.reason for o in outcomes if isinstance(o, RequestEnded)}
        outputs = self._outputs(result, ended, stop_tokens)
        for request_id in ended:
            self._forget(request_id)
        return outputs

    def _take_token(
        self,
        request: LiveRequest,
        row: RowOutput,
        stopped: list[RowStopped],
        sealed: list[BlockSealed],
        stop_tokens: dict[RequestId, int],
    ) -> None:
        if row.vector is not None:  # its one output, which nothing is computed from
            request.num_outputs += 1
            return
        if row.token_id is None:
            stopped.append(RowStopped(request_id=row.request_id, reason=FinishReason.FAILED))
            return
        request.num_outputs += 1
        sampling = request.sampling
        if request.num_outputs >= request.min_tokens:
            if row.token_id in sampling.eos_token_ids:
                stopped.append(RowStopped(request_id=row.request_id, reason=FinishReason.STOP))
            elif row.token_id in sampling.stop_token_ids:
                stopped.append(RowStopped(request_id=row.request_id, reason=FinishReason.STOP))
                stop_tokens[row.request_id] = row.token_id
        if self._config.enable_prefix_caching:
            request.open_block.append(row.token_id)
            if len(request.open_block) == self._config.block_size:
                packed = request.open_block.tobytes()
                request.parent_hash = block_hash(self._secret, request.parent_hash, packed)
                request.open_block = array("i")
                sealed.append(
                    BlockSealed(request_id=row.request_id, block_hash=request.parent_hash)
                )

    def _outputs(
        self,
        result: StepResult,
        ended: dict[RequestId, FinishReason],
        stop_tokens: dict[RequestId, int],
    ) -> dict[int, list[Output]]:
        outputs: dict[int, list[Output]] = {}
        told = {p.request_id: self._untold(p) for p in result.prompt_logprobs}
        for row in result.rows:
            request = self._requests.get(row.request_id)
            if request is None:
                continue
            outputs.setdefault(request.frontend_index, []).append(
                Output(
                    request_key=request.request_key,
                    token_ids=() if row.token_id is None else (row.token_id,),
                    logprobs=None if row.logprobs is None else (row.logprobs,),
                    finish_reason=ended.get(row.request_id),
                    stop_token_id=stop_tokens.get(row.request_id),
                    num_cached_tokens=request.num_cached_tokens,
                    prompt_logprobs=told.pop(row.request_id, ()),
                    is_grammar_fault=row.is_grammar_fault,
                    vector=row.vector,
                )
            )
            request.num_cached_tokens = None
        for request_id, logprobs in told.items():  # of chunks that do not sample
            request = self._requests.get(request_id)
            if request is not None and logprobs:
                outputs.setdefault(request.frontend_index, []).append(
                    prompt_output(request.request_key, logprobs)
                )
        return outputs

    def _untold(self, told: PromptLogprobs) -> tuple[TokenLogprobs, ...]:
        """What the frontend does not know yet: a preemption makes a chunk run twice."""
        request = self._requests.get(told.request_id)
        if request is None:
            return ()
        assert told.start <= request.num_prompt_told, (
            f"request {told.request_id}: prompt tokens from {told.start} on are told,"
            f" {request.num_prompt_told} are known"
        )
        untold = told.logprobs[request.num_prompt_told - told.start :]
        request.num_prompt_told += len(untold)
        return untold

    def _apply(self, event: Event) -> tuple[Outcome, ...]:
        self._is_stuck = self._is_stuck and isinstance(event, ClockAdvanced)
        self._log.append(event)
        outcomes = self._scheduler.apply(event)
        for outcome in outcomes:
            self._log.append(outcome)
        self.num_progress += len(outcomes)
        return outcomes

    def _goes_on(self, chunk: PrefillChunk) -> bool:
        """Whether a chunk computes what was not computed before: a repetition is no progress."""
        request = self._requests.get(chunk.request_id)
        end = chunk.start + chunk.num_tokens
        if request is None or end <= request.num_prefilled:
            return False
        request.num_prefilled = end
        return True

    def _forget(self, request_id: RequestId) -> None:
        request = self._requests.pop(request_id)
        del self._by_key[request.frontend_index, request.request_key]
        self._unsent.pop(request_id, None)
        if request.is_at_worker:
            self._ended_at_worker.append(request_id)


def prompt_output(request_key: RequestKey, logprobs: tuple[TokenLogprobs, ...]) -> Output:
    """Log-probabilities of a part of the prompt, before the first token."""
    return Output(
        request_key=request_key,
        token_ids=(),
        logprobs=None,
        finish_reason=None,
        stop_token_id=None,
        num_cached_tokens=None,
        prompt_logprobs=logprobs,
    )


def ended_output(request_key: RequestKey, reason: FinishReason) -> Output:
    """The end of a request without a token."""
    return Output(
        request_key=request_key,
        token_ids=(),
        logprobs=None,
        finish_reason=reason,
        stop_token_id=None,
        num_cached_tokens=None,
    )


def _sampling_rows(plan: StepPlan) -> Iterator[RequestId]:
    """The requests that get a token from this plan, in the order of `StepResult.rows`."""
    yield from plan.decodes
    for chunk in plan.chunks:
        if chunk.samples:
            yield chunk.request_id
