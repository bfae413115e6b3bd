"""What the scheduler keeps of one request, and the order in which requests go.

Plain state: lengths, blocks and where it stands. Changed by the scheduler's parts only.
"""

from enum import IntEnum
from typing import TypeAlias

import msgspec

from cearx.core.identifiers import BlockHash, BlockId, RequestId, StepId

Order: TypeAlias = tuple[int, RequestId]
"""(priority, arrival): total, lower goes first. All priorities are 0 without that policy."""


class RequestState(IntEnum):
    WAITING = 0
    PREFILLING = 1
    """Known tokens are left to compute, beside the one that decodes compute."""
    JOINING = 2
    """Decodes from the next step on; also one that found no block for its decode."""
    DECODING = 3
    """A member of the decode batch."""
    FINISHING = 4
    """Its last token is in flight: max_tokens is reached and it gets no further row."""
    ENDED = 5


class Request(msgspec.Struct, array_like=True, kw_only=True):
    """One request's bookkeeping; all lengths in tokens.

    promised tokens 0 ──────────────────────────────────────────── num_promised
    known tokens    0 ─────────────────────────── num_tokens ─ pending ─┘
    scheduled KV    0 ───────────────────────────── num_scheduled
    written KV      0 ─────────────── num_settled ─ unsettled ─┘

    While it decodes, the batch counts for it: num_tokens, num_scheduled and the rows in flight are
    brought up to date when it leaves (`decode_batch.py`).
    """

    request_id: RequestId
    priority: int
    num_prompt_tokens: int
    max_tokens: int
    has_exact_length: bool
    deadline_us: int
    block_hashes: list[BlockHash]
    """Of the full blocks of known tokens."""
    num_tokens: int
    num_pending: int = 0
    """Tokens that steps in flight sample for it, the batch's rows not counted."""
    num_scheduled: int = 0
    num_unsettled: int = 0
    """Scheduled tokens that are in flight, the batch's rows not counted."""
    block_ids: list[BlockId] = msgspec.field(default_factory=list)
    num_shared: int = 0
    """Leading blocks that came from the cache at admission."""
    num_published: int = 0
    """Leading blocks that are published, or shared from the cache."""
    publishes: bool = True
    """False from a reset of the cache to its next admission."""
    state: RequestState = RequestState.WAITING
    admitted_step: StepId | None = None
    """Rows of earlier steps belong to a life before a preemption: their KV is gone."""
    num_admitted_tokens: int = 0
    """Known tokens at its last admission."""
    last_step: StepId | None = None
    """The last step with a row for it, the batch's rows not counted."""
    joined_step: StepId | None = None
    """The first step with a row of its present membership in the batch."""
    base: int = 0
    """num_scheduled while it decodes is base + the batch's clock."""
    num_lost: int = 0
    """Tokens whose KV a preemption took, until they are computed again."""
    num_overtaken: int = 0
    """Admissions that passed it while it waited for blocks."""
    is_entitled: bool = False
    """Others were preempted for it, so no policy keeps it waiting."""

    @property
    def order(self) -> Order:
        return self.priority, self.request_id

    @property
    def num_promised(self) -> int:
        """Known and awaited tokens; not while it decodes."""
        return self.num_tokens + self.num_pending

    @property
    def num_settled(self) -> int:
        """Tokens whose KV is written; not while it decodes."""
        return self.num_scheduled - self.num_unsettled

    @property
    def final_length(self) -> int:
        """Tokens whose KV it writes at most: the last output's is never needed."""
        return self.num_prompt_tokens + self.max_tokens - 1


def in_order(request: Request) -> Order:
    """The key to sort by."""
    return request.order
