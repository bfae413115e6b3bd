"""One request in the books that are kept from records alone.

Owns its lengths, its table of blocks and its stay in the batch. Kept by `ledger.py`; what the
other verbs read of a request.
"""

import msgspec

from cearx.core.config import SchedulerConfig
from cearx.core.events import RequestArrived
from cearx.core.identifiers import BlockHash, BlockId, RequestId, StepId
from cearx.core.request import Request
from cearx.core.scheduler import Scheduler
from cearx.replay.rows import Row


class LedgerRequest(msgspec.Struct, kw_only=True):
    """A request that has not ended; lengths in tokens."""

    request_id: RequestId
    num_prompt_tokens: int
    max_tokens: int
    block_hashes: list[BlockHash]
    """Of the full blocks of known tokens."""
    num_tokens: int
    """Known: the prompt and the tokens of finished steps."""
    num_pending: int = 0
    """Tokens that steps in flight will sample."""
    num_planned: int = 0
    """Whose KV the steps planned so far compute."""
    num_written: int = 0
    """Whose KV the finished steps have computed."""
    block_ids: list[BlockId] = msgspec.field(default_factory=list)
    is_running: bool = False
    num_admissions: int = 0
    num_published: int = 0
    """Leading blocks that can be found, or were at its admission."""
    publishes: bool = True
    """False from a failure, or a reset of the cache, to its next admission."""
    last_step: StepId | None = None
    """The last step with a row of its present stay."""
    priority: int = 0
    deadline_us: int = 0
    """With request_timeout_us only."""

    @property
    def num_outputs(self) -> int:
        return self.num_tokens - self.num_prompt_tokens

    def settle(self, row: Row, has_failed: bool, is_same_stay: bool) -> None:
        """One row: its token counts in any case, its KV only if it was not preempted since."""
        self.num_pending -= row.samples
        if has_failed:
            self.publishes = False
        else:
            self.num_tokens += row.samples
        if self.is_running and is_same_stay:
            self.num_written += row.num_tokens


def arrived(config: SchedulerConfig, event: RequestArrived) -> LedgerRequest:
    """One that waits for its first admission."""
    return LedgerRequest(
        request_id=event.request_id,
        num_prompt_tokens=event.num_prompt_tokens,
        max_tokens=event.max_tokens,
        block_hashes=list(event.block_hashes) if config.enable_prefix_caching else [],
        num_tokens=event.num_prompt_tokens,
        priority=event.priority if config.scheduling_policy == "priority" else 0,
        deadline_us=event.arrived_us + config.request_timeout_us,
    )


def carried_over(scheduler: Scheduler, request: Request) -> LedgerRequest:
    """One of a snapshot, its rows in flight counted as known."""
    books = scheduler.books
    return LedgerRequest(
        request_id=request.request_id,
        num_prompt_tokens=request.num_prompt_tokens,
        max_tokens=request.max_tokens,
        block_hashes=list(request.block_hashes),
        num_tokens=books.steps.num_promised(request),
        num_planned=books.steps.num_scheduled(request),
        num_written=books.steps.num_settled(request),
        block_ids=list(request.block_ids),
        is_running=request.request_id in books.running,
        num_admissions=1,
        publishes=request.publishes,
        num_published=request.num_published,
        last_step=request.last_step,
        priority=request.priority,
        deadline_us=request.deadline_us,
    )
