"""Answers that are given before a body was read: their form, and the connection behind them."""

import socket
from collections.abc import Iterator

import pytest
from frontend_server import FrontendServer, frontend_server

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


@pytest.mark.parametrize("path", ["/v1/embeddings", "/v1/score", "/v1/rerank"])
def test_what_is_not_there_yet(server: FrontendServer, path: str) -> None:
    """Named, in OpenAI's form, with a status that no client repeats."""
    answer = server.post(path, model="x", input="a")
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (400, "unsupported_endpoint")
    assert path in error["message"]
    assert error.keys() == {"message", "type", "param", "code"}
