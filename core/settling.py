"""What a finished step changes: tokens become known, KV becomes shareable, requests end.

Only rows that the batch does not count, stops and block borders are looked at one by one, so a step
of calm decodes costs nothing for each row. Called by `scheduler.py` for `StepFinished`.
"""

from cearx.core.books import Books
from cearx.core.events import FinishReason, PrefillChunk, RequestEnded, StepFinished
from cearx.core.identifiers import RequestId, StepId
from cearx.core.request import Request, RequestState
from cearx.core.step_books import InFlightStep


def finish_step(books: Books, event: StepFinished) -> tuple[RequestEnded, ...]:
    """Takes in the oldest step in flight; answers who ended, by arrival."""
    oldest = books.steps.in_flight[0].step_id if books.steps.in_flight else None
    assert oldest == event.step_id, f"step {event.step_id} finished, step {oldest} is the next"
    step = books.steps.in_flight.popleft()
    if books.config.enable_prefix_caching:
        for sealed in event.sealed:
            request = books.requests.get(sealed.request_id)
            if request is not None:
                request.block_hashes.append(sealed.block_hash)
    stopped = {row.request_id: row.reason for row in event.stopped}
    ends = _settle_rows(books, step, stopped)
    for grant in step.plan.granted:  # with its row the block before the granted one was written
        request = books.requests.get(grant.request_id)
        if request is not None and request.admitted_step is not None:
            books.publish(request)
    outcomes = [_end(books, books.requests[i], reason) for i, reason in sorted(ends.items())]
    if books.fences.release(step.step_id):
        books.blocked = None
    if step.plan.decodes or step.plan.chunks:
        books.pace.observe(sum(chunk.num_tokens for chunk in step.plan.chunks), event.execute_us)
    return tuple(outcomes)


def _settle_rows(
    books: Books, step: InFlightStep, stopped: dict[RequestId, FinishReason]
) -> dict[RequestId, FinishReason]:
    """Counts the step's rows; answers who ends and why."""
    ends: dict[RequestId, FinishReason] = {}
    for request_id in step.left:
        request = books.requests.get(request_id)
        if request is not None:
            _settle_row(books, request, step.step_id, None, stopped, ends)
    for chunk in step.plan.chunks:
        request = books.requests.get(chunk.request_id)
        if request is not None:
            _settle_row(books, request, step.step_id, chunk, stopped, ends)
    for request_id, reason in stopped.items():
        request = books.requests.get(request_id)
        if request is None or request_id in ends:
            continue
        assert request.state is RequestState.DECODING, f"{request_id} stops without a row"
        books.steps.leave_batch(request)
        if reason is FinishReason.FAILED:
            _take_back(request)
        ends[request_id] = reason
    return ends


def _settle_row(
    books: Books,
    request: Request,
    step_id: StepId,
    chunk: PrefillChunk | None,
    stopped: dict[RequestId, FinishReason],
    ends: dict[RequestId, FinishReason],
) -> None:
    """One row that the batch does not count: its token counts in any case, its KV only if the
    request was not preempted since."""
    num_tokens, samples = (1, True) if chunk is None else (chunk.num_tokens, chunk.samples)
    reason = stopped.get(request.request_id)
    has_failed = reason is FinishReason.FAILED
    if request.admitted_step is not None and step_id >= request.admitted_step:
        request.num_unsettled -= num_tokens
        if chunk is not None and not has_failed:
            books.publish(request)
    if samples:
        request.num_pending -= 1
        if request.state is not RequestState.DECODING:  # else the batch knows
            request.num_tokens += not has_failed
            num_outputs = request.num_tokens - request.num_prompt_tokens
            if reason is None and num_outputs == request.max_tokens:
                reason = FinishReason.LENGTH
    if has_failed:
        request.publishes = False
    if reason is not None:
        ends[request.request_id] = reason


def _take_back(request: Request) -> None:
    """A failed decode gave no token and wrote nothing that may be shared."""
    request.num_tokens -= 1
    request.publishes = False


def _end(books: Books, request: Request, reason: FinishReason) -> RequestEnded:
    if request.state is RequestState.DECODING:
        books.steps.leave_batch(request)
    if request.admitted_step is not None:
        books.publish(request)
    if reason in (FinishReason.STOP, FinishReason.LENGTH):
        num_outputs = request.num_tokens - request.num_prompt_tokens
        if not request.has_exact_length:
            books.lengths.observe(max(num_outputs, 1))
        books.margin_blocks -= min(books.margin_blocks, 1 + books.config.num_blocks // 1024)
    return books.end(request, reason)
