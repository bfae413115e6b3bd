"""Processes that try grammars, and what becomes of a request when one of them is killed."""

import os
import signal
import threading
import time
from collections.abc import Iterator

import httpx
import psutil
import pytest
from frontend_server import MODEL, FrontendServer, frontend_server

from cearx.frontend.grammar_check import Check, Setup
from cearx.frontend.grammar_checker import TRIES, _Process


@pytest.fixture
def server() -> Iterator[FrontendServer]:
    with frontend_server() as started:
        yield started


def ask(server: FrontendServer, number: int = 0) -> httpx.Response:
    return server.post(
        "/v1/completions",
        model=MODEL,
        prompt="a",
        max_tokens=1,
        guided_json={"type": "boolean", "title": f"{number}"},
    )


@pytest.mark.parametrize(
    ("kind", "kills", "status", "code"),
    [
        (Check, 1, 200, None),
        (Check, TRIES, 400, "invalid_value"),
        (Setup, 1, 200, None),
        (Setup, TRIES, 503, "grammar_check_unavailable"),
    ],
)
def test_a_killed_process(
    server: FrontendServer,
    monkeypatch: pytest.MonkeyPatch,
    kind: type[Setup] | type[Check],
    kills: int,
    status: int,
    code: str | None,
) -> None:
    """One kill is nobody's fault; a grammar in whose check it happens again is refused."""
    original = _Process.ask
    left = [None] * kills

    async def ask_and_kill(self: _Process, message: Setup | Check, limit_s: float) -> str | None:
        if isinstance(message, kind) and left:
            left.pop()
            self._process.kill()
        return await original(self, message, limit_s)

    monkeypatch.setattr(_Process, "ask", ask_and_kill)
    answer = ask(server)
    assert not left
    assert answer.status_code == status, answer.text
    if code is not None:
        assert answer.json()["error"]["code"] == code
    assert ask(server, 1).status_code == 200  # and the next grammar finds a process


def test_the_end_waits_for_no_grammar(server: FrontendServer) -> None:
    """Who is amid a check, or in the queue for one, gets a 503 that says why."""
    assert ask(server).status_code == 200  # a process is there
    (checker,) = [
        child
        for child in psutil.Process().children()
        if "cearx.frontend.grammar_check" in child.cmdline()
    ]
    os.kill(checker.pid, signal.SIGSTOP)
    answers: list[httpx.Response] = []
    threads = [
        threading.Thread(target=lambda number=number: answers.append(ask(server, number)))
        for number in range(1, 3)
    ]
    for thread in threads:
        thread.start()
    time.sleep(0.3)
    server.loop.call_soon_threadsafe(server.shut_down.set)
    began = time.monotonic()
    for thread in threads:
        thread.join()
    assert time.monotonic() - began < 10
    refused = [answer for answer in answers if answer.status_code == 503]
    assert refused  # the other one may have found a second process
    assert {answer.json()["error"]["code"] for answer in refused} == {"shutting_down"}
    assert {answer.status_code for answer in answers} <= {200, 503}
