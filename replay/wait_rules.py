"""Who may wait and why: an idle engine lets the head in, and a reason is true (I9).

Pure functions of the ledger and the plan, called by `invariants.py` when the plan is in the books.
"""

from collections.abc import Iterator

from cearx.core.events import StepPlan, WaitReason
from cearx.replay.ledger import Ledger
from cearx.replay.rows import num_batched_tokens
from cearx.replay.violation import Finding


def judge_waits(ledger: Ledger, plan: StepPlan) -> Iterator[Finding]:
    """Every reason of a plan that is in the books, and whether somebody should have got in."""
    is_alone = set(ledger.in_flight) == {plan.step_id}
    if is_alone and not (plan.decodes or plan.chunks or plan.preempted or ledger.blocks.fenced()):
        yield "I9", "a step without any row, and nothing else is in flight", ()
    if is_alone and ledger.num_running == 0 and ledger.num_waiting and not plan.preempted:
        head = ledger.waiting()[0]
        yield "I9", f"nobody runs and request {head.request_id} waits", (head.request_id,)
    for wait in plan.waits:
        text = _false_reason(ledger, wait.reason, plan)
        if text:
            yield "I9", f"request {wait.request_id} waits for {text}", (wait.request_id,)


def _false_reason(ledger: Ledger, reason: WaitReason, plan: StepPlan) -> str:
    """Empty for a reason that is true, or that the log does not show."""
    config = ledger.config
    if reason is WaitReason.NO_SEAT and ledger.num_running < config.max_num_seqs:
        return f"a seat, {ledger.num_running} of {config.max_num_seqs} run"
    if reason is WaitReason.NO_BUDGET and not config.target_itl_us:
        total, limit = num_batched_tokens(plan), config.max_num_batched_tokens
        return f"budget, {total} of {limit} tokens are used" if total < limit else ""
    if reason is WaitReason.AFTER_PREEMPTION and not _is_short_of_blocks(ledger, plan):
        return "the end of a preemption, nobody was preempted"
    return ""


def _is_short_of_blocks(ledger: Ledger, plan: StepPlan) -> bool:
    """Somebody was preempted, or runs and found no block for its next token."""
    return bool(plan.preempted) or any(
        wait.reason is WaitReason.NO_BLOCKS and ledger.live[wait.request_id].is_running
        for wait in plan.waits
        if wait.request_id in ledger.live
    )
