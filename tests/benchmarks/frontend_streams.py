"""What a frontend process pays for each token of many streams at once.

Owns a measurement, not a test: run it by hand on a quiet machine. A scripted core sends one token
to every stream in each step; the clients are bare sockets in this process. Reported is the CPU time
of the frontend process alone, from the first token to the end of the last stream.

    python tests/benchmarks/frontend_streams.py --streams 64 --tokens 500 --step-ms 4
"""

import argparse
import selectors
import socket
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

import msgspec
import psutil
from fake_core import FakeCore, Reply
from frontend_process import Started, write_model
from frontend_server import BOOT_ID, ENGINE

from cearx.core.messages import ProcessReady


def open_streams(port: int, count: int, tokens: int) -> list[socket.socket]:
    fields = {
        "model": "served",
        "messages": [{"role": "user", "content": "hi"}],
        "stream": True,
        "max_tokens": tokens,
    }
    body = msgspec.json.encode(fields)
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(
        body
    )
    clients = [socket.create_connection(("127.0.0.1", port)) for _ in range(count)]
    for client in clients:
        client.sendall(head + body)
        client.setblocking(False)
    return clients


def read_all(clients: list[socket.socket]) -> bytes:
    selector = selectors.DefaultSelector()
    received: dict[socket.socket, list[bytes]] = {client: [] for client in clients}
    for client in clients:
        selector.register(client, selectors.EVENT_READ)
    while selector.get_map():
        for key, _ in selector.select():
            client = key.fileobj
            assert isinstance(client, socket.socket)
            received[client].append(client.recv(1 << 16))
            if b"[DONE]" in b"".join(received[client][-2:]):
                selector.unregister(client)
                client.close()
    return b"".join(b"".join(chunks) for chunks in received.values())


def measure(options: argparse.Namespace, runtime_dir: Path, model: Path) -> None:
    write_model(model)
    engine = msgspec.structs.replace(ENGINE, max_model_len=1 << 16, num_blocks=1 << 20)
    with FakeCore(runtime_dir, BOOT_ID, engine) as core:
        started = Started(runtime_dir, model, options.stream_interval)
        try:
            started.reports_until(ProcessReady)
            core.reply = lambda submit: Reply(token_ids=[97] * submit.max_tokens)
            core.step_s = options.step_ms / 1000
            core.is_paused = True
            clients = open_streams(started.port, options.streams, options.tokens)
            core.wait_until(lambda core: core.num_running == options.streams)
            process = psutil.Process(started.process.pid)
            before, began = process.cpu_times(), time.monotonic()
            core.is_paused = False
            events = read_all(clients).count(b"data: {")
            seconds, after = time.monotonic() - began, process.cpu_times()
        finally:
            started.end()
    tokens = options.streams * options.tokens
    cpu_us = (after.user + after.system - before.user - before.system) * 1e6
    print(
        f"{tokens} tokens in {events} events: {cpu_us / tokens:.1f} us of CPU a token, "
        f"{cpu_us / events:.1f} us an event, {tokens / seconds:,.0f} tokens/s"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=500)
    parser.add_argument("--step-ms", type=float, default=4.0)
    parser.add_argument("--stream-interval", type=int, default=1)
    with tempfile.TemporaryDirectory() as runtime, tempfile.TemporaryDirectory() as folder:
        measure(parser.parse_args(), Path(runtime), Path(folder))
