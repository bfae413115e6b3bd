"""GET /openapi.json: the API's description, made from the structs that read and write its bodies.

Owns the table of what each route takes and answers; the schemas are msgspec's. A stream's events
are described by their media type only. Called by `app.py`.
"""

from importlib.metadata import version
from typing import Any

import msgspec

from cearx.core.config import Task
from cearx.frontend.answer_format import ChatCompletion, Completion
from cearx.frontend.anthropic_errors import AnthropicErrorBody, error_type
from cearx.frontend.anthropic_types import (
    CountTokensAnswer,
    CountTokensRequest,
    MessagesRequest,
)
from cearx.frontend.errors import ErrorBody
from cearx.frontend.openai_types import (
    ChatCompletionRequest,
    CompletionRequest,
    ModelCard,
    ModelList,
    PrefixCacheResetAnswer,
)
from cearx.frontend.pooling_types import (
    EmbeddingsAnswer,
    EmbeddingsRequest,
    RerankAnswer,
    RerankRequest,
    ScoreAnswer,
    ScoreRequest,
)
from cearx.frontend.profiler_routes import START, STOP, ProfileAnswer
from cearx.frontend.responses_types import Response, ResponsesRequest
from cearx.frontend.task_routes import PATHS, RERANK_PATHS, SCORE_PATHS
from cearx.frontend.token_routes import (
    AbortAnswer,
    AbortRequest,
    DetokenizeAnswer,
    DetokenizeRequest,
    TokenizeAnswer,
    TokenizeRequest,
)

Struct = type[msgspec.Struct]

POSTS: dict[str, tuple[Struct, Struct | None]] = {
    "/v1/chat/completions": (ChatCompletionRequest, ChatCompletion),
    "/v1/completions": (CompletionRequest, Completion),
    "/v1/messages": (MessagesRequest, None),
    "/v1/messages/count_tokens": (CountTokensRequest, CountTokensAnswer),
    "/v1/responses": (ResponsesRequest, Response),
    "/v1/embeddings": (EmbeddingsRequest, EmbeddingsAnswer),
    **dict.fromkeys(SCORE_PATHS, (ScoreRequest, ScoreAnswer)),
    **dict.fromkeys(RERANK_PATHS, (RerankRequest, RerankAnswer)),
    "/tokenize": (TokenizeRequest, TokenizeAnswer),
    "/detokenize": (DetokenizeRequest, DetokenizeAnswer),
    "/abort_requests": (AbortRequest, AbortAnswer),
}
"""Path: body, and answer where it is a struct."""
STREAMS = ("/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses")
GETS: dict[str, Struct | None] = {
    "/v1/models": ModelList,
    "/v1/models/{name}": ModelCard,
    "/health": None,
    "/live": None,
    "/load": None,
    "/version": None,
    "/metrics": None,
    "/openapi.json": None,
}
"""Path: answer, where it is a struct."""
REFERENCE = "#/components/schemas/{name}"


def describe_api(*, has_keys: bool, task: Task) -> dict[str, Any]:
    """The document, for OpenAPI 3.1, of what a server of this task serves."""
    posts = {path: pair for path, pair in POSTS.items() if task in PATHS.get(path, (task,))}
    types = [kind for pair in posts.values() for kind in pair if kind is not None]
    types += [kind for kind in GETS.values() if kind is not None]
    types += [ErrorBody, AnthropicErrorBody, PrefixCacheResetAnswer, ProfileAnswer]
    references, schemas = msgspec.json.schema_components(types, ref_template=REFERENCE)
    of: dict[Struct, Any] = dict(zip(types, references, strict=True))
    paths: dict[str, Any] = {}
    for path, (body, answer) in posts.items():
        good = {} if answer is None else _content(of[answer])
        if path in STREAMS:
            good["text/event-stream"] = {}  # OpenAPI 3.1 has no schema for single events
        paths[path] = {
            "post": {
                "requestBody": {"required": True, "content": _content(of[body])},
                "responses": _responses(good, of[error_type(path)]),
            }
        }
    paths["/reset_prefix_cache"] = {
        "post": {"responses": _responses(_content(of[PrefixCacheResetAnswer]), of[ErrorBody])}
    }
    for path in (START, STOP):
        good = _content(of[ProfileAnswer])
        paths[path] = {"post": {"responses": _responses(good, of[ErrorBody])}}
    for path, found in GETS.items():
        good = {} if found is None else _content(of[found])
        paths[path] = {"get": {"responses": _responses(good, of[ErrorBody])}}
    name = {"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}
    paths["/v1/models/{name}"]["get"]["parameters"] = [name]
    document: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": "CearX", "version": version("cearx")},
        "paths": paths,
        "components": {"schemas": schemas},
    }
    if has_keys:
        document["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        document["security"] = [{"key": []}]
    return document


def _content(schema: Any) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}


def _responses(good: dict[str, Any], error: Any) -> dict[str, Any]:
    right = {"description": "Success", **({"content": good} if good else {})}
    return {"200": right, "default": {"description": "An error", "content": _content(error)}}
