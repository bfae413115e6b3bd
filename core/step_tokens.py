"""What the tokens of a step mean to the scheduler: who stops or fails, which blocks are full.

Counts each live request's tokens on and hashes the blocks that they fill; the scheduler gets no
token id. Called by `engine.py` for each result of the worker.
"""

from array import array
from collections.abc import Iterable

import msgspec

from cearx.core.block_hash import block_hash
from cearx.core.config import SchedulerConfig
from cearx.core.events import BlockSealed, FinishReason, RowStopped
from cearx.core.identifiers import RequestId
from cearx.core.live_requests import LiveRequest, LiveRequests
from cearx.core.messages import RowOutput


class StepTokens(msgspec.Struct, kw_only=True):
    """Of one result."""

    stopped: list[RowStopped] = []
    sealed: list[BlockSealed] = []
    stop_tokens: dict[RequestId, int] = {}
    """The members of stop_token_ids that ended requests."""


def take_tokens(
    requests: LiveRequests, rows: Iterable[RowOutput], config: SchedulerConfig, secret: bytes
) -> StepTokens:
    """Takes in the rows of a result; `secret` is the key of the block hashes."""
    taken, find = StepTokens(), requests.get
    for row in rows:
        request, token_id = find(row.request_id), row.token_id
        if request is None:  # it ended while the step ran
            continue
        if row.vector is not None:  # its one output, which nothing is computed from
            request.num_outputs += 1
            continue
        if token_id is None:
            taken.stopped.append(RowStopped(request_id=row.request_id, reason=FinishReason.FAILED))
            continue
        request.num_outputs += 1
        if request.num_outputs >= request.min_tokens:
            sampling = request.sampling
            if token_id in sampling.eos_token_ids:
                taken.stopped.append(_stop(row))
            elif token_id in sampling.stop_token_ids:
                taken.stopped.append(_stop(row))
                taken.stop_tokens[row.request_id] = token_id
        if config.enable_prefix_caching:
            request.open_block.append(token_id)
            if len(request.open_block) == config.block_size:
                taken.sealed.append(_seal(request, row.request_id, secret))
    return taken


def _stop(row: RowOutput) -> RowStopped:
    return RowStopped(request_id=row.request_id, reason=FinishReason.STOP)


def _seal(request: LiveRequest, request_id: RequestId, secret: bytes) -> BlockSealed:
    """Its open block is full."""
    packed = request.open_block.tobytes()
    request.parent_hash = block_hash(secret, request.parent_hash, packed)
    request.open_block = array("i")
    return BlockSealed(request_id=request_id, block_hash=request.parent_hash)
