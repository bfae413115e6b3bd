"""What a frontend process pays for a burst of requests: to the engine, and to the first event.

Owns a measurement, not a test: run it by hand on a quiet machine. A scripted core takes the
requests and makes no step before it has all of them; the clients are bare sockets in this process.
Reported is the CPU time of the frontend process alone, for each request: from the sockets to the
core, and from the first step's outputs to every stream's first event.

    python tests/benchmarks/frontend_burst.py --requests 64 --bursts 20
"""

import argparse
import contextlib
import selectors
import socket
import statistics
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

TOKENS = 4
"""Of each answer; two steps: the first token, then the others."""
STEP_S = 0.2
"""Between the two: long enough for the first events to be told."""


def body(words: int) -> bytes:
    content = "to be or not to be " * (words // 6)
    fields = {
        "model": "served",
        "messages": [{"role": "user", "content": content}],
        "stream": True,
        "max_tokens": TOKENS,
        "ignore_eos": True,
        "temperature": 1.0,
    }
    return msgspec.json.encode(fields)


def send_all(port: int, count: int, content: bytes) -> list[socket.socket]:
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n"
    clients = [socket.create_connection(("127.0.0.1", port)) for _ in range(count)]
    for client in clients:
        client.sendall(head % len(content) + content)
        client.setblocking(False)
    return clients


def read_until(clients: list[socket.socket], mark: bytes) -> None:
    with selectors.DefaultSelector() as selector:
        received = dict.fromkeys(clients, b"")
        for client in clients:
            selector.register(client, selectors.EVENT_READ)
        while selector.get_map():
            for key, _ in selector.select():
                client = key.fileobj
                assert isinstance(client, socket.socket)
                received[client] += client.recv(1 << 16)
                if mark in received[client]:
                    selector.unregister(client)


def measure(options: argparse.Namespace, runtime_dir: Path, model: Path) -> None:
    engine = msgspec.structs.replace(
        ENGINE, max_model_len=1 << 16, num_blocks=1 << 20, vocab_size=1 << 18
    )
    with FakeCore(runtime_dir, BOOT_ID, engine) as core:
        started = Started(runtime_dir, model)
        try:
            started.reports_until(ProcessReady)
            core.reply = lambda submit: Reply(token_ids=[97] * submit.max_tokens, splits=[1, 3])
            process = psutil.Process(started.process.pid)

            def cpu_s() -> float:
                times = process.cpu_times()
                return times.user + times.system

            submits, firsts, walls = [], [], []
            for _ in range(options.bursts):
                core.is_paused = True
                before, began = cpu_s(), time.monotonic()
                clients = send_all(started.port, options.requests, body(options.words))
                core.wait_until(lambda core: core.num_running == options.requests)
                walls.append(time.monotonic() - began)
                submitted = cpu_s()
                core.step_s = STEP_S
                core.is_paused = False
                read_until(clients, b"data: {")
                firsts.append(cpu_s() - submitted)
                submits.append(submitted - before)
                read_until(clients, b"[DONE]")
                for client in clients:
                    client.close()
                core.wait_until(lambda core: core.num_running == 0)
                time.sleep(STEP_S)  # the core sleeps behind its last step, and would take nothing
        finally:
            started.end()
    requests = options.requests
    print(
        f"bursts of {requests}: {1e6 * statistics.mean(submits) / requests:.0f} us of CPU a "
        f"request to the core, {1e6 * statistics.mean(firsts) / requests:.0f} us to the first "
        f"event; the core had all after {1e3 * statistics.median(walls):.1f} ms (median)"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--bursts", type=int, default=20)
    parser.add_argument("--words", type=int, default=24, help="length of each prompt")
    parser.add_argument("--model", type=Path, help="a .gguf file; default: a tokenizer of bytes")
    chosen = parser.parse_args()
    with contextlib.ExitStack() as stack:
        runtime = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        if chosen.model is None:
            write_model(folder)
        measure(chosen, runtime, chosen.model or folder)
