"""Clients that leave or do not read: their requests end, everybody else's go on."""

import asyncio
import socket
import struct
import time
from collections.abc import Iterator
from typing import Any

import httpx
import msgspec
import pytest
from fake_core import Reply, logprob_of
from frontend_server import MODEL, FrontendServer, frontend_server
from starlette.types import Message, Send

from cearx.core.events import CancelReason, FinishReason
from cearx.frontend import disconnect
from cearx.frontend.disconnect import serve_while_connected

TEXT = "/v1/completions"


@pytest.fixture
def server() -> Iterator[FrontendServer]:
    with frontend_server() as started:
        started.core.reply = lambda submit: Reply(token_ids=[97] * 1_000_000)
        started.core.step_s = 0.001
        yield started


def open_request(server: FrontendServer, **fields: Any) -> socket.socket:
    """A request whose connection the test holds in its hand."""
    body = msgspec.json.encode({"model": MODEL, "prompt": "x", **fields})
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body)
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.connect(("127.0.0.1", server.port))
    client.sendall(head + body)
    return client


def long_reply(num_tokens: int) -> Reply:
    """About 600 bytes of stream for each token: more than sockets buffer."""
    token_ids = [97 + i % 26 for i in range(num_tokens)]
    row = logprob_of(0, 97)
    wide = msgspec.structs.replace(row, top=tuple((i, -0.5) for i in range(32, 52)))
    return Reply(token_ids=token_ids, logprobs=[wide] * num_tokens)


@pytest.mark.parametrize("sent", [b"", b"GET /li", b"GET /live HTTP/1.1\r\nHost: x\r\n\r\n"])
@pytest.mark.parametrize("is_late", [True, False])
def test_a_connection_ends_with_its_client(
    server: FrontendServer, sent: bytes, is_late: bool
) -> None:
    """The server closes what the client has closed, before a request, amid one and behind one."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=5) as client:
        client.sendall(sent)
        if is_late:
            time.sleep(0.2)  # the answer is out and the connection idle again
        client.shutdown(socket.SHUT_WR)
        while client.recv(4096):
            pass


@pytest.mark.parametrize("stream", [True, False])
def test_a_disconnect_ends_the_request(server: FrontendServer, stream: bool) -> None:
    """Closing the connection cancels the request at the core, streaming or not, at once."""
    with open_request(server, stream=stream, n=3):
        server.core.wait_until(lambda core: core.num_running == 3)
    left = time.monotonic()
    server.core.wait_until(lambda core: core.num_running == 0)
    assert time.monotonic() - left < 0.5
    assert [reason for _, reason in server.core.cancels] == [CancelReason.DISCONNECT] * 3
    server.core.reply = lambda submit: Reply(token_ids=[97])
    assert server.post(TEXT, prompt="x").status_code == 200


@pytest.mark.parametrize("more", [b"\r\n", b"GET /live HTTP/1.1\r\nHost: x\r\n\r\n", b"G"])
@pytest.mark.parametrize("is_reset", [True, False])
def test_a_disconnect_behind_more_than_one_request(
    server: FrontendServer, more: bytes, is_reset: bool
) -> None:
    """What came behind a request waits for its answer; the client's end is seen all the same."""
    with open_request(server, stream=False) as client:
        client.sendall(more)
        server.core.wait_until(lambda core: core.num_running == 1)
        if is_reset:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    server.core.wait_until(lambda core: core.num_running == 0)
    assert server.core.cancels[0][1] is CancelReason.DISCONNECT


def test_requests_that_come_at_once_are_answered_in_turn(server: FrontendServer) -> None:
    """What came behind a request is not lost."""
    server.core.reply = lambda submit: Reply(token_ids=[97, 98])
    with open_request(server, max_tokens=2) as client:
        client.sendall(b"GET /live HTTP/1.1\r\nHost: x\r\n\r\n" * 3)
        received = b""
        while received.count(b"HTTP/1.1 200 ") < 4 or not received.endswith(b"}"):
            chunk = client.recv(4096)
            assert chunk, received
            received += chunk


def test_a_disconnect_before_the_first_token(server: FrontendServer) -> None:
    """The same while the request still waits."""
    server.core.is_paused = True
    with open_request(server, stream=True):
        server.core.wait_until(lambda core: core.num_running == 1)
    server.core.wait_until(lambda core: core.num_running == 0)


