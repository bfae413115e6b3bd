"""torch's profiler around the worker's steps, from a start to a stop, written as one trace file.

Owns the profiler and the names of its files: Chrome's trace format, gzipped, which Perfetto and
chrome://tracing read. Starts and stops between two steps, in the order of the core's messages.
Called by the process's loop.
"""

import contextlib
import os
import time
from contextlib import AbstractContextManager
from pathlib import Path

import structlog
import torch
from torch.profiler import ProfilerActivity, profile, record_function

from cearx.core.child import StartupError
from cearx.core.messages import ExecuteStep, Profile, Profiled

SUFFIX = ".pt.trace.json.gz"

log = structlog.get_logger()


class StepProfiler:
    """At most one recording at a time; without a folder there is none."""

    def __init__(self, folder: Path | None, device: torch.device) -> None:
        """Makes the folder; raises StartupError where it cannot be written to."""
        self._folder = folder
        self._device = device
        self._profile: profile | None = None
        if folder is None:
            return
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise StartupError(f"cannot write profiles to {folder}: {error.strerror}") from error
        if not os.access(folder, os.W_OK):
            raise StartupError(f"cannot write profiles to {folder}: it is not writable")

    @property
    def is_available(self) -> bool:
        """Whether there is a folder for traces."""
        return self._folder is not None

    def take(self, message: Profile) -> Profiled:
        """Starts or stops a recording; answers what became of it."""
        path: Path | None = None
        error: str | None = None
        try:
            if not self.is_available:
                error = "the server runs without --profiler-dir"
            elif message.is_on and self._profile is not None:
                error = "a profile is recorded already"
            elif message.is_on:
                self.start()
            elif self._profile is None:
                error = "no profile is recorded"
            else:
                path = self.stop()
        except (OSError, RuntimeError) as failure:
            log.exception("profiler failed")
            error = f"the profiler failed: {failure}"
        return Profiled(
            frontend_index=message.frontend_index,
            number=message.number,
            path=None if path is None else str(path),
            error=error,
        )

    def start(self) -> None:
        """Records from here on."""
        activities = [ProfilerActivity.CPU]
        if self._device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        started = profile(activities=activities)
        started.start()
        self._profile = started
        log.info("profile begun", folder=str(self._folder))

    def stop(self) -> Path:
        """Writes what was recorded, with all that was launched; answers the file."""
        recorded, self._profile = self._profile, None
        assert recorded is not None and self._folder is not None, "no profile is recorded"
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        recorded.stop()
        path = self._folder / f"worker-{os.getpid()}-{time.time_ns() // 1_000_000}{SUFFIX}"
        recorded.export_chrome_trace(str(path))
        log.info("profile written", path=str(path))
        return path

    def close(self) -> None:
        """Writes what is still recorded."""
        if self._profile is not None:
            self.stop()

    def step(self, step: ExecuteStep) -> AbstractContextManager[object]:
        """Marks a step's launch in a recording."""
        if self._profile is None:
            return contextlib.nullcontext()
        plan = step.plan
        num_prefill = sum(chunk.num_tokens for chunk in plan.chunks)
        return record_function(
            f"step {plan.step_id}: {len(plan.decodes)} decodes, {num_prefill} prefill tokens"
        )
