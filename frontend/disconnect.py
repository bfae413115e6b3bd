"""Ends the work for a client that went away or does not read.

A disconnect is delivered only through `receive`, so a task awaits it for as long as the answer is
in the making; a client that takes nothing for too long is treated the same. Both cancel the scope
in which the answer is made. Called by `generation_route.py`.
"""

import asyncio
from collections.abc import Awaitable, Callable

import anyio
import anyio.lowlevel
import structlog
from starlette.types import Message, Receive, Send

MAX_BLOCKED_S = 30.0
"""How long one write may wait for the client to read."""

log = structlog.get_logger()


class _WatchedSend:
    """`send` that remembers since when it waits; a single timer looks, so that a send is cheap."""

    def __init__(self, send: Send, scope: anyio.CancelScope, limit_s: float) -> None:
        self._send = send
        self._scope = scope
        self._limit_s = limit_s
        self._loop = asyncio.get_running_loop()
        self._blocked_since: float | None = None
        self._timer = self._loop.call_later(limit_s, self._check)

    async def __call__(self, message: Message) -> None:
        self._blocked_since = self._loop.time()
        try:
            await self._send(message)
        except OSError:  # the connection broke, for example because its peer acknowledges nothing
            self._scope.cancel()
            await anyio.lowlevel.checkpoint()  # raises the cancellation
        self._blocked_since = None

    def stop(self) -> None:
        self._timer.cancel()

    def _check(self) -> None:
        now = self._loop.time()
        since = self._blocked_since
        if since is not None and now - since >= self._limit_s:
            log.warning("client does not read, its request is ended", after_s=self._limit_s)
            self._scope.cancel()
        else:
            due = (now if since is None else since) + self._limit_s
            self._timer = self._loop.call_at(due, self._check)


async def serve_while_connected(
    receive: Receive,
    send: Send,
    work: Callable[[Send], Awaitable[None]],
    max_blocked_s: float | None = None,
) -> None:
    """Runs `work` with a watched `send`, and cancels it when the client is gone or stuck.

    `max_blocked_s` is MAX_BLOCKED_S unless given.
    """
    async with anyio.create_task_group() as group:
        group.start_soon(_cancel_on_disconnect, receive, group.cancel_scope)
        watched = _WatchedSend(send, group.cancel_scope, max_blocked_s or MAX_BLOCKED_S)
        try:
            await work(watched)
        finally:
            watched.stop()
        group.cancel_scope.cancel()


async def _cancel_on_disconnect(receive: Receive, scope: anyio.CancelScope) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    scope.cancel()
