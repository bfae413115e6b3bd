"""A real scheduler with a fake worker around it, checked after every call.

The worker keeps a fake KV memory: one integer a token place, that stands for this token and all
before it. Before a step it checks that the places a row reads hold what the request says, so a
block shared too early, reused too soon or found under a wrong hash is noticed as wrong KV. Steps
are executed when their result is asked for, in order, so a step is planned while others run.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from scheduler_checker import DecisionChecker, check_internals

from cearx.core.block_hash import block_hash, prompt_hashes, root_hash
from cearx.core.config import SchedulerConfig
from cearx.core.events import (
    BlockSealed,
    CancelReason,
    CancelRequested,
    ClockAdvanced,
    Decision,
    Event,
    FinishReason,
    PrefixCacheReset,
    RequestArrived,
    RequestEnded,
    RowStopped,
    StepFinished,
    StepPlan,
)
from cearx.core.identifiers import BlockHash, BlockId, RequestId
from cearx.core.messages import pack_tokens
from cearx.core.scheduler import Scheduler
from cearx.replay.invariants import Checker
from cearx.replay.trace import TraceRecord

SECRET = bytes(range(32))
ROOT = root_hash(SECRET, None)
STEP_US = 8_000
VOCABULARY = 5


class Log(Protocol):
    """Where records go: a TraceWriter, or a list."""

    def append(self, record: Event | Decision) -> None: ...

    def flush(self) -> None: ...


class RecordList(list[Event | Decision]):
    """A log in memory."""

    def flush(self) -> None:
        """Nothing to do."""


class SimulatedRequest:
    """A request's known tokens with what identifies every prefix of them."""

    def __init__(self, token_ids: Sequence[int], block_size: int) -> None:
        self.block_size = block_size
        self.num_prompt_tokens = len(token_ids)
        self.token_ids: list[int] = []
        self.prefix_ids: list[int] = []
        """prefix_ids[p] stands for tokens [0, p]."""
        self.last_hash = ROOT
        for token_id in token_ids:
            self.append(token_id)

    def append(self, token_id: int) -> BlockHash | None:
        """One more token; answers the hash of the block that it fills, if it does."""
        parent = self.prefix_ids[-1] if self.prefix_ids else 0
        self.token_ids.append(token_id)
        self.prefix_ids.append(hash((parent, token_id)))
        if len(self.token_ids) % self.block_size:
            return None
        packed = pack_tokens(self.token_ids[-self.block_size :])
        self.last_hash = block_hash(SECRET, self.last_hash, packed)
        return self.last_hash

    def sample(self) -> int:
        """The next token: a function of all before, from a small vocabulary."""
        return self.prefix_ids[-1] % VOCABULARY


@dataclass
class DispatchedStep:
    """A plan on its way through the worker, with the requests as they were at dispatch."""

    plan: StepPlan
    requests: dict[RequestId, SimulatedRequest]
    """All that were live."""

    def sampling_rows(self) -> list[RequestId]:
        chunks = (chunk.request_id for chunk in self.plan.chunks if chunk.samples)
        return [*self.plan.decodes, *chunks]


