"""Each request is one line that nothing in the request can forge."""

import asyncio
from typing import Any

import pytest
from structlog.testing import capture_logs

from cearx.frontend.access_log import CLIENT_GONE, MAX_PATH, AccessLog


def serve(scope: dict[str, Any], statuses: list[int]) -> list[dict[str, Any]]:
    """The lines logged while an application answers with these statuses."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        for status in statuses:
            await send({"type": "http.response.start", "status": status, "headers": []})

    async def drop(message: Any) -> None:
        pass

    with capture_logs() as lines:
        asyncio.run(
            AccessLog(app)({"type": "http", "method": "POST", "headers": [], **scope}, drop, drop)
        )  # type: ignore[arg-type]
    return lines


@pytest.mark.parametrize(
    ("path", "statuses", "level", "status"),
    [
        (b"/v1/completions", [200], "info", 200),
        (b"/v1/completions", [413], "info", 413),
        (b"/v1/completions", [], "info", CLIENT_GONE),
        (b"/health", [200], "debug", 200),
    ],
)
def test_a_request_is_one_line(path: bytes, statuses: list[int], level: str, status: int) -> None:
    """Method, path, status and time; health checks only at debug."""
    (line,) = serve({"raw_path": path}, statuses)
    assert line.pop("ms") >= 0
    assert len(line.pop("request_id")) == 32
    assert line == {
        "event": "request",
        "log_level": level,
        "method": "POST",
        "path": path.decode(),
        "status": status,
    }


def test_a_path_stays_encoded_and_short() -> None:
    """A line feed in a path is its three characters of percent-encoding, a long path is cut."""
    (line,) = serve({"raw_path": b"/a%0Ab" + b"x" * 1000}, [404])
    assert line["path"].startswith("/a%0Ab")
    assert len(line["path"]) == MAX_PATH
