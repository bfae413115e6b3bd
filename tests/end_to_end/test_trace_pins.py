"""The trace log of a real server: pinned on request, crash and stall, and silent about people."""

import random
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import psutil
import pytest
from server_process import Server, replay, serving

pytestmark = pytest.mark.model

NUM_CANARIES = 1000


def wait_for(path: Path, pattern: str, timeout_s: float = 20) -> Path:
    """The pinned set of that name, once its link is there."""
    give_up = time.monotonic() + timeout_s
    while time.monotonic() < give_up:
        for found in path.glob(pattern):
            if (found / "trace.log").exists():
                return found
        time.sleep(0.05)
    raise AssertionError(f"no {pattern} in {sorted(p.name for p in path.iterdir())}")


def test_sigusr1_pins_the_log(tmp_path: Path) -> None:
    """The supervisor hands the signal to the core, and serving goes on."""
    with serving(trace=tmp_path) as server:
        server.post("/v1/completions", prompt="a", max_tokens=2)
        server.process.send_signal(signal.SIGUSR1)
        pinned = wait_for(tmp_path, "pinned-request-*")
        assert server.post("/v1/completions", prompt="b", max_tokens=2).status_code == 200
        assert server.stop() == 0
        assert replay(pinned).returncode == 0
        assert any(str(pinned) in line for line in server.stderr)


def test_a_crash_pins_the_log(tmp_path: Path) -> None:
    """The person is told where, and the pinned set replays."""
    with serving(trace=tmp_path) as server:
        server.post("/v1/completions", prompt="a", max_tokens=2)
        server.child("cearx.worker").kill()
        assert server.wait_end() == 1
    pinned = wait_for(tmp_path, "pinned-crash-*")
    assert replay(pinned).returncode == 0
    assert any(str(pinned) in line for line in server.stderr)


def test_a_stall_pins_the_log(tmp_path: Path) -> None:
    """A worker that stands still for five seconds; when it goes on, so does the request."""
    with serving(trace=tmp_path) as server:
        server.post("/v1/completions", prompt="a", max_tokens=2)
        worker = server.child("cearx.worker")
        worker.suspend()
        codes: list[int] = []
        body = {"prompt": "b", "max_tokens": 2}
        asked = threading.Thread(
            target=lambda: codes.append(server.post("/v1/completions", **body).status_code)
        )
        start = time.monotonic()
        asked.start()
        try:
            pinned = wait_for(tmp_path, "pinned-stall-*")
            assert time.monotonic() - start > 4.5
        finally:
            worker.resume()
            asked.join(30)
        assert codes == [200]
        assert server.stop() == 0
        assert replay(pinned).returncode == 0
    (line,) = [line for line in server.stderr if "stalled" in line]
    assert "1 running" in line and "in flight" in line


def test_files_are_bounded(tmp_path: Path) -> None:
    """`--trace-segment-seconds` and `--trace-keep` hold, and what is left replays."""
    with serving("--trace-segment-seconds", "1", "--trace-keep", "2", trace=tmp_path) as server:
        for _ in range(4):
            server.post("/v1/completions", prompt="a", max_tokens=2)
            time.sleep(1.1)
        assert server.stop() == 0
    segments = sorted(tmp_path.glob("trace-*.log"))
    assert len(segments) == 2 and segments[-1].stem[-6:] >= "000002"
    done = replay(tmp_path)
    assert done.returncode == 0, done.stdout


class Canaries:
    """Strings that occur nowhere by chance, each used once."""

    def __init__(self) -> None:
        self._draw = random.Random(7)
        self.planted: list[str] = []

    def __call__(self) -> str:
        canary = f"{self._draw.getrandbits(48):012x}"
        self.planted.append(canary)
        return canary

    def many(self, count: int) -> list[str]:
        return [self() for _ in range(count)]


def plant(server: Server, canary: Canaries) -> None:
    """Requests with canaries in all that a client can send, right and wrong ones."""
    with httpx.Client(base_url=server.url, timeout=120) as client:

        def post(path: str, body: object, status: Callable[[int], bool], **options: object) -> None:
            # X-Request-Id is the client's name for its request in our log, and nothing secret.
            headers = {"Authorization": f"Bearer {canary()}", "X-Request-Id": "named-by-the-client"}
            reply = client.post(path, json=body, headers=headers, **options)  # type: ignore[arg-type]
            assert status(reply.status_code), reply.text

        for _ in range(29):
            body: dict[str, object] = {
                "model": server.name,
                "prompt": " ".join(canary.many(8)),
                "stop": canary.many(4),
                "user": canary(),
                "max_tokens": 1,
            }
            post("/v1/completions", body, lambda code: code == 200)
            chat = {
                "model": server.name,
                "messages": [
                    {"role": "system", "content": " ".join(canary.many(3))},
                    {"role": "user", "content": " ".join(canary.many(4)), "name": canary()},
                ],
                "stop": canary(),
                "metadata": {canary(): canary()},
                "max_tokens": 1,
            }
            post("/v1/chat/completions", chat, lambda code: code == 200)
            wrong = body | {"prompt": canary(), "temperature": canary(), "stop": None}
            post("/v1/completions", wrong, lambda code: 400 <= code < 500)
            post("/v1/completions", body | {"model": canary()}, lambda code: code == 404)
            post("/v1/nothing", body, lambda code: code == 404, params={canary(): canary.many(2)})


def test_no_canary_is_in_any_log(tmp_path: Path) -> None:
    """1,000 strings in prompts, stop strings, keys, names and queries; a pin and a crash later."""
    canary = Canaries()
    with serving("--log-level", "debug", "--trace-segment-size", "64KiB", trace=tmp_path) as server:
        plant(server, canary)
        server.process.send_signal(signal.SIGUSR1)
        wait_for(tmp_path, "pinned-request-*")
        family = server.family()
        server.child("cearx.core").send_signal(signal.SIGABRT)
        assert server.wait_end() == 1
        psutil.wait_procs(family, 5)
    wait_for(tmp_path, "pinned-crash-*")
    assert len(canary.planted) >= NUM_CANARIES
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) > 4
    texts = {str(path): path.read_bytes() for path in files}
    texts["standard error"] = "".join(server.stderr).encode()
    assert all(texts.values())
    for name, text in texts.items():
        for planted in canary.planted:
            for form in (planted.encode(), bytes.fromhex(planted)):
                assert form not in text, f"{planted} in {name}"
    assert replay(tmp_path).returncode == 0
