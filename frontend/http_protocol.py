"""One HTTP/1.1 connection on hypercorn: the head of a request comes in time, or it gets a 408.

Owns that timer and the answers to what is no request at all, which are error objects as all errors
are. HTTP/2 and web sockets, which hypercorn would begin when a client asks, are not spoken: nothing
of the server's limits and deadlines was made for them. Used by `http_server.py`.
"""

import asyncio
from typing import Any

import h11
from hypercorn.config import Config
from hypercorn.events import Closed, Event, RawData, Updated
from hypercorn.protocol.h11 import H11Protocol

from cearx.frontend.errors import ApiError, invalid, too_slow


class ServerConfig(Config):
    """hypercorn's, with what it has no setting for."""

    request_read_timeout_s: float


class HTTP1(H11Protocol):
    """Created by hypercorn for each connection, in place of its choice between versions."""

    config: ServerConfig

    def __init__(self, *arguments: Any) -> None:
        *of_h11, _alpn_protocol = arguments  # as hypercorn's ProtocolWrapper is called
        super().__init__(*of_h11)
        self._head_timer: asyncio.TimerHandle | None = None

    async def handle(self, event: Event) -> None:
        await super().handle(event)
        if isinstance(event, Closed):
            self._stop_timer()
        elif isinstance(event, RawData) and self._head_timer is None and self._has_part_of_head:
            await self.send(Updated(idle=False))  # the idle timer has no say from here on
            loop, limit_s = asyncio.get_running_loop(), self.config.request_read_timeout_s
            self._head_timer = loop.call_later(limit_s, self._refuse_slow_head)

    @property
    def _has_part_of_head(self) -> bool:
        return self.connection.their_state is h11.IDLE and bool(self.connection.trailing_data[0])

    def _stop_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _refuse_slow_head(self) -> None:
        self._head_timer = None
        self.task_group.spawn(self._refuse, too_slow("head", self.config.request_read_timeout_s))

    async def _create_stream(self, request: h11.Request) -> None:
        """The head is complete."""
        self._stop_timer()
        kept = [(name, value) for name, value in request.headers if name != b"upgrade"]
        if len(kept) != len(request.headers):
            request = h11.Request(
                method=request.method,
                target=request.target,
                headers=kept,
                http_version=request.http_version,
            )
        await super()._create_stream(request)

    async def _check_protocol(self, event: h11.Request) -> None:
        """Whatever else it asks for, it is answered in HTTP/1.1."""

    async def _send_error_response(self, status_code: int) -> None:
        await self._send_refusal(_explain(status_code, self.config))

    async def _refuse(self, error: ApiError) -> None:
        await self._send_refusal(error)
        await self.send(Closed())

    async def _send_refusal(self, error: ApiError) -> None:
        """To a client whose connection is of no use any more."""
        body = error.body()
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", b"%d" % len(body)),
            (b"connection", b"close"),
            *self.config.response_headers("h11"),
        ]
        await self._send_h11_event(h11.Response(status_code=error.status, headers=headers))
        await self._send_h11_event(h11.Data(data=body))
        await self._send_h11_event(h11.EndOfMessage())


def _explain(status: int, config: Config) -> ApiError:
    """What the HTTP parser has against a request."""
    if status == 431:
        limit = config.h11_max_incomplete_size
        message = f"The head of a request may have {limit} bytes (--max-header-bytes)"
        return ApiError(431, message, code="headers_too_large")
    if status == 501:
        return ApiError(501, "A body may be chunked or have a length", code="not_implemented")
    return invalid(None, "The request is not valid HTTP/1.1", "invalid_http")
