"""For verbs that mean something only for a run from its first record to its last.

Owns the refusal of a log that begins within its run or has a gap. Called by `diff.py`,
`what_if.py` and `shrink_command.py`.
"""

from collections.abc import Iterator

from cearx.core.trace_records import TraceGap, TraceSnapshot
from cearx.replay.trace import Trace, TraceRecord


class NotWhole(Exception):
    """Records are missing at the start or within; the message says which."""


def whole_records(trace: Trace) -> Iterator[TraceRecord]:
    """All but the snapshots, which repeat what stands before them; raises NotWhole."""
    if trace.segment.segment:
        raise NotWhole(next(trace.notes()))
    for record in trace.records():
        if isinstance(record.value, TraceGap):
            raise NotWhole(next(trace.notes()))
        if not isinstance(record.value, TraceSnapshot):
            yield record
