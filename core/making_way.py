"""Preemption as a step plans it: what it does to the books, and for a more urgent request.

Whom to preempt is `preemption.py`'s business. Called by `planner.py` and `decode_planning.py`.
"""

from cearx.core.admission import pays
from cearx.core.books import Books, blocks_needed
from cearx.core.preemption import choose_victim
from cearx.core.request import Request, RequestState
from cearx.core.step_draft import StepDraft

MAX_PREEMPTIONS_FOR_HEAD = 4
"""In one step, for a more urgent request that waits."""


def preempt(books: Books, draft: StepDraft, request: Request, *, has_row: bool) -> None:
    num_new = books.steps.num_scheduled(request) - (not has_row) - request.num_admitted_tokens
    if not pays(max(num_new, 0), request.num_admitted_tokens):
        more = 1 + books.config.num_blocks // 128
        books.margin_blocks = min(books.margin_blocks + more, books.config.num_blocks // 4)
    books.preempt(request, has_row=has_row)
    draft.preempted.append(request.request_id)


def make_way_for_head(books: Books, draft: StepDraft) -> None:
    """Preempts less urgent requests when the head of the queue lacks a seat or blocks."""
    head = next(iter(books.waiting), None)
    if head is None or head.num_pending:
        return
    for _ in range(MAX_PREEMPTIONS_FOR_HEAD):
        victims = [
            (r, books.steps.num_scheduled(r))
            for r in books.running.values()
            if r.priority > head.priority and r.state is not RequestState.FINISHING
        ]
        if not victims:
            return
        lacks_seat = len(books.running) >= books.config.max_num_seqs
        _, need, num_free = blocks_needed(books, head)
        if not lacks_seat and need <= num_free:
            return
        if need > num_free + books.num_coming(r for r, _ in victims):
            return  # it would not be enough
        if not lacks_seat and need <= num_free + books.num_coming():
            return  # on their way
        worst = max(r.priority for r, _ in victims)
        least_urgent = [(r, n) for r, n in victims if r.priority == worst]
        victim = choose_victim(least_urgent, head.order, books.pool, books.config.block_size)
        if victim is None:
            return
        preempt(books, draft, victim, has_row=True)
        head.is_entitled = True
