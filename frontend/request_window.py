"""The window of requests that the core has at a time; others wait here, in order.

Owns the keys, and which stream each key's outputs belong to. Never asks whether the engine is
there. Called by `engine_client.py`.
"""

from collections.abc import Callable, Iterable, Sequence

import msgspec

from cearx.core.events import CancelReason
from cearx.core.identifiers import BlockHash, RequestKey
from cearx.core.messages import (
    Cancel,
    FrontendToCore,
    Output,
    Pooling,
    Refused,
    SamplingParams,
    Submit,
)
from cearx.frontend.errors import ApiError, refused
from cearx.frontend.request_stream import RequestStream

MAX_OUTSTANDING = 1024
"""Requests of one frontend that the core has at a time."""


class EngineRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What the engine needs of one request; valid already."""

    token_ids: bytes
    block_hashes: tuple[BlockHash, ...]
    cache_root: BlockHash
    max_tokens: int
    sampling: SamplingParams
    priority: int = 0
    has_exact_length: bool = False
    num_choices: int = 0
    """n in the first of a prompt's n requests, for the metrics."""
    grammar: str | None = None
    """What the output must follow; it was checked, and the vocabulary was sent."""
    pooling: Pooling | None = None
    """The one output is a vector."""


class RequestWindow:
    """Use inside the event loop."""

    def __init__(self, send: Callable[[FrontendToCore], None]) -> None:
        self._send = send
        self._next_key = 0
        self._outstanding: dict[RequestKey, tuple[RequestStream, int]] = {}
        self._waiting: dict[RequestKey, tuple[RequestStream, int, Submit]] = {}

    @property
    def num_outstanding(self) -> int:
        return len(self._outstanding)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def submit(self, requests: Sequence[EngineRequest], received_us: int | None) -> RequestStream:
        """Hands them to the core, in order, as there is room."""
        keys = [RequestKey(self._next_key + index) for index in range(len(requests))]
        self._next_key += len(requests)
        stream = RequestStream(self.cancel, keys)
        for index, (key, request) in enumerate(zip(keys, requests, strict=True)):
            self._waiting[key] = (stream, index, _submit(key, request, received_us))
        self._fill()
        return stream

    def cancel(self, key: RequestKey, reason: CancelReason) -> None:
        """Takes one back, wherever it is."""
        if self._waiting.pop(key, None) is None and self._outstanding.pop(key, None) is not None:
            self._send(Cancel(request_key=key, reason=reason))
            self._fill()

    def cancel_all(self, reason: CancelReason) -> None:
        """Those that the core has."""
        for key in tuple(self._outstanding):
            self.cancel(key, reason)

    def forget_all(self) -> None:
        """The core has nothing any more."""
        self._outstanding.clear()

    def fail(self, error: ApiError) -> None:
        """Ends every stream with an error; nothing waits any more."""
        streams = [stream for stream, _ in self._outstanding.values()]
        streams += [stream for stream, _, _ in self._waiting.values()]
        self._waiting.clear()
        for stream in streams:
            stream.fail(error)

    def take(self, outputs: Iterable[Output]) -> None:
        """Brings a step's outputs to their streams."""
        for output in outputs:
            key = output.request_key
            entry = self._outstanding.get(key)
            if entry is None:  # cancelled while this output was on its way
                continue
            if output.finish_reason is not None:
                del self._outstanding[key]
            stream, index = entry
            stream.deliver(index, output)
        self._fill()

    def refuse(self, message: Refused) -> None:
        entry = self._outstanding.pop(message.request_key, None)
        if entry is not None:
            entry[0].fail(refused(message))
        self._fill()

    def _fill(self) -> None:
        while self._waiting and len(self._outstanding) < MAX_OUTSTANDING:
            key = next(iter(self._waiting))
            stream, index, submit = self._waiting.pop(key)
            self._outstanding[key] = (stream, index)
            self._send(submit)


def _submit(key: RequestKey, request: EngineRequest, received_us: int | None) -> Submit:
    return Submit(
        request_key=key,
        token_ids=request.token_ids,
        block_hashes=request.block_hashes,
        cache_root=request.cache_root,
        max_tokens=request.max_tokens,
        sampling=request.sampling,
        priority=request.priority,
        has_exact_length=request.has_exact_length,
        received_us=received_us,
        num_choices=request.num_choices,
        grammar=request.grammar,
        pooling=request.pooling,
    )
