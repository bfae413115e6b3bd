"""The ASGI application: the table of routes, and errors that no route has turned into an answer."""

from collections.abc import Awaitable, Callable
from importlib.metadata import version

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from cearx.frontend.access_log import AccessLog
from cearx.frontend.anthropic_errors import error_body
from cearx.frontend.anthropic_route import count_tokens
from cearx.frontend.authentication import Authentication
from cearx.frontend.errors import ApiError, model_not_found, server_error, shown
from cearx.frontend.http_io import refuse_body
from cearx.frontend.metrics_route import metrics_endpoint
from cearx.frontend.openai_types import ModelCard, ModelList, PrefixCacheResetAnswer
from cearx.frontend.openapi import describe_api
from cearx.frontend.profiler_routes import profiler_routes
from cearx.frontend.server_state import ServerState
from cearx.frontend.task_routes import task_routes
from cearx.frontend.token_routes import abort_requests, detokenize, json_endpoint, tokenize

Endpoint = Callable[[Request], Awaitable[Response]]


def build_app(state: ServerState) -> ASGIApp:
    """All routes of one frontend, behind what every request goes through."""
    app: ASGIApp = _routes(state)
    if state.api_key_digests:
        app = Authentication(app, state.api_key_digests)
    config = state.config
    if config.allowed_origins:  # outside: a browser asks for leave without a key
        app = CORSMiddleware(
            app,
            allow_origins=config.allowed_origins,
            allow_methods=config.allowed_methods,
            allow_headers=config.allowed_headers,
            allow_credentials=config.allow_credentials,
        )
    return AccessLog(app)


def _routes(state: ServerState) -> Starlette:
    app = Starlette(
        routes=[
            Route("/health", _health(state)),
            Route("/live", _live(state)),
            Route("/version", _version),
            Route("/openapi.json", _openapi(state)),
            Route("/metrics", metrics_endpoint(state)),
            Route("/load", _load(state)),
            Route("/v1/models", _models(state)),
            Route("/v1/models/{name:path}", _model(state)),
            Route("/reset_prefix_cache", _reset_prefix_cache(state), methods=["POST"]),
            *_small_routes(state),
            *profiler_routes(state),
            *task_routes(state),
        ],
        exception_handlers={
            HTTPException: _routing_error,
            ApiError: _api_error,
            Exception: _unexpected_error,
        },
    )
    app.router.redirect_slashes = False
    return app


def _small_routes(state: ServerState) -> list[Route]:
    return [
        Route(path, json_endpoint(state, handle), methods=["POST"])
        for path, handle in (
            ("/tokenize", tokenize),
            ("/detokenize", detokenize),
            ("/v1/messages/count_tokens", count_tokens),
            ("/abort_requests", abort_requests),
        )
    ]


def _json(value: object) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")


class Refusal(Response):
    """An error that may come before the body of the request was read."""

    def __init__(
        self, request: Request, error: ApiError, headers: dict[str, str] | None = None
    ) -> None:
        body = error_body(request.url.path, error)
        super().__init__(body, error.status, headers, media_type="application/json")
        self._more_headers = [(k.encode(), v.encode()) for k, v in (headers or {}).items()]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = bytes(self.body)
        await refuse_body(receive, send, self.status_code, body, self._more_headers)


def _health(state: ServerState) -> Endpoint:
    async def health(request: Request) -> Response:
        """200 while requests can be served, else 503 with the reason."""
        state.client.require_ready()
        return _json({"status": "ok"})

    return health


def _live(state: ServerState) -> Endpoint:
    async def live(request: Request) -> Response:
        """200 while the engine is there, also when it takes no more requests before its end."""
        state.client.require_engine()
        return _json({"status": "ok"})

    return live


def _reset_prefix_cache(state: ServerState) -> Endpoint:
    async def reset_prefix_cache(request: Request) -> Response:
        """200 when it is done: what is sent after the answer, to any frontend, finds nothing old.

        Blocks that requests in the engine use stay theirs until they end, and are not found.
        """
        outcome = await state.client.reset_prefix_cache()
        return _json(
            PrefixCacheResetAnswer(
                num_blocks_freed=outcome.num_freed, num_blocks_in_use=outcome.num_in_use
            )
        )

    return reset_prefix_cache


def _openapi(state: ServerState) -> Endpoint:
    document = msgspec.json.encode(
        describe_api(has_keys=bool(state.api_key_digests), task=state.task)
    )

    async def openapi(request: Request) -> Response:
        return Response(document, media_type="application/json")

    return openapi


def _load(state: ServerState) -> Endpoint:
    async def load(request: Request) -> Response:
        """Requests in the engine, of all frontends; the server_load of vLLM is their sum."""
        load = (await state.client.read_metrics()).load
        return _json(
            {
                "server_load": load.num_running + load.num_waiting,
                "num_requests_running": load.num_running,
                "num_requests_waiting": load.num_waiting,
            }
        )

    return load


async def _version(request: Request) -> Response:
    return _json({"version": version("cearx")})


def _card(state: ServerState) -> ModelCard:
    return ModelCard(
        id=state.model_name,
        root=state.model_root,
        created=state.created,
        max_model_len=state.context_length(state.client.require_ready()),
    )


def _models(state: ServerState) -> Endpoint:
    async def models(request: Request) -> Response:
        return _json(ModelList(data=[_card(state)]))

    return models


def _model(state: ServerState) -> Endpoint:
    async def model(request: Request) -> Response:
        name = request.path_params["name"]
        if name != state.model_name:
            raise model_not_found(name, state.model_name)
        return _json(_card(state))

    return model


async def _api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    retry = error.retry_after_s
    return Refusal(request, error, None if retry is None else {"Retry-After": str(retry)})


async def _routing_error(request: Request, error: Exception) -> Response:
    """404 for an unknown path, 405 with an Allow header for a wrong method."""
    assert isinstance(error, HTTPException)
    asked = f"{request.method} {shown(request.url.path)}"
    if error.status_code == 405:
        methods = ", ".join(sorted((error.headers or {}).get("Allow", "").split(", ")))
        answer = ApiError(405, f"{asked} is not allowed: use {methods}", code="method_not_allowed")
        return Refusal(request, answer, {"Allow": methods})
    if error.status_code == 404:
        return Refusal(request, ApiError(404, f"There is no {asked}", code="not_found"))
    told = ApiError(error.status_code, error.detail)
    return Refusal(request, told, dict(error.headers or {}))


async def _unexpected_error(request: Request, error: Exception) -> Response:
    """The client learns nothing of it; the server's log has the traceback."""
    return Refusal(request, server_error("Internal server error"))
