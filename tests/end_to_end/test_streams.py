"""Streams of a real model through all processes: lengths, bytes, sharing, cancelling, replay."""

import asyncio
import json
import random
from pathlib import Path
from typing import Any

import httpx
import pytest
from server_process import Server, final_scheduler, replay, serving

pytestmark = pytest.mark.model

PIECES = (
    "Hello, world! ",
    "The answer is 42. ",
    "你好世界\u3002",
    "日本語のテスト ",
    "한국어 문장. ",
    "😀👩‍👩‍👧‍👦🏳️‍🌈",
    "e\u0301a\u0308o\u0302 ",
    "नमस्ते ",
    "\n\n\t  ",
    "def f(x):\n    return x\n",
    "ΑΒΓ ѣѳ ",
    "\U0001f1e9\U0001f1ea",
)


def prompts(count: int, seed: int) -> list[str]:
    rng = random.Random(seed)
    return ["".join(rng.choices(PIECES, k=rng.randint(1, 6))) for _ in range(count)]


def stream_events(text: str) -> list[dict[str, Any]]:
    """The JSON events of an SSE body; the last line must be [DONE]."""
    data = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    assert data[-1] == "[DONE]"
    return [json.loads(line) for line in data[:-1]]


async def gather_limited(count: int, coroutines: list[Any]) -> list[Any]:
    limit = asyncio.Semaphore(count)

    async def run(coroutine: Any) -> Any:
        async with limit:
            return await coroutine

    return await asyncio.gather(*map(run, coroutines))


def test_the_capital_of_france(server: Server) -> None:
    """The default model answers a question through its own chat template."""
    question = [{"role": "user", "content": "What is the capital of France?"}]
    reply = server.post("/v1/chat/completions", messages=question, temperature=0, max_tokens=32)
    assert "Paris" in reply.json()["choices"][0]["message"]["content"]


def test_64_streams_are_exactly_as_long_as_asked(server: Server) -> None:
    """With ignore_eos each of 64 concurrent streams of different lengths has its exact length."""

    async def one(client: httpx.AsyncClient, index: int) -> tuple[int, int, int]:
        length = 1 + index * 7 % 61
        body = {
            "model": server.name,
            "prompt": list(range(500, 500 + 1 + index * 13 % 150)),
            "max_tokens": length,
            "ignore_eos": True,
            "seed": index,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        reply = await client.post("/v1/completions", json=body)
        events = stream_events(reply.text)
        finishes = [c["finish_reason"] for e in events for c in e["choices"] if c["finish_reason"]]
        assert finishes == ["length"]
        usage = events[-1]["usage"]
        assert usage["prompt_tokens"] == len(body["prompt"])
        return length, usage["completion_tokens"], len(events)

    async def all_of_them() -> list[tuple[int, int, int]]:
        limits = httpx.Limits(max_connections=64)
        async with httpx.AsyncClient(base_url=server.url, timeout=120, limits=limits) as client:
            return await asyncio.gather(*(one(client, index) for index in range(64)))

    for asked, got, _events in asyncio.run(all_of_them()):
        assert got == asked


def test_the_stream_is_the_body(server: Server) -> None:
    """For 200 prompts of emoji, CJK and combining marks the streamed bytes equal the body's."""

    async def one(client: httpx.AsyncClient, index: int, prompt: str) -> tuple[str, str]:
        body = {
            "model": server.name,
            "prompt": prompt,
            "max_tokens": 8,
            "temperature": 1.3,
            "seed": index,
            "ignore_eos": True,
        }
        # Prefix hits may change the last bits of logits, so both runs get their own salt.
        whole = await client.post("/v1/completions", json={**body, "cache_salt": f"a{index}"})
        parts = await client.post(
            "/v1/completions", json={**body, "cache_salt": f"b{index}", "stream": True}
        )
        texts = [c["text"] for e in stream_events(parts.text) for c in e["choices"]]
        return whole.json()["choices"][0]["text"], "".join(texts)

    async def all_of_them() -> list[tuple[str, str]]:
        async with httpx.AsyncClient(base_url=server.url, timeout=120) as client:
            jobs = [one(client, index, text) for index, text in enumerate(prompts(200, 3))]
            return await gather_limited(16, jobs)

    for whole, streamed in asyncio.run(all_of_them()):
        assert streamed.encode() == whole.encode()


def test_a_salt_isolates_the_prefix_cache(server: Server) -> None:
    """Equal prompts share blocks within a salt and never across salts."""
    prompt = list(range(2000, 2080))

    def cached(salt: str | None) -> int:
        extra = {} if salt is None else {"cache_salt": salt}
        reply = server.post("/v1/completions", prompt=prompt, max_tokens=1, **extra).json()
        return int(reply["usage"]["prompt_tokens_details"]["cached_tokens"])

    assert [cached(s) for s in ("x", "x", "y", None, None)] == [0, 64, 0, 0, 64]


def test_500_aborts_leave_the_pool_idle(tmp_path: Path) -> None:
    """Clients that leave at random moments, in every state, give all blocks back."""
    rng = random.Random(5)

    async def one(client: httpx.AsyncClient, index: int, patience_s: float) -> None:
        body = {
            "model": name,
            "prompt": list(range(100, 100 + rng.randint(1, 200))),
            "max_tokens": 400,
            "ignore_eos": True,
            "stream": index % 3 != 0,
            "n": 1 + index % 2,
        }
        try:
            await asyncio.wait_for(client.post("/v1/completions", json=body), patience_s)
        except TimeoutError:
            return

    async def storm() -> None:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=url, timeout=120, limits=limits) as client:
            jobs = [one(client, index, rng.uniform(0.0, 0.6)) for index in range(500)]
            await gather_limited(40, jobs)

    flags = ("--max-num-seqs", "8", "--max-num-batched-tokens", "64", "--max-model-len", "1024")
    with serving(*flags, "--kv-cache-memory", "60MiB", trace=tmp_path) as server:
        url, name = server.url, server.name
        asyncio.run(storm())
        # Everybody has left; a last request is served at once, and nobody else is running.
        assert server.post("/v1/completions", prompt="end", max_tokens=4).status_code == 200
        assert server.stop() == 0
        done = replay(server.trace_log, hash_seed="77")
        assert done.returncode == 0, done.stdout
        scheduler = final_scheduler(server.trace_log)
        assert (len(scheduler.books.running), len(scheduler.books.waiting)) == (0, 0)
        assert scheduler.books.pool.num_free == scheduler.config.num_blocks
