"""One id and one log line for every HTTP request: what was asked, how it was answered, how long.

Never a body, a header or anything of a prompt but the id, and that only if it is plain; paths as
they came over the wire, so that nothing in them can forge a line. Health checks are logged at debug
only. Wraps the whole application.
"""

import re
import secrets
import time

import structlog
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cearx.frontend.anthropic_errors import error_body
from cearx.frontend.caller import Caller, set_caller
from cearx.frontend.errors import ApiError
from cearx.frontend.http_io import refuse_body

QUIET = (b"/health", b"/live")
MAX_PATH = 200
MAX_METHOD = 16
MAX_HEADERS = 100
"""More than any client sends."""
PLAIN_ID = re.compile(rb"[A-Za-z0-9._:/+=@-]{1,128}")
"""Another X-Request-Id is not taken over."""
CLIENT_GONE = 499
"""Logged when the client left before there was an answer."""

log = structlog.get_logger()


class AccessLog:
    """An ASGI application around another one."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status = CLIENT_GONE
        start = time.monotonic()
        request_id = _request_id(scope)
        id_header = (b"x-request-id", request_id.encode())
        set_caller(scope, Caller(request_id=request_id))

        async def send_and_look(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message = {**message, "headers": [*message.get("headers", ()), id_header]}
            await send(message)

        try:
            if len(scope["headers"]) > MAX_HEADERS:
                await _refuse_headers(scope, receive, send_and_look)
            else:
                await self._app(scope, receive, send_and_look)
        finally:
            path: bytes = scope.get("raw_path") or b""
            write = log.debug if path in QUIET else log.info
            write(
                "request",
                method=scope["method"][:MAX_METHOD],
                path=path[:MAX_PATH].decode("ascii", "replace"),
                status=status,
                ms=round((time.monotonic() - start) * 1000),
                request_id=request_id,
            )


def _request_id(scope: Scope) -> str:
    for name, value in scope["headers"]:
        if name == b"x-request-id" and PLAIN_ID.fullmatch(value):
            text: str = value.decode("ascii")
            return text
    return secrets.token_hex(16)


async def _refuse_headers(scope: Scope, receive: Receive, send: Send) -> None:
    count = len(scope["headers"])
    message = f"A request may have at most {MAX_HEADERS} headers, got {count}"
    error = ApiError(431, message, code="too_many_headers")
    await refuse_body(receive, send, error.status, error_body(scope["path"], error))
