"""POST /start_profile and /stop_profile: a trace of torch's profiler in the worker, as in vLLM.

They are there only where the server was started with a folder for traces; elsewhere they answer
404 and name the flag. Called by `app.py`.
"""

from collections.abc import Awaitable, Callable

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from cearx.frontend.errors import ApiError
from cearx.frontend.server_state import ServerState

START, STOP = "/start_profile", "/stop_profile"


class ProfileAnswer(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Answer of both; `path` is on the server's machine."""

    status: str
    path: str | None = None
    """The trace that a stop has written."""


def profiler_routes(state: ServerState) -> list[Route]:
    """Both endpoints."""
    return [
        Route(path, _endpoint(state, path, is_on), methods=["POST"])
        for path, is_on in ((START, True), (STOP, False))
    ]


def _endpoint(
    state: ServerState, path: str, is_on: bool
) -> Callable[[Request], Awaitable[Response]]:
    async def profile(request: Request) -> Response:
        if not state.client.require_engine().has_profiler:
            message = f"There is no POST {path}: the server runs without --profiler-dir"
            raise ApiError(404, message, code="profiler_is_off")
        done = await state.client.questions.profile(is_on)
        if done.error is not None:
            raise ApiError(400, f"POST {path}: {done.error}", code="profiler_state")
        answer = ProfileAnswer(status="started" if is_on else "stopped", path=done.path)
        return Response(msgspec.json.encode(answer), media_type="application/json")

    return profile
