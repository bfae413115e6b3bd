"""Where the core's trace log goes, and what it says while the server runs.

Owns the mapping from flags to a `TraceWriter` and its log lines. Called by `process.py`, and by the
supervisor, which pins what a crashed run has logged.
"""

import tempfile
from pathlib import Path

import structlog

from cearx.core.child import StartupError
from cearx.core.config import CoreConfig, CoreLaunch, SchedulerConfig, TraceLimits
from cearx.core.trace_writer import TraceError, TraceWriter, pin_text

log = structlog.get_logger()


def trace_folder(config: CoreConfig) -> Path | None:
    """The folder that `--trace` means, None for none."""
    if config.trace == "off":
        return None
    auto = Path.home() / ".cache" / "cearx" / "traces"
    return auto if config.trace == "auto" else Path(config.trace)


def require_folder(config: CoreConfig) -> None:
    """Raises StartupError for a folder that cannot be written, before anybody loads a model."""
    folder = trace_folder(config)
    if folder is None:
        return
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        reason = error.strerror or error
        raise StartupError(
            f"cannot write the trace log to {folder}: {reason}"
            " (--trace DIR for another folder, --trace off)"
        ) from error


def open_trace(spec: CoreLaunch, config: SchedulerConfig) -> TraceWriter | None:
    """The writer that the flags ask for; raises StartupError."""
    folder = trace_folder(spec.config)
    if folder is None:
        return None
    limits = TraceLimits(
        segment_bytes=spec.config.trace_segment_size,
        segment_seconds=spec.config.trace_segment_seconds,
        keep=spec.config.trace_keep,
        fsync=spec.config.trace_fsync,
    )
    try:
        return TraceWriter.open(
            folder, config, spec.boot_id, _trace_stopped, limits=limits, on_note=_trace_note
        )
    except TraceError as error:
        raise StartupError(f"{error} (--trace DIR for another folder, --trace off)") from error


def pin_after_crash(config: CoreConfig, boot_id: int) -> str | None:
    """Pins what a run that crashed has logged; answers a line for the person."""
    folder = trace_folder(config)
    if folder is None:
        return None
    return pin_text(folder, boot_id, "crash")


def _trace_stopped(reason: str) -> None:
    log.error("trace log stopped, serving goes on", reason=reason)


def _trace_note(text: str) -> None:
    log.warning(text)
