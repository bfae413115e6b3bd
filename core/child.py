"""What every child process of the supervisor does first and last.

Reads its launch spec from standard input, dies when that pipe closes (the supervisor is gone, by
whatever way), and reports progress, readiness and start-up failures to the supervisor.
"""

import contextlib
import ctypes
import logging
import os
import signal
import sys
import threading
from pathlib import Path
from typing import TypeVar

import msgspec
import structlog
import zmq

from cearx.core.config import LaunchSpec
from cearx.core.link import Channel, DealerLink, configure
from cearx.core.messages import ChildToSupervisor, ProcessFailed, ProcessReady, Progress
from cearx.core.standard_streams import secure_standard_streams

SPEC = TypeVar("SPEC", bound=LaunchSpec)
PR_SET_PDEATHSIG = 1


class StartupError(Exception):
    """A start-up failure whose message is the one clear line that the person needs."""


def encode_launch(spec: LaunchSpec) -> bytes:
    """One line of JSON, for the child's standard input."""
    return msgspec.json.encode(spec, enc_hook=str) + b"\n"


def decode_launch(line: bytes, spec_type: type[SPEC]) -> SPEC:
    """The inverse of `encode_launch`; raises msgspec.DecodeError."""
    return msgspec.json.decode(line, type=spec_type, dec_hook=lambda kind, value: kind(value))


def read_launch(spec_type: type[SPEC]) -> SPEC:
    """Reads the spec and ties this process's life to the supervisor's."""
    secure_standard_streams()
    spec = decode_launch(sys.stdin.buffer.readline(), spec_type)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    threading.Thread(target=_exit_with_supervisor, name="death-pipe", daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the supervisor turns it into an orderly end
    configure_logging(spec.log_level, spec.log_format)
    return spec


def _exit_with_supervisor() -> None:
    with contextlib.suppress(OSError):
        while os.read(0, 4096):
            pass
    os._exit(1)


def configure_logging(level: str, log_format: str = "console") -> None:
    """structlog to stderr, one line an event, for people or as JSON; never prompt text."""
    if log_format == "json":
        stamp = structlog.processors.TimeStamper(fmt="iso", utc=True)
        # Neither format shows local variables with a traceback: they hold prompts and answers.
        last: list[structlog.types.Processor] = [
            structlog.processors.format_exc_info,
            structlog.processors.JSONRenderer(),
        ]
    else:
        stamp = structlog.processors.TimeStamper(fmt="%H:%M:%S")
        last = [
            structlog.dev.ConsoleRenderer(
                colors=sys.stderr.isatty(),
                exception_formatter=structlog.dev.plain_traceback,
            )
        ]
    structlog.configure(
        processors=[structlog.processors.add_log_level, stamp, *last],
        wrapper_class=structlog.make_filtering_bound_logger(
            getattr(logging, level.upper(), logging.INFO)
        ),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )


def signal_fd(*numbers: int) -> int:
    """A file descriptor that gets the numbers of these signals, so that they cut no work in half.

    From then on the signals do nothing else. Call it in the main thread.
    """
    read_fd, write_fd = os.pipe()
    os.set_blocking(write_fd, False)
    for number in numbers:
        signal.signal(number, lambda _number, _frame: None)
    signal.set_wakeup_fd(write_fd, warn_on_full_buffer=False)
    return read_fd


class SupervisorLink:
    """Reports of one child; its messages are few and small, so they never wait."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], spec: LaunchSpec, process: str):
        socket = context.socket(zmq.DEALER)
        configure(socket)
        socket.setsockopt(zmq.IDENTITY, process.encode())
        socket.setsockopt(zmq.IMMEDIATE, 0)  # a report may be made before the connection is up
        socket.connect(endpoint(spec.runtime_dir, "supervisor"))
        self.process = process
        self._link: DealerLink[ChildToSupervisor, object] = DealerLink(
            socket, Channel(spec.boot_id, 0, object)
        )

    def progress(self, stage: str, completed: int = 0, total: int = 0) -> None:
        self._link.send(
            Progress(process=self.process, stage=stage, completed=completed, total=total)
        )

    def ready(self, detail: str = "") -> None:
        self._link.send(ProcessReady(process=self.process, detail=detail))

    def failed(self, reason: str) -> None:
        self._link.send(ProcessFailed(process=self.process, reason=reason))


def endpoint(runtime_dir: Path, name: str) -> str:
    """The ipc address of a socket: 'supervisor' and 'frontends' (ROUTER), 'worker' (DEALER)."""
    return f"ipc://{runtime_dir}/{name}.sock"
