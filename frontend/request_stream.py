"""The outputs of a few requests as one stream of batches, for the client that waits for them.

Owns what came and was not read yet, and its limit; taking requests back is told to whoever made the
stream. Knows no HTTP and no text. Made by `request_window.py`, read by the routes.
"""

import asyncio
from collections.abc import Callable, Sequence
from types import TracebackType

from cearx.core.events import CancelReason
from cearx.core.identifiers import RequestKey
from cearx.core.messages import Output
from cearx.frontend.errors import ApiError, unavailable

MAX_GATHERED = 65536
"""Tokens and log-probabilities kept for a client that does not read; more end its request."""


class RequestStream:
    """The outputs of a few requests that one client waits for, as one stream of batches.

    Iterate it inside `with`: leaving the block takes back whatever has not ended.
    """

    def __init__(
        self, cancel: Callable[[RequestKey, CancelReason], None], keys: Sequence[RequestKey]
    ) -> None:
        self._cancel = cancel
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
            self._cancel(key, reason)

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
