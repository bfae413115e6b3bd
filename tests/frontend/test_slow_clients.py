"""Clients that send slowly, or what is no HTTP/1.1 request: each gets an error object in time."""

import http.client
import json
import socket
import time
from collections.abc import Iterator

import pytest
from frontend_server import MODEL, FrontendServer, frontend_server

TIMEOUT_S = 1
POST = b"POST %s HTTP/1.1\r\nHost: x\r\nContent-Length: 99\r\n\r\n{"


@pytest.fixture(scope="module")
def server() -> Iterator[FrontendServer]:
    with frontend_server(request_read_timeout=TIMEOUT_S, max_header_bytes=2048) as started:
        yield started


def connect(server: FrontendServer, sent: bytes = b"") -> socket.socket:
    client = socket.create_connection(("127.0.0.1", server.port), timeout=20)
    client.sendall(sent)
    return client


def answer_of(client: socket.socket) -> tuple[int, bytes]:
    """Status and body; the connection must be closed behind it."""
    response = http.client.HTTPResponse(client)
    response.begin()
    status, body = response.status, response.read()
    assert client.recv(1) == b""
    return status, body


@pytest.mark.parametrize(
    ("sent", "part"),
    [
        (b"G", "head"),
        (b"GET /live HTTP/1.1\r\nHost: x\r\n", "head"),
        (POST % b"/v1/completions", "body"),
        (POST % b"/tokenize", "body"),
    ],
)
def test_a_request_that_does_not_come_to_its_end(
    server: FrontendServer, sent: bytes, part: str
) -> None:
    """408 after the time that the flag gives, though a byte comes now and then."""
    with connect(server, sent) as client:
        began = time.monotonic()
        client.settimeout(0.2)
        while time.monotonic() - began < TIMEOUT_S + 10:
            try:
                assert client.recv(1, socket.MSG_PEEK)
                break
            except TimeoutError:
                client.sendall(b"x")
        assert time.monotonic() - began > 0.9 * TIMEOUT_S
        client.settimeout(20)
        status, body = answer_of(client)
    assert status == 408
    error = json.loads(body)["error"]
    assert error["code"] == "request_read_timeout"
    assert part in error["message"] and f"{TIMEOUT_S} s" in error["message"]


def test_a_slow_body_of_anthropics_api(server: FrontendServer) -> None:
    """The error has that API's form."""
    with connect(server, POST % b"/v1/messages") as client:
        status, body = answer_of(client)
    assert (status, json.loads(body)["error"]["type"]) == (408, "timeout_error")


def test_slow_clients_are_in_nobodys_way(server: FrontendServer) -> None:
    """200 of them, half amid a head, half amid a body: others are served, and all are told."""
    parts = (b"POST /v1/completions HTTP/1.1\r\nHost:", POST % b"/v1/completions")
    slow = [connect(server, parts[index % 2]) for index in range(200)]
    for client in slow:
        client.sendall(b"x")
    began = time.monotonic()
    answer = server.post("/v1/completions", model=MODEL, prompt="a", max_tokens=1)
    assert answer.status_code == 200
    assert time.monotonic() - began < TIMEOUT_S
    assert {answer_of(client)[0] for client in slow} == {408}
    for client in slow:
        client.close()


def test_an_idle_connection_may_wait(server: FrontendServer) -> None:
    """The time runs from the first byte of a request, not from the end of the one before."""
    with connect(server) as client:
        for _ in range(2):
            time.sleep(1.2 * TIMEOUT_S)
            client.sendall(b"GET /live HTTP/1.1\r\n")
            time.sleep(0.2 * TIMEOUT_S)
            client.sendall(b"Host: x\r\n\r\n")
            response = http.client.HTTPResponse(client)
            response.begin()
            assert (response.status, response.read()) == (200, b'{"status":"ok"}')


def test_an_error_does_not_hold_up_the_next_request(server: FrontendServer) -> None:
    """A body that was read whole leaves nothing to wait for, whatever it says."""
    for path in ("/tokenize", "/detokenize", "/abort_requests", "/v1/messages/count_tokens"):
        server.http.post(path, content=b"{}")
        began = time.monotonic()
        assert server.http.post(path, content=b"{}").status_code == 400
        assert server.http.get("/live").status_code == 200
        assert time.monotonic() - began < 1, path


@pytest.mark.parametrize(
    ("sent", "status", "code"),
    [
        (b"nonsense\r\n\r\n", 400, "invalid_http"),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", 400, "invalid_http"),
        (b"GET /live HTTP/1.1\r\n\r\n", 400, "invalid_http"),
        (b"GET /live HTTP/1.1\r\nHost: x\r\nbad header\r\n\r\n", 400, "invalid_http"),
        (b"GET /live HTTP/1.1\r\nHost: x\r\nx: " + b"y" * 100_000, 431, "headers_too_large"),
        (
            b"POST /tokenize HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: gzip\r\n\r\n",
            501,
            "not_implemented",
        ),
    ],
)
def test_what_is_no_request(server: FrontendServer, sent: bytes, status: int, code: str) -> None:
    """An error object, and the connection is closed."""
    with connect(server, sent) as client:
        response = http.client.HTTPResponse(client)
        response.begin()
        body = json.loads(response.read())
    assert (response.status, body["error"]["code"]) == (status, code)
    assert response.headers["content-type"] == "application/json"


@pytest.mark.parametrize(
    "extra",
    [
        b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAAA\r\n",
        b"Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
        b"Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n",
    ],
)
def test_no_other_protocol_is_spoken(server: FrontendServer, extra: bytes) -> None:
    """A client that offers one is answered in HTTP/1.1, as if it had not."""
    with connect(server, b"GET /live HTTP/1.1\r\nHost: x\r\n" + extra + b"\r\n") as client:
        response = http.client.HTTPResponse(client)
        response.begin()
        assert (response.status, response.read()) == (200, b'{"status":"ok"}')


def test_http2_without_asking_is_refused(server: FrontendServer) -> None:
    """The preface of HTTP/2 is a request of HTTP/1.1 for which there is no route."""
    with connect(server, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n") as client:
        assert client.recv(100).startswith(b"HTTP/1.1 404 ")
