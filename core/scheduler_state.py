"""The scheduler's snapshot: its books as canonical bytes, and books made of them again.

Owns the snapshot's schema. Called by `scheduler.py`; `cearx replay` reads it.
"""

from collections import deque

import msgspec

from cearx.core.block_pool import BlockPool, BlockPoolState
from cearx.core.books import Books, Totals
from cearx.core.config import SchedulerConfig
from cearx.core.decode_batch import DecodeBatch, DecodeBatchState
from cearx.core.fences import Fence, Fences
from cearx.core.identifiers import RequestId, StepId
from cearx.core.output_lengths import OutputLengths
from cearx.core.prefill_pace import PrefillPace
from cearx.core.request import Request, RequestState
from cearx.core.step_books import InFlightStep


class SchedulerState(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """A snapshot; msgpack of it is canonical."""

    now_us: int
    next_step: StepId
    last_id: RequestId | None
    in_flight: tuple[InFlightStep, ...]
    requests: tuple[Request, ...]
    running: tuple[RequestId, ...]
    batch: DecodeBatchState
    fences: tuple[Fence, ...]
    pool: BlockPoolState
    lengths: OutputLengths
    pace: PrefillPace
    margin_blocks: int
    totals: Totals
    blocked: tuple[RequestId, int] | None


def state_of(books: Books, last_id: RequestId | None) -> SchedulerState:
    """Of books, and of the last request that arrived."""
    return SchedulerState(
        now_us=books.now_us,
        next_step=books.steps.next_step,
        last_id=last_id,
        in_flight=tuple(books.steps.in_flight),
        requests=tuple(books.requests.values()),
        running=tuple(books.running),
        batch=books.steps.batch.snapshot(),
        fences=books.fences.all(),
        pool=books.pool.snapshot(),
        lengths=books.lengths,
        pace=books.pace,
        margin_blocks=books.margin_blocks,
        totals=books.totals,
        blocked=books.blocked,
    )


def books_of(config: SchedulerConfig, state: SchedulerState) -> Books:
    """Books from which everything goes on as from those that the state was taken of."""
    books = Books(config)
    books.now_us = state.now_us
    books.steps.next_step = state.next_step
    books.steps.in_flight = deque(state.in_flight)
    books.requests = {request.request_id: request for request in state.requests}
    books.running = {request_id: books.requests[request_id] for request_id in state.running}
    for request in state.requests:
        if request.state is RequestState.WAITING:
            books.waiting.add(request)
        elif request.state is RequestState.PREFILLING:
            books.steps.prefilling[request.request_id] = request
        elif request.state is RequestState.JOINING:
            books.steps.joining[request.request_id] = request
    decoding = [r.request_id for r in state.requests if r.state is RequestState.DECODING]
    books.steps.batch = DecodeBatch.restore(state.batch, decoding)
    books.pool = BlockPool.restore(state.pool)
    books.fences = Fences(books.pool, state.fences)
    books.lengths, books.pace, books.totals = state.lengths, state.pace, state.totals
    books.margin_blocks, books.blocked = state.margin_blocks, state.blocked
    books.num_to_come = sum(
        books.num_blocks(request.final_length) - len(request.block_ids)
        for request in books.running.values()
    )
    return books
