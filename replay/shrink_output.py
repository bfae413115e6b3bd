"""What `shrink` leaves behind: a trace log of the smallest case and a pytest file that runs it."""

import contextlib
import secrets
from pathlib import Path

from cearx.core.trace_writer import TraceWriter
from cearx.replay.failures import Failure, MakeScheduler
from cearx.replay.scripted import Script, encode_script, run_script
from cearx.replay.terminal import printable

TEST = '''"""Shrunk from a trace: {title}."""

from cearx.replay.failures import Watch, first_failure, running_scheduler
from cearx.replay.scripted import decode_script

SCRIPT = r"""
{script}
"""


def test_{name}() -> None:
    """The scheduler takes this input without the failure that it was shrunk from."""
    watch = Watch(kinds=frozenset({{"{kind}"}}), stall_steps={stall_steps})
    found = first_failure(running_scheduler, decode_script(SCRIPT), watch)
    assert found is None, found.text
'''


def write_case(
    folder: Path, script: Script, failure: Failure, make: MakeScheduler, stall_steps: int
) -> tuple[Path, Path | None]:
    """The trace and the test; a divergence from another tree has no test of its own.

    Raises OSError and TraceError.
    """
    writer = TraceWriter.open(folder, script.config, secrets.randbits(64), _stopped)
    # A scheduler that fails leaves a log without an end, as in a served run.
    with contextlib.suppress(Exception):
        run_script(make(script.config), script.items, writer)
    writer.flush()
    if failure.kind != "crash":
        writer.close()
    if failure.kind == "divergence":
        return writer.path, None
    name = "".join(c if c.isalnum() else "_" for c in f"{failure.kind}_{failure.label}").lower()
    path = folder / f"test_{name[:50].rstrip('_')}.py"
    path.write_text(
        TEST.format(
            title=printable(failure.text).replace('"', "'").replace("\\", "/"),
            name=name[:50].rstrip("_"),
            script=encode_script(script),
            kind=failure.kind,
            stall_steps=stall_steps,
        )
    )
    return writer.path, path


def _stopped(reason: str) -> None:
    raise OSError(0, reason)
