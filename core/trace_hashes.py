"""Short forms of the two events that carry block hashes: all hashes of an event in one string.

Exact inverses of their expansion, for hashes of the usual size. Pure functions; called by
`trace_records.py`.
"""

import msgspec

from cearx.core.block_hash import DIGEST_SIZE
from cearx.core.events import BlockSealed, RequestArrived, RowStopped, StepFinished
from cearx.core.identifiers import BlockHash, RequestId, StepId


class ShortArrival(msgspec.Struct, frozen=True, array_like=True, tag=1, kw_only=True):
    """A `RequestArrived`."""

    request_id: RequestId
    num_prompt_tokens: int
    max_tokens: int
    hashes: bytes
    frontend_index: int
    arrived_us: int
    priority: int
    has_exact_length: bool


class ShortFinish(msgspec.Struct, frozen=True, array_like=True, tag=3, kw_only=True):
    """A `StepFinished`."""

    step_id: StepId
    stopped: tuple[RowStopped, ...]
    sealed: tuple[RequestId, ...]
    hashes: bytes
    """One for each of these."""
    execute_us: int


Short = ShortArrival | ShortFinish


def shorten(event: RequestArrived | StepFinished) -> Short | None:
    """None where there is nothing to gain or a hash has another size."""
    if type(event) is RequestArrived:
        hashes: list[BlockHash] | tuple[BlockHash, ...] = event.block_hashes
    else:
        assert isinstance(event, StepFinished), f"{event} carries no hashes"
        hashes = [sealed.block_hash for sealed in event.sealed]
    if not hashes or set(map(len, hashes)) != {DIGEST_SIZE}:
        return None
    joined = b"".join(hashes)
    if isinstance(event, StepFinished):
        return ShortFinish(
            step_id=event.step_id,
            stopped=event.stopped,
            sealed=tuple([sealed.request_id for sealed in event.sealed]),
            hashes=joined,
            execute_us=event.execute_us,
        )
    return ShortArrival(
        request_id=event.request_id,
        num_prompt_tokens=event.num_prompt_tokens,
        max_tokens=event.max_tokens,
        hashes=joined,
        frontend_index=event.frontend_index,
        arrived_us=event.arrived_us,
        priority=event.priority,
        has_exact_length=event.has_exact_length,
    )


def expand(short: Short) -> RequestArrived | StepFinished:
    """The inverse of `shorten`; raises ValueError for what it never returns."""
    data = short.hashes
    if len(data) % DIGEST_SIZE:
        raise ValueError(f"hashes of {len(data)} bytes, a hash has {DIGEST_SIZE}")
    hashes = [BlockHash(data[i : i + DIGEST_SIZE]) for i in range(0, len(data), DIGEST_SIZE)]
    if isinstance(short, ShortFinish):
        if len(hashes) != len(short.sealed):
            raise ValueError(f"{len(hashes)} hashes for {len(short.sealed)} requests")
        sealed = zip(short.sealed, hashes, strict=True)
        return StepFinished(
            step_id=short.step_id,
            stopped=short.stopped,
            sealed=tuple([BlockSealed(request_id=i, block_hash=h) for i, h in sealed]),
            execute_us=short.execute_us,
        )
    return RequestArrived(
        request_id=short.request_id,
        num_prompt_tokens=short.num_prompt_tokens,
        max_tokens=short.max_tokens,
        block_hashes=tuple(hashes),
        frontend_index=short.frontend_index,
        arrived_us=short.arrived_us,
        priority=short.priority,
        has_exact_length=short.has_exact_length,
    )
