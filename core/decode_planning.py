"""The decodes of a step: a row for everyone in the batch, and a block for who needs one.

Where no block is free somebody is preempted, or the row waits for blocks that are on their way.
Functions over the books and the step under construction; called by `planner.py`.
"""

from cearx.core.books import Books
from cearx.core.events import WaitReason
from cearx.core.identifiers import RequestId
from cearx.core.making_way import preempt
from cearx.core.preemption import choose_victim
from cearx.core.request import Request, RequestState, in_order
from cearx.core.step_draft import StepDraft


def plan_decodes(books: Books, draft: StepDraft) -> None:
    """Everyone in the batch gets a row; only who joins or is due is looked at."""
    if not books.steps.joining and not len(books.steps.batch):
        return
    due_ids = dict.fromkeys(books.steps.batch.tick())
    due = [books.running[i] for i in due_ids if _is_due(books, i)]
    joining = list(books.steps.joining.values())
    for request in joining:
        books.steps.join_batch(request)
    for request in sorted(due + joining, key=in_order):
        if request.state is RequestState.DECODING:  # else preempted for one before it
            _plan_due_decode(books, draft, request)
    draft.decodes = books.steps.batch.rows()
    draft.budget -= len(draft.decodes)  # the config holds max_num_seqs within the budget


def _is_due(books: Books, request_id: RequestId) -> bool:
    """An entry of the calendar may be of somebody who has left, or joined anew since."""
    request = books.running.get(request_id)
    return request is not None and request.state is RequestState.DECODING


def _plan_due_decode(books: Books, draft: StepDraft, request: Request) -> None:
    length = books.steps.batch.num_scheduled(request)
    if length > len(request.block_ids) * books.config.block_size:
        if not _find_block(books, draft, request):
            return
        draft.grant(request, books.grant(request, 1))
    if length == request.final_length:
        draft.finishing.append(request)
    else:
        books.steps.batch.set_due(request, books.config.block_size)


def _find_block(books: Books, draft: StepDraft, request: Request) -> bool:
    """Whether a block is free for its row, after preemptions if need be; else it has left."""
    while not books.pool.num_free:
        draft.is_short_of_blocks = True
        num_coming = books.num_coming(draft.finishing)
        if num_coming > len(draft.waits):  # one for each that waits already
            # Its block is on its way: whoever is preempted now would be so for nothing.
            books.steps.leave_batch(request, has_row=False)
            draft.wait(request, WaitReason.NO_BLOCKS)
            return False
        victim = choose_victim(
            ((r, books.steps.num_scheduled(r)) for r in books.running.values()),
            request.order,
            books.pool,
            books.config.block_size,
        )
        preempt(books, draft, victim or request, has_row=False)
        if victim is None:
            return False
    return True
