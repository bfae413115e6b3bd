"""One log line for every HTTP request: what was asked, how it was answered, how long it took.

Never a body, a header or anything of a prompt; paths as they came over the wire, so that nothing in
them can forge a line. Health checks are logged at debug only. Wraps the whole application.
"""

import time

import structlog
from starlette.types import ASGIApp, Message, Receive, Scope, Send

QUIET = b"/health"
MAX_PATH = 200
MAX_METHOD = 16
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

        async def send_and_look(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, send_and_look)
        finally:
            path: bytes = scope.get("raw_path") or b""
            write = log.debug if path == QUIET else log.info
            write(
                "request",
                method=scope["method"][:MAX_METHOD],
                path=path[:MAX_PATH].decode("ascii", "replace"),
                status=status,
                ms=round((time.monotonic() - start) * 1000),
            )
