"""An OpenAI server that counts words as tokens and misbehaves on request.

A prompt's tokens are its words and TEMPLATE_TOKENS; words of `double` count twice. Streams come at
a pace of `step_s`; the model's name picks what goes wrong (`FAULTS`).
"""

import asyncio
import contextlib
import json
import threading
from collections.abc import Iterator
from typing import Any

TEMPLATE_TOKENS = 8
FAULTS = {
    "good": "nothing",
    "short": "one token fewer than asked for",
    "long-prompt": "usage tells one prompt token more",
    "no-usage": "no usage chunk",
    "refuses": "HTTP status 503 with an OpenAI error",
    "breaks": "the connection closes after the first chunk",
    "error-event": "an error inside the stream",
    "no-done": "the stream ends without [DONE]",
    "no-http": "bytes that are no HTTP",
    "silent": "no answer at all",
}


class FakeOpenAI:
    """The server's state; `requests` holds the bodies in the order of their arrival."""

    def __init__(self, model: str, step_s: float, double: frozenset[str], per_chunk: int) -> None:
        assert model in FAULTS, model
        self.model = model
        self.step_s = step_s
        self.double = double
        self.per_chunk = per_chunk
        self.requests: list[dict[str, Any]] = []
        self.headers: list[str] = []
        self.num_running = 0
        self.max_running = 0
        self.url = ""

    def count(self, body: dict[str, Any]) -> int:
        if "messages" in body:
            words = body["messages"][0]["content"].split()
            return TEMPLATE_TOKENS + len(words) + sum(word in self.double for word in words)
        prompt = body["prompt"]
        return len(prompt.split() if isinstance(prompt, str) else prompt)

    async def connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                text = head.decode()
                lines = dict(
                    line.lower().split(": ", 1) for line in text.split("\r\n")[1:] if ": " in line
                )
                body = await reader.readexactly(int(lines.get("content-length", 0)))
                await self._answer(text, json.loads(body) if body else {}, writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass  # the client has gone
        finally:
            writer.close()

    async def _answer(self, head: str, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        if head.startswith("GET"):
            _send_json(writer, 200, {"data": [{"id": self.model}]})
            return
        self.headers.append(head)
        if not body.get("stream"):
            usage = {"prompt_tokens": self.count(body), "completion_tokens": 1}
            _send_json(writer, 200, {"usage": usage})
            return
        self.requests.append(body)
        self.num_running += 1
        self.max_running = max(self.max_running, self.num_running)
        try:
            await self._stream(body, writer)
        finally:
            self.num_running -= 1

    async def _stream(self, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        if self.model == "silent":
            await asyncio.sleep(60)
        if self.model == "refuses":
            _send_json(writer, 503, {"error": {"message": "too many requests wait: 9, limit 8"}})
            return
        if self.model == "no-http":
            writer.write(b"hello there\r\n\r\n")
            return
        writer.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
            b"transfer-encoding: chunked\r\n\r\n"
        )
        tokens = body["max_tokens"] - (self.model == "short")
        for first in range(0, tokens, self.per_chunk):
            await asyncio.sleep(self.step_s)
            text = "x" * min(self.per_chunk, tokens - first)
            _send_event(writer, {"choices": [{"index": 0, "delta": {"content": text}}]})
            if self.model == "breaks":
                writer.transport.abort()
                raise ConnectionAbortedError
        if self.model == "error-event":
            _send_event(writer, {"error": {"message": "the engine has died", "code": 500}})
        if self.model != "no-usage":
            usage = {
                "prompt_tokens": self.count(body) + (self.model == "long-prompt"),
                "completion_tokens": tokens,
            }
            _send_event(writer, {"choices": [], "usage": usage})
        if self.model != "no-done":
            _send_chunk(writer, b"data: [DONE]\n\n")
        writer.write(b"0\r\n\r\n")


def _send_event(writer: asyncio.StreamWriter, event: dict[str, Any]) -> None:
    _send_chunk(writer, b"data: " + json.dumps(event).encode() + b"\n\n")


def _send_chunk(writer: asyncio.StreamWriter, content: bytes) -> None:
    writer.write(b"%x\r\n%s\r\n" % (len(content), content))


def _send_json(writer: asyncio.StreamWriter, status: int, content: dict[str, Any]) -> None:
    body = json.dumps(content).encode()
    writer.write(b"HTTP/1.1 %d X\r\ncontent-length: %d\r\n\r\n%s" % (status, len(body), body))


@contextlib.contextmanager
def fake_openai(
    model: str = "good",
    *,
    step_s: float = 0.0,
    double: frozenset[str] = frozenset(),
    per_chunk: int = 1,
) -> Iterator[FakeOpenAI]:
    """The server in a thread of its own, for the time of the block."""
    server = FakeOpenAI(model, step_s, double, per_chunk)
    started, ended = threading.Event(), asyncio.Event()
    loop = asyncio.new_event_loop()

    async def serve() -> None:
        async with await asyncio.start_server(server.connected, "127.0.0.1", 0) as listener:
            server.url = f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
            started.set()
            await ended.wait()

    def run() -> None:
        with asyncio.Runner(loop_factory=lambda: loop) as runner:
            runner.run(serve())

    thread = threading.Thread(target=run)
    thread.start()
    try:
        assert started.wait(10), "the fake server did not start"
        yield server
    finally:
        loop.call_soon_threadsafe(ended.set)
        thread.join()
