"""The prefill chunks of a step: what budget and caps leave for prompts that are under way.

Functions over the books and the step under construction; called by `planner.py`, and by
`admitting.py` for the first chunk of a newcomer.
"""

from cearx.core.books import Books
from cearx.core.events import PrefillChunk, WaitReason
from cearx.core.request import Request, RequestState, in_order
from cearx.core.step_draft import StepDraft


def limit_prefill(books: Books, draft: StepDraft) -> None:
    """Beside decodes, chunks may not make the step longer than its target."""
    if books.config.target_itl_us and draft.decodes:
        limit = books.pace.num_tokens(books.config.target_itl_us, books.config.block_size)
        if limit is not None:
            draft.budget = min(draft.budget, limit)


def plan_chunks(books: Books, draft: StepDraft) -> None:
    for request in sorted(books.steps.prefilling.values(), key=in_order):
        if draft.budget:
            add_chunk(books, draft, request)
        else:
            draft.num_partial += 1
            draft.wait(request, WaitReason.NO_BUDGET)


def add_chunk(books: Books, draft: StepDraft, request: Request) -> None:
    """The next part of its known tokens, as long as budget and cap allow."""
    rest = request.num_promised - request.num_scheduled
    num_tokens = min(draft.budget, rest, books.config.long_prefill_token_threshold or rest)
    draft.budget -= num_tokens
    samples = num_tokens == rest
    draft.chunks.append(
        PrefillChunk(
            request_id=request.request_id,
            start=request.num_scheduled,
            num_tokens=num_tokens,
            samples=samples,
        )
    )
    request.num_scheduled += num_tokens
    request.num_unsettled += num_tokens
    request.last_step = books.steps.next_step
    if not samples:
        draft.num_partial += 1
        return
    request.num_pending += 1
    request.num_lost = 0
    is_last = request.num_scheduled == request.final_length
    state = RequestState.FINISHING if is_last else RequestState.JOINING
    books.steps.set_state(request, state)
