"""`cearx replay what-if`: the same load under another configuration, in virtual time.

Owns the comparison and its honesty: first the logged configuration is simulated and held against
what was measured; above the error that is allowed nothing else is said. Lengths, ends, cancels and
arrivals are the log's; step times come from a model fitted on it.
"""

import itertools
from collections.abc import Sequence
from typing import Literal

import msgspec
from rich.console import Console

from cearx.core.config import SchedulerConfig
from cearx.core.events import Decision, Event
from cearx.core.trace_records import StepNote
from cearx.replay.comparison import comparison
from cearx.replay.figures import RunFigures, request_figures, run_figures, token_times
from cearx.replay.oracle import Recorder, SimulatedRequest
from cearx.replay.simulation import Simulation, closed_loop, open_loop
from cearx.replay.step_time import NUM_STEPS_MIN, StepTime, fit
from cearx.replay.terminal import duration, table
from cearx.replay.timeline import Timeline
from cearx.replay.trace import Trace
from cearx.replay.verify import fresh_scheduler
from cearx.replay.whole_run import whole_records

Arrivals = Literal["open", "closed"]


class Error(msgspec.Struct, frozen=True, kw_only=True):
    """One figure, measured and simulated."""

    name: str
    measured: int
    simulated: int
    num_steps: int | None = None
    """Steps that a percentile rests on; of too few it is shown and not judged."""

    @property
    def is_judged(self) -> bool:
        return self.num_steps is None or self.num_steps >= NUM_STEPS_MIN

    @property
    def percent(self) -> float:
        return 100 * (self.simulated - self.measured) / max(abs(self.measured), 1)


class WhatIf(msgspec.Struct, frozen=True, kw_only=True):
    """`changed` is None where the calibration is not good enough."""

    step_time: StepTime
    calibration: list[Error]
    measured: RunFigures
    simulated: RunFigures
    changed: RunFigures | None

    @property
    def error_percent(self) -> float:
        """The largest one of the calibration that is judged."""
        judged = (abs(error.percent) for error in self.calibration if error.is_judged)
        return max(judged, default=0.0)


class _Timed:
    """A log that keeps the timeline only."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.timeline = Timeline(config)

    def append(self, record: Event | Decision | StepNote, /) -> None:
        self.timeline.feed(record)


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """What a log says about the world around the scheduler."""

    requests: list[SimulatedRequest]
    ended_us: list[int]
    start_us: int
    stop_us: int | None
    """Of the virtual clock, where the log breaks off with requests unfinished."""


def load_of(trace: Trace) -> tuple[Timeline, Load]:
    """One pass over the trace; raises NotWhole."""
    recorder = Recorder(trace.header.config)
    for record in whole_records(trace):
        recorder.feed(record.value)
    requests = recorder.requests()
    timeline = recorder.timeline
    start_us = min([timeline.first_us, *(r.arrived_us for r in requests)])
    lines = timeline.requests.values()
    unfinished = any(line.ended is None and line.refused is None for line in lines)
    load = Load(
        requests=requests,
        ended_us=sorted(line.ended_us for line in lines if line.ended_us is not None),
        start_us=start_us,
        stop_us=timeline.last_us - start_us if unfinished else None,
    )
    return timeline, load


def simulate(
    config: SchedulerConfig, load: Load, step_time: StepTime, arrivals: Arrivals
) -> RunFigures:
    """The figures of the load under a configuration."""
    log = _Timed(config)
    coming = (
        open_loop(load.requests, load.start_us)
        if arrivals == "open"
        else closed_loop(load.requests, load.ended_us, load.start_us)
    )
    Simulation(fresh_scheduler(config), coming, step_time, log, load.stop_us).run()
    log.timeline.finish()
    return figures_of(log.timeline)


def figures_of(timeline: Timeline) -> RunFigures:
    lines = timeline.requests.values()
    return run_figures(timeline, [request_figures(line, timeline) for line in lines])


def what_if(
    trace: Trace, changed: SchedulerConfig, arrivals: Arrivals, max_error_percent: float
) -> WhatIf:
    """Raises NotEnoughNotes, and ValueError for a change that the log's hashes do not survive."""
    config = trace.header.config
    hashed = config.enable_prefix_caching and changed.enable_prefix_caching
    if hashed and changed.block_size != config.block_size:
        raise ValueError(
            f"block_size={changed.block_size}: the log's hashes are of blocks of"
            f" {config.block_size} tokens (add --set enable_prefix_caching=false)"
        )
    timeline, load = load_of(trace)
    step_time = fit(timeline.steps, config.pipeline_depth)
    measured = figures_of(timeline)
    simulated = simulate(config, load, step_time, arrivals)
    calibration = _calibration(measured, simulated, num_tail_steps(timeline, measured))
    result = WhatIf(
        step_time=step_time,
        calibration=calibration,
        measured=measured,
        simulated=simulated,
        changed=None,
    )
    if result.error_percent > max_error_percent:
        return result
    figures = simulate(changed, load, step_time, arrivals)
    return msgspec.structs.replace(result, changed=figures)


