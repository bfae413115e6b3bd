"""Names the pure scheduler's source, so that a trace says which behaviour it recorded.

Owns the list of modules that decide what a scheduler answers to an event, and their hash. Reads
source files only; called by `trace_writer.py` at open and by `cearx replay`.
"""

import hashlib
import importlib.metadata
import importlib.util
from functools import cache
from pathlib import Path

PURE_MODULES = (
    "cearx.core.admission",
    "cearx.core.admitting",
    "cearx.core.block_pool",
    "cearx.core.books",
    "cearx.core.chunk_planning",
    "cearx.core.config",
    "cearx.core.decode_batch",
    "cearx.core.decode_planning",
    "cearx.core.events",
    "cearx.core.fences",
    "cearx.core.forecast",
    "cearx.core.identifiers",
    "cearx.core.making_way",
    "cearx.core.output_lengths",
    "cearx.core.planner",
    "cearx.core.preemption",
    "cearx.core.prefill_pace",
    "cearx.core.prefix_index",
    "cearx.core.refusals",
    "cearx.core.request",
    "cearx.core.scheduler",
    "cearx.core.scheduler_state",
    "cearx.core.settling",
    "cearx.core.step_books",
    "cearx.core.step_draft",
    "cearx.core.waiting_queue",
)
"""The scheduler and all that it imports of ours; a test compares it with the imports."""


@cache
def scheduler_sha256() -> str:
    """SHA-256 over names and contents of the source files; differs as soon as one byte does."""
    digest = hashlib.sha256()
    for name in PURE_MODULES:
        spec = importlib.util.find_spec(name)
        assert spec is not None and spec.origin is not None, f"{name} has no source file"
        source = Path(spec.origin).read_bytes()
        digest.update(f"{name} {len(source)}\n".encode() + source)
    return digest.hexdigest()


def code_version() -> str:
    """Version of the installed cearx package, or 'unknown' when it runs from a plain folder."""
    try:
        return importlib.metadata.version("cearx")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"
