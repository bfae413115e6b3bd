"""Rules that hold for every run whatever the policy, judged by the ledger.

    I1 every block exists and is in one place      I7  one end a request, for the right reason
    I2 nobody gets a block that somebody holds     I8  nothing for a request that waits or ended
    I3 a shared block holds what its hash says     I9  an idle engine lets the head in
    I4 a step keeps its token budget               I10 refused is what never fits
    I5 at most max_num_seqs run                    I11 the head is overtaken only so often
    I6 rows go on where the last one stopped       I12 preempted work resumes, no token is lost

Owns the rules; knows events and decisions only, no scheduler. One violation does not end the check.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import msgspec

from cearx.core.config import SchedulerConfig
from cearx.core.events import (
    BlocksGranted,
    CancelRequested,
    ClockAdvanced,
    FinishReason,
    PrefillChunk,
    RefusalReason,
    RequestArrived,
    RequestEnded,
    RequestRefused,
    StepFinished,
    StepPlan,
    WaitReason,
)
from cearx.core.identifiers import BlockId, RequestId, StepId
from cearx.core.trace_records import TraceGap, TraceSnapshot
from cearx.replay.ledger import Ledger
from cearx.replay.ledger_request import LedgerRequest
from cearx.replay.rows import num_batched_tokens, rows
from cearx.replay.trace import TraceRecord

Finding = tuple[str, str, tuple[RequestId, ...]]
"""Rule, what is wrong, who is concerned."""


class Violation(msgspec.Struct, frozen=True, kw_only=True):
    """A rule that a record breaks."""

    invariant: str
    seq: int
    offset: int
    step_id: StepId | None
    """The step planned last."""
    text: str
    request_ids: tuple[RequestId, ...]


@dataclass
class _Due:
    """Outcomes that the last event must lead to."""

    ends: dict[RequestId, FinishReason] = field(default_factory=dict)
    refusal: RequestRefused | None = None


class Checker:
    """Feed every record in order; each call answers what it breaks."""

    def __init__(self, config: SchedulerConfig, max_overtaken: int | None = None) -> None:
        self.ledger = Ledger(config)
        self._config = config
        self._max_overtaken = config.max_overtakes if max_overtaken is None else max_overtaken
        self._orders: dict[RequestId, tuple[int, RequestId]] = {}
        """(priority, arrival) of each request; all priorities are 0 under the other policy."""
        self._deadlines: dict[RequestId, int] = {}
        self._ended: set[RequestId] = set()
        self._seen: set[RequestId] = set()
        self._due = _Due()
        self._overtaken: dict[RequestId, int] = {}
        self._preempted: set[RequestId] = set()
        """Those that have not been let in again."""

    def feed(self, record: TraceRecord) -> list[Violation]:
        """Judges the record, then takes it into the books; raises as the ledger does."""
        if isinstance(record.value, TraceGap | TraceSnapshot):
            self._go_on_behind(record.value)
            return []
        findings = list(self._judge(record.value))
        step_before = self.ledger.step_id
        self.ledger.apply(record.value)
        if isinstance(record.value, StepPlan):
            step_before = record.value.step_id
            findings += self._judge_rows(record.value)
            findings += self._judge_waits(record.value)
        return [
            Violation(
                invariant=rule,
                seq=record.seq,
                offset=record.offset,
                step_id=step_before,
                text=text,
                request_ids=ids,
            )
            for rule, text, ids in findings
        ]

    def _go_on_behind(self, value: TraceGap | TraceSnapshot) -> None:
        """What a gap holds is not judged; who was overtaken before is not known behind it."""
        begins = self.ledger.begins_with(value)
        self.ledger.apply(value)
        if isinstance(value, TraceGap):
            self._due = _Due()
        elif begins:
            self._overtaken.clear()
            self._orders = {i: (r.priority, i) for i, r in self.ledger.live.items()}
            self._deadlines = {}
            if self._config.request_timeout_us:
                self._deadlines = {i: r.deadline_us for i, r in self.ledger.live.items()}

    def finish(self, last: TraceRecord, ended: bool) -> list[Violation]:
        """What is missing at the end of a log; only a log with its end must be complete."""
        if not ended:
            return []
        return [
            Violation(
                invariant=rule,
                seq=last.seq,
                offset=last.offset,
                step_id=self.ledger.step_id,
                text=text,
                request_ids=ids,
            )
            for rule, text, ids in self._missing()
        ]

    # --- judged before the record is taken in --------------------------------------------------

    def _judge(self, value: object) -> Iterator[Finding]:
        if isinstance(value, RequestEnded):
            yield from self._judge_end(value)
            return
        if isinstance(value, RequestRefused):
            yield from self._judge_refusal(value)
            return
        yield from self._missing()
        self._due = _Due()
        if isinstance(value, RequestArrived):
            if value.request_id in self._seen:
                yield "I7", f"request {value.request_id} arrives twice", (value.request_id,)
            self._seen.add(value.request_id)
            priority = value.priority if self._config.scheduling_policy == "priority" else 0
            self._orders[value.request_id] = (priority, value.request_id)
            self._due.refusal = expected_refusal(
                self._config, value, self.ledger.waiting(), self.ledger.num_running
            )
            if self._due.refusal is None and self._config.request_timeout_us:
                deadline_us = value.arrived_us + self._config.request_timeout_us
                self._deadlines[value.request_id] = deadline_us
        elif isinstance(value, ClockAdvanced):
            late = (i for i, at_us in self._deadlines.items() if at_us <= value.now_us)
            self._due.ends = dict.fromkeys(late, FinishReason.TIMEOUT)
        elif isinstance(value, CancelRequested):
            if value.request_id in self.ledger.live:
                self._due.ends[value.request_id] = FinishReason.CANCELLED
        elif isinstance(value, StepFinished):
            yield from self._judge_result(value)
        elif isinstance(value, StepPlan):
            yield from self._judge_preemptions(value)
            yield from self._judge_admissions(value)
            yield from self._judge_grants(value)

    def _missing(self) -> Iterator[Finding]:
        """Outcomes that should have been logged by now."""
        for request_id, reason in self._due.ends.items():
            yield "I7", f"request {request_id} does not end with {reason.name}", (request_id,)
        if self._due.refusal is not None:
            refused = self._due.refusal
            text = f"request {refused.request_id} is let in: {refused.reason.name},"
            text += f" needs {refused.num_tokens}, limit {refused.limit_tokens}"
            yield "I10", text, (refused.request_id,)

    def _judge_end(self, ended: RequestEnded) -> Iterator[Finding]:
        mine, ids = ended.request_id, (ended.request_id,)
        due = self._due.ends.pop(mine, None)
        if mine in self._ended:
            yield "I7", f"request {mine} ends twice", ids
        elif due is None:
            yield "I7", f"request {mine} ends with {ended.reason.name} for no reason", ids
        elif due is not ended.reason:
            yield "I7", f"request {mine} ends with {ended.reason.name}, not {due.name}", ids
        self._ended.add(mine)
        self._preempted.discard(mine)
        self._overtaken.pop(mine, None)
        self._orders.pop(mine, None)
        self._deadlines.pop(mine, None)

    def _judge_refusal(self, refused: RequestRefused) -> Iterator[Finding]:
        due, self._due.refusal = self._due.refusal, None
        if refused != due:
            text = f"request {refused.request_id} is refused with {refused.reason.name}"
            expected = "it fits" if due is None else f"not {due.reason.name}"
            yield "I10", f"{text}, {expected}", (refused.request_id,)
        self._ended.add(refused.request_id)

    def _judge_result(self, event: StepFinished) -> Iterator[Finding]:
        """Who must end now: stopped, failed, or as long as it may get."""
        step = self.ledger.in_flight.get(event.step_id)
        if step is None:
            yield "I7", f"the result of step {event.step_id}, which is not in flight", ()
            return
        stopped = {row.request_id: row.reason for row in event.stopped}
        for row in rows(step.plan):
            request = self.ledger.live.get(row.request_id)
            if request is None:
                continue
            reason = stopped.get(row.request_id)
            if reason is None and row.samples and request.num_outputs + 1 >= request.max_tokens:
                reason = FinishReason.LENGTH
            if reason is not None:
                self._due.ends[row.request_id] = reason

    def _judge_preemptions(self, plan: StepPlan) -> Iterator[Finding]:
        for request_id in plan.preempted:
            request = self.ledger.live.get(request_id)
            if request is None or not request.is_running:
                yield "I8", f"request {request_id} is preempted and does not run", (request_id,)
            self._preempted.add(request_id)

    def _judge_admissions(self, plan: StepPlan) -> Iterator[Finding]:
        if plan.admitted and plan.preempted and self._config.scheduling_policy == "fcfs":
            ids = (*(a.request_id for a in plan.admitted), *plan.preempted)
            yield "I12", "lets somebody in and preempts somebody in the same step", ids
        size = self._config.block_size
        waiting = {r.request_id for r in self.ledger.waiting()} | set(plan.preempted)
        for admission in plan.admitted:
            mine, cached = admission.request_id, admission.num_cached_tokens
            request = self.ledger.live.get(mine)
            if request is None or mine not in waiting:
                yield "I8", f"request {mine} is let in and does not wait", (mine,)
                continue
            waiting.discard(mine)
            self._preempted.discard(mine)
            self._overtaken.pop(mine, None)
            known = request.num_tokens + request.num_pending
            if request.num_pending:
                text = f"request {mine} is let in while a token of it is in flight"
                yield "I12", text, (mine,)
            if cached % size or not 0 <= cached < known:
                yield "I3", f"request {mine}: {cached} of {known} tokens cached", (mine,)
            for other in sorted(waiting):
                if other in self._orders and self._orders[other] < self._orders[mine]:
                    yield from self._overtake(other, mine)

    def _overtake(self, other: RequestId, mine: RequestId) -> Iterator[Finding]:
        count = self._overtaken[other] = self._overtaken.get(other, 0) + 1
        if count == self._max_overtaken + 1:
            text = f"request {other} waits and {mine} is let in, the {count}. that overtakes it"
            yield "I11", text, (other, mine)

    def _judge_grants(self, plan: StepPlan) -> Iterator[Finding]:
        size = self._config.block_size
        hits = {a.request_id: a.num_cached_tokens // size for a in plan.admitted}
        for request_id in plan.preempted:
            hits.setdefault(request_id, 0)
        freed = self._freed_by(plan)
        taken: dict[BlockId, RequestId] = {}
        for grant in plan.granted:
            num_hits = hits.get(grant.request_id, 0)
            if grant.request_id not in self.ledger.live:
                text = f"request {grant.request_id} has ended and gets blocks"
                yield "I8", text, (grant.request_id,)
            yield from self._judge_shared(grant, num_hits, taken)
            for block in grant.block_ids[num_hits:]:
                if not 0 <= block < self._config.num_blocks:
                    text = f"block {block} of {self._config.num_blocks} is granted"
                    yield "I1", text, (grant.request_id,)
                    continue
                holders = self.ledger.blocks.num_holders(block) - freed.get(block, 0)
                if holders > 0 or block in taken:
                    text = f"block {block} is held and granted to {grant.request_id}"
                    yield "I2", text, (grant.request_id,)
                taken[block] = grant.request_id

    def _freed_by(self, plan: StepPlan) -> dict[BlockId, int]:
        """Holders that the plan's preemptions take away, if no step in flight touches them."""
        freed: dict[BlockId, int] = {}
        for request_id in plan.preempted:
            request = self.ledger.live.get(request_id)
            if request is not None and request.last_step not in self.ledger.in_flight:
                for block in request.block_ids:
                    freed[block] = freed.get(block, 0) + 1
        return freed

    def _judge_shared(
        self, grant: BlocksGranted, num_hits: int, taken: dict[BlockId, RequestId]
    ) -> Iterator[Finding]:
        """The cached head of an admission: each block is findable under the right hash."""
        request = self.ledger.live.get(grant.request_id)
        hashes = [] if request is None else request.block_hashes
        if num_hits > min(len(hashes), len(grant.block_ids)):
            text = f"request {grant.request_id} hits {num_hits} blocks and has {len(hashes)} hashes"
            yield "I3", text, (grant.request_id,)
            return
        for index, block in enumerate(grant.block_ids[:num_hits]):
            known = 0 <= block < self._config.num_blocks and block not in taken
            if not known or self.ledger.blocks.content(block) != hashes[index]:
                text = f"block {block} does not hold block {index} of request {grant.request_id}"
                yield "I3", text, (grant.request_id,)

    # --- judged when the plan is in the books --------------------------------------------------

    def _judge_rows(self, plan: StepPlan) -> Iterator[Finding]:
        total, limit = num_batched_tokens(plan), self._config.max_num_batched_tokens
        if total > limit:
            yield "I4", f"{total} tokens in the step, the budget is {limit}", ()
        count = self.ledger.num_running
        if count > self._config.max_num_seqs:
            yield "I5", f"{count} run, max_num_seqs is {self._config.max_num_seqs}", ()
        seen: set[RequestId] = set()
        for row in rows(plan):
            mine, request = row.request_id, self.ledger.live.get(row.request_id)
            if mine in seen:
                yield "I6", f"request {mine} has two rows", (mine,)
            seen.add(mine)
            if request is None or not request.is_running:
                state = "has ended" if request is None else "waits"
                yield "I8", f"request {mine} {state} and gets a row", (mine,)
            elif request.num_planned > len(request.block_ids) * self._config.block_size:
                yield (
                    "I6",
                    f"request {mine} writes past its {len(request.block_ids)} blocks",
                    (mine,),
                )
        for request_id in plan.decodes:
            request = self.ledger.live.get(request_id)
            if request is not None:
                known = request.num_tokens + request.num_pending - 1  # before this step samples
                if request.num_planned != known:
                    yield from self._lost(request, request.num_planned, known)
        for chunk in plan.chunks:
            yield from self._judge_chunk(chunk)

    def _judge_chunk(self, chunk: PrefillChunk) -> Iterator[Finding]:
        request = self.ledger.live.get(chunk.request_id)
        if request is None:
            return
        ids, end = (chunk.request_id,), chunk.start + chunk.num_tokens
        expected = request.num_planned - chunk.num_tokens
        if chunk.num_tokens < 1 or chunk.start != expected:
            text = f"request {chunk.request_id}: a chunk of {chunk.num_tokens} tokens at"
            yield "I6", f"{text} {chunk.start}, the last one ended at {expected}", ids
        cap = self._config.long_prefill_token_threshold
        if 0 < cap < chunk.num_tokens:
            text = f"request {chunk.request_id}: {chunk.num_tokens} tokens in a chunk, the cap is"
            yield "I4", f"{text} {cap}", ids
        known = request.num_tokens + request.num_pending - chunk.samples
        if end > known or chunk.samples != (end == known):
            yield from self._lost(request, end, known)

    def _lost(self, request: LedgerRequest, end: int, known: int) -> Iterator[Finding]:
        """A row that does not fit the known tokens; after a preemption work is lost by that."""
        rule = "I12" if request.num_admissions > 1 else "I6"
        text = f"request {request.request_id}: a row ends at token {end}, it has {known}"
        yield rule, text, (request.request_id,)

    def _judge_waits(self, plan: StepPlan) -> Iterator[Finding]:
        ledger = self.ledger
        is_alone = set(ledger.in_flight) == {plan.step_id}
        if is_alone and not (
            plan.decodes or plan.chunks or plan.preempted or ledger.blocks.fenced()
        ):
            yield "I9", "a step without any row, and nothing else is in flight", ()
        if is_alone and ledger.num_running == 0 and ledger.num_waiting and not plan.preempted:
            head = ledger.waiting()[0]
            yield "I9", f"nobody runs and request {head.request_id} waits", (head.request_id,)
        for wait in plan.waits:
            text = self._false_reason(wait.reason, plan)
            if text:
                yield "I9", f"request {wait.request_id} waits for {text}", (wait.request_id,)

    def _false_reason(self, reason: WaitReason, plan: StepPlan) -> str:
        """Empty for a reason that is true, or that the log does not show."""
        config = self._config
        if reason is WaitReason.NO_SEAT and self.ledger.num_running < config.max_num_seqs:
            return f"a seat, {self.ledger.num_running} of {config.max_num_seqs} run"
        if reason is WaitReason.NO_BUDGET and not config.target_itl_us:
            total, limit = num_batched_tokens(plan), config.max_num_batched_tokens
            return f"budget, {total} of {limit} tokens are used" if total < limit else ""
        if reason is WaitReason.AFTER_PREEMPTION and not self._is_short_of_blocks(plan):
            return "the end of a preemption, nobody was preempted"
        return ""

    def _is_short_of_blocks(self, plan: StepPlan) -> bool:
        """Somebody was preempted, or runs and found no block for its next token."""
        return bool(plan.preempted) or any(
            wait.reason is WaitReason.NO_BLOCKS and self.ledger.live[wait.request_id].is_running
            for wait in plan.waits
            if wait.request_id in self.ledger.live
        )


def expected_refusal(
    config: SchedulerConfig,
    event: RequestArrived,
    waiting: Sequence[LedgerRequest],
    num_running: int,
) -> RequestRefused | None:
    """What must be said to a request that can never run, or may not wait."""
    queued = event.num_prompt_tokens + sum(r.num_tokens + r.num_pending for r in waiting)
    num_queued = len(waiting) + num_running - config.max_num_seqs  # a free seat is no queue
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


def violations(
    config: SchedulerConfig, records: Iterable[TraceRecord], max_overtaken: int | None = None
) -> Iterator[Violation]:
    """All violations of records that end in good order."""
    checker = Checker(config, max_overtaken)
    last = None
    for last in records:
        yield from checker.feed(last)
    if last is not None:
        yield from checker.finish(last, ended=True)