RATE = "tok/s"
"""The one figure of the calibration that is no time: in thousandths."""


def _millitokens_per_s(figures: RunFigures) -> int:
    return figures.num_output_tokens * 1_000_000_000 // max(figures.duration_us, 1)


def num_tail_steps(timeline: Timeline, figures: RunFigures) -> int:
    """How many steps made the tokens that came as late as the 99th percentile or later."""
    if figures.itl_us is None:
        return 0
    late_us = figures.itl_us.p99
    steps: set[int] = set()
    for line in timeline.requests.values():
        times = token_times(line, timeline)
        gaps = zip(line.token_steps[1:], itertools.pairwise(times), strict=True)
        steps.update(step for step, (before, at) in gaps if at - before >= late_us)
    return len(steps)


def _calibration(measured: RunFigures, simulated: RunFigures, num_tail_steps: int) -> list[Error]:
    rates = _millitokens_per_s(measured), _millitokens_per_s(simulated)
    pairs: list[tuple[str, int, int]] = [(RATE, *rates)]
    for name, left, right in (
        ("TTFT mean", measured.ttft_us, simulated.ttft_us),
        ("ITL p50", measured.itl_us, simulated.itl_us),
        ("ITL p99", measured.itl_us, simulated.itl_us),
    ):
        if left is not None and right is not None:
            field = name.split()[1]
            pairs.append((name, getattr(left, field), getattr(right, field)))
    return [
        Error(
            name=name,
            measured=a,
            simulated=b,
            num_steps=num_tail_steps if name.endswith("p99") else None,
        )
        for name, a, b in pairs
    ]


def print_what_if(
    result: WhatIf, settings: Sequence[str], console: Console, max_error_percent: float
) -> None:
    """The calibration line, the model, then the comparison or a refusal."""
    errors = ", ".join(
        f"{error.name} {_shown(error.name, error.measured)} ->"
        f" {_shown(error.name, error.simulated)} ({error.percent:+.1f} %"
        f"{'' if error.is_judged else f', of {error.num_steps} steps, not judged'})"
        for error in result.calibration
    )
    console.print(f"calibration, measured -> simulated: {errors}")
    model = result.step_time
    console.print(
        f"step time: {model.fixed:.0f} us + {model.prefill:.0f} with chunks"
        f" + {model.decode:.2f} a decode + {model.prefill_token:.2f} a prefill token"
        f" + {model.context_token:.4f} a context token + {model.attended:.6f} a pair attended;"
        f" {model.schedule_us} + {model.gap_us} us in the core,"
        f" {model.handover_us} us between steps"
    )
    if result.changed is None:
        console.print(
            f"REFUSED: the simulation is off by {result.error_percent:.1f} %,"
            f" {max_error_percent:g} % are allowed (--max-error)"
        )
        return
    console.print()
    console.print(
        table(
            ["", "as logged", ", ".join(settings), "change"],
            comparison(result.simulated, result.changed),
            "simulated",
        )
    )


def _shown(name: str, value: int) -> str:
    return f"{value / 1000:.1f}" if name == RATE else duration(value) or "-"
