"""Whom to preempt when blocks, or seats for somebody more urgent, run out.

Pure functions of who runs. Only requests that go later than the one in need are candidates, so the
first in order always gets on and no two requests can preempt each other in turns.
"""

from collections.abc import Iterable

from cearx.core.block_pool import BlockPool
from cearx.core.request import Order, Request, RequestState


def recompute_cost(request: Request, num_scheduled: int, pool: BlockPool, block_size: int) -> int:
    """Tokens whose KV would have to be computed again.

    Leading blocks that others hold as well stay; its own published ones are the first to be taken
    by whoever needed room, so they count as lost.
    """
    num_kept = 0
    for block in request.block_ids:
        if pool.num_holders(block) == 1:
            break
        num_kept += block_size
    return max(num_scheduled - num_kept, 0)


def choose_victim(
    running: Iterable[tuple[Request, int]], after: Order, pool: BlockPool, block_size: int
) -> Request | None:
    """The cheapest of those (with their scheduled tokens) that go later than `after`.

    Somebody who has got on since the last admission goes before somebody who has not; one whose
    last block is not its own is left alone. None when nobody is left.
    """
    best: Request | None = None
    best_key: tuple[bool, int, int, int] | None = None
    for request, num_scheduled in running:
        if request.order <= after or request.state is RequestState.FINISHING:
            continue
        if pool.num_holders(request.block_ids[-1]) > 1:
            continue
        has_got_on = num_scheduled > request.num_admitted_tokens
        cost = recompute_cost(request, num_scheduled, pool, block_size)
        key = (not has_got_on, cost, -request.priority, -request.request_id)
        if best_key is None or key < best_key:
            best, best_key = request, key
    return best
