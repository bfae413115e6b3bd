"""The endpoints that depend on what the model is served for, and the refusal of the others.

Owns the table of paths by task. An endpoint of another task is a 400 that says what this server is
for: a model asked for what it was not trained for would answer, and nobody would see that it is
nonsense. Called by `app.py`.
"""

from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from cearx.core.config import Task
from cearx.frontend.anthropic_errors import anthropic_error, error_body
from cearx.frontend.anthropic_route import plan_messages
from cearx.frontend.chat_route import plan_chat
from cearx.frontend.completions_route import plan_completion
from cearx.frontend.embeddings_route import plan_embeddings
from cearx.frontend.errors import ApiError, shown
from cearx.frontend.generation_route import GenerationRoute
from cearx.frontend.http_io import refuse_body
from cearx.frontend.pooling_route import PoolingRoute
from cearx.frontend.rerank_routes import plan_rerank, plan_score
from cearx.frontend.responses_route import plan_responses
from cearx.frontend.server_state import ServerState

SCORE_PATHS = ("/v1/score", "/score")
RERANK_PATHS = ("/v1/rerank", "/v2/rerank", "/rerank")
PATHS: dict[str, tuple[Task, ...]] = {
    "/v1/chat/completions": ("generate",),
    "/v1/completions": ("generate",),
    "/v1/messages": ("generate",),
    "/v1/responses": ("generate",),
    "/v1/embeddings": ("embed",),
    **dict.fromkeys((*SCORE_PATHS, *RERANK_PATHS), ("score", "embed")),
}
"""Which tasks serve each."""
PURPOSES: dict[Task, str] = {
    "generate": "text that it generates",
    "embed": "embeddings",
    "score": "scores of pairs of texts",
}


def task_routes(state: ServerState) -> list[Route]:
    """All paths of the table, each served or refused."""
    score, rerank = PoolingRoute(state, plan_score), PoolingRoute(state, plan_rerank)
    apps: dict[str, ASGIApp] = {
        "/v1/chat/completions": GenerationRoute(state, plan_chat),
        "/v1/completions": GenerationRoute(state, plan_completion),
        "/v1/messages": GenerationRoute(state, plan_messages, anthropic_error),
        "/v1/responses": GenerationRoute(state, plan_responses),
        "/v1/embeddings": PoolingRoute(state, plan_embeddings),
        **dict.fromkeys(SCORE_PATHS, score),
        **dict.fromkeys(RERANK_PATHS, rerank),
    }
    return [
        Route(path, apps[path] if state.task in tasks else _Refused(path, state), methods=["POST"])
        for path, tasks in PATHS.items()
    ]


class _Refused:
    """An ASGI application; the body is not looked at."""

    def __init__(self, path: str, state: ServerState) -> None:
        wanted = " or ".join(f"--task {task}" for task in PATHS[path])
        message = (
            f"{path} is not served here: {shown(state.model_name)} serves {PURPOSES[state.task]};"
            f" it needs a model that is served with {wanted}"
        )
        self._body = error_body(path, ApiError(400, message, code="unsupported_endpoint"))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await refuse_body(receive, send, 400, self._body)
