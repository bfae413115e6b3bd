"""Who is refused at the door: what can never run, and what may not wait.

A pure function of the books. Called by `scheduler.py` for `RequestArrived`.
"""

from cearx.core.books import Books
from cearx.core.events import RefusalReason, RequestArrived, RequestRefused


def refusal(books: Books, event: RequestArrived) -> RequestRefused | None:
    """Whether it can never run, or may not wait; with what it needs and what there is."""
    config, waiting = books.config, books.waiting
    length = event.num_prompt_tokens + event.max_tokens
    pool_tokens = config.num_blocks * config.block_size
    most_tokens = config.max_num_queued_tokens
    # Whoever finds a free seat does not queue: it only waits for the next plan.
    num_queued = len(waiting) - (config.max_num_seqs - len(books.running))
    if event.num_prompt_tokens < 1:
        reason, need, limit = RefusalReason.EMPTY_PROMPT, event.num_prompt_tokens, 1
    elif event.max_tokens < 1:
        reason, need, limit = RefusalReason.NO_OUTPUT, event.max_tokens, 1
    elif length > config.max_model_len:
        reason, need, limit = RefusalReason.PROMPT_TOO_LONG, length, config.max_model_len
    elif length - 1 > pool_tokens:
        # The last token's KV is never written, so it needs no place.
        reason, need, limit = RefusalReason.POOL_TOO_SMALL, length - 1, pool_tokens
    elif 0 < config.max_num_queued_reqs <= num_queued:
        reason, need = RefusalReason.QUEUE_FULL, num_queued + 1
        limit = config.max_num_queued_reqs
    elif num_queued > 0 and 0 < most_tokens < waiting.num_tokens + event.num_prompt_tokens:
        # Alone in the queue it is let in whatever its length, or it could never come in.
        need = waiting.num_tokens + event.num_prompt_tokens
        reason, limit = RefusalReason.QUEUE_TOKENS, most_tokens
    else:
        return None
    return RequestRefused(
        request_id=event.request_id, reason=reason, num_tokens=need, limit_tokens=limit
    )
