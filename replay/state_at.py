"""`cearx replay at --step N`: queues, block tables, budget and pool around one step.

Owns the picture of one moment and its text; the books are the ledger's. The moment is behind the
plan of the step (default), or before it (`--before`), or when its result was taken in (`--after`).
"""

from collections.abc import Sequence
from typing import Literal

import msgspec
from rich.console import Console

from cearx.core.events import Decision, Event, RequestEnded, StepFinished, StepPlan
from cearx.core.identifiers import BlockId, RequestId, StepId
from cearx.replay.ledger import Ledger
from cearx.replay.ledger_request import LedgerRequest
from cearx.replay.rows import num_batched_tokens, rows
from cearx.replay.terminal import table
from cearx.replay.trace import Trace

When = Literal["before", "planned", "after"]


class QueueEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One live request."""

    request_id: RequestId
    num_prompt_tokens: int
    num_output_tokens: int
    max_tokens: int
    num_written_tokens: int
    """Whose KV is there."""
    block_ids: tuple[BlockId, ...]
    row: str
    """What the step computes for it, or why it waits."""


class StateAt(msgspec.Struct, frozen=True, kw_only=True):
    """Everything there is at one moment."""

    step_id: StepId
    when: When
    now_us: int
    running: list[QueueEntry]
    waiting: list[QueueEntry]
    budget: int
    budget_used: int
    num_blocks: int
    num_held: int
    num_cached: int
    num_blank: int
    fenced: list[tuple[StepId, list[BlockId]]]
    admitted: tuple[RequestId, ...]
    preempted: tuple[RequestId, ...]


class NoSuchStep(Exception):
    """The trace does not hold the step."""


def state_at(trace: Trace, step_id: StepId, when: When) -> StateAt:
    """Reads up to the moment; raises NoSuchStep."""
    ledger = Ledger(trace.header.config)
    plan: StepPlan | None = None
    first = last = None
    finished = False
    for record in trace.records():
        value = record.value
        if isinstance(value, StepPlan):
            first = value.step_id if first is None else first
            last = value.step_id
            if last == step_id:
                plan = value
                if when == "before":
                    return _state(ledger, plan, when)
        if finished and not isinstance(value, RequestEnded):
            break
        ledger.apply(value)
        if plan is not None and when == "planned":
            return _state(ledger, plan, when)
        finished = finished or _finishes(value, step_id)
    if plan is None:
        steps = "no step" if first is None else f"steps {first} to {last}"
        raise NoSuchStep(f"there is no step {step_id}, the trace holds {steps}")
    if not finished:
        raise NoSuchStep(f"step {step_id} is planned, but the trace ends before its result")
    ledger.settle()
    return _state(ledger, plan, when)


def _finishes(value: Event | Decision | object, step_id: StepId) -> bool:
    return isinstance(value, StepFinished) and value.step_id == step_id


def _state(ledger: Ledger, plan: StepPlan, when: When) -> StateAt:
    texts = {wait.request_id: wait.reason.name for wait in plan.waits}
    for row in rows(plan):
        is_decode = row.request_id in plan.decodes
        texts[row.request_id] = "decode" if is_decode else f"prefill {row.num_tokens}"
    return StateAt(
        step_id=plan.step_id,
        when=when,
        now_us=ledger.now_us,
        running=[_entry(request, texts) for request in ledger.running()],
        waiting=[_entry(request, texts) for request in ledger.waiting()],
        budget=ledger.config.max_num_batched_tokens,
        budget_used=num_batched_tokens(plan),
        num_blocks=ledger.config.num_blocks,
        num_held=ledger.blocks.num_held,
        num_cached=ledger.blocks.num_cached,
        num_blank=ledger.blocks.num_free - ledger.blocks.num_cached,
        fenced=ledger.blocks.fenced(),
        admitted=tuple(admission.request_id for admission in plan.admitted),
        preempted=plan.preempted,
    )


def _entry(request: LedgerRequest, texts: dict[RequestId, str]) -> QueueEntry:
    return QueueEntry(
        request_id=request.request_id,
        num_prompt_tokens=request.num_prompt_tokens,
        num_output_tokens=request.num_outputs,
        max_tokens=request.max_tokens,
        num_written_tokens=request.num_written,
        block_ids=tuple(request.block_ids),
        row=texts.get(request.request_id, ""),
    )


def print_state(state: StateAt, console: Console, limit: int) -> None:
    """Pool and budget, then the two queues."""
    console.print(f"step {state.step_id}, {state.when}, at {state.now_us} us")
    console.print(f"budget   {state.budget_used} of {state.budget} tokens")
    fenced = sum(len(blocks) for _, blocks in state.fenced)
    console.print(
        f"blocks   {state.num_held} held ({fenced} until a step in flight ends),"
        f" {state.num_cached} cached, {state.num_blank} blank, {state.num_blocks} in all"
    )
    console.print(f"let in   {_ids(state.admitted)}")
    console.print(f"put out  {_ids(state.preempted)}")
    for name, entries in (("running", state.running), ("waiting", state.waiting)):
        console.print()
        columns = [name, "prompt", "out", "max", "in KV", "step", "blocks"]
        made = table(columns, (_cells(entry) for entry in entries[:limit]))
        made.columns[-1].justify = "left"
        console.print(made)
        if len(entries) > limit:
            console.print(f"… and {len(entries) - limit} more (--limit, --json)")


def _cells(entry: QueueEntry) -> list[object]:
    return [
        entry.request_id,
        entry.num_prompt_tokens,
        entry.num_output_tokens,
        entry.max_tokens,
        entry.num_written_tokens,
        entry.row,
        block_ranges(entry.block_ids),
    ]


def block_ranges(block_ids: Sequence[BlockId]) -> str:
    """`3-7 12 9-10` for a block table."""
    parts: list[list[int]] = []
    for block in block_ids:
        if parts and block == parts[-1][1] + 1:
            parts[-1][1] = block
        else:
            parts.append([block, block])
    return " ".join(f"{a}-{b}" if b > a else f"{a}" for a, b in parts)


def _ids(request_ids: Sequence[RequestId]) -> str:
    return " ".join(map(str, request_ids)) or "-"
