"""The frontend as its own process: launch, readiness, an orderly end, failures in one line."""

import os
import signal
import socket
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import msgspec
import pytest
from fake_core import FakeCore, Reply
from frontend_process import Started, write_model
from frontend_server import BOOT_ID, ENGINE

from cearx.core.messages import ProcessFailed, ProcessReady, Progress


@pytest.fixture
def model(tmp_path: Path) -> Path:
    write_model(tmp_path)
    return tmp_path


@pytest.fixture
def runtime_dir() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as name:  # short: socket paths have a limit
        yield Path(name)


def test_the_life_of_a_frontend(model: Path, runtime_dir: Path) -> None:
    """Ready only after the engine; on SIGTERM streams end with an error, exit 0 within 3 s."""
    with FakeCore(runtime_dir, BOOT_ID, ENGINE) as core:
        started = Started(runtime_dir, model)
        try:
            reports = started.reports_until(ProcessReady)
            assert [r.process for r in reports] == ["frontend-0"] * len(reports)
            assert isinstance(reports[0], Progress)
            assert httpx.get(started.url + "/health").status_code == 200
            assert httpx.get(started.url + "/v1/models").json()["data"][0]["id"] == "served"
            core.reply = lambda submit: Reply(token_ids=[97] * 1_000_000)
            core.step_s = 0.01
            messages = [{"role": "user", "content": "x"}]
            body = {"model": "served", "messages": messages, "stream": True}
            url = started.url + "/v1/chat/completions"
            with httpx.stream("POST", url, json=body, timeout=10) as answer:
                lines = answer.iter_lines()
                assert "assistant" in next(lines)
                began = time.monotonic()
                started.process.send_signal(signal.SIGTERM)
                last = [line for line in lines if line][-2:]
            assert "shutting_down" in last[0]
            assert last[1] == "data: [DONE]"
            assert started.process.wait(5) == 0
            assert time.monotonic() - began < 3.5
            core.wait_until(lambda core: core.num_running == 0)
        finally:
            errors = started.end()
        assert "Traceback" not in errors, errors


def test_sigterm_with_a_client_that_does_not_read(model: Path, runtime_dir: Path) -> None:
    """Nobody can keep the process from ending."""
    with FakeCore(runtime_dir, BOOT_ID, ENGINE) as core:
        started = Started(runtime_dir, model)
        try:
            started.reports_until(ProcessReady)
            core.reply = lambda submit: Reply(token_ids=[97] * 8_000)
            body = msgspec.json.encode({"model": "served", "prompt": "x", "stream": True, "n": 4})
            head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n"
            with socket.socket() as client:
                client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                client.connect(("127.0.0.1", started.port))
                client.sendall(head % len(body) + body)
                core.wait_until(lambda core: bool(core.submits) and not core.num_running, 20)
                began = time.monotonic()
                started.process.send_signal(signal.SIGTERM)
                assert started.process.wait(6) == 0, started.end()
                assert time.monotonic() - began < 4
        finally:
            errors = started.end()
        assert "Traceback" not in errors, errors


def test_the_end_before_the_engine_is_ready(model: Path, runtime_dir: Path) -> None:
    """A frontend that still waits ends as well, and was never ready."""
    with FakeCore(runtime_dir, BOOT_ID, ENGINE) as core:
        core.answers_hello = False
        started = Started(runtime_dir, model)
        try:
            while started.reports_until(Progress)[-1].stage != "waiting for the engine":  # type: ignore[union-attr]
                pass
            started.process.send_signal(signal.SIGTERM)
            assert started.process.wait(5) == 0
        finally:
            started.end()


def test_a_model_without_tokenizer(runtime_dir: Path, tmp_path: Path) -> None:
    """A known failure is one line for the person, told to the supervisor."""
    with FakeCore(runtime_dir, BOOT_ID, ENGINE):
        started = Started(runtime_dir, tmp_path)
        try:
            failed = started.reports_until(ProcessFailed)[-1]
            assert isinstance(failed, ProcessFailed)
            assert "tokenizer.json" in failed.reason and "\n" not in failed.reason
            assert started.process.wait(5) != 0
        finally:
            errors = started.end()
        assert "Traceback" not in errors, errors


def test_the_supervisor_is_gone(model: Path, runtime_dir: Path) -> None:
    """The end of the supervisor's pipe is the end of the process."""
    with FakeCore(runtime_dir, BOOT_ID, ENGINE):
        started = Started(runtime_dir, model)
        try:
            started.reports_until(ProcessReady)
            assert started.process.stdin is not None
            started.process.stdin.close()
            started.process.wait(5)
            with pytest.raises(ProcessLookupError):
                os.kill(started.process.pid, 0)
        finally:
            started.process.stdin = None
            started.end()
