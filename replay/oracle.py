"""What the model would answer: lengths, ends and hashes of each request, taken from a log.

Owns the answer to "what does this row's next token do" for a scheduler that decides otherwise than
the logged one. A request that the log does not see through to its end goes on to max_tokens.
"""

import hashlib
from collections.abc import Iterable

import msgspec

from cearx.core.block_hash import DIGEST_SIZE
from cearx.core.config import SchedulerConfig
from cearx.core.events import (
    BlockSealed,
    CancelReason,
    CancelRequested,
    FinishReason,
    RequestArrived,
    StepFinished,
)
from cearx.core.identifiers import BlockHash, RequestId
from cearx.replay.timeline import Timeline
from cearx.replay.trace import TraceRecord


class Cancellation(msgspec.Struct, frozen=True, kw_only=True):
    """When the client takes a request back."""

    reason: CancelReason
    after_us: int
    """Since its arrival."""
    after_outputs: int
    """How many tokens it had by then."""


class SimulatedRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request and what becomes of it, whatever the scheduler does."""

    request_id: RequestId
    arrived_us: int
    num_prompt_tokens: int
    max_tokens: int
    num_outputs: int
    """Tokens until it ends by itself."""
    finish: FinishReason = FinishReason.LENGTH
    """STOP with the last token, FAILED instead of one more, or LENGTH."""
    block_hashes: tuple[BlockHash, ...] = ()
    sealed: tuple[BlockHash, ...] = ()
    """Hashes of the blocks that its outputs fill; made up beyond those."""
    cancellation: Cancellation | None = None
    frontend_index: int = 0
    priority: int = 0
    has_exact_length: bool = False

    def arrival(self, now_us: int) -> RequestArrived:
        return RequestArrived(
            request_id=self.request_id,
            num_prompt_tokens=self.num_prompt_tokens,
            max_tokens=self.max_tokens,
            block_hashes=self.block_hashes,
            frontend_index=self.frontend_index,
            arrived_us=now_us,
            priority=self.priority,
            has_exact_length=self.has_exact_length,
        )

    def stop_at(self, num_outputs: int) -> FinishReason | None:
        """How the row ends that would sample output number `num_outputs`, from 1."""
        if self.finish is FinishReason.FAILED:
            return FinishReason.FAILED if num_outputs > self.num_outputs else None
        stops = self.finish is FinishReason.STOP and num_outputs >= self.num_outputs
        return FinishReason.STOP if stops else None

    def sealed_by(self, num_outputs: int, block_size: int) -> BlockSealed | None:
        """The block that output number `num_outputs` fills, if it does."""
        num_tokens = self.num_prompt_tokens + num_outputs
        if num_tokens % block_size:
            return None
        index = num_tokens // block_size - 1
        logged = index - self.num_prompt_tokens // block_size
        known = self.sealed[logged] if logged < len(self.sealed) else None
        block_hash = known or made_up_hash(self.request_id, index)
        return BlockSealed(request_id=self.request_id, block_hash=block_hash)


def made_up_hash(*parts: object) -> BlockHash:
    """The same for the same parts, and for no others."""
    text = repr(parts).encode()
    return BlockHash(hashlib.blake2b(text, digest_size=DIGEST_SIZE, person=b"cearx-sim").digest())


class Recorder:
    """Feed the records of a log; then `requests` says what the model answered."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.timeline = Timeline(config)
        self._arrivals: dict[RequestId, RequestArrived] = {}
        self._sealed: dict[RequestId, list[BlockHash]] = {}
        self._cancels: dict[RequestId, tuple[CancelReason, int, int]] = {}
        self._now_us = 0

    def feed(self, value: object) -> None:
        self.timeline.feed(value)
        if isinstance(value, RequestArrived):
            self._arrivals[value.request_id] = value
        elif isinstance(value, StepFinished):
            for sealed in value.sealed:
                self._sealed.setdefault(sealed.request_id, []).append(sealed.block_hash)
        elif isinstance(value, CancelRequested):
            line = self.timeline.requests.get(value.request_id)
            if line is not None and line.ended is None and line.refused is None:
                num_outputs = len(line.token_steps)
                self._cancels[value.request_id] = (value.reason, self.timeline.now_us, num_outputs)

    def requests(self) -> list[SimulatedRequest]:
        """In order of arrival; call once, behind the last record."""
        self.timeline.finish()
        return [self._request(event) for event in self._arrivals.values()]

    def _request(self, event: RequestArrived) -> SimulatedRequest:
        line = self.timeline.requests[event.request_id]
        finish, num_outputs = FinishReason.LENGTH, event.max_tokens
        if line.ended in (FinishReason.STOP, FinishReason.FAILED):
            finish, num_outputs = line.ended, len(line.token_steps)
        cancellation = None
        if event.request_id in self._cancels:
            reason, at_us, after_outputs = self._cancels[event.request_id]
            cancellation = Cancellation(
                reason=reason,
                after_us=max(0, at_us - line.arrived_us),
                after_outputs=after_outputs,
            )
        return SimulatedRequest(
            request_id=event.request_id,
            arrived_us=line.arrived_us,
            num_prompt_tokens=event.num_prompt_tokens,
            max_tokens=event.max_tokens,
            num_outputs=num_outputs,
            finish=finish,
            block_hashes=event.block_hashes,
            sealed=tuple(self._sealed.get(event.request_id, ())),
            cancellation=cancellation,
            frontend_index=event.frontend_index,
            priority=event.priority,
            has_exact_length=event.has_exact_length,
        )


def requests_of(config: SchedulerConfig, records: Iterable[TraceRecord]) -> list[SimulatedRequest]:
    """One pass over a log."""
    recorder = Recorder(config)
    for record in records:
        recorder.feed(record.value)
    return recorder.requests()
