"""What the scheduler is told (events) and what it decides (decisions), as plain data.

Events are past tense, decisions are what the scheduler answers. Both are written to the trace log
exactly as they stand here, so they hold counts, times and codes only: no text and no token id.
Lengths are in tokens, times in integer microseconds of a monotonic clock.
"""

from enum import IntEnum

import msgspec

from cearx.core.identifiers import BlockHash, BlockId, RequestId, StepId


class FinishReason(IntEnum):
    """Why a request ended."""

    STOP = 0
    """The model produced an end-of-sequence or a stop token."""
    LENGTH = 1
    """max_tokens tokens were produced; the last one is delivered."""
    CANCELLED = 2
    """The frontend cancelled it (disconnect, stop string, shutdown)."""
    FAILED = 3
    """The worker could not compute this request; others go on."""
    TIMEOUT = 4
    """Its deadline passed."""


class CancelReason(IntEnum):
    """Why a frontend takes a request back."""

    DISCONNECT = 0
    STOP_STRING = 1
    SHUTDOWN = 2
    FRONTEND_ERROR = 3


class RefusalReason(IntEnum):
    """Why a request is refused at the door; `RequestRefused` carries both sizes."""

    PROMPT_TOO_LONG = 0
    """The prompt leaves no room for one token within max_model_len."""
    POOL_TOO_SMALL = 1
    """Prompt and max_tokens need more tokens of KV than the whole pool holds."""
    EMPTY_PROMPT = 2
    """A request needs at least one prompt token."""
    NO_OUTPUT = 3
    """max_tokens must be at least one."""
    QUEUE_FULL = 4
    """max_num_queued_reqs requests wait already; both sizes are in requests."""
    QUEUE_TOKENS = 5
    """With its prompt more than max_num_queued_tokens tokens would wait."""


class WaitReason(IntEnum):
    """Why a request that was considered in a step got nothing."""

    NO_SEAT = 0
    """max_num_seqs requests run already."""
    NO_BUDGET = 1
    """The step's token budget is used up."""
    NO_BLOCKS = 2
    """The pool cannot hold its known tokens, or its next one, now."""
    AFTER_PREEMPTION = 3
    """Blocks ran out in this step, so nobody is let in."""
    ADMISSION = 4
    """The admission policy expects the pool to run out of blocks."""
    IN_FLIGHT = 5
    """It was preempted, and a step that still samples its next token is in flight."""
    PARTIAL_PREFILLS = 6
    """max_num_partial_prefills prompts are computed in part."""


class _Record(msgspec.Struct, frozen=True, array_like=True, tag=True, kw_only=True):
    pass


# --- events ---------------------------------------------------------------------------------


class RequestArrived(_Record, frozen=True, tag=1):
    request_id: RequestId
    num_prompt_tokens: int
    max_tokens: int
    block_hashes: tuple[BlockHash, ...]
    """One per full block of the prompt, in order; empty when prefix caching is off."""
    frontend_index: int
    arrived_us: int
    """On the clock of `ClockAdvanced`."""
    priority: int
    """Lower goes first; looked at under the priority policy only."""
    has_exact_length: bool
    """Nothing but max_tokens, a cancel or a failure can end it."""


class CancelRequested(_Record, frozen=True, tag=2):
    request_id: RequestId
    reason: CancelReason


class RowStopped(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    request_id: RequestId
    reason: FinishReason
    """STOP or FAILED."""


class BlockSealed(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    request_id: RequestId
    block_hash: BlockHash


class StepFinished(_Record, frozen=True, tag=3):
    """The worker computed a step: every row that samples got one token, except the failed ones."""

    step_id: StepId
    stopped: tuple[RowStopped, ...]
    sealed: tuple[BlockSealed, ...]
    """Hashes of blocks that became full of known tokens with this step's tokens."""
    execute_us: int
    """Measured in the worker."""


class ClockAdvanced(_Record, frozen=True, tag=4):
    now_us: int


class PrefixCacheReset(_Record, frozen=True, tag=5):
    """Somebody asked that nothing computed before is found again."""


Event = RequestArrived | CancelRequested | StepFinished | ClockAdvanced | PrefixCacheReset

# --- decisions ------------------------------------------------------------------------------


class PrefillChunk(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """Tokens [start, start + num_tokens) of a request's known tokens are computed in this step."""

    request_id: RequestId
    start: int
    num_tokens: int
    samples: bool
    """True when the chunk reaches the last known token, so that a new one is sampled."""


class BlocksGranted(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """Blocks appended to a request's block table in this step, in order."""

    request_id: RequestId
    block_ids: tuple[BlockId, ...]


class Admission(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """A request leaves the waiting queue; its block table starts empty before `BlocksGranted`."""

    request_id: RequestId
    num_cached_tokens: int
    """Tokens whose KV the prefix cache already holds; the first chunk starts there."""
    num_recomputed_tokens: int = 0
    """Tokens that were computed before a preemption and are computed again."""


class RequestWaits(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    request_id: RequestId
    reason: WaitReason


class StepPlan(_Record, frozen=True, tag=16):
    """One step's work: rows are first the decodes, then the chunks, in this order.

    A decode computes the last known token of a request and samples the next one.
    """

    step_id: StepId
    decodes: tuple[RequestId, ...]
    chunks: tuple[PrefillChunk, ...]
    granted: tuple[BlocksGranted, ...]
    admitted: tuple[Admission, ...]
    preempted: tuple[RequestId, ...]
    """Lost all blocks and wait again; the worker keeps their tokens."""
    waits: tuple[RequestWaits, ...]
    margin_blocks: int = 0
    """What the forecast holds back after preemptions that did not pay."""


class RequestEnded(_Record, frozen=True, tag=17):
    request_id: RequestId
    reason: FinishReason


class RequestRefused(_Record, frozen=True, tag=18):
    request_id: RequestId
    reason: RefusalReason
    num_tokens: int
    """What the request needs."""
    limit_tokens: int
    """What there is."""


class PrefixCacheEmptied(_Record, frozen=True, tag=19):
    """The answer to `PrefixCacheReset`: no block is found by its contents now."""

    num_freed: int
    """Blocks that nobody used: they held contents and hold none now."""
    num_in_use: int
    """Blocks that requests keep until they end."""


Outcome = RequestEnded | RequestRefused | PrefixCacheEmptied
"""What an event is answered with."""

Decision = StepPlan | Outcome
