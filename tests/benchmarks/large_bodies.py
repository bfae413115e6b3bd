"""How long one large body holds up the event loop of a frontend, on which all streams run.

Owns a measurement, not a test: bodies of 4 MiB that are costly to read, each sent once to a real
frontend with a scripted core, while a task on its loop asks to be woken every millisecond.

    python tests/benchmarks/large_bodies.py
"""

import asyncio
import sys
import time
from pathlib import Path

import httpx

sys.path.insert(0, str(Path(__file__).parent.parent / "support"))
from frontend_server import FrontendServer, frontend_server

SIZE = 4 * 1024 * 1024 - 1024


def filled(before: bytes, item: bytes, after: bytes) -> bytes:
    """As many items, joined by commas, as fit a body."""
    return before + b",".join([item] * (SIZE // (len(item) + 1))) + after


USER = b'{"role":"user","content":"a"}'
PART = b'{"type":"text","text":"b"}'
TOOL = b'{"type":"function","function":{"name":"a"}}'
BODIES = {
    "ids": ("/detokenize", filled(b'{"tokens":[', b"7", b"]}")),
    "text": ("/tokenize", b'{"return_token_strs":true,"prompt":"' + b"a" * SIZE + b'"}'),
    "labels": ("/abort_requests", filled(b'{"request_ids":[', b'"a"', b"]}")),
    "prompt of ids": ("/v1/completions", filled(b'{"prompt":[', b"7", b"]}")),
    "prompts": ("/v1/completions", filled(b'{"prompt":[', b"[7]", b"]}")),
    "unknown lists": ("/v1/completions", filled(b'{"prompt":"a","x":[', b"[]", b"]}")),
    "unknown objects": ("/v1/completions", filled(b'{"prompt":"a","x":[', b'{"a":1}', b"]}")),
    "parts": (
        "/v1/chat/completions",
        filled(b'{"messages":[{"role":"user","content":[', PART, b"]}]}"),
    ),
    "tools": (
        "/v1/chat/completions",
        filled(b'{"messages":[' + USER + b'],"tools":[', TOOL, b"]}"),
    ),
    "schema": (
        "/v1/completions",
        filled(b'{"prompt":"a","guided_json":{"enum":[', b'"a"', b"]}}"),
    ),
    "items": ("/v1/responses", filled(b'{"input":[', USER, b"]}")),
    "messages": ("/v1/messages", filled(b'{"max_tokens":1,"messages":[', USER, b"]}")),
}


def measure(server: FrontendServer) -> None:
    lags: list[float] = []

    async def beat() -> None:
        while True:
            start = time.perf_counter()
            await asyncio.sleep(0.001)
            lags.append(time.perf_counter() - start - 0.001)

    beats = asyncio.run_coroutine_threadsafe(beat(), server.loop)
    with httpx.Client(base_url=server.url, timeout=60) as client:
        for name, (path, body) in BODIES.items():
            time.sleep(0.2)
            lags.clear()
            start = time.perf_counter()
            status = client.post(path, content=body).status_code
            seconds = time.perf_counter() - start
            print(
                f"{path:22} {name:16} {status}: longest stop {max(lags) * 1000:4.0f} ms, "
                f"answer after {seconds * 1000:5.0f} ms"
            )
    beats.cancel()


if __name__ == "__main__":
    with frontend_server(require_model=False) as server:
        measure(server)
