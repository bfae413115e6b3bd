"""Errors in Anthropic's form, and on which paths a client expects that form.

Called by the layers that refuse a request before its route sees it, and by the routes themselves.
"""

from typing import Literal

import msgspec
from starlette.responses import Response

from cearx.frontend.errors import ApiError, ErrorBody

PATHS = "/v1/messages"
"""This one and all below it."""
ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "request_too_large",
    431: "invalid_request_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class AnthropicErrorObject(msgspec.Struct, kw_only=True):
    type: str
    message: str


class AnthropicErrorBody(msgspec.Struct, kw_only=True):
    type: Literal["error"] = "error"
    error: AnthropicErrorObject


def anthropic_error(error: ApiError) -> bytes:
    kind = ERROR_TYPES.get(error.status, "api_error")
    told = AnthropicErrorObject(type=kind, message=error.error.message)
    return msgspec.json.encode(AnthropicErrorBody(error=told))


def error_type(path: str) -> type[ErrorBody] | type[AnthropicErrorBody]:
    """The form that belongs to the path."""
    is_ours = path == PATHS or path.startswith(f"{PATHS}/")
    return AnthropicErrorBody if is_ours else ErrorBody


def error_body(path: str, error: ApiError) -> bytes:
    return anthropic_error(error) if error_type(path) is AnthropicErrorBody else error.body()


def error_response(path: str, error: ApiError) -> Response:
    """For a request that was read to its end."""
    retry = error.retry_after_s
    headers = None if retry is None else {"Retry-After": str(retry)}
    body = error_body(path, error)
    return Response(body, error.status, headers, media_type="application/json")
