"""What an operator relies on: a socket of one's own, keys, logs for machines, an orderly end."""

import contextlib
import json
import signal
import stat
import threading
import time
from pathlib import Path

import httpx
import pytest
from server_process import READY, Server

pytestmark = pytest.mark.model

SECRET_PROMPT = "xylophone quartz vexes"
BODY = {
    "model": "smollm2",
    "prompt": SECRET_PROMPT,
    "max_tokens": 60,
    "ignore_eos": True,
    "stream": True,
}


@pytest.fixture
def socket_path(tmp_path: Path) -> Path:
    return tmp_path / "s"


def wait_for_line(server: Server, word: str) -> None:
    give_up = time.monotonic() + 60
    while word not in "".join(server.stderr):
        assert time.monotonic() < give_up and server.process.poll() is None, server.stderr
        time.sleep(0.05)


def test_unix_socket_keys_json_logs_and_a_graceful_end(tmp_path: Path, socket_path: Path) -> None:
    """SIGTERM: not ready at once, the running stream comes to its end, exit code 0."""
    keys = tmp_path / "keys"
    keys.write_text("sk-one\n")
    server = Server(
        *("--uds", str(socket_path), "--api-key-file", str(keys)),
        *("--log-format", "json", "--shutdown-timeout", "60"),
    )
    try:
        wait_for_line(server, "ready")
        assert not READY.search("".join(server.stderr))  # no TCP address
        assert stat.S_ISSOCK(socket_path.stat().st_mode)
        transport = httpx.HTTPTransport(uds=str(socket_path))
        with httpx.Client(transport=transport, base_url="http://x", timeout=60) as client:
            assert client.get("/v1/models").status_code == 401
            client.headers["authorization"] = "Bearer sk-one"
            with client.stream("POST", "/v1/completions", json=BODY) as answer:
                lines = answer.iter_lines()
                next(lines)
                server.process.send_signal(signal.SIGTERM)
                while client.get("/health").status_code == 200:
                    time.sleep(0.01)
                assert client.post("/v1/completions", json=BODY).status_code == 503
                rest = [line for line in lines if line]
        assert '"finish_reason":"length"' in rest[-2]
        assert server.wait_end(30) == 0
        assert not socket_path.exists()
    finally:
        server.process.kill()
        server.process.wait()
    text = "".join(server.stderr)
    entries = [json.loads(line) for line in server.stderr if line.startswith("{")]
    assert {entry["event"] for entry in entries} >= {"request", "ending"}
    assert all({"level", "timestamp"} <= entry.keys() for entry in entries)
    assert "xylophone" not in text and "sk-one" not in text


def test_the_end_has_a_limit_and_a_second_signal_needs_no_patience() -> None:
    """A stream that outlives the limit ends with an error event; SIGINT then ends all at once."""
    for timeout, second in (("1", None), ("600", signal.SIGINT)):
        server = Server("--port", "0", "--shutdown-timeout", timeout)
        try:
            server.wait_ready()
            body = {**BODY, "max_tokens": 4000}
            url = server.url + "/v1/completions"
            with httpx.stream("POST", url, json=body, timeout=60) as answer:
                lines = answer.iter_lines()
                next(lines)
                server.process.send_signal(signal.SIGTERM)
                if second is not None:
                    threading.Timer(0.5, server.process.send_signal, (second,)).start()
                rest = [line for line in lines if line]
            assert "shutting_down" in rest[-2]
            assert rest[-1] == "data: [DONE]"
            assert server.wait_end(20) == 0
        finally:
            server.process.kill()
            server.process.wait()


@pytest.mark.parametrize("module", ["cearx.worker", "cearx.frontend"])
def test_a_process_that_is_killed_while_requests_finish_is_named(module: str) -> None:
    """What dies between SIGTERM and the end is a fault like any other: told, and no exit code 0."""
    server = Server("--port", "0", "--shutdown-timeout", "60")
    try:
        server.wait_ready()
        url = server.url + "/v1/completions"
        with contextlib.suppress(httpx.TransportError):
            with httpx.stream("POST", url, json={**BODY, "max_tokens": 4000}, timeout=60) as answer:
                lines = answer.iter_lines()
                next(lines)
                server.process.send_signal(signal.SIGTERM)
                time.sleep(0.5)
                server.child(module).kill()
                for _ in lines:
                    pass
        assert server.wait_end(20) == 1
        assert "was killed by SIGKILL" in "".join(server.stderr)
    finally:
        server.process.kill()
        server.process.wait()
