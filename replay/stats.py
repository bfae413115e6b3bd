"""`cearx replay stats`: the figures of a run and of its requests, as text or JSON."""

import msgspec
from rich.console import Console

from cearx.replay.figures import RequestFigures, RunFigures, Spread, request_figures, run_figures
from cearx.replay.terminal import duration, table
from cearx.replay.timeline import timeline_of
from cearx.replay.trace import Trace

SORT_KEYS = {
    "arrival": lambda f: f.request_id,
    "wait": lambda f: -f.waited_us,
    "ttft": lambda f: -(f.ttft_us or 0),
    "stall": lambda f: -f.stall_us,
    "preemptions": lambda f: -f.num_preemptions,
    "recomputed": lambda f: -f.num_recomputed_tokens,
}


class Stats(msgspec.Struct, frozen=True, kw_only=True):
    """What `--json` prints."""

    run: RunFigures
    log_bytes_per_step: int
    requests: list[RequestFigures]


def compute(trace: Trace, sort: str = "arrival") -> Stats:
    """One pass over the trace."""
    timeline = timeline_of(trace.header.config, trace.records())
    requests = [request_figures(line, timeline) for line in timeline.requests.values()]
    run = run_figures(timeline, requests)
    requests.sort(key=SORT_KEYS[sort])
    return Stats(
        run=run,
        log_bytes_per_step=trace.num_bytes_in_all // max(run.num_steps, 1),
        requests=requests,
    )


def print_stats(stats: Stats, console: Console, limit: int) -> None:
    """The run, then `limit` requests."""
    run = stats.run
    console.print(table(["", ""], _totals(stats)))
    spreads: list[tuple[str, Spread | None, bool]] = [
        ("queue time", run.queue_us, True),
        ("time to first token", run.ttft_us, True),
        ("inter-token latency", run.itl_us, True),
        ("request, whole", run.total_us, True),
        ("worker, a step", run.execute_us, True),
        ("core, a step", run.schedule_us, True),
        ("running", run.running, False),
        ("waiting", run.waiting, False),
        ("budget fill, per mille", run.budget_fill_permille, False),
        ("blocks held, per mille", run.block_occupancy_permille, False),
    ]
    console.print()
    console.print(
        table(
            ["", "mean", "p50", "p99", "max", "count"],
            (_spread_row(*entry) for entry in spreads if entry[1] is not None),
        )
    )
    for title, parts in (
        ("a step, part by part", run.step_parts),
        ("a first token, hop by hop", run.first_token_parts),
    ):
        if parts:
            console.print()
            columns = [title, "mean", "p50", "p99", "max", "count"]
            rows = [_spread_row(name, values, True) for name, values in parts.items()]
            console.print(table(columns, rows))
    console.print()
    console.print(_request_table(stats.requests[:limit]))
    hidden = len(stats.requests) - limit
    if hidden > 0:
        console.print(f"… and {hidden} more (--limit, --json)")


def _totals(stats: Stats) -> list[tuple[str, str]]:
    run = stats.run
    ended = ", ".join(f"{count} {reason}" for reason, count in run.ended.items())
    stall = duration(run.stall_us) or "-"
    if run.stall_step is not None:
        stall += f", behind step {run.stall_step}"
    return [
        ("requests", f"{run.num_requests}: {ended or 'none'}"),
        ("steps", f"{run.num_steps} in {duration(run.duration_us)}"),
        ("prompt tokens", f"{run.num_prompt_tokens}, {run.num_hit_tokens} from the prefix cache"),
        ("computed tokens", f"{run.num_computed_tokens}, {run.num_recomputed_tokens} once more"),
        ("output tokens", f"{run.num_output_tokens}, {run.output_tokens_per_s} a second"),
        ("preemptions", f"{run.num_preemptions}"),
        ("longest stall", stall),
        ("log", f"{stats.log_bytes_per_step} bytes a step"),
    ]


def _spread_row(name: str, spread: Spread | None, is_time: bool) -> list[object]:
    assert spread is not None, f"{name} has no values"
    values = (spread.mean, spread.p50, spread.p99, spread.max)
    return [name, *(duration(value) if is_time else value for value in values), spread.count]


def _request_table(requests: list[RequestFigures]) -> object:
    columns = ["request", "prompt", "out", "queue", "waited", "ttft", "itl p50", "itl p99", "stall"]
    columns += ["chunks", "preempted", "again", "hit", "ended"]
    return table(
        columns,
        (
            [
                f.request_id,
                f.num_prompt_tokens,
                f.num_output_tokens,
                duration(f.queue_us),
                duration(f.waited_us),
                duration(f.ttft_us),
                duration(f.itl_p50_us),
                duration(f.itl_p99_us),
                duration(f.stall_us),
                f.num_chunks,
                f.num_preemptions,
                f.num_recomputed_tokens,
                f.num_hit_tokens,
                f.ended,
            ]
            for f in requests
        ),
    )
