"""One streamed POST on a connection of its own, timed.

Owns the request's bytes, the HTTP parsing (httptools) and the clock readings: the start is before
the connection is made, a chunk's time is when its bytes are read. Never retries. Called by
`load_loop.py`.
"""

import asyncio
import contextlib
import ssl
import time
from itertools import pairwise
from typing import Any, cast

import httptools
import msgspec

from cearx.frontend.bench.event_parser import EventParser, error_text
from cearx.frontend.bench.wire import StreamRecord, Target

MAX_ERROR_BYTES = 65536
"""So much of a body that is no stream is kept for its error message."""


def request_bytes(target: Target, body: bytes) -> bytes:
    """The whole HTTP request, ready to be written."""
    host = f"[{target.host}]" if ":" in target.host else target.host
    headers = {
        "Host": f"{host}:{target.port}",
        "Content-Type": "application/json",
        "Accept": "text/event-stream",
        "Content-Length": str(len(body)),
        **target.headers,
    }
    lines = [f"POST {target.path} HTTP/1.1", *(f"{name}: {text}" for name, text in headers.items())]
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + body


class StreamProtocol(asyncio.Protocol):
    """Writes one request and feeds the answer to the parsers until it ends."""

    def __init__(self, request: bytes, ended: asyncio.Future[None]) -> None:
        self._request = request
        self._ended = ended
        self._http = httptools.HttpResponseParser(self)
        self._now = 0.0
        self._is_stream = False
        self._error_body = b""
        self.events = EventParser()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are no subclasses of asyncio's.
        cast(asyncio.WriteTransport, transport).write(self._request)

    def data_received(self, data: bytes) -> None:
        self._now = time.monotonic()
        try:
            self._http.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(f"the answer is no HTTP: {error}")

    def connection_lost(self, error: Exception | None) -> None:
        reason = f": {error}" if error else ""
        self._fail(f"the connection closed before the answer's end{reason}")

    # What httptools calls.

    def on_headers_complete(self) -> None:
        self._is_stream = self._http.get_status_code() == 200

    def on_body(self, body: bytes) -> None:
        if not self._is_stream:
            self._error_body += body[: MAX_ERROR_BYTES - len(self._error_body)]
            return
        self.events.feed(body, self._now)
        if self.events.is_done:
            self._end()

    def on_message_complete(self) -> None:
        if not self._is_stream:
            self._fail(f"HTTP status {self._http.get_status_code()}: {_message(self._error_body)}")
        elif not self.events.is_done:
            self._fail("the stream ended without [DONE]")

    def _end(self) -> None:
        if not self._ended.done():
            self._ended.set_result(None)

    def _fail(self, reason: str) -> None:
        if not self._ended.done():
            self.events.error = self.events.error or reason
            self._ended.set_result(None)


def _message(body: bytes) -> str:
    try:
        content: Any = msgspec.json.decode(body)
    except msgspec.DecodeError:
        return body[:200].decode(errors="replace")
    return error_text(content.get("error", content) if isinstance(content, dict) else content)


async def stream(
    target: Target, tls: ssl.SSLContext | None, request: bytes, record: StreamRecord, begin: float
) -> int:
    """Sends one request and fills its record; answers the number of chunks."""
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[None] = loop.create_future()
    protocol = StreamProtocol(request, ended)
    start = time.monotonic()
    transport: asyncio.BaseTransport | None = None
    try:
        async with asyncio.timeout(target.request_timeout_s):
            transport, _ = await loop.create_connection(
                lambda: protocol,
                target.address,
                target.port,
                ssl=tls,
                server_hostname=target.host if tls else None,
            )
            await ended
    except TimeoutError:
        protocol.events.error = f"no end within {target.request_timeout_s:g} s"
    except OSError as error:
        protocol.events.error = f"no connection to {target.host}:{target.port}: {error}"
    finally:
        if transport is not None:
            with contextlib.suppress(RuntimeError):
                transport.close()
    fill(record, protocol.events, start, begin)
    record.end_s = time.monotonic() - begin
    return len(protocol.events.chunk_times)


def fill(record: StreamRecord, events: EventParser, start: float, begin: float) -> None:
    """TTFT to the first chunk, ITL between chunks, latency to the last one."""
    times = events.chunk_times
    record.start_s = start - begin
    record.prompt_tokens = events.prompt_tokens
    record.completion_tokens = events.completion_tokens
    record.error = events.error
    if times:
        record.ttft_s = times[0] - start
        record.latency_s = times[-1] - start
        record.itls_s = [later - earlier for earlier, later in pairwise(times)]
    elif record.error is None:
        record.error = "the stream holds no chunk with choices"
