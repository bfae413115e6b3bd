"""`cearx replay verify`: re-runs the scheduler over a trace and prints whether it decides the same.

Owns the words: SAME with a summary, or DIVERGED with the first difference and whose fault it is.
"""

from pathlib import Path

from cearx.core.scheduler_source import code_version, scheduler_sha256
from cearx.core.trace_records import TraceHeader
from cearx.replay.summary import Summary
from cearx.replay.terminal import printable
from cearx.replay.trace import Trace
from cearx.replay.verify import Difference, Verifier, fresh_scheduler


def verify(path: Path, trace: Trace) -> bool:
    """Prints the verdict; answers whether every decision is repeated."""
    verifier = Verifier(fresh_scheduler(trace.header.config))
    summary = Summary()
    for record in trace.records():
        difference = verifier.feed(record)
        if difference is not None:
            break
        summary.feed(record)
    else:
        difference = verifier.finish(trace.ended)
    if difference is not None:
        print(_difference_text(difference, trace.header))
        return False
    print(f"SAME {path}: every decision of {summary.num_steps} steps is repeated")
    print(summary.text())
    print(f"scheduler    {_scheduler_text(trace.header)}")
    print_end(trace)
    return True


def print_missing(trace: Trace) -> None:
    """Which records are not there; call behind the last one."""
    for note in trace.notes():
        print(f"note: {note}")


def print_end(trace: Trace) -> None:
    """What is not in the file, if that is worth a note; call behind the last record."""
    print_missing(trace)
    if trace.torn_at is not None:
        torn = trace.num_bytes - trace.torn_at
        print(f"note: the last record is not whole ({torn} bytes from offset {trace.torn_at})")
    if not trace.ended:
        print("note: the log has no end, so its writer was killed, failed or still runs")


def _scheduler_text(header: TraceHeader) -> str:
    logged, running = header.scheduler_sha256, scheduler_sha256()
    if logged == running:
        return f"{running[:8]}, the one that was logged"
    return f"{running[:8]} repeats what {_author(header)} did"


def _author(header: TraceHeader) -> str:
    return printable(f"{header.scheduler_sha256[:8]} (cearx {header.code_version})")


def _difference_text(difference: Difference, header: TraceHeader) -> str:
    logged, running = header.scheduler_sha256, scheduler_sha256()
    if logged == running:
        verdict = f"the same scheduler ({running[:8]}) decides otherwise -> bug"
    else:
        version = printable(header.code_version)
        verdict = (
            f"logged by scheduler {printable(logged[:8])} of cearx {version},"
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
