"""Every error that a client can see, and the one place where it becomes an OpenAI error object.

Code that finds bad input raises `ApiError` (mostly through the constructors below); routes turn it
into a response or into an event of a running stream. Messages name the value and the limit; a
client's value is shown as cut, escaped JSON and nothing internal is ever shown.
"""

import msgspec

from cearx.core.events import RefusalReason
from cearx.core.messages import Refused

SHOWN_VALUE_CHARS = 64
RETRY_AFTER_S = 1
"""A full queue moves as soon as a running request ends."""


class ErrorObject(msgspec.Struct, kw_only=True):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(msgspec.Struct, kw_only=True):
    error: ErrorObject


class ApiError(Exception):
    """An answer other than success: HTTP status and OpenAI's error fields."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        # A client's own names stand in some messages; in a log they must not end a line.
        message = printable(message)
        param = None if param is None else printable(param)
        super().__init__(message)
        self.status = status
        self.retry_after_s = retry_after_s
        """When it may be worth to ask again."""
        self.error = ErrorObject(message=message, type=kind, param=param, code=code)

    def body(self) -> bytes:
        return msgspec.json.encode(ErrorBody(error=self.error))


def shown(value: object) -> str:
    """A client's value for an error message: JSON, cut, whatever does not print escaped."""
    if isinstance(value, str | list):
        value = value[: SHOWN_VALUE_CHARS + 1]  # so that a huge one is not encoded for nothing
    try:
        text = msgspec.json.encode(value).decode()
    except RecursionError:  # decoding it took less stack than we have left here
        text = "a deeply nested value"
    if len(text) > SHOWN_VALUE_CHARS:
        text = text[:SHOWN_VALUE_CHARS] + "..."
    return printable(text)


def printable(text: str) -> str:
    """The text with what does not print escaped as in JSON."""
    return "".join(c if c.isprintable() else f"\\u{ord(c):04x}" for c in text)


def invalid(param: str | None, message: str, code: str | None = "invalid_value") -> ApiError:
    """400: a field is out of range, of a wrong type or in conflict with another."""
    return ApiError(400, message, param=param, code=code)


def not_supported(param: str, message: str) -> ApiError:
    """400: a known feature that this server does not have."""
    return ApiError(400, message, param=param, code="unsupported_parameter")


def model_not_found(name: str, served: str) -> ApiError:
    message = f"The model {shown(name)} does not exist; this server serves {shown(served)}"
    return ApiError(404, message, param="model", code="model_not_found")


def prompt_too_long(
    param: str, num_tokens: int, context_length: int, *, is_bound: bool = False
) -> ApiError:
    """`is_bound`: the prompt was not tokenised, it has at least `num_tokens`."""
    size = f"at least {num_tokens}" if is_bound else f"{num_tokens}"
    return invalid(
        param,
        f"The prompt has {size} tokens, but the model's context holds {context_length} "
        "tokens and at least one must stay free for the answer",
        "context_length_exceeded",
    )


def grammar_too_expensive() -> ApiError:
    """400: found out in the midst of an answer; most such grammars are refused before it begins."""
    message = "The grammar of this request takes too much work for a token: simplify it"
    return invalid(None, message, "grammar_too_expensive")


def refused(refusal: Refused) -> ApiError:
    """400 for what can never run, 503 for what may not wait; both sizes are in the message."""
    sizes = f"{refusal.num_tokens} tokens are asked for and there are {refusal.limit_tokens}"
    match refusal.reason:
        case RefusalReason.PROMPT_TOO_LONG:
            return prompt_too_long("prompt", refusal.num_tokens, refusal.limit_tokens)
        case RefusalReason.POOL_TOO_SMALL:
            message = f"Prompt and max_tokens need more KV cache than the server has: {sizes}"
            return invalid("max_tokens", message, "context_length_exceeded")
        case RefusalReason.EMPTY_PROMPT:
            return invalid("prompt", "The prompt must have at least one token, got 0")
        case RefusalReason.NO_OUTPUT:
            return invalid("max_tokens", f"max_tokens must be at least 1: {sizes}")
        case RefusalReason.QUEUE_FULL:
            message = (
                f"The server is busy: {refusal.num_tokens} requests would wait and "
                f"{refusal.limit_tokens} may (--max-num-queued-reqs)"
            )
            return unavailable(message, "server_busy", RETRY_AFTER_S)
        case RefusalReason.QUEUE_TOKENS:
            message = (
                f"The server is busy: prompts of {refusal.num_tokens} tokens would wait and "
                f"{refusal.limit_tokens} may (--max-num-queued-tokens)"
            )
            return unavailable(message, "server_busy", RETRY_AFTER_S)


def too_slow(part: str, timeout_s: float) -> ApiError:
    """408: `part` of a request, 'head' or 'body', was not there in time."""
    message = (
        f"The {part} of the request was not complete after {timeout_s:g} s (--request-read-timeout)"
    )
    return ApiError(408, message, code="request_read_timeout")


def server_error(message: str, code: str = "internal_error") -> ApiError:
    """500: the server is at fault; the message is a constant."""
    return ApiError(500, message, kind="server_error", code=code)


def unavailable(message: str, code: str, retry_after_s: int | None = None) -> ApiError:
    """503: not now."""
    return ApiError(503, message, kind="server_error", code=code, retry_after_s=retry_after_s)


def timed_out() -> ApiError:
    """504: the request's deadline passed, while it waited or in the midst of its answer."""
    message = "The request took longer than the server allows (--request-timeout)"
    return ApiError(504, message, kind="server_error", code="request_timeout")
