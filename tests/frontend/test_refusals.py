"""Answers that are given before a body was read: their form, and the connection behind them."""

import socket
from collections.abc import Iterator

import pytest
from frontend_server import FrontendServer, frontend_server

from cearx.core.config import Task
from cearx.frontend.task_routes import PATHS

KEY = "sk-a"


@pytest.fixture(scope="module")
def server() -> Iterator[FrontendServer]:
    with frontend_server(api_keys=(KEY,), max_body_bytes=4096) as started:
        started.http.headers["authorization"] = f"Bearer {KEY}"
        yield started


def read_answer(stream: socket.SocketIO) -> tuple[int, bytes]:
    status = int(stream.readline().split()[1])
    length = 0
    while line := stream.readline().strip():
        name, value = line.lower().split(b":", 1)
        if name == b"content-length":
            length = int(value)
    body = b""
    while len(body) < length:
        body += stream.read(length - len(body)) or b""
    return status, body


@pytest.mark.parametrize(
    ("line", "headers", "status"),
    [
        ("POST /nowhere", "", 404),
        ("POST /v1/rerank", "", 400),
        ("PUT /v1/models", "", 405),
        ("POST /v1/completions", "Authorization: Bearer sk-b\r\n", 401),
        ("POST /v1/completions", "".join(f"x-{i}: a\r\n" for i in range(101)), 431),
        ("POST /v1/completions", "", 413),
    ],
)
def test_connection_lives_on(server: FrontendServer, line: str, headers: str, status: int) -> None:
    """The client sends its body behind the answer, and then another request."""
    if "Authorization" not in headers:
        headers += f"Authorization: Bearer {KEY}\r\n"
    size = 5000 if status == 413 else 10
    head = f"{line} HTTP/1.1\r\nHost: a\r\n{headers}Content-Length: {size}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", server.port), timeout=5) as connection:
        connection.sendall(head.encode())
        stream = connection.makefile("rb", buffering=0)
        assert read_answer(stream)[0] == status
        connection.sendall(b"x" * size)
        connection.sendall(b"GET /live HTTP/1.1\r\nHost: a\r\n\r\n")
        assert read_answer(stream)[0] == 200


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
def test_anthropic_form(server: FrontendServer, path: str) -> None:
    """On Anthropic's paths everything that goes wrong is told in Anthropic's form."""
    wrong = {"authorization": "", "x-api-key": "sk-b"}
    answers = [
        (401, "authentication_error", server.http.post(path, headers=wrong)),
        (405, "invalid_request_error", server.http.get(path)),
        (404, "not_found_error", server.http.get(f"{path}/batches")),
        (413, "request_too_large", server.http.post(path, content=b" " * 5000)),
        (400, "invalid_request_error", server.http.post(path, content=b"{")),
    ]
    for status, kind, answer in answers:
        body = answer.json()
        assert (answer.status_code, body["type"], body["error"]["type"]) == (status, "error", kind)
    assert "error" in server.http.get("/v1/messagesx").json()
    assert "type" not in server.http.get("/v1/messagesx").json()


@pytest.mark.parametrize("task", ["generate", "embed", "score"])
def test_what_the_model_is_not_for(task: Task) -> None:
    """Named, in the path's own form, with a status that no client repeats and what would serve."""
    with frontend_server(task=task) as other:
        refused = {path for path, tasks in PATHS.items() if task not in tasks}
        assert 4 <= len(refused) < len(PATHS)
        for path in refused:
            answer = other.post(path, model="x", input="a")
            error = answer.json()["error"]
            assert answer.status_code == 400
            assert path in error["message"] and f"--task {PATHS[path][0]}" in error["message"]
            is_anthropic = path == "/v1/messages"
            assert is_anthropic or error["code"] == "unsupported_endpoint"
            names = {"message", "type"} if is_anthropic else {"message", "type", "param", "code"}
            assert error.keys() == names
        assert not other.core.submits


def test_requests_behind_one_another_on_a_connection(server: FrontendServer) -> None:
    """Two sent at once are answered in turn, and the connection takes a third."""
    request = f"GET /live HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {KEY}\r\n\r\n".encode()
    with socket.create_connection(("127.0.0.1", server.port), timeout=5) as connection:
        stream = connection.makefile("rb", buffering=0)
        for count in (2, 1, 3, 1):
            connection.sendall(request * count)
            assert [read_answer(stream)[0] for _ in range(count)] == [200] * count
