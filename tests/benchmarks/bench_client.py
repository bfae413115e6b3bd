"""What the benchmark's client itself costs: CPU an event, and its share of a burst's TTFT.

Owns a measurement, not a test: run it by hand. A process of its own sends one event to every stream
each step, as a server with that step time would; where aiohttp is installed, the same streams are
read with it and msgspec for comparison.

    python tests/benchmarks/bench_client.py --streams 64 --events 500 --step-ms 4
"""

import argparse
import asyncio
import contextlib
import multiprocessing
import resource
import socket
import statistics
import time

import msgspec
import uvloop

from cearx.frontend.bench.concurrency_gate import ConcurrencyGate
from cearx.frontend.bench.event_parser import EventParser
from cearx.frontend.bench.http_stream import fill
from cearx.frontend.bench.load_loop import LoadLoop
from cearx.frontend.bench.wire import Load, PlannedRequest, StreamRecord, Target

CHUNK = {
    "id": "chatcmpl-" + "0123456789abcdef" * 2,
    "object": "chat.completion.chunk",
    "created": 1764540000,
    "model": "qwen3-8b",
    "choices": [{"index": 0, "delta": {"content": " word"}, "finish_reason": None}],
    "usage": None,
}
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
BODY = b'{"messages":[{"role":"user","content":"hello"}],"stream":true}'


def event(content: bytes) -> bytes:
    data = b"data: " + content + b"\n\n"
    return b"%x\r\n%s\r\n" % (len(data), data)


class PacedStream(asyncio.Protocol):
    """One stream of the server; `running` holds those that get an event each step."""

    running: set["PacedStream"] = set()  # noqa: RUF012 - shared on purpose
    num_events = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        if b"POST" in data:
            self.left = self.num_events
            self.transport.write(HEAD)
            self.running.add(self)

    def connection_lost(self, error: Exception | None) -> None:
        self.running.discard(self)


def serve(listener: socket.socket, num_events: int, step_s: float) -> None:
    chunk = event(msgspec.json.encode(CHUNK))
    end = event(b"[DONE]") + b"0\r\n\r\n"
    PacedStream.num_events = num_events

    async def steps() -> None:
        await asyncio.get_running_loop().create_server(PacedStream, sock=listener)
        while True:
            for stream in list(PacedStream.running):
                stream.left -= 1
                stream.transport.write(chunk if stream.left else chunk + end)
                if not stream.left:
                    PacedStream.running.discard(stream)
            await asyncio.sleep(step_s)

    with contextlib.suppress(KeyboardInterrupt):
        uvloop.run(steps())


async def with_ours(port: int, streams: int) -> list[StreamRecord]:
    target = Target(
        host="127.0.0.1",
        address="127.0.0.1",
        port=port,
        is_tls=False,
        path="/v1/chat/completions",
        headers={},
        request_timeout_s=60,
    )
    requests = [PlannedRequest(index, 0.0, BODY) for index in range(streams)]
    load = Load(target=target, requests=requests, is_gated=False)
    loop = LoadLoop(load, ConcurrencyGate(0, 0), lambda ended, chunks: None)
    return (await loop.run(time.monotonic())).records


async def with_aiohttp(port: int, streams: int) -> list[StreamRecord]:
    import aiohttp

    begin = time.monotonic()
    url = f"http://127.0.0.1:{port}/v1/chat/completions"

    async def one(session: aiohttp.ClientSession, index: int) -> StreamRecord:
        parser, start = EventParser(), time.monotonic()
        async with session.post(url, data=BODY) as response:
            async for piece in response.content.iter_any():
                parser.feed(piece, time.monotonic())
        record = StreamRecord(index, 0.0)
        fill(record, parser, start, begin)
        return record

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        return await asyncio.gather(*(one(session, index) for index in range(streams)))


def cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--events", type=int, default=500)
    parser.add_argument("--step-ms", type=float, default=4.0)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    server = multiprocessing.get_context("fork").Process(
        target=serve, args=(listener, options.events, options.step_ms / 1000), daemon=True
    )
    server.start()
    clients = {"ours": with_ours, "aiohttp": with_aiohttp}
    try:
        import aiohttp  # noqa: F401 - only whether it is there
    except ImportError:
        del clients["aiohttp"]
    for _ in range(options.rounds):
        for name, client in clients.items():
            before = cpu_s()
            records = uvloop.run(client(port, options.streams))
            used = cpu_s() - before
            events = sum(1 + len(record.itls_s) for record in records)
            assert events == options.streams * options.events, f"{events} events came"
            ttft_ms = [1e3 * (record.ttft_s or 0.0) for record in records]
            print(
                f"{name:8} {1e6 * used / events:5.1f} us of CPU an event, TTFT median"
                f" {statistics.median(ttft_ms):5.1f} ms, max {max(ttft_ms):5.1f} ms"
            )
    server.terminate()


if __name__ == "__main__":
    main()
