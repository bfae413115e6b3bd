"""`cearx replay`: one verb a question about a trace log.

Owns the verbs, their options and the exit codes: 0 fine, 1 the scheduler decides otherwise or a
check fails, 2 the file is damaged, cannot be read or lacks records that the verb needs (and wrong
usage), 3 another version of the format or schema wrote it, 4 a simulation is too far from what was
measured.
"""

import contextlib
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from cearx.core.admission import load_policy
from cearx.core.identifiers import RequestId, StepId
from cearx.core.trace_format import TraceDamaged, TraceIncompatible
from cearx.core.trace_writer import TraceError
from cearx.replay import stats as stats_verb
from cearx.replay.check import check_trace, print_check
from cearx.replay.diff import compare
from cearx.replay.diff_text import print_diff
from cearx.replay.jsonl import JsonlError, rebuild
from cearx.replay.jsonl import export as export_jsonl
from cearx.replay.other_tree import OtherTree, OtherTreeError
from cearx.replay.overrides import with_overrides
from cearx.replay.patient_output import patient_output
from cearx.replay.perfetto import document as perfetto_document
from cearx.replay.report import report as report_page
from cearx.replay.shrink import NotReproduced
from cearx.replay.shrink_command import Keep, run_shrink
from cearx.replay.shrink_command import Request as ShrinkRequest
from cearx.replay.state_at import NoSuchStep, When, print_state, state_at
from cearx.replay.step_time import NotEnoughNotes
from cearx.replay.terminal import console, printable
from cearx.replay.timeline import timeline_of
from cearx.replay.trace import Trace
from cearx.replay.verdict import print_end, print_missing
from cearx.replay.verdict import verify as print_verdict
from cearx.replay.what_if import Arrivals, print_what_if
from cearx.replay.what_if import what_if as compute_what_if
from cearx.replay.whole_run import NotWhole
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


@app.callback()
def load_policies(
    policy: Annotated[
        list[str] | None,
        typer.Option(help="Installed admission policy that the trace may be of; before the verb."),
    ] = None,
) -> None:
    try:
        for name in policy or ():
            load_policy(name)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


@contextmanager
def reading(path: Path) -> Iterator[Trace]:
    """The trace at `path`; what is wrong with it becomes one line and an exit code."""
    try:
        yield Trace.open(path)
    except TraceDamaged as error:
        print(f"DAMAGED {_where(error, path)} at offset {error.offset}: {error.reason}")
        raise typer.Exit(DAMAGED) from None
    except TraceIncompatible as error:
        print(f"INCOMPATIBLE {_where(error, path)}: {printable(str(error))}")
        raise typer.Exit(INCOMPATIBLE) from None
    except NotWhole as error:
        print(f"REFUSED {_where(error, path)}: this needs the whole run, and {error}")
        raise typer.Exit(DAMAGED) from None


def _where(error: Exception, path: Path) -> str:
    """The damaged segment, or which of two traces it was."""
    if isinstance(error, TraceDamaged) and error.path is not None:
        return str(error.path)
    notes: list[str] = getattr(error, "__notes__", [])
    return notes[0] if notes else str(path)


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
        print_missing(opened)


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
        print_missing(opened)


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
        int | None,
        typer.Option(min=0, help="Others that may pass a waiting one (default: as configured)."),
    ] = None,
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
def diff(
    first: Annotated[Path, typer.Argument(metavar="A", help="A trace log or its folder.")],
    second: Annotated[Path, typer.Argument(metavar="B", help="The one to hold against it.")],
    json: AsJson = False,
    limit: Limit = 20,
) -> None:
    """The first decision that differs, then what it did to each request (exit 1: they differ)."""
    with reading(first) as left, reading(second) as right:
        found = compare((first, left), (second, right))
    if json:
        print(msgspec.json.encode(found, order="sorted").decode())
    else:
        print_diff(found, console(), limit)
    raise typer.Exit(SAME if found.first is None else DIVERGED)


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