class FakeWorker:
    """Block tables as the plans tell them, and the fake KV memory."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.block_size = config.block_size
        self.kv: list[list[int | None]] = [
            [None] * config.block_size for _ in range(config.num_blocks)
        ]
        self.tables: dict[RequestId, list[BlockId]] = {}
        self.failed: set[RequestId] = set()
        """Their KV is poisoned; nobody looks at what their late rows bring."""

    def execute(self, step: DispatchedStep, failed: set[RequestId]) -> None:
        """Block tables first, then all reads: rows of one step do not see each other's writes."""
        plan, requests = step.plan, step.requests
        self._take_plan(plan, requests)
        rows = [(i, len(requests[i].token_ids) - 1, 1) for i in plan.decodes]
        rows += [(c.request_id, c.start, c.num_tokens) for c in plan.chunks]
        for request_id, start, _ in rows:
            if request_id in self.failed:
                continue
            found = [id_ for block in self.tables[request_id] for id_ in self.kv[block]][:start]
            expected = requests[request_id].prefix_ids[:start]
            assert found == expected, f"step {plan.step_id}: wrong KV for request {request_id}"
        self.failed |= failed
        for chunk in plan.chunks:
            length = len(requests[chunk.request_id].token_ids)
            assert chunk.samples == (chunk.start + chunk.num_tokens == length), f"{chunk}: {length}"
        for request_id, start, num_tokens in rows:
            for position in range(start, start + num_tokens):
                block = self.tables[request_id][position // self.block_size]
                value = (
                    None if request_id in self.failed else requests[request_id].prefix_ids[position]
                )
                self.kv[block][position % self.block_size] = value

    def _take_plan(self, plan: StepPlan, live: dict[RequestId, SimulatedRequest]) -> None:
        self.tables = {i: table for i, table in self.tables.items() if i in live}
        for request_id in plan.preempted:
            del self.tables[request_id]
        for admission in plan.admitted:
            assert admission.request_id not in self.tables, f"{admission} runs already"
            self.tables[admission.request_id] = []
        for grant in plan.granted:
            self.tables[grant.request_id].extend(grant.block_ids)


class SimulatedEngine:
    """Drives a scheduler as the core's shell does: one call, one event; checks after each.

    After `fork`, a scheduler restored from a snapshot runs beside the first one and must agree.
    """

    def __init__(
        self, config: SchedulerConfig, scheduler: Scheduler | None = None, log: Log | None = None
    ) -> None:
        self.config = config
        self.scheduler = Scheduler(config) if scheduler is None else scheduler
        self.shadow: Scheduler | None = None
        self.log: Log = RecordList() if log is None else log
        self.checker = DecisionChecker(config)
        self._rules = Checker(config)
        self.worker = FakeWorker(config)
        self.requests: dict[RequestId, SimulatedRequest] = {}
        """Of live requests."""
        self.ended: dict[RequestId, FinishReason] = {}
        self.in_flight: deque[DispatchedStep] = deque()
        self.num_preemptions = 0
        self.num_hit_tokens = 0
        """Of all admissions."""
        self.num_output_tokens = 0
        self.now_us = 0
        self._next_id = 0
        self._is_stuck = False
        """Nothing can be planned before an event comes."""

    @property
    def can_plan(self) -> bool:
        return not self._is_stuck and self.scheduler.has_work()

    def apply(self, event: Event) -> tuple[Decision, ...]:
        self._is_stuck = False
        self.log.append(event)
        outcomes = self.scheduler.apply(event)
        for outcome in outcomes:
            self.log.append(outcome)
        if self.shadow is not None:
            assert self.shadow.apply(event) == outcomes, f"the restored scheduler differs: {event}"
        self._check_rules(event, *outcomes)
        self.checker.on_event(event, outcomes)
        check_internals(self.scheduler, self.checker)
        self._forget(outcomes)
        return outcomes

    def arrive(
        self,
        token_ids: Sequence[int],
        max_tokens: int,
        *,
        priority: int = 0,
        has_exact_length: bool = False,
    ) -> RequestId:
        """A request comes in; it may be refused."""
        request_id = RequestId(self._next_id)
        self._next_id += 1
        hashes: tuple[BlockHash, ...] = ()
        if self.config.enable_prefix_caching:
            packed = pack_tokens(list(token_ids))
            hashes = prompt_hashes(SECRET, ROOT, packed, self.config.block_size)
        refused = self.apply(
            RequestArrived(
                request_id=request_id,
                num_prompt_tokens=len(token_ids),
                max_tokens=max_tokens,
                block_hashes=hashes,
                frontend_index=0,
                arrived_us=self.now_us,
                priority=priority,
                has_exact_length=has_exact_length,
            )
        )
        if not refused:
            self.requests[request_id] = SimulatedRequest(token_ids, self.config.block_size)
        return request_id

    def cancel(self, request_id: RequestId) -> None:
        """A request is taken back, in whatever state it is."""
        self.apply(CancelRequested(request_id=request_id, reason=CancelReason.DISCONNECT))

    def reset_cache(self) -> None:
        """Nothing computed before is found again."""
        self.apply(PrefixCacheReset())

    def advance(self, duration_us: int) -> None:
        """Time passes."""
        self.now_us += duration_us
        self.apply(ClockAdvanced(now_us=self.now_us))

    def try_plan(self) -> StepPlan | None:
        """The next step, unless nothing can be done before one in flight is finished."""
        self.advance(STEP_US)
        if not self.scheduler.has_work():
            return None  # the last ones ran out of time
        before = self.scheduler.snapshot() if self.in_flight else b""
        plan = self.scheduler.plan()
        if self.shadow is not None:
            assert self.shadow.plan() == plan, f"the restored scheduler plans otherwise: {plan}"
        if plan is None:
            assert self.in_flight, "work is pending, nothing runs and nothing is planned"
            assert self.scheduler.snapshot() == before, "no plan, and still something changed"
            self._is_stuck = True
            return None
        self.log.append(plan)
        self.log.flush()
        self._check_rules(plan)
        self.checker.on_plan(plan)
        check_internals(self.scheduler, self.checker)
        self.num_preemptions += len(plan.preempted)
        self.num_hit_tokens += sum(admission.num_cached_tokens for admission in plan.admitted)
        self.in_flight.append(DispatchedStep(plan, dict(self.requests)))
        return plan

    def plan(self) -> StepPlan:
        """The next step; there must be one."""
        plan = self.try_plan()
        assert plan is not None, "nothing to plan"
        return plan

    def sampling_rows(self) -> list[RequestId]:
        """Who gets a token from the oldest step in flight; those that ended since left out."""
        return [i for i in self.in_flight[0].sampling_rows() if i in self.requests]

    def finish(
        self,
        stopped: Iterable[RequestId] = (),
        failed: Iterable[RequestId] = (),
        execute_us: int = STEP_US,
    ) -> tuple[Decision, ...]:
        """The oldest step in flight is computed; some of its sampling rows stop or fail."""
        step = self.in_flight.popleft()
        failures = set(failed)
        self.worker.execute(step, failures)
        sealed = []
        for request_id in step.sampling_rows():
            if request_id in failures:
                continue
            request = step.requests[request_id]
            filled = request.append(request.sample())
            if request_id not in self.requests:
                continue  # a late row: the worker cannot know
            self.num_output_tokens += 1
            if filled is not None and self.config.enable_prefix_caching:
                sealed.append(BlockSealed(request_id=request_id, block_hash=filled))
        rows = [RowStopped(request_id=i, reason=FinishReason.FAILED) for i in failures]
        rows += [
            RowStopped(request_id=i, reason=FinishReason.STOP) for i in stopped if i not in failures
        ]
        rows.sort(key=lambda row: row.request_id)
        return self.apply(
            StepFinished(
                step_id=step.plan.step_id,
                stopped=tuple(rows),
                sealed=tuple(sealed),
                execute_us=execute_us,
            )
        )

    def _check_rules(self, *values: Event | Decision) -> None:
        for value in values:
            broken = self._rules.feed(TraceRecord(0, 0, value, 0))
            assert not broken, broken

    def _forget(self, outcomes: Iterable[Decision]) -> None:
        for outcome in outcomes:
            if isinstance(outcome, RequestEnded):
                assert outcome.request_id not in self.ended, f"{outcome.request_id} ends twice"
                self.ended[outcome.request_id] = outcome.reason
                del self.requests[outcome.request_id]

    def fork(self) -> None:
        """From here on the restored scheduler decides, and its original must agree with it."""
        snapshot = self.scheduler.snapshot()
        if self.shadow is not None:
            assert self.shadow.snapshot() == snapshot, "equal decisions, other states"
        restored = type(self.scheduler).restore(self.config, snapshot)
        assert restored.snapshot() == snapshot, "restore and snapshot are not inverse"
        self.scheduler, self.shadow = restored, self.scheduler

    def drain(self) -> None:
        """Runs without new arrivals until everyone has ended, in a bounded number of steps."""
        left = sum(
            request.max_tokens + request.num_prompt_tokens for request in self.checker.live.values()
        )
        last_step = self.checker.num_steps + 20 + 20 * left
        while self.checker.num_steps <= last_step:
            if self.can_plan:
                self.try_plan()
            elif self.in_flight:
                self.finish()
            else:
                break
        self.checker.check_idle()
        assert self.scheduler.books.pool.num_free == self.config.num_blocks, "blocks are missing"
