"""The life of one HTTP request with a body: read it, answer while the client is there, tell errors.

Owns the order, and what is known of a request beside its body; how it is answered is the caller's
function. Called by the routes, which are bare ASGI applications.
"""

import time
from collections.abc import Awaitable, Callable

import msgspec
from starlette.types import Receive, Scope, Send

from cearx.frontend.caller import caller_of
from cearx.frontend.disconnect import serve_while_connected
from cearx.frontend.errors import ApiError
from cearx.frontend.http_io import (
    BodyLimits,
    ClientDisconnected,
    read_body,
    refuse_body,
    send_error,
)
from cearx.frontend.server_state import ServerState


class Received(msgspec.Struct, frozen=True, kw_only=True):
    """A request whose body is complete."""

    body: bytes
    received_us: int
    """When it was, on the monotonic clock."""
    label: str
    """The id by which the request may be aborted."""


MakeAnswer = Callable[[ServerState, Received, Send], Awaitable[None]]
"""Sends the whole answer; raises ApiError as long as nothing was sent."""


async def serve_request(
    state: ServerState,
    scope: Scope,
    receive: Receive,
    send: Send,
    make_answer: MakeAnswer,
    error_body: Callable[[ApiError], bytes] = ApiError.body,
) -> None:
    """Returns when the answer is sent or the client is gone."""
    try:
        body = await read_body(scope, receive, BodyLimits.of(state.config))
    except ClientDisconnected:
        return
    except ApiError as error:
        await refuse_body(receive, send, error.status, error_body(error))
        return
    caller = caller_of(scope)
    received = Received(body=body, received_us=time.monotonic_ns() // 1000, label=caller.request_id)

    async def answer(send: Send) -> None:
        try:
            await make_answer(state.for_caller(caller), received, send)
        except ApiError as error:
            await send_error(send, error, error_body(error))

    await serve_while_connected(receive, send, answer)
