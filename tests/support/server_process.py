"""A real server in its own processes, for tests and measurements."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil

from cearx.core.scheduler import Scheduler
from cearx.replay.trace import Trace
from cearx.replay.verify import Verifier, fresh_scheduler

READY = re.compile(r"ready (?P<name>\S+) on (?P<url>http://\S+) after (?P<seconds>[\d.]+) s")


class Server:
    """`cearx serve` as a person starts it; `stderr` gathers what it prints."""

    def __init__(self, *arguments: str, trace: Path | None = None) -> None:
        self.trace = trace
        command = [sys.executable, "-P", "-m", "cearx.core.cli", "serve", *arguments]
        command += ["--trace", str(trace) if trace else "off"]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        self.stderr: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.url = ""
        self.name = ""

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.stderr.append(line)

    def wait_ready(self, timeout_s: float = 120) -> "Server":
        give_up = time.monotonic() + timeout_s
        while time.monotonic() < give_up and self.process.poll() is None:
            found = READY.search("".join(self.stderr))
            if found:
                self.url, self.name = found["url"], found["name"]
                return self
            time.sleep(0.05)
        raise AssertionError(f"not ready: {''.join(self.stderr)}")

    def wait_end(self, timeout_s: float = 20) -> int:
        code = self.process.wait(timeout_s)
        self._reader.join(5)
        assert self.process.stderr is not None
        self.process.stderr.close()
        return code

    def stop(self) -> int:
        """Ends it as Ctrl-C does and answers the exit code."""
        self.process.send_signal(signal.SIGINT)
        return self.wait_end()

    def child(self, module: str) -> psutil.Process:
        """The child process that runs `module`."""
        for child in psutil.Process(self.process.pid).children():
            if module in child.cmdline():
                return child
        raise AssertionError(f"no child runs {module}")

    def family(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def post(self, path: str, **body: object) -> httpx.Response:
        return httpx.post(self.url + path, json={"model": self.name, **body}, timeout=120)

    @property
    def trace_log(self) -> Path:
        assert self.trace is not None
        return self.trace / "trace.log"


@contextlib.contextmanager
def serving(
    *arguments: str, trace: Path | None = None, ready_timeout_s: float = 120
) -> Iterator[Server]:
    """A server of one test; ended, whatever happens."""
    server = Server("--port", "0", *arguments, trace=trace)
    try:
        yield server.wait_ready(ready_timeout_s)
    finally:
        if server.process.poll() is None:
            family = server.family()
            server.process.kill()
            server.wait_end()
            psutil.wait_procs(family, 5)


def replay(trace_log: Path, hash_seed: str = "1") -> "subprocess.CompletedProcess[str]":
    """`cearx replay` in another process with another hash seed."""
    return subprocess.run(
        [sys.executable, "-P", "-m", "cearx.core.cli", "replay", str(trace_log)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONHASHSEED": hash_seed},
    )


def final_scheduler(trace_log: Path) -> Scheduler:
    """The scheduler as it stood after the last record of a trace."""
    trace = Trace.open(trace_log)
    scheduler = fresh_scheduler(trace.header.config)
    verifier = Verifier(scheduler)
    for record in trace.records():
        assert verifier.feed(record) is None
    return scheduler
