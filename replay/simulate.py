"""`cearx simulate`: the scheduler against a synthetic load and a step-time model, in virtual time.

Owns the command line. The trace that it writes is one like any other: `cearx replay` verifies and
questions it. No model, no torch, no server.
"""

import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from cearx.core.config import SchedulerConfig
from cearx.core.events import Decision, Event, StepPlan
from cearx.core.trace_format import TraceIncompatible
from cearx.core.trace_records import StepNote
from cearx.core.trace_writer import TraceError, TraceWriter
from cearx.replay import stats
from cearx.replay.overrides import with_overrides
from cearx.replay.patient_output import patient_output
from cearx.replay.simulation import Simulation
from cearx.replay.step_time import StepTime
from cearx.replay.terminal import console
from cearx.replay.trace import Trace
from cearx.replay.verify import fresh_scheduler
from cearx.replay.workload import WorkloadError, WorkloadLine, arrivals_of, read_workload, uniform

DEFAULTS = SchedulerConfig(
    block_size=16,
    num_blocks=8192,
    max_model_len=32768,
    max_num_seqs=64,
    max_num_batched_tokens=2048,
    enable_prefix_caching=True,
)
"""What `--set` changes."""
EXIT_FAILED = 1

Size = Annotated[int, typer.Option(min=1)]
Us = Annotated[float, typer.Option(min=0.0)]

app = typer.Typer(name="cearx simulate", pretty_exceptions_enable=False, add_completion=False)


class _FlushedLog:
    """Writes each step before it is computed, as the core's shell does."""

    def __init__(self, writer: TraceWriter) -> None:
        self._writer = writer

    def append(self, record: Event | Decision | StepNote, /) -> None:
        self._writer.append(record)
        if isinstance(record, StepPlan):
            self._writer.flush()


@app.command()
def simulate(
    workload: Annotated[
        Path | None,
        typer.Argument(
            help="JSON lines such as"
            ' {"prompt": 256, "output": 64, "at_us": 0}; without it the options below.'
        ),
    ] = None,
    num_requests: Size = 256,
    input_len: Size = 256,
    output_len: Size = 256,
    shared_prefix: Annotated[
        int, typer.Option(min=0, help="Tokens that all prompts begin with.")
    ] = 0,
    concurrency: Annotated[
        int | None, typer.Option(min=1, help="Closed loop: so many requests in flight.")
    ] = None,
    rate: Annotated[
        float | None, typer.Option(min=0.001, help="Open loop: requests a second, Poisson.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the arrivals.")] = 0,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="NAME=VALUE", help="Field of the scheduler's configuration."),
    ] = None,
    fixed_us: Us = 5000.0,
    prefill_us: Us = 500.0,
    decode_us: Us = 20.0,
    prefill_token_us: Us = 10.0,
    context_token_us: Us = 0.01,
    trace: Annotated[Path, typer.Option(help="Folder of the trace.")] = Path("simulated"),
) -> None:
    """Run the scheduler against a synthetic load and a step-time model; write a trace."""
    step_time = StepTime(
        fixed=fixed_us,
        prefill=prefill_us,
        decode=decode_us,
        prefill_token=prefill_token_us,
        context_token=context_token_us,
        schedule_us=100,
        gap_us=100,
    )
    if concurrency is not None and rate is not None:
        raise typer.BadParameter("--concurrency is a closed loop and --rate an open one")
    try:
        config = with_overrides(DEFAULTS, settings or ())
        scheduler = fresh_scheduler(config)
    except (ValueError, TraceIncompatible) as error:
        raise typer.BadParameter(str(error)) from None
    lines = (
        _read(workload)
        if workload is not None
        else uniform(num_requests, input_len, output_len, shared_prefix, rate, seed)
    )
    try:
        writer = TraceWriter.open(trace, config, secrets.randbits(64), _fail)
    except TraceError as error:
        raise typer.BadParameter(str(error)) from None
    arrivals = arrivals_of(lines, config, concurrency)
    Simulation(scheduler, arrivals, step_time, _FlushedLog(writer)).run()
    writer.close()
    print(f"trace {writer.path}")
    stats.print_stats(stats.compute(Trace.open(writer.path), "wait"), console(), 10)


def _read(workload: Path) -> list[WorkloadLine]:
    try:
        with workload.open(encoding="utf-8") as file:
            return read_workload(file)
    except OSError as error:
        raise typer.BadParameter(f"cannot read {workload}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise typer.BadParameter(f"{workload} is no UTF-8: {error.reason}") from None
    except WorkloadError as error:
        raise typer.BadParameter(f"{workload}, {error}") from None


def _fail(reason: str) -> None:
    print(reason)
    raise typer.Exit(EXIT_FAILED)


def main(argv: Sequence[str]) -> int:
    """Runs the command with the arguments behind `cearx simulate`; answers the exit code."""
    try:
        with patient_output():
            app(args=list(argv), prog_name="cearx simulate")
    except SystemExit as exit_:
        return exit_.code if isinstance(exit_.code, int) else 0
    return 0
