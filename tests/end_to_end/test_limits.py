"""Limits, priorities and steps ahead in a real server: what clients see, and that it replays."""

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from server_process import Server, replay, serving

pytestmark = pytest.mark.model


def complete(server: Server, number: int, **fields: object) -> httpx.Response:
    prompt = [1000 + number, 2000, 3000]
    return server.post("/v1/completions", prompt=prompt, temperature=0, ignore_eos=True, **fields)


def burst(server: Server, count: int, **fields: object) -> list[httpx.Response]:
    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(lambda number: complete(server, number, **fields), range(count)))


def test_both_modes_give_the_same_tokens(tmp_path: Path) -> None:
    """With and without steps planned ahead; the traces of both replay."""
    texts = []
    for flag in ("--async-scheduling", "--no-async-scheduling"):
        with serving(flag, trace=tmp_path / flag) as server:
            answers = burst(server, 6, max_tokens=20)
            texts.append([answer.json()["choices"][0]["text"] for answer in answers])
            assert server.stop() == 0
            done = replay(server.trace_log)
            assert done.returncode == 0, done.stdout
    assert texts[0] == texts[1]


def test_limits(tmp_path: Path) -> None:
    """503 with Retry-After for whom the queue has no place, 504 at the deadline."""
    flags = ("--max-num-seqs", "1", "--max-num-queued-reqs", "2", "--request-timeout", "15")
    with serving(*flags, trace=tmp_path) as server:
        answers = burst(server, 6, max_tokens=4)
        codes = [answer.status_code for answer in answers]
        assert codes.count(200) >= 3 and codes.count(503) >= 1
        assert all("retry-after" in a.headers for a in answers if a.status_code == 503)
        start = time.monotonic()
        assert complete(server, 0, max_tokens=8000).status_code == 504
        assert 14 < time.monotonic() - start < 40
        assert server.stop() == 0
        assert replay(server.trace_log).returncode == 0


def test_urgent_requests_go_first(tmp_path: Path) -> None:
    """One seat: the urgent request takes it, and the other comes back and ends whole."""
    flags = ("--max-num-seqs", "1", "--scheduling-policy", "priority")
    with serving(*flags, trace=tmp_path) as server:
        with ThreadPoolExecutor(2) as pool:
            slow = pool.submit(complete, server, 1, max_tokens=60, priority=5)
            time.sleep(0.3)
            urgent = pool.submit(complete, server, 2, max_tokens=2, priority=-1)
            assert urgent.result().status_code == 200
            assert not slow.done()
            assert slow.result().json()["usage"]["completion_tokens"] == 60
        assert httpx.post(server.url + "/reset_prefix_cache").status_code == 200
        assert server.stop() == 0
        done = replay(server.trace_log)
        assert done.returncode == 0 and "1 preemption" in done.stdout, done.stdout
