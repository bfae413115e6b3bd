"""`cearx replay`: one verb a question about a trace log.

Owns the verbs, their options and the exit codes: 0 fine, 1 the scheduler decides otherwise or a
check fails, 2 the file is damaged or cannot be read (and wrong usage), 3 another version of the
format or schema wrote it, 4 a simulation is too far from what was measured.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from cearx.core.identifiers import RequestId, StepId
from cearx.core.trace_format import TraceDamaged, TraceIncompatible
from cearx.replay import stats as stats_verb
from cearx.replay.invariants import MAX_OVERTAKEN, check_trace, print_check
from cearx.replay.overrides import with_overrides
from cearx.replay.state_at import NoSuchStep, When, print_state, state_at
from cearx.replay.step_time import NotEnoughNotes
from cearx.replay.terminal import console, printable
from cearx.replay.trace import Trace
from cearx.replay.verdict import print_end
from cearx.replay.verdict import verify as print_verdict
from cearx.replay.what_if import Arrivals, print_what_if
from cearx.replay.what_if import what_if as compute_what_if
from cearx.replay.why import UnknownRequest, explain
from cearx.replay.why_text import print_why

SAME, DIVERGED, DAMAGED, INCOMPATIBLE, UNCALIBRATED = 0, 1, 2, 3, 4

TracePath = Annotated[
    Path,
    typer.Argument(metavar="TRACE", help="A trace log, or a folder whose newest one is meant."),
]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON object instead of text.")]
Limit = Annotated[int, typer.Option(min=0, help="Most lines of a list.")]

app = typer.Typer(
    name="cearx replay",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    help="Re-run the scheduler over a trace log and ask it questions."
    " `cearx replay TRACE` alone verifies.",
)


@contextmanager
def reading(path: Path) -> Iterator[Trace]:
    """The trace at `path`; what is wrong with it becomes one line and an exit code."""
    try:
        yield Trace.open(path)
    except TraceDamaged as error:
        print(f"DAMAGED {path} at offset {error.offset}: {error.reason}")
        raise typer.Exit(DAMAGED) from None
    except TraceIncompatible as error:
        print(f"INCOMPATIBLE {path}: {printable(str(error))}")
        raise typer.Exit(INCOMPATIBLE) from None


@app.command()
def verify(trace: TracePath) -> None:
    """Re-run the scheduler on the logged inputs and compare every decision (exit 1: diverged)."""
    with reading(trace) as opened:
        same = print_verdict(trace, opened)
    raise typer.Exit(SAME if same else DIVERGED)


@app.command()
def stats(
    trace: TracePath,
    json: AsJson = False,
    sort: Annotated[
        str, typer.Option(help=f"Order of the requests: {', '.join(stats_verb.SORT_KEYS)}.")
    ] = "arrival",
    limit: Limit = 20,
) -> None:
    """Queue time, TTFT, ITL, preemptions, budget fill, block occupancy, stalls."""
    if sort not in stats_verb.SORT_KEYS:
        raise typer.BadParameter(f"{sort!r} is none of {', '.join(stats_verb.SORT_KEYS)}")
    with reading(trace) as opened:
        computed = stats_verb.compute(opened, sort)
    if json:
        print(msgspec.json.encode(computed, order="sorted").decode())
    else:
        stats_verb.print_stats(computed, console(), limit)


@app.command()
def why(
    trace: TracePath,
    request: Annotated[int, typer.Argument(min=0, help="A request's number in the log.")],
    json: AsJson = False,
) -> None:
    """Each step a request waited and the reason, who got in instead, when it ran, what it got."""
    with reading(trace) as opened:
        try:
            spans = explain(opened.header.config, opened.records(), RequestId(request))
        except UnknownRequest as error:
            raise typer.BadParameter(str(error)) from None
    if json:
        print(msgspec.json.encode(spans, order="sorted").decode())
    else:
        print_why(RequestId(request), spans, console())


@app.command()
def at(
    trace: TracePath,
    step: Annotated[int, typer.Option(min=0, help="A step's number in the log.")],
    before: Annotated[bool, typer.Option("--before", help="Before it was planned.")] = False,
    after: Annotated[bool, typer.Option("--after", help="When its result is taken in.")] = False,
    json: AsJson = False,
    limit: Limit = 50,
) -> None:
    """Queues, block tables, budget and free blocks as of one step."""
    if before and after:
        raise typer.BadParameter("--before and --after exclude each other")
    when: When = "before" if before else "after" if after else "planned"
    with reading(trace) as opened:
        try:
            state = state_at(opened, StepId(step), when)
        except NoSuchStep as error:
            raise typer.BadParameter(str(error)) from None
    if json:
        print(msgspec.json.encode(state, order="sorted").decode())
    else:
        print_state(state, console(), limit)


@app.command()
def check(
    trace: TracePath,
    json: AsJson = False,
    limit: Limit = 20,
    max_overtaken: Annotated[
        int, typer.Option(min=0, help="Later arrivals that may be let in before a waiting one.")
    ] = MAX_OVERTAKEN,
) -> None:
    """Judge every record by rules that hold whatever the policy (exit 1: one is broken)."""
    with reading(trace) as opened:
        found = check_trace(opened, max_overtaken)
        if json:
            print(msgspec.json.encode(found, order="sorted").decode())
        else:
            print_check(trace, found, limit)
            print_end(opened)
    raise typer.Exit(DIVERGED if found else SAME)


@app.command()
def what_if(
    trace: TracePath,
    settings: Annotated[
        list[str],
        typer.Option("--set", metavar="NAME=VALUE", help="Field of the scheduler's configuration."),
    ],
    arrivals: Annotated[
        Arrivals,
        typer.Option(help="At the logged times, or as many in flight as logged."),
    ] = "open",
    max_error: Annotated[
        float, typer.Option(min=0.0, help="Calibration error in percent above which to refuse.")
    ] = 10.0,
    json: AsJson = False,
) -> None:
    """The same load under another configuration (exit 4: the simulation is not good enough)."""
    with reading(trace) as opened:
        try:
            changed = with_overrides(opened.header.config, settings)
            result = compute_what_if(opened, changed, arrivals, max_error)
        except (ValueError, NotEnoughNotes) as error:
            raise typer.BadParameter(str(error)) from None
    if json:
        print(msgspec.json.encode(result, order="sorted").decode())
    else:
        print_what_if(result, settings, console(), max_error)
    raise typer.Exit(UNCALIBRATED if result.changed is None else SAME)


def main(argv: Sequence[str]) -> int:
    """Runs the command with the arguments behind `cearx replay`; answers the exit code."""
    arguments = list(argv)
    if arguments and arguments[0] not in VERBS and not arguments[0].startswith("-"):
        arguments.insert(0, "verify")
    try:
        app(args=arguments, prog_name="cearx replay")
    except SystemExit as exit_:
        return exit_.code if isinstance(exit_.code, int) else SAME
    except OSError as error:
        print(f"cannot open {error.filename}: {error.strerror}")
        return DAMAGED
    return SAME


VERBS = frozenset(
    getattr(command.callback, "__name__", "").replace("_", "-")
    for command in app.registered_commands
)
