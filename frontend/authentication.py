"""Lets in whoever sends an API key; everything but the probes are closed to others.

Owns the comparison, whose time does not depend on how much of a key is right, and the tenant that a
key stands for. An ASGI layer around all routes; built by `app.py`.
"""

import hashlib
import hmac

from starlette.types import ASGIApp, Receive, Scope, Send

from cearx.frontend.anthropic_errors import error_body
from cearx.frontend.caller import caller_of
from cearx.frontend.errors import ApiError
from cearx.frontend.http_io import refuse_body

OPEN_PATHS = ("/health", "/live")
BEARER = b"bearer "


class Authentication:
    """Around `app`, for at least one key; `digests` are the keys' SHA-256."""

    def __init__(self, app: ASGIApp, digests: tuple[bytes, ...]) -> None:
        self._app = app
        self._digests = digests

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS:
            key = _key(scope)
            digest = None if key is None else self._find(key)
            if digest is None:
                await _refuse(scope, receive, send, key)
                return
            if len(self._digests) > 1:
                caller_of(scope).tenant = digest.hex()
        await self._app(scope, receive, send)

    def _find(self, key: bytes) -> bytes | None:
        given = hashlib.sha256(key).digest()
        found = None
        for digest in self._digests:  # all of them, whichever is right
            if hmac.compare_digest(digest, given):
                found = digest
        return found


def _key(scope: Scope) -> bytes | None:
    """From OpenAI's header or Anthropic's."""
    headers = dict(scope["headers"])
    value: bytes = headers.get(b"authorization", b"")
    if value[: len(BEARER)].lower() == BEARER:
        return value[len(BEARER) :].strip()
    key: bytes | None = headers.get(b"x-api-key")
    return key


async def _refuse(scope: Scope, receive: Receive, send: Send, key: bytes | None) -> None:
    message = (
        "An API key is needed: send the header Authorization: Bearer KEY"
        if key is None
        else "The API key is not one of this server's"
    )
    error = ApiError(401, message, code="invalid_api_key")
    challenge = (b"www-authenticate", b"Bearer")
    body = error_body(scope["path"], error)
    await refuse_body(receive, send, error.status, body, more_headers=[challenge])
