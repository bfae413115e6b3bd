"""Tells when a kernel is compiled after start-up, where it stops every request for a second.

Owns the count of such late compiles; never prevents one. Armed by `start.py` when the worker is
ready; a number above zero is a gap in the warm-up.
"""

from typing import Any

import structlog
import triton

log = structlog.get_logger()


class CompileWatch:
    """Counts the kernel variants that are built or loaded while it is armed."""

    def __init__(self) -> None:
        self.num_late = 0

    def arm(self) -> None:
        """From now on every new variant is counted and logged."""
        triton.knobs.runtime.jit_post_compile_hook = self._note

    def disarm(self) -> None:
        triton.knobs.runtime.jit_post_compile_hook = None

    def _note(self, **details: Any) -> None:
        self.num_late += 1
        log.warning(
            "kernel compiled after start-up",
            kernel=str(details.get("repr")),
            late_compiles=self.num_late,
        )
