"""What a step may compute: within budget (I4) and seats (I5), rows that go on where the last one
stopped (I6), for requests that run (I8), with nothing lost by a preemption (I12).

Pure functions of the ledger and the plan. Called by `invariants.py` when the plan is in the books.
"""

from collections.abc import Iterator

from cearx.core.events import PrefillChunk, StepPlan
from cearx.core.identifiers import RequestId
from cearx.replay.ledger import Ledger
from cearx.replay.ledger_request import LedgerRequest
from cearx.replay.rows import num_batched_tokens, rows
from cearx.replay.violation import Finding


def judge_rows(ledger: Ledger, plan: StepPlan) -> Iterator[Finding]:
    """Every row of a plan that is in the books."""
    total, limit = num_batched_tokens(plan), ledger.config.max_num_batched_tokens
    if total > limit:
        yield "I4", f"{total} tokens in the step, the budget is {limit}", ()
    count = ledger.num_running
    if count > ledger.config.max_num_seqs:
        yield "I5", f"{count} run, max_num_seqs is {ledger.config.max_num_seqs}", ()
    seen: set[RequestId] = set()
    for row in rows(plan):
        mine, request = row.request_id, ledger.live.get(row.request_id)
        if mine in seen:
            yield "I6", f"request {mine} has two rows", (mine,)
        seen.add(mine)
        if request is None or not request.is_running:
            state = "has ended" if request is None else "waits"
            yield "I8", f"request {mine} {state} and gets a row", (mine,)
        elif request.num_planned > len(request.block_ids) * ledger.config.block_size:
            text = f"request {mine} writes past its {len(request.block_ids)} blocks"
            yield "I6", text, (mine,)
    for request_id in plan.decodes:
        request = ledger.live.get(request_id)
        if request is not None:
            known = request.num_tokens + request.num_pending - 1  # before this step samples
            if request.num_planned != known:
                yield from _lost(request, request.num_planned, known)
    for chunk in plan.chunks:
        yield from _judge_chunk(ledger, chunk)


def _judge_chunk(ledger: Ledger, chunk: PrefillChunk) -> Iterator[Finding]:
    request = ledger.live.get(chunk.request_id)
    if request is None:
        return
    ids, end = (chunk.request_id,), chunk.start + chunk.num_tokens
    expected = request.num_planned - chunk.num_tokens
    if chunk.num_tokens < 1 or chunk.start != expected:
        text = f"request {chunk.request_id}: a chunk of {chunk.num_tokens} tokens at"
        yield "I6", f"{text} {chunk.start}, the last one ended at {expected}", ids
    cap = ledger.config.long_prefill_token_threshold
    if 0 < cap < chunk.num_tokens:
        text = f"request {chunk.request_id}: {chunk.num_tokens} tokens in a chunk, the cap is"
        yield "I4", f"{text} {cap}", ids
    known = request.num_tokens + request.num_pending - chunk.samples
    if end > known or chunk.samples != (end == known):
        yield from _lost(request, end, known)


def _lost(request: LedgerRequest, end: int, known: int) -> Iterator[Finding]:
    """A row that does not fit the known tokens; after a preemption work is lost by that."""
    rule = "I12" if request.num_admissions > 1 else "I6"
    text = f"request {request.request_id}: a row ends at token {end}, it has {known}"
    yield rule, text, (request.request_id,)
