"""Reading request bodies and writing whole responses, on bare ASGI.

Owns the limits of bodies: their size, counted as they arrive whatever Content-Length says, and the
time in which they must be there. Called by the routes.
"""

import asyncio
from collections.abc import Iterable

import anyio
import msgspec
from starlette.types import Receive, Scope, Send

from cearx.core.config import FrontendConfig
from cearx.frontend.errors import ApiError, too_slow

DISCARD_BYTES = 64 * 1024 * 1024
DISCARD_S = 2.0
"""What is still read of a body that is too large: a client that is cut off in the middle of
sending would see a broken connection and not the answer."""


class ClientDisconnected(Exception):
    """The client went away before its request was complete."""


class BodyLimits(msgspec.Struct, frozen=True):
    """What a body may be."""

    max_bytes: int
    timeout_s: float

    @classmethod
    def of(cls, config: FrontendConfig) -> "BodyLimits":
        return cls(config.max_body_bytes, config.request_read_timeout)


async def read_body(scope: Scope, receive: Receive, limits: BodyLimits) -> bytes:
    """The whole body; raises ApiError as soon as it is too large (413) or too late (408)."""
    declared = _content_length(scope)
    if declared is not None and declared > limits.max_bytes:
        raise _too_large(declared, limits.max_bytes)
    try:
        async with asyncio.timeout(limits.timeout_s):
            return await _receive_all(receive, limits.max_bytes)
    except TimeoutError:
        raise too_slow("body", limits.timeout_s) from None


async def _receive_all(receive: Receive, limit: int) -> bytes:
    chunks: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnected
        chunk: bytes = message.get("body", b"")
        size += len(chunk)
        if size > limit:
            raise _too_large(size, limit)
        chunks.append(chunk)
        if not message.get("more_body", False):
            return b"".join(chunks)


def _content_length(scope: Scope) -> int | None:
    for name, value in scope["headers"]:
        if name == b"content-length":
            return int(value)  # the HTTP parser accepts nothing but digits
    return None


def _too_large(size: int, limit: int) -> ApiError:
    message = f"The body must be at most {limit} bytes, got at least {size}"
    return ApiError(413, message, code="request_too_large")


async def send_body(
    send: Send,
    status: int,
    body: bytes,
    *,
    more_body: bool = False,
    more_headers: Iterable[tuple[bytes, bytes]] = (),
) -> None:
    """A JSON response with its length; with `more_body` the caller ends it by an empty body."""
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    headers += more_headers
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": more_body})


async def send_error(send: Send, error: ApiError, body: bytes | None = None) -> None:
    """`body`: the error in another form than OpenAI's."""
    retry = error.retry_after_s
    headers = [] if retry is None else [(b"retry-after", b"%d" % retry)]
    await send_body(send, error.status, body or error.body(), more_headers=headers)


async def refuse_body(
    receive: Receive,
    send: Send,
    status: int,
    body: bytes,
    more_headers: Iterable[tuple[bytes, bytes]] = (),
) -> None:
    """Answers at once, then lets the client finish sending within bounds.

    For every answer that is given before the body was read: a connection on which a part of a
    request is still to come cannot carry the next one, and is cut.
    """
    await send_body(send, status, body, more_body=True, more_headers=more_headers)
    discarded = 0
    with anyio.move_on_after(DISCARD_S):
        while discarded < DISCARD_BYTES:
            message = await receive()
            discarded += len(message.get("body", b""))
            if not message.get("more_body", False):
                break
    await send({"type": "http.response.body", "body": b"", "more_body": False})