@app.command()
def shrink(
    trace: TracePath,
    keep: Annotated[
        Keep, typer.Option(help="What must still happen; any: a broken rule or a crash.")
    ] = "any",
    other: Annotated[
        Path | None,
        typer.Option(help="Checkout whose scheduler decides otherwise, for --keep divergence."),
    ] = None,
    stall_steps: Annotated[
        int, typer.Option(min=1, help="Steps without a row that are a stall.")
    ] = 1000,
    seconds: Annotated[float, typer.Option(min=0.1, help="Most time to search.")] = 120.0,
    out: Annotated[Path, typer.Option(help="Folder for the trace and the test.")] = Path("shrunk"),
) -> None:
    """Find the smallest input with the same failure; write it as a trace and a pytest file."""
    if (keep == "divergence") != (other is not None):
        raise typer.BadParameter("--keep divergence and --other CHECKOUT belong together")
    with reading(trace) as opened, contextlib.ExitStack() as stack:
        try:
            make = None if other is None else stack.enter_context(OtherTree(other)).make
            run_shrink(
                opened,
                ShrinkRequest(
                    keep=keep,
                    other=make,  # type: ignore[arg-type]
                    stall_steps=stall_steps,
                    seconds=seconds,
                    folder=out,
                ),
            )
        except (NotReproduced, OtherTreeError, TraceError) as error:
            print(f"nothing to shrink: {error}")
            raise typer.Exit(DIVERGED) from None


@app.command()
def export(
    trace: TracePath,
    jsonl: Annotated[
        Path | None, typer.Option(help="File for one JSON object a record ('-': standard output).")
    ] = None,
    perfetto: Annotated[
        Path | None, typer.Option(help="File for ui.perfetto.dev: steps, batch slots, requests.")
    ] = None,
    from_step: Annotated[int | None, typer.Option(min=0, help="First step for Perfetto.")] = None,
    to_step: Annotated[int | None, typer.Option(min=0, help="Last step for Perfetto.")] = None,
) -> None:
    """Write the log in another form: JSON lines, or trace events for Perfetto."""
    if jsonl is None and perfetto is None:
        raise typer.BadParameter("--jsonl FILE or --perfetto FILE says what to write")
    with reading(trace) as opened:
        if jsonl is not None:
            write_pieces(jsonl, (line + "\n" for line in export_jsonl(opened)))
        if perfetto is not None:
            timeline = timeline_of(opened.header.config, opened.records())
            write_pieces(perfetto, perfetto_document(timeline, from_step, to_step))


@app.command()
def report(
    trace: TracePath,
    out: Annotated[Path, typer.Option(help="File for the page.")] = Path("report.html"),
) -> None:
    """One HTML page to look at: a timeline, and why each request waited."""
    with reading(trace) as opened:
        write_pieces(out, report_page(opened, trace.name))


@app.command(name="import")
def import_jsonl(
    lines: Annotated[Path, typer.Argument(help="What `export --jsonl` wrote.")],
    trace: Annotated[Path, typer.Argument(help="The trace log to make.")],
) -> None:
    """Make the trace log again from its JSON lines, byte for byte."""
    try:
        with lines.open(encoding="utf-8") as file, trace.open("xb") as made:
            for piece in rebuild(file):
                made.write(piece)
    except (JsonlError, UnicodeDecodeError) as error:
        trace.unlink()
        raise typer.BadParameter(f"{lines}, {error}") from None


def write_pieces(path: Path, pieces: Iterable[str]) -> None:
    """To a file that is replaced, or to standard output for `-`."""
    if str(path) == "-":
        sys.stdout.writelines(pieces)
        return
    with path.open("w", encoding="utf-8") as file:
        file.writelines(pieces)
    print(f"wrote {path}, {path.stat().st_size} bytes")


def main(argv: Sequence[str]) -> int:
    """Runs the command with the arguments behind `cearx replay`; answers the exit code."""
    arguments = list(argv)
    at = 0
    while arguments[at : at + 1] == ["--policy"]:
        at += 2
    if arguments[at:] and arguments[at] not in VERBS and not arguments[at].startswith("-"):
        arguments.insert(at, "verify")
    try:
        with patient_output():
            app(args=arguments, prog_name="cearx replay")
    except SystemExit as exit_:
        return exit_.code if isinstance(exit_.code, int) else SAME
    except OSError as error:
        print(f"cannot open {error.filename}: {error.strerror}")
        return DAMAGED
    return SAME


VERBS = frozenset(
    command.name or getattr(command.callback, "__name__", "").replace("_", "-")
    for command in app.registered_commands
)
