"""`cearx replay TRACE`: verifies a trace log and prints a short summary.

Owns the words and the exit codes: 0 the scheduler decides as the log says, 1 it does not, 2 the
file is damaged or cannot be read, 3 another version of the format or schema wrote it.
"""

import argparse
import os
import sys
from pathlib import Path

from cearx.core.scheduler_source import code_version, scheduler_sha256
from cearx.core.trace_format import TraceDamaged, TraceIncompatible
from cearx.core.trace_records import TraceHeader
from cearx.replay.summary import Summary
from cearx.replay.trace import Trace
from cearx.replay.verify import Difference, Verifier, fresh_scheduler

SAME, DIVERGED, DAMAGED, INCOMPATIBLE = 0, 1, 2, 3


def main(argv: list[str]) -> int:
    """Runs the command with the arguments behind `cearx replay`; answers the exit code."""
    parser = argparse.ArgumentParser(prog="cearx replay", description=__doc__)
    parser.add_argument(
        "trace", type=Path, help="a trace log, or a folder whose newest one is meant"
    )
    path: Path = parser.parse_args(argv).trace
    try:
        code, text = _replay(path)
    except TraceDamaged as error:
        code, text = DAMAGED, f"DAMAGED {path} at offset {error.offset}: {error.reason}"
    except TraceIncompatible as error:
        code, text = INCOMPATIBLE, f"INCOMPATIBLE {path}: {error}"
    except OSError as error:
        code, text = DAMAGED, f"cannot read {path}: {error.strerror}"
    _print(text)
    return code


def _print(text: str) -> None:
    """What nobody takes is dropped: the exit code says the same, and 1 would mean a divergence."""
    try:
        print(text, flush=True)
    except OSError:
        with open(os.devnull, "w") as null:
            os.dup2(null.fileno(), sys.stdout.fileno())


def _replay(path: Path) -> tuple[int, str]:
    """The exit code and what to print; raises TraceDamaged, TraceIncompatible, OSError."""
    trace = Trace.open(path)
    verifier = Verifier(fresh_scheduler(trace.header.config))
    summary = Summary()
    for record in trace.records():
        summary.feed(record)
        difference = verifier.feed(record)
        if difference is not None:
            break
    else:
        difference = verifier.finish(trace.ended)
    if difference is not None:
        return DIVERGED, _difference_text(difference, trace.header)
    lines = [
        f"SAME {path}: every decision of {summary.num_steps} steps is repeated",
        summary.text(),
        f"scheduler    {_scheduler_text(trace.header)}",
    ]
    if trace.torn_at is not None:
        torn = trace.num_bytes - trace.torn_at
        lines.append(
            f"note: the last record is not whole ({torn} bytes from offset {trace.torn_at})"
        )
    if not trace.ended:
        lines.append("note: the log has no end, so its writer was killed, failed or still runs")
    return SAME, "\n".join(lines)


def _scheduler_text(header: TraceHeader) -> str:
    logged, running = header.scheduler_sha256, scheduler_sha256()
    if logged == running:
        return f"{running[:8]}, the one that was logged"
    return f"{running[:8]} repeats what {logged[:8]} (cearx {header.code_version}) did"


def _difference_text(difference: Difference, header: TraceHeader) -> str:
    logged, running = header.scheduler_sha256, scheduler_sha256()
    if logged == running:
        verdict = f"the same scheduler ({running[:8]}) decides otherwise -> bug"
    else:
        verdict = (
            f"logged by scheduler {logged[:8]} of cearx {header.code_version},"
            f" running {running[:8]} of cearx {code_version()} -> behaviour change"
        )
    step = "before the first step" if difference.step_id is None else f"step {difference.step_id}"
    requests = ", ".join(map(str, difference.request_ids)) or "-"
    return "\n".join(
        [
            f"DIVERGED at record {difference.seq} (offset {difference.offset}), {step}:"
            f" {difference.field}",
            f"  logged    {difference.logged}",
            f"  computed  {difference.computed}",
            f"  requests  {requests}",
            f"  {verdict}",
            f"  the last {len(difference.inputs)} inputs:",
            *(f"    {line}" for line in difference.inputs),
        ]
    )
