"""Three figures of the whole server on the default model: one stream, many, and a first token.

Owns a measurement, not a test: run it by hand on a quiet machine. Everything counts: HTTP,
processes, scheduler, prompt, sampling, detokenising. No prompt is answered from the prefix cache.

    python tests/benchmarks/server_figures.py --rounds 5

With the instructions of a machine with AVX2 (compiled code is kept apart by processor and
features; the name alone would leave this machine's features on):

    ATEN_CPU_CAPABILITY=avx2 MKL_ENABLE_INSTRUCTIONS=AVX2 ONEDNN_MAX_CPU_ISA=AVX2 \
    NUMBA_CPU_NAME=haswell NUMBA_CPU_FEATURES=+avx2,+avx,+fma,+f16c,+bmi,+bmi2,+lzcnt,+popcnt,\
+sse4.2,+sse4.1,+ssse3,+sse3,+sse2,+sse,+cx16,+64bit python tests/benchmarks/server_figures.py
"""

import argparse
import asyncio
import statistics
import sys
import time
from pathlib import Path

import httpx

sys.path.insert(0, str(Path(__file__).parent.parent / "support"))
from server_process import Server, serving

FIRST_TOKEN = 1000
PROMPT, OUTPUT = 64, 64
LONG_PROMPT = 512


async def answer(client: httpx.AsyncClient, prompt_len: int, tokens: int, salt: str) -> float:
    """Streams one completion of exactly `tokens` tokens; seconds to its first event."""
    body = {
        "model": "smollm2",
        "prompt": list(range(FIRST_TOKEN, FIRST_TOKEN + prompt_len)),
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "cache_salt": salt,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    start = time.perf_counter()
    first = None
    usage = ""
    async with client.stream("POST", "/v1/completions", json=body) as reply:
        reply.raise_for_status()
        async for line in reply.aiter_lines():
            if first is None and line.startswith("data:"):
                first = time.perf_counter() - start
            if '"completion_tokens"' in line:
                usage = line
    assert first is not None and f'"completion_tokens":{tokens}' in usage.replace(" ", ""), usage
    return first


async def one_round(server: Server, streams: int, salt: str) -> tuple[float, float, float]:
    """Tokens a second of one stream and of `streams` at once; seconds to a long prompt's first."""
    async with httpx.AsyncClient(base_url=server.url, timeout=600) as client:
        await client.get("/health")
        rates = []
        for count in (1, streams):
            start = time.perf_counter()
            salts = [f"{salt}-{count}-{index}" for index in range(count)]
            await asyncio.gather(*(answer(client, PROMPT, OUTPUT, each) for each in salts))
            rates.append(count * OUTPUT / (time.perf_counter() - start))
        return rates[0], rates[1], await answer(client, LONG_PROMPT, 1, f"{salt}-long")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--streams", type=int, default=16)
    arguments = parser.parse_args()
    with serving() as server:
        asyncio.run(one_round(server, arguments.streams, "warm-up"))
        rounds = [
            asyncio.run(one_round(server, arguments.streams, str(turn)))
            for turn in range(arguments.rounds)
        ]
    names = (
        f"one stream, {PROMPT} tokens in and {OUTPUT} out, tok/s",
        f"{arguments.streams} streams of the same, tok/s",
        f"first token of a prompt of {LONG_PROMPT}, s",
    )
    for name, values in zip(names, zip(*rounds, strict=True), strict=True):
        low, middle, high = min(values), statistics.median(values), max(values)
        print(f"{name:45} {middle:8.2f} ({low:.2f} to {high:.2f})")


if __name__ == "__main__":
    main()
