"""Clients that leave a real server at random moments of a request's life, with witnesses that stay.

Owns the storm and what is looked at before and behind it: streams, processes, pool. Called by
`tests/end_to_end/test_disconnect_storm.py` and, at its full size, by
`tests/benchmarks/disconnect_storm.py`.
"""

import asyncio
import collections
import contextlib
import json
import random
import socket
import struct
import time
from typing import Any

import httpx
import msgspec
import psutil
from server_process import Server

MODEL = "m"
"""The name under which the model must be served."""
AT_ONCE = 64
WITNESSES = 4
WITNESS_TOKENS = 48
RESET = struct.pack("ii", 1, 0)
"""SO_LINGER with which a close sends a reset and not an orderly end."""
MESSAGES = [{"role": "user", "content": "Tell me of people."}]
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "tags": {"type": "array", "items": {"enum": [1]}}},
    "required": ["name", "tags"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "find", "parameters": SCHEMA}}
STAGES = (
    "connect",
    "head",
    "body",
    "queue",
    "prefill",
    "stream",
    "whole",
    "tools",
    "structured",
    "grammar",
    "pipelined",
)


class ProcessState(msgspec.Struct, frozen=True):
    name: str
    rss_bytes: int
    num_fds: int


def processes(server: Server) -> list[ProcessState]:
    """The supervisor and all below it, by pid."""
    family = [psutil.Process(server.process.pid), *server.family()]
    return [
        ProcessState(_module(process), process.memory_info().rss, process.num_fds())
        for process in sorted(family, key=lambda process: process.pid)
    ]


def _module(process: psutil.Process) -> str:
    names = [word for word in process.cmdline() if word.startswith("cearx.")]
    return names[0] if names else process.name()


def request(stage: str, chance: random.Random, number: int) -> bytes:
    """The bytes of one request, head and body."""
    path, body = "/v1/completions", {"prompt": "a" * chance.randint(1, 40)}
    more: dict[str, Any] = {
        "model": MODEL,
        "max_tokens": 200,
        "ignore_eos": True,
        "n": 1 + number % 2,
    }
    if stage == "prefill":
        body = {"prompt": "b" * chance.randint(400, 700)}
    elif stage in ("tools", "structured", "grammar"):
        path, body = "/v1/chat/completions", {"messages": MESSAGES}
        more = {"model": MODEL, "max_tokens": 200}
        if stage == "tools":
            more |= {"tools": [TOOL], "tool_choice": "required"}
        else:  # a grammar that nobody has tried before, or one that all have
            title = str(number) if stage == "grammar" else "same"
            more["guided_json"] = SCHEMA | {"title": title}
    if stage not in ("whole", "pipelined"):
        more["stream"] = True
    encoded = json.dumps(body | more).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(encoded)}\r\n\r\n"
    return head.encode() + encoded


async def leave(address: tuple[str, int], stage: str, chance: random.Random, number: int) -> None:
    """One client's life."""
    loop = asyncio.get_running_loop()
    client = socket.socket()
    client.setblocking(False)
    try:
        await loop.sock_connect(client, address)
        data = request(stage, chance, number)
        head = data.index(b"\r\n\r\n") + 4
        if stage == "connect":
            data = b""
        elif stage == "head":
            data = data[: chance.randrange(1, head)]
        elif stage == "body":
            data = data[: chance.randrange(head, len(data))]
        elif stage == "pipelined":  # what is behind a request keeps the server from reading on
            data += data[: chance.randrange(1, 60)]
        await loop.sock_sendall(client, data)
        if stage in ("stream", "tools", "structured"):
            for _ in range(chance.randint(1, 12)):
                async with asyncio.timeout(chance.uniform(0.05, 2)):
                    if not await loop.sock_recv(client, 512):
                        break
        else:
            await asyncio.sleep(chance.choice([0, 0, 0.01, 0.1, 0.3]))
    except (TimeoutError, ConnectionError):
        pass
    finally:
        if chance.random() < 0.5:
            with contextlib.suppress(OSError):
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        client.close()


async def witness(client: httpx.AsyncClient, number: int) -> str:
    """The text of one stream, as its events brought it."""
    body = {
        "model": MODEL,
        "prompt": f"{number}: once upon a time",
        "max_tokens": WITNESS_TOKENS,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
        "cache_salt": f"{number}",
    }
    text = ""
    async with client.stream("POST", "/v1/completions", json=body) as answer:
        assert answer.status_code == 200, await answer.aread()
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                text += json.loads(line[6:])["choices"][0]["text"]
    assert line == "" or line == "data: [DONE]"
    return text


async def storm(server: Server, clients: int, seed: int) -> "collections.Counter[str]":
    """Lets them come and leave; counts stages, and witnesses ('exact' and 'other')."""
    address = ("127.0.0.1", httpx.URL(server.url).port or 0)
    chance = random.Random(seed)
    found: collections.Counter[str] = collections.Counter()
    limit = asyncio.Semaphore(AT_ONCE)
    is_over = asyncio.Event()
    async with httpx.AsyncClient(base_url=server.url, timeout=120) as http:
        expected = [await witness(http, number) for number in range(WITNESSES)]

        async def watch(number: int) -> None:
            while not is_over.is_set():
                is_exact = await witness(http, number) == expected[number]
                found["exact" if is_exact else "other"] += 1

        async def one(number: int) -> None:
            stage = STAGES[number % len(STAGES)]
            found[stage] += 1
            async with limit:
                await leave(address, stage, random.Random(seed * 1_000_003 + number), number)

        watchers = [asyncio.create_task(watch(number)) for number in range(WITNESSES)]
        numbers = list(range(clients))
        chance.shuffle(numbers)
        await asyncio.gather(*map(one, numbers))
        is_over.set()
        await asyncio.gather(*watchers)
    return found


def wait_idle(server: Server, timeout_s: float = 20) -> float:
    """Seconds until nobody runs or waits and every client's descriptor is closed."""
    start = time.monotonic()
    while time.monotonic() - start < timeout_s:
        with httpx.Client(base_url=server.url) as client:
            load = client.get("/load").json()
        if load["server_load"] == 0 and not open_connections(server):
            return time.monotonic() - start
        time.sleep(0.05)
    raise AssertionError(f"not idle after {timeout_s} s: {load}, {open_connections(server)}")


def open_connections(server: Server) -> int:
    """Connections of clients that the frontends hold."""
    return sum(
        connection.status != psutil.CONN_LISTEN
        for process in server.family()
        for connection in process.net_connections("tcp")
    )
