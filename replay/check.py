"""`cearx replay check`: judges a whole log by the rules of `invariants.py`, prints what breaks."""

from collections.abc import Sequence
from pathlib import Path

from cearx.replay.invariants import Checker
from cearx.replay.trace import Trace
from cearx.replay.violation import Violation


def check_trace(trace: Trace, max_overtaken: int | None) -> list[Violation]:
    """All violations of a log; what it may lack depends on whether it has its end."""
    checker = Checker(trace.header.config, max_overtaken)
    found: list[Violation] = []
    last = None
    for last in trace.records():
        found += checker.feed(last)
    if last is not None:
        found += checker.finish(last, trace.ended)
    return found


def print_check(path: Path, found: Sequence[Violation], limit: int) -> None:
    """One line a violation."""
    if not found:
        print(f"KEPT {path}: no rule is broken")
        return
    print(f"BROKEN {path}: {len(found)} times")
    for violation in found[:limit]:
        step = "before the first step" if violation.step_id is None else f"step {violation.step_id}"
        print(f"  {violation.invariant:<4} {step}, record {violation.seq}: {violation.text}")
    if len(found) > limit:
        print(f"  … and {len(found) - limit} more (--limit, --json)")
