"""The server's processes: how they start, how they end, who says what when one of them fails."""

import os
import re
import signal
import socket
import stat
import subprocess
import sys
import time
from pathlib import Path

import httpx
import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families
from server_process import READY, Server, replay, serving

pytestmark = pytest.mark.model


def test_ctrl_c_ends_everything(tmp_path: Path) -> None:
    """SIGINT ends all processes with exit code 0, and the trace is closed and replays."""
    with serving(trace=tmp_path) as server:
        family = server.family()
        assert len(family) >= 3
        assert server.post("/v1/completions", prompt="a", max_tokens=2).status_code == 200
        assert server.stop() == 0
        assert not psutil.wait_procs(family, 5)[1]
        done = replay(server.trace_log)
        assert done.returncode == 0, done.stdout
        assert "torn" not in done.stdout


def test_a_killed_supervisor_takes_everything_along(tmp_path: Path) -> None:
    """SIGKILL of the supervisor leaves no process, and the trace up to then replays."""
    with serving(trace=tmp_path) as server:
        family = server.family()
        server.post("/v1/completions", prompt="a", max_tokens=2)
        server.process.kill()
        server.wait_end()
        assert not psutil.wait_procs(family, 5)[1]
        assert replay(server.trace_log).returncode == 0


@pytest.mark.parametrize("module", ["cearx.core", "cearx.worker", "cearx.frontend"])
def test_a_killed_child_is_named(module: str) -> None:
    """When one process dies the server ends with exit code 1 and says which one and how."""
    with serving() as server:
        family = server.family()
        server.child(module).kill()
        assert server.wait_end() == 1
        assert not psutil.wait_procs(family, 5)[1]
        (message,) = [line for line in server.stderr if "SIGKILL" in line]
        assert module.removeprefix("cearx.") in message


def test_a_used_port_is_one_clear_line() -> None:
    """The port is taken before anything slow happens: exit code 2 within seconds."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        start = time.monotonic()
        server = Server("--port", str(port))
        assert server.wait_end() == 2
    (line,) = server.stderr
    assert str(port) in line and "in use" in line
    assert time.monotonic() - start < 10


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (("/no/such/model",), "/no/such/model"),
        (("--max-model-len", "100000", "--kv-cache-memory", "64MiB"), "100000"),
        (("--kv-cache-memory", "1"), "kv"),
        (("--chat-template", "/no/such/template"), "/no/such/template"),
        (("--admission", "generous"), "forecast, watermark, greedy, got 'generous'"),
    ],
)
def test_what_cannot_start_says_why(arguments: tuple[str, ...], word: str) -> None:
    """A start-up fault is one clear line and exit code 2, and nothing stays behind."""
    server = Server("--port", "0", *arguments)
    assert server.wait_end(60) == 2
    text = "".join(server.stderr)
    assert word.lower() in text.lower()
    assert "Traceback" not in text


def test_an_unwritable_trace_folder_is_told_at_the_start(tmp_path: Path) -> None:
    """A trace that cannot be written stops the start, not the serving later."""
    (tmp_path / "file").write_text("")
    server = Server("--port", "0", trace=tmp_path / "file" / "folder")
    assert server.wait_end(60) == 2
    assert "--trace" in "".join(server.stderr)


def test_two_frontends_share_the_port_and_the_cache(tmp_path: Path) -> None:
    """Requests go to both, and a prompt that one has sent is a hit for the other."""
    flags = ("--frontends", "2", "--enable-prompt-tokens-details")
    with serving(*flags, trace=tmp_path) as server:
        prompt = list(range(1000, 1100))
        cached = set()
        for _ in range(24):
            with httpx.Client() as client:  # a connection each: the kernel picks the process
                body = {"model": server.name, "prompt": prompt, "max_tokens": 1}
                usage = client.post(server.url + "/v1/completions", json=body).json()["usage"]
                cached.add(usage["prompt_tokens_details"]["cached_tokens"])
        assert cached == {0, 96}
        scrapes = [_scrape(server.url) for _ in range(8)]
        assert all(scrape == scrapes[0] for scrape in scrapes)
        counts = scrapes[0]
        assert (
            counts["vllm:prompt_tokens_total"] == counts["vllm:prefix_cache_queries_total"] == 2400
        )
        assert counts["vllm:prefix_cache_hits_total"] == 23 * 96
        assert counts["vllm:generation_tokens_total"] == 24
        assert counts["vllm:e2e_request_latency_seconds_count"] == 24
        assert 0 < counts["vllm:time_to_first_token_seconds_sum"] < 240
        reset = httpx.post(server.url + "/reset_prefix_cache")
        assert reset.json() == {"num_blocks_freed": 6, "num_blocks_in_use": 0}
        usage = httpx.post(server.url + "/v1/completions", json=body, timeout=60).json()["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] == 0
        assert server.stop() == 0
        assert replay(server.trace_log).returncode == 0


def _scrape(url: str) -> dict[str, float]:
    """The samples without labels of their own, from whichever frontend answers."""
    with httpx.Client() as client:
        text = client.get(url + "/metrics").text
    return {
        sample.name: sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.labels.keys() <= {"model_name", "engine"}
    }


def test_nobody_else_can_reach_the_sockets() -> None:
    """The runtime folder is 0700, the only TCP socket is the one of the API, on loopback."""
    with serving() as server:
        listening = {
            connection.laddr
            for process in [psutil.Process(server.process.pid), *server.family()]
            for connection in process.net_connections("tcp")
            if connection.status == psutil.CONN_LISTEN
        }
        assert {address.ip for address in listening} == {"127.0.0.1"}
        assert len(listening) == 1
        core = server.child("cearx.core")
        paths = {c.laddr for c in core.net_connections("unix") if c.laddr}
        folders = {Path(str(p)).parent for p in paths if str(p).endswith(".sock")}
        (folder,) = folders
        assert stat.S_IMODE(os.stat(folder).st_mode) == 0o700


def test_sigterm_ends_running_streams_with_an_error() -> None:
    """A stream that is cut says so; the server is gone within seconds."""
    with serving() as server:
        body = {
            "model": server.name,
            "prompt": "Once",
            "max_tokens": 2000,
            "ignore_eos": True,
            "stream": True,
        }
        with httpx.stream("POST", server.url + "/v1/completions", json=body, timeout=60) as reply:
            lines = reply.iter_lines()
            next(lines)
            server.process.send_signal(signal.SIGTERM)
            rest = "\n".join(lines)
        assert re.search(r'"error"', rest)
        assert server.wait_end(15) == 0


def test_a_server_without_its_terminal_serves_on() -> None:
    """Standard input closed, nohup, and at last nobody who reads standard error."""
    command = [sys.executable, "-P", "-m", "cearx.core.cli", "serve", "--port", "0"]
    process = subprocess.Popen(
        ["sh", "-c", 'trap "" HUP; exec "$@" <&-', "sh", *command, "--trace", "off"],
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    try:
        found = next(filter(None, map(READY.search, process.stderr)))
        process.stderr.close()
        process.send_signal(signal.SIGHUP)
        for name in ("field_that_is_logged", "another"):
            answer = httpx.post(
                f"{found['url']}/v1/completions",
                json={"model": found["name"], "prompt": "a", "max_tokens": 2, name: 1},
                timeout=60,
            )
            assert answer.status_code == 200, answer.text
        process.terminate()
        assert process.wait(20) == 0
    finally:
        process.kill()
        process.wait()
