"""The frontend's view of the engine: requests go in, streams of outputs come back.

Routes the core's step outputs to the requests they belong to, holds the window of outstanding
requests, cancels, and tells every stream when the core is gone. Knows no HTTP and no text. The
routes call `submit`; `process.py` creates it.
"""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

import anyio
import msgspec
import structlog
import zmq

from cearx.core.events import CancelReason, PrefixCacheEmptied
from cearx.core.identifiers import BlockHash, RequestKey
from cearx.core.messages import (
    AbortLabels,
    Cancel,
    CoreToFrontend,
    EngineMetrics,
    EngineReady,
    Output,
    Pooling,
    PrefixCacheWasReset,
    Refused,
    SamplingParams,
    StepOutputs,
    Submit,
    Vocabulary,
)
from cearx.frontend.core_questions import CoreQuestions
from cearx.frontend.core_socket import CoreSocket
from cearx.frontend.errors import ApiError, refused, unavailable
from cearx.frontend.request_labels import RequestLabels

MAX_OUTSTANDING = 1024
"""Requests of one frontend that the core has at a time; others wait here, in order."""
MAX_GATHERED = 65536
"""Tokens and log-probabilities kept for a client that does not read; more end its request."""

log = structlog.get_logger()


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


class RequestStream:
    """The outputs of a few requests that one client waits for, as one stream of batches.

    Iterate it inside `with`: leaving the block takes back whatever has not ended.
    """

    def __init__(self, client: "EngineClient", keys: Sequence[RequestKey]) -> None:
        self._client = client
        self._open = dict(enumerate(keys))
        self._gathered: list[tuple[int, Output]] = []
        self._num_gathered = 0
        self._error: ApiError | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._is_nudged = False

    def __aiter__(self) -> "RequestStream":
        return self

    async def __anext__(self) -> list[tuple[int, Output]]:
        """(index of the request, output) pairs, all that came since the last call, in order.

        Empty only after a `nudge`. Raises ApiError when the engine refuses a request, is lost or
        shuts down.
        """
        while not self._gathered:
            if self._is_nudged:
                break
            if self._error is not None:
                raise self._error
            if not self._open:
                raise StopAsyncIteration
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        batch, self._gathered = self._gathered, []
        self._num_gathered = 0
        self._is_nudged = False
        return batch

    def nudge(self) -> None:
        """Whoever iterates gets a batch now, though it may be empty."""
        self._is_nudged = True
        self._wake()

    def __enter__(self) -> "RequestStream":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        # Nothing but the client's leaving (or not reading) cancels the task of a request.
        is_disconnect = kind is not None and issubclass(kind, asyncio.CancelledError)
        self.close(CancelReason.DISCONNECT if is_disconnect else CancelReason.FRONTEND_ERROR)

    def close(self, reason: CancelReason) -> None:
        """Takes back whatever has not ended."""
        for index in tuple(self._open):
            self.cancel(index, reason)

    def cancel(self, index: int, reason: CancelReason) -> None:
        """Takes one request back; it brings no further output."""
        key = self._open.pop(index, None)
        if key is not None:
            self._gathered = [pair for pair in self._gathered if pair[0] != index]
            self._client.cancel(key, reason)

    def deliver(self, index: int, output: Output) -> None:
        if index not in self._open or self._error is not None:
            return
        self._gathered.append((index, output))
        self._num_gathered += len(output.token_ids)
        for logprobs in output.logprobs or ():
            self._num_gathered += len(logprobs.top)
        if output.finish_reason is not None:
            del self._open[index]
        if self._num_gathered > MAX_GATHERED:
            self.fail(unavailable("The client reads too slowly", "client_too_slow"))
            self.close(CancelReason.DISCONNECT)
        self._wake()

    def fail(self, error: ApiError) -> None:
        """Ends the stream with an error, after what was gathered before it."""
        self._error = self._error or error
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class EngineClient:
    """One core link of one frontend; see the module docstring. Use inside the event loop."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        runtime_dir: Path,
        boot_id: int,
        frontend_index: int,
    ) -> None:
        self.engine: EngineReady | None = None
        """None until the engine is ready; use `require_ready` in routes."""
        self._ready = anyio.Event()
        self._down: ApiError | None = None
        self._is_draining = False
        self._next_key = 0
        self._outstanding: dict[RequestKey, tuple[RequestStream, int]] = {}
        self._waiting: dict[RequestKey, tuple[RequestStream, int, Submit]] = {}
        self.labels = RequestLabels()
        self._socket = CoreSocket(
            context, runtime_dir, boot_id, frontend_index, self._on_message, self._on_lost
        )
        self._questions = CoreQuestions(self._socket.send)

    async def wait_ready(self) -> EngineReady:
        """Raises ApiError when the core goes away before it is ready."""
        await self._ready.wait()
        return self.require_ready()

    def require_ready(self) -> EngineReady:
        """The engine's sizes; raises ApiError (503) when new requests cannot be served now."""
        if self._is_draining and self._down is None:
            raise unavailable("The server is shutting down", "shutting_down")
        return self.require_engine()

    def require_engine(self) -> EngineReady:
        """The engine's sizes; raises ApiError (503) when nobody is there to be asked."""
        if self._down is not None:
            raise self._down
        if self.engine is None:
            raise unavailable("The engine is starting", "engine_starting")
        return self.engine

    def submit(
        self, requests: Sequence[EngineRequest], received_us: int | None = None
    ) -> RequestStream:
        """Hands requests to the core, in order, as the window allows; raises ApiError (503).

        `received_us` is when their HTTP request had been read, on the monotonic clock.
        """
        self.require_ready()
        keys = [RequestKey(self._next_key + index) for index in range(len(requests))]
        self._next_key += len(requests)
        stream = RequestStream(self, keys)
        for index, (key, request) in enumerate(zip(keys, requests, strict=True)):
            self._waiting[key] = (stream, index, _submit(key, request, received_us))
        self._fill_window()
        return stream

    def cancel(self, key: RequestKey, reason: CancelReason) -> None:
        if self._waiting.pop(key, None) is None and self._outstanding.pop(key, None) is not None:
            self._socket.send(Cancel(request_key=key, reason=reason))
            self._fill_window()

    def send_vocabulary(self, vocabulary: Vocabulary) -> None:
        """For grammars; raises ApiError (503)."""
        self.require_ready()
        self._socket.send(vocabulary)

    async def read_metrics(self) -> EngineMetrics:
        """What the core has counted up to now, for all frontends; raises ApiError (503)."""
        self.require_engine()
        return await self._questions.read_metrics()

    def abort_labels(self, labels: Sequence[str]) -> None:
        """Ends the requests with these ids in whatever frontend; raises ApiError (503)."""
        self.require_engine()
        self._socket.send(AbortLabels(labels=tuple(labels)))

    async def reset_prefix_cache(self) -> PrefixCacheEmptied:
        """Lets the core find nothing again that was computed before; raises ApiError (503)."""
        self.require_ready()
        return await self._questions.reset_prefix_cache()

    def drain(self) -> None:
        """From here on no new requests; those that run go on."""
        self._is_draining = True

    @property
    def is_busy(self) -> bool:
        return bool(self._outstanding or self._waiting)

    def shut_down(self) -> None:
        """Takes everything back; running streams end with an error, new requests get 503."""
        self._go_down(unavailable("The server is shutting down", "shutting_down"))
        for key in tuple(self._outstanding):
            self.cancel(key, CancelReason.SHUTDOWN)

    def close(self) -> None:
        self._socket.close()

    @property
    def num_outstanding(self) -> int:
        return len(self._outstanding)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def _fill_window(self) -> None:
        while self._waiting and len(self._outstanding) < MAX_OUTSTANDING:
            key = next(iter(self._waiting))
            stream, index, submit = self._waiting.pop(key)
            self._outstanding[key] = (stream, index)
            self._socket.send(submit)

    def _on_message(self, message: CoreToFrontend) -> None:
        if isinstance(message, StepOutputs):
            for output in message.outputs:
                self._route(output)
            self._fill_window()
        elif isinstance(message, Refused):
            entry = self._outstanding.pop(message.request_key, None)
            if entry is not None:
                entry[0].fail(refused(message))
            self._fill_window()
        elif isinstance(message, EngineMetrics | PrefixCacheWasReset):
            self._questions.answer(message)
        elif isinstance(message, AbortLabels):
            self.labels.abort(message.labels)
        else:
            self.engine = message
            self._ready.set()

    def _route(self, output: Output) -> None:
        key = output.request_key
        entry = self._outstanding.get(key)
        if entry is None:  # cancelled while this output was on its way
            return
        if output.finish_reason is not None:
            del self._outstanding[key]
        stream, index = entry
        stream.deliver(index, output)

    def _on_lost(self) -> None:
        if self._down is None:
            log.error("core lost", outstanding=self.num_outstanding, waiting=self.num_waiting)
        self._go_down(unavailable("The engine is gone", "engine_lost"))
        self._outstanding.clear()

    def _go_down(self, error: ApiError) -> None:
        self._down = self._down or error
        self._ready.set()
        streams = [stream for stream, _ in self._outstanding.values()]
        streams += [stream for stream, _, _ in self._waiting.values()]
        self._waiting.clear()
        self._questions.fail(error)
        for stream in streams:
            stream.fail(error)


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
