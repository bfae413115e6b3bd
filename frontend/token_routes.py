"""POST /tokenize, /detokenize and /abort_requests: small questions that generate nothing.

Each is a typed body in and a JSON body out. Long texts and lists are read, worked on and written in
threads, so that no stream waits for them. Called by Starlette.
"""

from collections.abc import Awaitable, Callable
from typing import Annotated, Any

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from cearx.frontend.access_log import CLIENT_GONE
from cearx.frontend.anthropic_errors import error_response
from cearx.frontend.caller import caller_of
from cearx.frontend.chat_messages import template_messages
from cearx.frontend.chat_template import ChatTemplateError, require
from cearx.frontend.errors import ApiError, invalid, shown
from cearx.frontend.generation_route import check_model
from cearx.frontend.http_io import BodyLimits, ClientDisconnected, read_body
from cearx.frontend.openai_types import MAX_MESSAGES
from cearx.frontend.server_state import ServerState

MAX_ABORTED = 1024

Endpoint = Callable[[Request], Awaitable[Response]]


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """A prompt, or messages that the chat template makes one of."""

    model: str | None = None
    prompt: str | None = None
    messages: (
        Annotated[list[dict[str, Any]], Meta(min_length=1, max_length=MAX_MESSAGES)] | None
    ) = None
    add_special_tokens: bool | None = None
    """True for a prompt, false for messages, unless given."""
    add_generation_prompt: bool = True
    return_token_strs: bool = False


class TokenizeAnswer(msgspec.Struct, kw_only=True):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    model: str | None = None
    tokens: list[int]
    skip_special_tokens: bool = False


class DetokenizeAnswer(msgspec.Struct, kw_only=True):
    prompt: str


class AbortRequest(msgspec.Struct, kw_only=True):
    request_ids: Annotated[list[str], Meta(min_length=1, max_length=MAX_ABORTED)]
    """As in X-Request-Id."""


class AbortAnswer(msgspec.Struct, kw_only=True):
    status: str = "ok"


def json_endpoint(
    state: ServerState, handle: Callable[[ServerState, bytes], Awaitable[bytes]]
) -> Endpoint:
    """A route from one JSON body to another; `handle` raises ApiError."""

    async def endpoint(request: Request) -> Response:
        try:
            body = await read_body(request.scope, request.receive, BodyLimits.of(state.config))
        except ClientDisconnected:
            return Response(status_code=CLIENT_GONE)  # nobody reads it
        try:
            answer = await handle(state.for_caller(caller_of(request.scope)), body)
        except ApiError as error:  # with nothing left to read the connection serves the next one
            return error_response(request.url.path, error)
        return Response(answer, media_type="application/json")

    return endpoint


async def tokenize(state: ServerState, body: bytes) -> bytes:
    """As the generation routes would; longer than the context is no error here."""
    request = await state.parse(body, TokenizeRequest)
    check_model(state, request.model)
    engine = state.client.require_ready()
    if (request.prompt is None) == (request.messages is None):
        raise invalid("prompt", "Exactly one of prompt and messages is needed")

    def make() -> bytes:
        token_ids = _encode(state, request)
        strings = None
        if request.return_token_strs:
            token_bytes = state.tokenizer.token_bytes
            strings = [token_bytes(token_id).decode("utf-8", "replace") for token_id in token_ids]
        answer = TokenizeAnswer(
            count=len(token_ids),
            max_model_len=state.context_length(engine),
            tokens=token_ids,
            token_strs=strings,
        )
        return msgspec.json.encode(answer)

    return await state.prompt_work.run(len(body), make)


def _encode(state: ServerState, request: TokenizeRequest) -> list[int]:
    text, adds = request.prompt, request.add_special_tokens
    is_chat = text is None
    if text is None:
        text = _render(state, request)
    return state.tokenizer.encode(text, add_special_tokens=not is_chat if adds is None else adds)


def _render(state: ServerState, request: TokenizeRequest) -> str:
    try:
        return require(state.chat_template).render(
            template_messages(request.messages or []),
            add_generation_prompt=request.add_generation_prompt,
        )
    except ChatTemplateError as error:
        raise ApiError(400, str(error), param="messages", code="chat_template_error") from None


async def detokenize(state: ServerState, body: bytes) -> bytes:
    """Special tokens are written out unless they are to be skipped."""
    request = await state.parse(body, DetokenizeRequest)
    check_model(state, request.model)
    limit = state.client.require_ready().vocab_size

    def make() -> bytes:
        for index, token_id in enumerate(request.tokens):
            if not 0 <= token_id < limit:
                raise invalid(
                    f"tokens[{index}]",
                    f"Token id {shown(token_id)} in tokens is not in the vocabulary of "
                    f"{limit} tokens",
                )
        skips = request.skip_special_tokens
        text = state.tokenizer.decode(request.tokens, skip_special_tokens=skips)
        return msgspec.json.encode(DetokenizeAnswer(prompt=text))

    return await state.prompt_work.run(len(body), make)


async def abort_requests(state: ServerState, body: bytes) -> bytes:
    """The requests with these ids end with an error, in whatever frontend they run."""
    request = await state.parse(body, AbortRequest)
    state.client.abort_labels(request.request_ids)
    return msgspec.json.encode(AbortAnswer())
