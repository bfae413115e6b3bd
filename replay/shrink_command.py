"""Runs `cearx replay shrink`: finds the failure to keep, shrinks, writes the case, says it all."""

from pathlib import Path
from typing import Literal

import msgspec

from cearx.replay.failures import (
    MakeScheduler,
    Watch,
    first_failure,
    keeps,
    running_scheduler,
)
from cearx.replay.scripted import Script, script_of
from cearx.replay.shrink import NotReproduced, renumbered, shrink
from cearx.replay.shrink_output import write_case
from cearx.replay.terminal import printable
from cearx.replay.trace import Trace
from cearx.replay.whole_run import whole_records

Keep = Literal["any", "invariant", "crash", "stall", "divergence"]


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """What is asked for."""

    keep: Keep
    other: MakeScheduler | None
    stall_steps: int
    seconds: float
    folder: Path


def run_shrink(trace: Trace, request: Request, make: MakeScheduler = running_scheduler) -> None:
    """Raises NotReproduced, NotWhole, OSError, TraceError and what reading the trace raises."""
    script = script_of(trace.header.config, whole_records(trace))
    watch = _watch(request)
    failure = first_failure(make, script, watch)
    if failure is None:
        raise NotReproduced(
            f"the running scheduler takes the inputs of the log without a failure"
            f" ({', '.join(sorted(watch.kinds))})"
        )
    print(f"found {failure.kind} {failure.label}: {printable(failure.text)}")
    predicate = keeps(make, watch, failure)
    shrunk = shrink(script, predicate, request.seconds, keep_config=failure.kind == "stall")
    small = renumbered(shrunk.script)
    last = first_failure(make, small, watch)
    if last is None or (last.kind, last.label) != (failure.kind, failure.label):
        small, last = shrunk.script, first_failure(make, shrunk.script, watch)
    assert last is not None, "the smallest script does not fail any more"
    path, test = write_case(request.folder, small, last, make, request.stall_steps)
    print(f"from  {_size(script)}")
    print(f"to    {_size(small)}, {shrunk.num_tried} runs")
    if not shrunk.finished:
        print(f"note: the time of {request.seconds:g} s is over, it may get smaller (--seconds)")
    print(f"now   {printable(last.text)}")
    print(f"trace {path}")
    if test is not None:
        print(f"test  {test}")


def _watch(request: Request) -> Watch:
    if request.keep == "any":
        kinds = {"invariant", "crash"}
    elif request.keep == "divergence":
        kinds = {"divergence", "crash"}
    else:
        kinds = {request.keep}
    return Watch(
        kinds=frozenset(kinds),  # type: ignore[arg-type]
        stall_steps=request.stall_steps,
        other=request.other,
    )


def _size(script: Script) -> str:
    return f"{script.num_requests} requests, {len(script.items)} items"
