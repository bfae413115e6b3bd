"""What the next step does: one budget of tokens, decodes first, then prefills, then newcomers.

Owns the order of the parts; each is in a file of its own and changes the books as it decides.
Called by `scheduler.py`: `plan_step`, then `close_step` once the step is in flight.
"""

from cearx.core.admission import Policy
from cearx.core.admitting import Newcomers
from cearx.core.books import Books
from cearx.core.chunk_planning import limit_prefill, plan_chunks
from cearx.core.decode_planning import plan_decodes
from cearx.core.events import StepPlan
from cearx.core.making_way import make_way_for_head
from cearx.core.request import RequestState
from cearx.core.step_draft import StepDraft


def plan_step(books: Books, policy: Policy) -> tuple[StepPlan, StepDraft] | None:
    """The step, or None when nothing can be done before a step in flight is finished."""
    draft = StepDraft(books.config.max_num_batched_tokens)
    if books.config.scheduling_policy == "priority":
        make_way_for_head(books, draft)
    plan_decodes(books, draft)
    limit_prefill(books, draft)
    plan_chunks(books, draft)
    if books.waiting:
        Newcomers(books, draft, policy).plan()
    if not (draft.decodes or draft.chunks or draft.preempted or draft.is_short_of_blocks):
        return None  # nothing in the books has changed
    plan = StepPlan(
        step_id=books.steps.next_step,
        decodes=draft.decodes,
        chunks=tuple(draft.chunks),
        granted=tuple(draft.granted),
        admitted=tuple(draft.admitted),
        preempted=tuple(draft.preempted),
        waits=tuple(draft.waits),
        margin_blocks=books.margin_blocks,
    )
    return plan, draft


def close_step(books: Books, draft: StepDraft) -> None:
    """Brings the books behind the step, which is in flight now."""
    for request in draft.finishing:
        books.steps.leave_batch(request)
        books.steps.set_state(request, RequestState.FINISHING)
    if draft.blocked is not None:
        books.blocked = draft.blocked
