"""What grammars that are too expensive cost their senders, and everybody else.

Owns a measurement, not a test: streams of a real server are timed token by token, first alone, then
while other clients send one degenerate grammar after the other.

    python tests/benchmarks/degenerate_grammars.py --streams 8 --tokens 100
"""

import argparse
import asyncio
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import httpx

sys.path.insert(0, str(Path(__file__).parent.parent / "support"))
from degenerate import DEGENERATE
from server_process import serving


async def stream(client: httpx.AsyncClient, index: int, tokens: int, gaps: list[float]) -> None:
    """One free stream; its gaps between events, in seconds."""
    body = {
        "model": "smollm2",
        "prompt": f"Story {index}:",
        "max_tokens": tokens,
        "ignore_eos": True,
        "stream": True,
    }
    last = None
    async with client.stream("POST", "/v1/completions", json=body) as answer:
        async for line in answer.aiter_lines():
            now = time.monotonic()
            if line.startswith("data: {"):
                if last is not None:
                    gaps.append(now - last)
                last = now


async def all_streams(client: httpx.AsyncClient, streams: int, tokens: int) -> list[float]:
    gaps: list[float] = []
    await asyncio.gather(*(stream(client, i, tokens, gaps) for i in range(streams)))
    return sorted(gaps)


async def send_degenerate(client: httpx.AsyncClient, ended: asyncio.Event) -> dict[str, Any]:
    """Each in turn and always new, so that nobody remembers it, until the streams have ended."""
    times: dict[str, list[float]] = {}
    number = 0
    while not ended.is_set():
        for name, fields in DEGENERATE.items():
            number += 1
            body = {"model": "smollm2", "prompt": "a", "max_tokens": 4, **fields(number)}
            start = time.monotonic()
            answer = await client.post("/v1/completions", json=body)
            label = f"{name} ({answer.status_code})"
            times.setdefault(label, []).append(time.monotonic() - start)
            assert answer.status_code in (200, 400), answer.text
    return times


def row(name: str, gaps: list[float]) -> str:
    p99 = gaps[int(len(gaps) * 0.99)]
    return (
        f"{name}: median {statistics.median(gaps) * 1000:.0f} ms, p99 {p99 * 1000:.0f} ms, "
        f"longest {gaps[-1] * 1000:.0f} ms between events"
    )


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=100)
    arguments = parser.parse_args()
    with serving() as server:
        async with httpx.AsyncClient(base_url=server.url, timeout=120) as client:
            await all_streams(client, arguments.streams, 10)
            print(row("alone", await all_streams(client, arguments.streams, arguments.tokens)))
            ended = asyncio.Event()
            sender = asyncio.create_task(send_degenerate(client, ended))
            gaps = await all_streams(client, arguments.streams, arguments.tokens)
            ended.set()
            print(row("beside degenerate grammars", gaps))
            for name, seconds in (await sender).items():
                print(f"  {name}: {len(seconds)} times, longest {max(seconds):.2f} s")


if __name__ == "__main__":
    asyncio.run(main())
