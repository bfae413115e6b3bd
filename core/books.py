"""The scheduler's books: every request and every block, and how they change.

Owns the state and the moves that keep it whole: admission, preemption, end, publication; what
steps change stands in `step_books.py`. Decides nothing; `planner.py` and `settling.py` do, on
behalf of `scheduler.py`.
"""

from collections.abc import Iterable

import msgspec

from cearx.core.block_pool import BlockPool
from cearx.core.config import SchedulerConfig
from cearx.core.events import FinishReason, RequestEnded
from cearx.core.fences import Fences
from cearx.core.identifiers import BlockId, RequestId
from cearx.core.output_lengths import OutputLengths
from cearx.core.prefill_pace import PrefillPace
from cearx.core.request import Request, RequestState
from cearx.core.step_books import StepBooks
from cearx.core.waiting_queue import WaitingQueue


class Totals(msgspec.Struct, array_like=True, kw_only=True):
    """Counts since the start."""

    num_preemptions: int = 0
    num_recomputed_tokens: int = 0
    """Computed again after a preemption."""
    num_lookup_tokens: int = 0
    """Known tokens of first admissions."""
    num_hit_tokens: int = 0
    """Of these, found in the prefix cache."""
    num_cache_resets: int = 0


class Books:
    """See the module docstring. A broken invariant is an AssertionError."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.now_us = 0
        self.pool = BlockPool(config.num_blocks)
        self.fences = Fences(self.pool)
        self.requests: dict[RequestId, Request] = {}
        """All that have not ended, by arrival."""
        self.waiting = WaitingQueue()
        self.running: dict[RequestId, Request] = {}
        """Who has a seat, in order of admission."""
        self.steps = StepBooks()
        self.num_to_come = 0
        """Blocks that the running ones will take in addition, if they reach their max_tokens."""
        self.lengths = OutputLengths()
        self.pace = PrefillPace()
        self.margin_blocks = 0
        self.totals = Totals()
        self.blocked: tuple[RequestId, int] | None = None
        """The head of the queue and its WaitReason, until something changes for it."""

    def num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.config.block_size)

    def preempt(self, request: Request, *, has_row: bool = True) -> None:
        """It loses its blocks and waits again; the tokens that it was promised stay its own."""
        if request.state is RequestState.DECODING:
            self.steps.leave_batch(request, has_row=has_row)
        del self.running[request.request_id]
        request.num_lost = max(request.num_lost, request.num_scheduled)
        self._take_blocks(request)
        request.num_scheduled = request.num_unsettled = 0
        request.admitted_step = None
        self.steps.set_state(request, RequestState.WAITING)
        self.waiting.add(request)
        self.totals.num_preemptions += 1
        self.blocked = None

    def end(self, request: Request, reason: FinishReason) -> RequestEnded:
        """It is gone from the books at once; its blocks go when no step touches them."""
        if request.state is RequestState.WAITING:
            self.waiting.remove(request)
        else:
            if request.state is RequestState.DECODING:
                self.steps.leave_batch(request)
            del self.running[request.request_id]
            self._take_blocks(request)
        del self.requests[request.request_id]
        self.blocked = None
        self.steps.set_state(request, RequestState.ENDED)
        return RequestEnded(request_id=request.request_id, reason=reason)

    def admit(self, request: Request, hits: list[BlockId], count: int) -> list[BlockId]:
        """It runs, with the blocks of its hits and so many new ones; answers all of them."""
        self.waiting.remove(request)
        self.running[request.request_id] = request
        self.pool.share(hits)
        request.block_ids = list(hits)
        request.num_shared = request.num_published = len(hits)
        request.num_scheduled = len(hits) * self.config.block_size
        request.num_admitted_tokens = request.num_promised
        request.admitted_step = self.steps.next_step
        request.publishes = True
        self.num_to_come += self.num_blocks(request.final_length) - len(hits)
        self.steps.set_state(request, RequestState.PREFILLING)
        return hits + self.grant(request, count)

    def _take_blocks(self, request: Request) -> None:
        self.num_to_come -= self.num_blocks(request.final_length) - len(request.block_ids)
        in_flight, last_step = self.steps.in_flight, request.last_step
        if in_flight and last_step is not None and last_step >= in_flight[0].step_id:
            self.fences.add(last_step, request.block_ids)
        else:
            self.pool.release(request.block_ids)
        request.block_ids = []
        request.num_shared = request.num_published = 0

    def publish(self, request: Request) -> None:
        """Makes its full blocks of settled tokens findable."""
        if not request.publishes:
            return
        num_full = self.steps.num_settled(request) // self.config.block_size
        full = min(num_full, len(request.block_hashes))
        for index in range(request.num_published, full):
            self.pool.publish(request.block_ids[index], request.block_hashes[index])
        request.num_published = max(request.num_published, full)

    def grant(self, request: Request, count: int) -> list[BlockId]:
        block_ids = self.pool.take(count)
        request.block_ids.extend(block_ids)
        self.num_to_come -= count
        return block_ids

    def num_coming(self, and_of: Iterable[Request] = ()) -> int:
        """Blocks that become free with the steps in flight, and with these requests' release."""
        tables: list[Iterable[BlockId]] = [fence.block_ids for fence in self.fences.all()]
        for request in self.running.values():
            if request.state is RequestState.FINISHING:
                tables.append(request.block_ids)
        tables += [request.block_ids for request in and_of]
        return self.pool.num_freed_by(tables)


def blocks_needed(books: Books, request: Request) -> tuple[list[BlockId], int, int]:
    """Of one who waits: its hits, the blocks that it needs beside them, what is free for those."""
    pool = books.pool
    # The last known token is always computed, because its logits are needed.
    limit = (request.num_promised - 1) // books.config.block_size
    hits = pool.index.find(request.block_hashes, limit)
    need = books.num_blocks(request.num_promised) - len(hits)
    return hits, need, pool.num_free - pool.num_cached(hits)