def test_a_disconnect_in_the_middle_of_the_body(server: FrontendServer) -> None:
    """Nothing is submitted for half a request."""
    with socket.create_connection(("127.0.0.1", server.port)) as client:
        client.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 99\r\n\r\n{")
    server.core.reply = lambda submit: Reply(token_ids=[97])
    assert server.post(TEXT, prompt="x").status_code == 200
    assert len(server.core.submits) == 1


def test_a_client_that_does_not_read(
    server: FrontendServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A write that is blocked for too long ends the request; other clients notice nothing."""
    monkeypatch.setattr(disconnect, "MAX_BLOCKED_S", 0.3)
    server.core.step_s = 0
    server.core.reply = lambda submit: long_reply(20_000)
    with open_request(server, stream=True, logprobs=2):
        server.core.wait_until(lambda core: bool(core.cancels), timeout_s=30)
        assert server.core.cancels[0][1] is CancelReason.DISCONNECT
        server.core.reply = lambda submit: Reply(token_ids=[97])
        assert server.post(TEXT, prompt="x").json()["choices"][0]["text"] == "a"


def test_a_slow_client_loses_nothing(server: FrontendServer) -> None:
    """What gathers while a client does not read is sent when it does, every token of it."""
    reply = long_reply(5_000)
    server.core.reply = lambda submit: reply
    server.core.step_s = 0
    with open_request(server, stream=True, logprobs=2) as client:
        server.core.wait_until(lambda core: len(core.submits) == 1 and not core.num_running, 60)
        received = b""
        while not received.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n"):
            chunk = client.recv(1 << 20)
            assert chunk, "the connection ended early"
            received += chunk
    data = [line for line in received.split(b"\n") if line.startswith(b"data: {")]
    texts = [msgspec.json.decode(d[len(b"data: ") :])["choices"][0]["text"] for d in data]
    assert "".join(texts) == bytes(reply.token_ids).decode()


def test_an_error_after_the_first_event(server: FrontendServer) -> None:
    """A stream that fails ends with an error event and [DONE]; a whole answer is a 500."""
    server.core.reply = lambda submit: Reply(
        token_ids=[97, 98], finish_reason=FinishReason.FAILED, splits=[1]
    )
    events = server.events(TEXT, prompt="x")
    assert events[0]["choices"][0]["text"] == "a"
    assert (events[-1]["error"]["type"], events[-1]["error"]["code"]) == (
        "server_error",
        "request_failed",
    )
    answer = server.post(TEXT, prompt="x")
    assert answer.status_code == 500
    assert answer.json()["error"]["code"] == "request_failed"


def test_shutting_down_tells_the_streams(server: FrontendServer) -> None:
    """Running streams end with an error that says why, and the connections close."""
    with httpx.stream(
        "POST", server.url + TEXT, json={"model": MODEL, "prompt": "x", "stream": True}, timeout=10
    ) as answer:
        lines = answer.iter_lines()
        assert next(lines).startswith("data: {")
        server.loop.call_soon_threadsafe(server.shut_down.set)
        last = [line for line in lines if line][-2:]
    assert msgspec.json.decode(last[0][len("data: ") :])["error"]["code"] == "shutting_down"
    assert last[1] == "data: [DONE]"
    server.core.wait_until(lambda core: core.num_running == 0)


def test_losing_the_core(server: FrontendServer) -> None:
    """Streams end with an error, and /health says 503 with the reason."""
    assert server.http.get("/health").status_code == 200
    with httpx.stream(
        "POST", server.url + TEXT, json={"model": MODEL, "prompt": "x", "stream": True}, timeout=10
    ) as answer:
        lines = answer.iter_lines()
        assert next(lines).startswith("data: {")
        server.core.die()
        last = [line for line in lines if line][-2:]
    assert msgspec.json.decode(last[0][len("data: ") :])["error"]["code"] == "engine_lost"
    health = server.http.get("/health")
    assert (health.status_code, health.json()["error"]["code"]) == (503, "engine_lost")
    assert server.post(TEXT, prompt="x").status_code == 503


def test_health_before_the_engine_is_ready() -> None:
    """503 until the engine can serve."""
    with frontend_server(ready=False) as server:
        health = server.http.get("/health")
        assert (health.status_code, health.json()["error"]["code"]) == (503, "engine_starting")


def test_a_write_in_time_is_not_blocked() -> None:
    """Only one single long wait counts, not the length of an answer."""

    async def run(pauses: list[float]) -> list[str]:
        sent: list[str] = []
        waits = iter(pauses)

        async def receive() -> Message:
            await asyncio.Event().wait()
            raise AssertionError

        async def send(message: Message) -> None:
            await asyncio.sleep(next(waits))
            sent.append(message["type"])

        async def work(send: Send) -> None:
            for _ in pauses:
                await send({"type": "x"})

        await serve_while_connected(receive, send, work, max_blocked_s=0.1)
        return sent

    assert asyncio.run(run([0.05] * 6)) == ["x"] * 6
    assert asyncio.run(run([0.05, 0.6, 0.05])) == ["x"]


@pytest.mark.parametrize("error", [TimeoutError(110, "timed out"), BrokenPipeError(), OSError(5)])
def test_a_connection_that_breaks_is_a_disconnect(error: OSError) -> None:
    """A write that fails cancels the work, as the client's leaving does, and raises nothing."""
    ends: list[str] = []

    async def receive() -> Message:
        await asyncio.Event().wait()
        raise AssertionError

    async def send(message: Message) -> None:
        raise error

    async def work(send: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": 200})
            ends.append("went on")
        except asyncio.CancelledError:
            ends.append("cancelled")
            raise

    asyncio.run(serve_while_connected(receive, send, work))
    assert ends == ["cancelled"]
